"""Any causal model type of transformers, tiny and random, by its own code over the paged cache."""

from __future__ import annotations

import contextlib
import copy
import json
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.engine.device.block_size import in_blocks
from quire.engine.models.general.attention import EVERY, Call, give
from quire.engine.models.general.described import SEE_TYPES
from quire.engine.models.general.host_reads import host_reads
from quire.engine.models.general.indexer import Indexer
from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.kernels.backend import torch_backend
from quire.kernels.formats.kv_format import UNSCALED
from quire.kernels.recurrence.operations import Recurrences
from tests.models.paged_driver import BLOCK_SIZE, PagedDriver

LAYERS = 4
STEPS = 8
MAX_LEN = 100
LENGTHS = (37, 1, 16)
MOST_PARAMETERS = 100_000_000
LEAST_AGREEMENT = 1e-3  # of logits, in their standard deviations
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
    | dict.fromkeys(("sliding_window", "attention_window_size", "window_size"), 7)
    | {"attention_chunk_size": 10, "floor_scale": 6, "attn_scale": 0.5}
    | dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "hidden_size_per_layer_input"), 8)
    | dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "bos_token_id"), 1)
    | dict.fromkeys(("num_shared_experts", "n_shared_experts"), 1)
    | {"q_lora_rank": 24, "num_kv_shared_layers": 2, "pad_token_id": 0, "eos_token_id": 2}
    | {"encoder_hash_byte_group_vocab": 97, "index_topk": 9, "index_head_dim": 16}
)
NEEDED = (  # which some leave to the folder
    "num_experts_per_tok", "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "n_group",
    "topk_group", "num_key_value_heads", "head_dim",
)  # fmt: skip
SEEING = ("gemma3",)  # whose part for images is made small, too: no text is computed by it
# Of layers with a window where they have sizes of their own: others than the rest of the layers.
OF_WINDOWS = {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 40}
OF_WINDOWS |= {"swa_kv_lora_rank": 20, "swa_head_dim": 32, "swa_qk_nope_head_dim": 24, "swa_v_head_dim": 12}
DELTA_NET = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA_NET |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}}
# So that there is attention, or that sizes go together.
OF_KIND: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8, "state_size": 16, "n_groups": 2},
    "qwen3_next": DELTA_NET,
    "qwen3_5_text": DELTA_NET,
    "kimi_linear": {"linear_num_heads": 4, "linear_head_dim": 16},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16},
    "zaya": {"num_experts_per_tok": 1},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * (LAYERS // 2),
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 3,
    },
    "mistral4": {"head_dim": 16},
    "step3p5": {"sliding_window": 7},
    "paddleocr_vl_text": MROPE,
    "ernie4_5_vl_moe_text": MROPE,
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16},
}
BY_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers")

