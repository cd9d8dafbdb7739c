"""What LLM and AsyncLLM begin with: the settings of an engine, and the model's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike, fspath
from typing import Any, Literal

from quire.arguments import ChatPrompt, Message, chat_prompt, engine_config
from quire.engine.config import KVCacheDtype, ModelImpl, PreemptionMode, Progress, QuantizedWeights
from quire.engine.models.pooling import Runner
from quire.service.demo import MODEL_FOLDER
from quire.service.text.model_tokenizer import tokenizer_of
from quire.service.text.tokenizer import Tokenizer


class Configured:
    """Takes the flags of `quire serve`, with their defaults; `_begin` is what each does with them."""

    tokenizer: Tokenizer

    def __init__(
        self,
        model: str | PathLike[str] = MODEL_FOLDER,
        *,
        device: Literal["auto", "cuda", "cpu"] = "auto",
        dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto",
        kv_cache_dtype: KVCacheDtype = "auto",
        load_format: Literal["auto", "dummy"] = "auto",
        quantized_weights: QuantizedWeights = "keep",
        quantization: str | None = None,
        lora: str | PathLike[str] | None = None,
        runner: Runner = "auto",
        model_impl: ModelImpl = "auto",
        generation_config: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        block_size: int | None = None,
        gpu_memory_utilization: float = 0.9,
        swap_space: float = 4.0,
        preemption_mode: PreemptionMode = "auto",
        num_gpu_blocks_override: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        seed: int | None = None,
        cache_seed: str | None = None,
        tensor_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        disable_custom_all_reduce: bool = False,
        chat_template: str | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        **unknown: Any,
    ) -> None:
        if lora is not None:
            lora = fspath(lora)
        self._config = engine_config(fspath(model), locals(), unknown)
        self._chat_template = chat_template
        self._begin(on_progress)

    def _begin(self, on_progress: Callable[[Progress], None] | None) -> None:
        """Make the engine, and `tokenizer`. `on_progress` is told how it starts."""
        raise NotImplementedError

    def _read_tokenizer(self) -> Tokenizer:
        return tokenizer_of(self._config, self._chat_template)

    def chat_prompt(self, messages: Sequence[Message]) -> ChatPrompt:
        """Return token ids of a conversation, by the model's chat template, that ask for the next answer."""
        return chat_prompt(self.tokenizer, messages)
