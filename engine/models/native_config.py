"""config.json of the architectures that have a decoder here. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.engine.models.config import MAX_HEAD_DIM, Activation, Dtype, ModelConfig
from quire.engine.models.dtype_names import FIELDS, usual_name
from quire.engine.models.json_fields import Fields, read_json
from quire.engine.models.modelopt import with_modelopt
from quire.engine.models.pooling import causal_name
from quire.engine.models.quantisation import read_quantised
from quire.engine.models.quantisation_config import quantisation_of
from quire.engine.models.rope_config import RopeConfig

HEADS, EMBEDDINGS = {"lm_head"}, {"embed_tokens", "wte"}  # how names of their modules end
_DTYPES: dict[str, Dtype] = {
    "float32": "float32",
    "float": "float32",
    "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
}
_SILU: dict[str, Activation] = {"silu": "silu", "swish": "silu"}
_PLAIN: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def read_native(folder: str | Path) -> ModelConfig:
    """Read config.json, and the eos ids of generation_config.json where that names any.

    Raises ValueError that names the field, what it holds and what it may be.
    """
    folder = Path(folder)
    raw = read_json(folder / "config.json")
    if raw is None:
        raise ValueError(
            f"{folder} has no config.json; give a folder that save_pretrained wrote, or of GGUF files on the "
            "Hub one, as owner/name:Q4_K_M"
        )
    raw = with_modelopt(folder, raw)
    fields = Fields(raw, str(folder / "config.json"))
    names = raw.get("architectures")
    given = names[0] if isinstance(names, list) and names else None
    name = causal_name(given) if isinstance(given, str) else given
    if not isinstance(name, str) or name not in _READERS:
        raise ValueError(
            f"{fields.where}: architecture {given!r} is not supported; supported are {', '.join(_READERS)}"
        )
    fields.refuse_unless("is_causal", True, None)  # else it sees what comes later
    quantised = read_quantised(raw, fields.where)
    config = replace(_READERS[name](fields, name), quantised=quantised)
    generation = folder / "generation_config.json"
    eos_token_ids = Fields(read_json(generation) or {}, str(generation)).token_ids("eos_token_id")
    if eos_token_ids:
        config = replace(config, eos_token_ids=eos_token_ids)
    if config.num_heads % config.num_kv_heads:
        raise fields.error(
            "num_key_value_heads", config.num_kv_heads, f"a divisor of {config.num_heads} heads"
        )
    if config.head_dim > MAX_HEAD_DIM:
        raise fields.error("head_dim", config.head_dim, f"at most {MAX_HEAD_DIM}")
    if config.rope is not None and config.head_dim % 2:
        raise fields.error("head_dim", config.head_dim, "even, since rotary embedding pairs its halves")
    return config


def _decoder(fields: Fields, architecture: str) -> ModelConfig:
    """Read Llama, Mistral, Qwen2/2.5 and Qwen3. Defaults of absent fields are transformers' own."""
    qwen = architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
    fields.refuse_unless("partial_rotary_factor", None, 1, 1.0)
    fields.refuse_unless("dual_chunk_attention_config", None)
    if architecture not in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        fields.refuse_unless("attention_bias", False, None)
    if architecture != "LlamaForCausalLM":
        fields.refuse_unless("mlp_bias", False, None)
    heads = fields.size("num_attention_heads")
    hidden = fields.size("hidden_size")
    kv_heads_if_absent = {"LlamaForCausalLM": heads, "MistralForCausalLM": 8}.get(architecture, 32)
    kv_heads = fields.size(
        "num_key_value_heads", heads if "num_key_value_heads" in fields.raw else kv_heads_if_absent
    )
    if fields.has("head_dim"):
        head_dim = fields.size("head_dim")
    elif architecture == "Qwen3ForCausalLM":
        head_dim = 128
    elif hidden % heads:
        raise fields.error("hidden_size", hidden, f"a multiple of num_attention_heads ({heads})")
    else:
        head_dim = hidden // heads
    layers = fields.size("num_hidden_layers")
    positions = fields.size("max_position_embeddings")
    attention_bias = fields.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.size("intermediate_size"),
        vocab_size=fields.size("vocab_size"),
        max_position_embeddings=positions,
        dtype=_dtype(fields),
        activation=fields.choice("hidden_act", "silu", _SILU),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=_bos_token_id(fields),
        pad_token_id=_pad_token_id(fields, None),
        windows=_windows(fields, layers, positions, architecture, qwen),
        rope=RopeConfig.read(fields, positions),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        embedding_size=hidden,
    )