Outcome = Literal["equal", "unequal", "refused", "untried"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a type: `detail` is the largest difference of logits, or why it cannot run.

    reads: by what a step has the host look at the device, so that no CUDA graph may hold it.
    """

    outcome: Outcome
    detail: str
    reads: tuple[str, ...] = ()


def tiny_config(kind: str, **changes: Any) -> PreTrainedConfig:
    """Return the type's default configuration, its sizes made small, with every kind of layer it has.

    changes: fields of a configuration of text alone, or of all of a model that does more, beside those.
    """
    make = CONFIG_MAPPING[kind]
    config = make()
    if config.get_text_config(decoder=True) is config:
        if changes:
            return make(**_small(config, changes.get("num_hidden_layers", LAYERS)) | changes)
        with contextlib.suppress(Exception):  # it checks what it is given, or works out more from it
            return make(**_small(config))
    text = config.get_text_config(decoder=True)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return _with_small_parts(make, config, changes)
    if kind in SEEING:
        config.vision_config = type(config.vision_config)(**_small(config.vision_config))
    for name, part in vars(config).items():
        if part is text:
            with contextlib.suppress(Exception):
                setattr(config, name, type(text)(**_small(text)))
                return config
    for part in {id(each): each for each in (text, config)}.values():
        for name, value in _small(part).items():
            with contextlib.suppress(AttributeError):  # it follows from others
                setattr(part, name, value)
    return config


def _with_small_parts(make: Any, config: PreTrainedConfig, changes: dict[str, Any]) -> PreTrainedConfig:
    """Return the configuration of a model that does more than text with all parts of it made small."""
    text = config.get_text_config(decoder=True)
    parts: dict[str, Any] = {}
    for name, part in vars(config).items():
        if isinstance(part, PreTrainedConfig):
            small = type(part)(**_small(part)).to_dict() if part is text else _small(part)
            parts[name] = small | {"model_type": part.model_type}
    return make(**parts | changes)


def _small(config: PreTrainedConfig, layers: int = LAYERS) -> dict[str, Any]:
    """Return those fields of a configuration that make a model small, and a decoder of an encoder's code.

    layers: of how many fields tell that tell of each.
    """
    fields = config.to_dict()
    before = getattr(config, "num_hidden_layers", 0)
    small: dict[str, Any] = {"is_decoder": True} if "is_decoder" in fields else {}
    for name in SIZES.keys() & ({*fields} | {*config.attribute_map}):
        if isinstance(fields.get(name, 0), int | float) or (fields[name] is None and name in NEEDED):
            small[name] = SIZES[name]
    if "qk_rope_head_dim" in fields:  # latent attention: each head has keys of its own
        small |= {"num_key_value_heads": 4} | ({"head_dim": 8} if "head_dim" in fields else {})
    if "conv_L_cache" in fields:  # LFM2, whose default leaves its convolutions out
        small["layer_types"] = ["conv", "full_attention"] * (layers // 2)
    if config.model_type == "granitemoehybrid":  # whose default leaves attention out
        small["layer_types"] = ["linear_attention", "full_attention"] * (layers // 2)
    small |= OF_KIND.get(config.model_type, {})
    if "default_language" in fields:
        small["default_language"] = config.languages[0]
    if "kv_n_heads" in (fields.get("attn_config") or {}):
        small["attn_config"] = {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}
    rope = fields.get("rope_parameters")
    if "mrope_section" in getattr(config, "ignore_keys_at_rope_validation", ()):
        rope = dict(rope or {"rope_type": "default", "rope_theta": 10_000.0})
        third = int(16 * rope.get("partial_rotary_factor", 1.0)) // 6  # of time, height and width
        rope = small["rope_parameters"] = rope | {"mrope_section": [0, third, third]}
        rope["mrope_section"][0] = int(16 * rope.get("partial_rotary_factor", 1.0)) // 2 - 2 * third
    if isinstance(rope, dict) and "rope_type" in rope and rope.get("rope_theta") is None:
        small["rope_parameters"] = rope | {"rope_theta": 10_000.0}
    if rope == {} and fields.get("layer_types"):
        default = {"rope_type": "default", "rope_theta": 10_000.0}
        small["rope_parameters"] = dict.fromkeys(fields["layer_types"], default)
    if "per_layer_config" in fields and "kv_lora_rank" in fields:
        small |= OF_WINDOWS
    if "per_layer_config" in fields:  # layers that see all have heads of their own
        small["global_head_dim"] = 32
    for name, each in fields.items():
        if isinstance(each, list) and name not in small and (name in BY_LAYER or len(each) == before > 0):
            different = [SIZES[name]] if name in SIZES else list(dict.fromkeys(map(_hashable, each)))
            small[name] = [different[layer % len(different)] for layer in range(layers)]
    return small


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class _Nothing:
    """Stands for attention that is kernels on a GPU."""

    def __call__(self, layer: int, call: Call) -> Tensor:
        return call.v.new_zeros(1, call.q.shape[1], call.q.shape[0], call.value_dim)

    def choose(self, layer: int, indexer: Indexer) -> Any:
        return EVERY


def save_tiny(kind: str, folder: Path, by: str = "eager", **changes: Any) -> None:
    """Save a random model of the type in a folder.

    by: which of its ways to attend.
    """
    made = _made(kind, by, json.dumps(changes))
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in made.files.items():
        (folder / name).write_bytes(content)
    torch.set_rng_state(made.drawn)


def two_layers(kind: str) -> dict[str, int]:
    """Return what makes a model of text alone have two layers, one of each type where there are two."""
    return {"n_layer" if kind == "gpt2" else "num_hidden_layers": 2}


def tiny_model(kind: str, folder: Path, by: str = "eager", **changes: Any) -> Any:
    """Save the same; return it as transformers runs it."""
    save_tiny(kind, folder, by, **changes)
    return copy.deepcopy(_made(kind, by, json.dumps(changes)).model)


@dataclass(frozen=True, slots=True)
class _Made:
    """A tiny model, its folder, and what random numbers come after its own."""

    model: Any
    files: dict[str, bytes]
    drawn: Tensor


@lru_cache(maxsize=16)  # of a megabyte each; tests of one file have few kinds, and each of them many times
def _made(kind: str, by: str, changes: str) -> _Made:
    config = partial(tiny_config, kind, **json.loads(changes))
    torch.manual_seed(1)
    auto = AutoModelForCausalLM if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForMultimodalLM
    with torch.device("meta"):
        count = auto.from_config(config()).num_parameters()
    if count > MOST_PARAMETERS:
        raise ValueError(f"it would have {count} parameters")
    model = auto.from_config(config(), attn_implementation=by, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(float(weight.mean().round()), 0.1)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return _Made(model, files, torch.get_rng_state())


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in LENGTHS]


def difference(generated: tuple[list[list[int]], list[Tensor]], reference: Any) -> float:
    """Return by how many standard deviations logits of the prompts differ from transformers' own."""
    worst = 0.0
    for prompt, output, rows in zip(prompts(), *generated, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0]
        worst = max(worst, float((rows - expected).abs().max() / expected.std()))
    return worst


def compare(
    kind: str, folder: Path, by: str = "eager", recurrences: Recurrences | None = None, **changes: Any
) -> Verdict:
    """Compare logits of a chunked, mixed and batched run over the cache with transformers' own.

    recurrences: by which states are computed, instead of transformers' code.
    """
    try:
        reference = tiny_model(kind, folder, by, **changes)
    except Exception as error:  # a configuration may need anything
        return Verdict("untried", f"no tiny model of it: {error!r}"[:120])
    try:
        config = read_model(folder, "transformers")
    except ValueError as error:
        return Verdict("refused", str(error).removesuffix(SEE_TYPES).split(" here: ", maxsplit=1)[-1][:160])
    config, _ = in_blocks(config, BLOCK_SIZE, UNSCALED[torch.float32], torch.float32)
    backend = replace(torch_backend(), recurrences=recurrences)
    model, _ = load_model(folder, config, backend, device="cpu", dtype=torch.float32, max_model_len=MAX_LEN)
    if recurrences is not None and model.takes_pieces:
        return Verdict("unequal", "the recurrences are not what its code computes")
    driver = PagedDriver(model, config, len(LENGTHS) + 1, MAX_LEN)
    worst = difference(driver.generate(prompts(), STEPS), reference)
    with contextlib.suppress(ValueError):  # it has no experts; a loop over them is a CPU's way
        model._causal.set_experts_implementation("batched_mm")
    model.fusion.undo()
    give(model._decoder, _Nothing())  # its own code alone
    reads = host_reads(lambda: driver.step({}, {len(LENGTHS): prompts()[0][:3]}))
    return Verdict("equal" if worst < LEAST_AGREEMENT else "unequal", f"{worst:.1g}", tuple(reads))
