"""Print what steps of many models launch on six GPUs, to show that a change chose as before.

    python tests/kernels/step_launches.py [--whole] > launches.json

A digest of each step's kernels, their grids, constants and tensors; with `--whole` all of these.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpus import GPUS
from launches import META, on_gpu
from torch import Tensor

from quire.engine.device.kv_cache import KVCache, dequantized_dtype
from quire.engine.models.config import ModelConfig
from quire.engine.models.loader import build_model
from quire.engine.models.rope_config import RopeConfig
from quire.engine.models.weights import Weights
from quire.kernels.attention.batch import DecodeBatch, ForwardBatch, Newest, PrefillBatch
from quire.kernels.attention.cascade import SharedPrefixes, rows_of_cascade, shared_lens
from quire.kernels.attention.splits import DecodeWorkspace
from quire.kernels.backend import triton_backend
from quire.kernels.formats.kv_format import BF16, FP8, FP12, FP16, FP32, KVFormat
from quire.kernels.gpu import Gpu
from quire.kernels.sampling.sample import sample
from quire.kernels.sampling.state import SamplingState

MOST_ROWS = 256
QWEN3 = ModelConfig(
    architecture="Qwen3ForCausalLM",
    num_layers=2,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=151936,
    max_position_embeddings=40960,
    dtype="bfloat16",
    activation="silu",
    norm_eps=1e-6,
    tie_word_embeddings=True,
    eos_token_ids=(),
    bos_token_id=None,
    windows=(0, 0),
    rope=RopeConfig(10000.0),
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=True,
    embedding_size=1024,
)


def model(
    hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int, vocabulary: int, **others: Any
) -> ModelConfig:
    """Return a decoder of such widths, by default without QK-norm."""
    return replace(
        QWEN3, hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        intermediate_size=inner, vocab_size=vocabulary, embedding_size=hidden,
        **({"qk_norm": False, "tie_word_embeddings": False} | others),
    )  # fmt: skip


LLAMA_8B = model(4096, 32, 8, 128, 14336, 128256)
BIASES: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
PLAIN: dict[str, Any] = {"rope": None, "activation": "gelu_tanh", **BIASES}
MODELS = {
    "Qwen3-0.6B": QWEN3,
    "Qwen3-1.7B": model(2048, 16, 8, 128, 6144, 151936, qk_norm=True),
    "Llama-3.1-8B": LLAMA_8B,
    "Qwen2.5-0.5B": model(896, 14, 2, 64, 4864, 151936, qkv_bias=True),
    "biases": model(1024, 16, 8, 128, 3072, 32000, **BIASES),
    "windows": replace(LLAMA_8B, windows=(0, 1024)),
    "all windows": replace(LLAMA_8B, windows=(512, 1024)),
    "dim 256": model(2048, 8, 1, 256, 8192, 32000),
    "group 3 of 96": model(576, 6, 2, 96, 1536, 49152),
    "group 32": model(4096, 32, 1, 128, 11008, 32000),
    "GPT-2": model(768, 12, 12, 64, 3072, 50257, **PLAIN, architecture="GPT2LMHeadModel"),
    "OPT": model(768, 12, 12, 64, 3072, 50272, **PLAIN, architecture="OPTForCausalLM"),
}
# Which models and types are tried on an H100, and which on the others.
ON_HOPPER = [
    *((name, BF16, BF16) for name in MODELS),
    *((name, BF16, FP12) for name in MODELS if name != "group 3 of 96"),
    *((name, BF16, FP8) for name in ("Qwen3-0.6B", "Llama-3.1-8B", "windows", "dim 256")),
    ("Llama-3.1-8B", FP16, FP16), ("Qwen3-0.6B", FP16, FP12), ("Qwen3-0.6B", FP16, FP8),
    ("Qwen3-0.6B", FP32, FP32), ("Qwen3-0.6B", FP32, FP12), ("Llama-3.1-8B", FP32, FP8),
]  # fmt: skip
ELSEWHERE = [
    ("Qwen3-0.6B", BF16, BF16), ("Llama-3.1-8B", BF16, BF16), ("Llama-3.1-8B", BF16, FP12),
    ("dim 256", FP16, FP16), ("GPT-2", FP32, FP32),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """How many decodes and chunks of a prompt, tokens in all, and how many those have at most."""

    decodes: int
    chunks: int = 0
    tokens: int = 0
    longest: int = 0
    newest: bool = False
    sharing: bool = False
    context: int = 4096


DECODES = [
    *(Step(rows) for rows in (1, 2, 3, 4, 8, 9, 16, 17, 32, 33, 34, 40, 48, 64, 100, 128, 256)),
    *(Step(rows, context=40960) for rows in (1, 2, 8, 32)),
    *(Step(rows, context=64) for rows in (1, 4)),
    *(Step(rows, sharing=True) for rows in (32, 96, 256)),
]
MIXED = [
    *(Step(size, 4, size, size, newest=True) for size in (16, 64, 128, 240)),
    *(Step(MOST_ROWS, size // 16, size, size, newest=True) for size in (256, 384, 640, 2048, 4224)),
    Step(0, 1, 5, 5), Step(0, 1, 1, 1), Step(1, 1, 4, 3), Step(3, 2, 64, 50), Step(0, 1, 700, 700),
    Step(5, 1, 2053, 2048, newest=True), Step(0, 16, 8192, 512, newest=True), Step(40, 0, 40, 1),
]  # fmt: skip
FEW = [DECODES[i] for i in (0, 1, 6, 8, 13, 16, 17)] + MIXED[1:6:2] + MIXED[9:11] + MIXED[-4:-2]


def words(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def batch_of(step: Step, config: ModelConfig, block_size: int, workspace: DecodeWorkspace) -> ForwardBatch:
    """Return the step as a model sees it."""
    tokens = step.tokens or step.decodes
    tables = words(MOST_ROWS + 1, step.context // block_size)
    rows, context_lens = words(step.decodes), words(step.decodes)
    shared = prefill = newest = None
    if step.sharing:
        width = rows_of_cascade(config.num_heads // config.num_kv_heads)
        members = words(step.decodes // 4, width)
        lens = shared_lens(members, rows, context_lens, tables, block_size)
        shared = SharedPrefixes(members, words(step.decodes), lens)
    if step.tokens:
        chunks = words(step.chunks), words(step.chunks + 1), words(step.chunks)
        prefill = PrefillBatch(tables, *chunks, step.longest)
    if step.newest:
        count = min(step.decodes + step.chunks, tokens)
        queries = DecodeBatch(tables, words(count), words(count), words(count), workspace)
        newest = Newest(words(count), queries)
    return ForwardBatch(
        tokens=words(tokens), positions=words(tokens), slots=words(tokens, dtype=torch.int64),
        decode=DecodeBatch(tables, rows, context_lens, words(step.decodes), workspace, shared),
        prefill=prefill, newest=newest,
    )  # fmt: skip


def launches(
    gpu: Gpu, name: str, plain: KVFormat, held: KVFormat, steps: list[Step], block_size: int = 16
) -> Iterator[tuple[Step, list[str], list[str]]]:
    """Yield each step with the names of what it launches, and the same in full."""
    config, dtype = MODELS[name], plain.dtype
    for step in steps:
        with on_gpu(gpu) as found:
            cache = KVCache(
                config, 8, block_size, held, META, lambda blocks, pairs: None,
                dequantized_dtype(config, held, dtype, gpu),
            )  # fmt: skip
            built = build_model(config, triton_backend(), Weights(META, dtype), 40960)
            workspace = DecodeWorkspace.allocate(MOST_ROWS + 1, config.num_heads, config.head_dim, META)
            batch = batch_of(step, config, block_size, workspace)
            logits = built.part_logits(built.forward(batch, cache.layers)[: step.decodes + step.chunks])
            drawn = words(len(logits)), words(len(logits))
            sample(logits, *drawn, SamplingState.allocate(MOST_ROWS + 1, META), words(MOST_ROWS + 1))
        yield step, found.names, found.lines


def everything() -> Iterator[tuple[str, list[str]]]:
    """Yield each step's name and its lines."""
    cases = [(90, *case, DECODES + MIXED, 16) for case in ON_HOPPER]
    cases += [(90, "Llama-3.1-8B", BF16, held, FEW, 128) for held in (BF16, FP12)]
    cases += [(chip, *case, FEW, 16) for chip in GPUS if chip != 90 for case in ELSEWHERE]
    cases += [(chip, "Llama-3.1-8B", BF16, FP8, FEW, 16) for chip in GPUS if chip >= 89 and chip != 90]
    for chip, name, plain, held, steps, block_size in cases:
        for step, _, lines in launches(GPUS[chip], name, plain, held, steps, block_size):
            types = "/".join(str(each.dtype).removeprefix("torch.") for each in (plain, held))
            yield f"{chip} {name} {types} {block_size} {step}", lines


if __name__ == "__main__":
    whole = "--whole" in sys.argv
    steps = {
        name: lines if whole else hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        for name, lines in everything()
    }
    json.dump(steps, sys.stdout, indent=1)