def _windows(fields: Fields, layers: int, positions: int, architecture: str, qwen: bool) -> tuple[int, ...]:
    """Return the attention window of each layer; one that no context can outgrow counts as none."""
    if architecture == "LlamaForCausalLM":
        fields.refuse_unless("sliding_window", None)
        fields.refuse_unless("layer_types", None, ["full_attention"] * layers)
        return (0,) * layers
    window = fields.raw.get("sliding_window", 4096)
    if qwen and not fields.flag("use_sliding_window", False):
        window = None
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise fields.error("sliding_window", window, "a positive integer or null")
    first = fields.raw.get("max_window_layers", 28) if qwen else 0
    if isinstance(first, bool) or not isinstance(first, int):
        raise fields.error("max_window_layers", first, "an integer")
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        sliding = [window is not None and layer >= first for layer in range(layers)]
    else:
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
            raise fields.error("layer_types", kinds, f"{layers} entries, each one of {', '.join(known)}")
        sliding = [kind == "sliding_attention" for kind in kinds]
        if any(sliding) and window is None:
            raise fields.error("layer_types", kinds, "full_attention only, since no sliding_window is in use")
    return tuple(window if slides and window is not None and window < positions else 0 for slides in sliding)


def _opt(fields: Fields, architecture: str) -> ModelConfig:
    heads = fields.size("num_attention_heads")
    hidden = fields.size("hidden_size")
    if hidden % heads:
        raise fields.error("hidden_size", hidden, f"a multiple of num_attention_heads ({heads})")
    layers = fields.size("num_hidden_layers")
    bias = fields.flag("enable_bias", True)
    norm_before = fields.flag("do_layer_norm_before", True)
    return ModelConfig(
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=fields.size("ffn_dim"),
        vocab_size=fields.size("vocab_size"),
        max_position_embeddings=fields.size("max_position_embeddings"),
        dtype=_dtype(fields),
        activation=fields.choice("activation_function", "relu", _PLAIN),
        norm_eps=1e-5,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=_bos_token_id(fields),
        pad_token_id=_pad_token_id(fields, 1),
        windows=(0,) * layers,
        rope=None,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        embedding_size=fields.size("word_embed_proj_dim", hidden),
        norm_before=norm_before,
        final_norm=norm_before and not fields.flag("_remove_final_layer_norm", False),
        norm_affine=fields.flag("layer_norm_elementwise_affine", True),
    )


def _gpt2(fields: Fields, architecture: str) -> ModelConfig:
    fields.refuse_unless("scale_attn_weights", True)
    fields.refuse_unless("scale_attn_by_inverse_layer_idx", False)
    fields.refuse_unless("reorder_and_upcast_attn", False)
    fields.refuse_unless("add_cross_attention", False)
    heads = fields.size("n_head")
    hidden = fields.size("n_embd")
    if hidden % heads:
        raise fields.error("n_embd", hidden, f"a multiple of n_head ({heads})")
    layers = fields.size("n_layer")
    return ModelConfig(
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=fields.size("n_inner", 4 * hidden),
        vocab_size=fields.size("vocab_size"),
        max_position_embeddings=fields.size("n_positions"),
        dtype=_dtype(fields),
        activation=fields.choice("activation_function", "gelu_tanh", _PLAIN),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=_bos_token_id(fields),
        pad_token_id=_pad_token_id(fields, None),
        windows=(0,) * layers,
        rope=None,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        embedding_size=hidden,
    )


_READERS: dict[str, Callable[[Fields, str], ModelConfig]] = {
    "LlamaForCausalLM": _decoder,
    "MistralForCausalLM": _decoder,
    "Qwen2ForCausalLM": _decoder,
    "Qwen3ForCausalLM": _decoder,
    "OPTForCausalLM": _opt,
    "GPT2LMHeadModel": _gpt2,
}


def _dtype(fields: Fields) -> Dtype:
    default: Dtype = "bfloat16" if quantisation_of(fields.raw) else "float32"
    name = next((each for each in FIELDS if fields.has(each)), FIELDS[0])
    return Fields({name: usual_name(fields.raw.get(name))}, fields.where).choice(name, default, _DTYPES)


def _bos_token_id(fields: Fields) -> int | None:
    return next(iter(fields.token_ids("bos_token_id")), None)


def _pad_token_id(fields: Fields, default: int | None) -> int | None:
    return next(iter(fields.token_ids("pad_token_id")), None) if "pad_token_id" in fields.raw else default


def has_native(raw: dict[str, Any]) -> bool:
    """Return whether a config.json is of an architecture that has a decoder here."""
    names = raw.get("architectures")
    return isinstance(names, list) and bool(names) and causal_name(str(names[0])) in _READERS
