"""Any causal model type of transformers, tiny and random, by its own code over the paged cache.

`python -m tests.models.any_model [TYPE ...]` prints the table of docs/models.md.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.engine.models.config import has_native
from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.kernels.backend import torch_backend
from tests.models.paged_driver import PagedDriver

LAYERS = 4
STEPS = 8
LENGTHS = (37, 1, 16)
LEAST_AGREEMENT = 1e-3  # of logits, in their standard deviations
SECONDS = 120  # for a type
SIZES: dict[str, int] = (
    dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size"), 64)
    | dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "ffn_hidden_size"), 96)
    | dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS)
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4)
    | dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2)
    | dict.fromkeys(("head_dim", "global_head_dim", "kv_channels", "v_head_dim", "kv_lora_rank"), 16)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
    | dict.fromkeys(("num_experts_per_tok", "moe_k", "max_window_layers"), 2)
    | dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32)
    | dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 128)
    | dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 97)
    | dict.fromkeys(("sliding_window", "attention_window_size"), 7)
    | dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "hidden_size_per_layer_input"), 8)
    | dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "bos_token_id"), 1)
    | dict.fromkeys(("num_shared_experts", "n_shared_experts"), 1)
    | {"q_lora_rank": 24, "num_kv_shared_layers": 0, "pad_token_id": 0, "eos_token_id": 2}
)
BY_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers")

Outcome = Literal["equal", "unequal", "refused", "untried"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a type: `detail` is the largest difference of logits, or why it cannot run."""

    outcome: Outcome
    detail: str


def tiny_config(kind: str) -> PreTrainedConfig:
    """Return the type's default configuration, its sizes made small, with every kind of layer it has."""
    config = CONFIG_MAPPING[kind]()
    for part in {id(each): each for each in (config.get_text_config(decoder=True), config)}.values():
        for name, size in SIZES.items():
            if isinstance(getattr(part, name, None), int | float):
                setattr(part, name, size)
        for name in BY_LAYER:
            kinds = getattr(part, name, None)
            if isinstance(kinds, list):
                different = list(dict.fromkeys(kinds))
                with contextlib.suppress(AttributeError):  # it follows from others
                    setattr(part, name, [different[layer % len(different)] for layer in range(LAYERS)])
    return config


def save_tiny(kind: str, folder: Path) -> Any:
    """Save a random model of the type in a folder; return it as transformers runs it."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        tiny_config(kind), attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(float(weight.mean().round()), 0.1)
    model.save_pretrained(folder)
    return model


def compare(kind: str, folder: Path) -> Verdict:
    """Compare logits of a chunked, mixed and batched run over the cache with transformers' own."""
    try:
        reference = save_tiny(kind, folder)
    except Exception as error:  # a configuration may need anything
        return Verdict("untried", f"no tiny model of it: {error!r}"[:120])
    try:
        config = read_model(folder, "transformers")
    except ValueError as error:
        return Verdict("refused", str(error).split(" here: ", maxsplit=1)[-1][:160])
    model, _ = load_model(
        folder, config, torch_backend(), device="cpu", dtype=torch.float32, max_model_len=100
    )
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in LENGTHS]
    outputs, logits = PagedDriver(model, config, len(prompts), 100).generate(prompts, STEPS)
    worst = 0.0
    for prompt, output, rows in zip(prompts, outputs, logits, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0]
        worst = max(worst, float((rows - expected).abs().max() / expected.std()))
    return Verdict("equal" if worst < LEAST_AGREEMENT else "unequal", f"{worst:.1g}")


def main() -> None:
    def give_up(*_: object) -> None:
        raise TimeoutError(f"took longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, give_up)
    transformers.logging.set_verbosity_error()
    counts: Counter[Outcome] = Counter()
    print("| type | native | by transformers' code | difference, or why not |\n| --- | --- | --- | --- |")
    for kind in sys.argv[1:] or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        signal.alarm(SECONDS)
        try:
            with tempfile.TemporaryDirectory() as folder:
                verdict = compare(kind, Path(folder))
        except Exception as error:  # which is a fault of Quire's
            verdict = Verdict("unequal", f"{error!r}"[:160])
        counts[verdict.outcome] += 1
        native = has_native({"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]})
        print(f"| {kind} | {'yes' if native else ''} | {verdict.outcome} | {verdict.detail} |", flush=True)
    print(f"\n{dict(counts)}", file=sys.stderr)


if __name__ == "__main__":
    main()
