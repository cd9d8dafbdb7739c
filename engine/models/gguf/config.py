"""What a GGUF file says of its model, as config.json and generation_config.json have it."""

from __future__ import annotations

import logging
import math
from typing import Any

from quire.engine.models.gguf.architectures import Architecture, architecture_of
from quire.engine.models.gguf.header import Headers
from quire.engine.models.quantisation import GGUF

logger = logging.getLogger("quire.engine")


_F32, _F16, _BF16 = 0, 1, 30  # ggml's numbers of kinds
_LOW, _HIGH, _TRAINED = 1.0, 4.0, 8192  # of the scaling of all of Llama 3.1, 3.2 and 3.3
_POOLS_LAST = 3
# Tokens that end a turn, where files name only that which ends a text; llama.cpp knows them by name, too.
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>")
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# What changes nothing, or is taken from elsewhere.
_UNREAD = {
    "vocab_size", "rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "attention.value_length",
    "pooling_type", "tensor_data_layout",
}  # fmt: skip
_ATTENDS_OTHERWISE = {"attention.causal": True, "attention.max_alibi_bias": 0.0, "attention.clamp_kqv": 0.0}


def config_of(headers: Headers) -> dict[str, Any]:
    """Return what config.json would say. Raises ValueError that names the file and what is not served."""
    path = headers.files[0].path
    try:
        return _config(headers)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # of values of other types
        raise ValueError(f"{path} has metadata that cannot be read: {error!r}; download it again") from error


def generation_of(headers: Headers) -> dict[str, Any]:
    """Return what generation_config.json would say: which tokens end a text, and how tokens are chosen."""
    metadata = headers.metadata
    found = (metadata.get(f"general.sampling.{name}") for name in _SAMPLING)
    said = zip(_SAMPLING.values(), found, strict=True)
    return {name: value for name, value in said if value is not None} | {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends(metadata),
    }


def _ends(metadata: dict[str, Any]) -> list[int]:
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    known = (tokens.index(text) for text in _ENDS if text in tokens)
    return [*dict.fromkeys(token for token in (*named, *known) if token is not None)]


def _config(headers: Headers) -> dict[str, Any]:
    metadata, architecture = headers.metadata, architecture_of(headers.metadata)
    said = _Said(metadata)
    embedding = headers.find("token_embd.weight")
    if embedding is None:
        raise ValueError("has no token_embd.weight, which every model has")
    for name, usual in _ATTENDS_OTHERWISE.items():
        if said.get(name, usual) != usual:
            raise ValueError(f"has {name} = {said.get(name)}, which is not served from a GGUF file")
    fields = dict(architecture.constants)
    for name, field in architecture.fields.items():
        if (value := said.get(name)) is not None:
            fields[field] = value
        elif name not in architecture.optional:
            raise ValueError(f"has no {said.name}.{name} in its metadata, which every such model has")
    _tell_unread(said, architecture)
    fields |= _heads(headers, said, architecture)
    fields |= {field: True for name, field in architecture.biases.items() if headers.find(name)}
    if architecture.model_type in ("gemma2", "gemma3_text"):
        fields |= _of_gemma(fields, said)
    return fields | {
        "architectures": [_class_of(architecture, said)],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": headers.find("output.weight") is None,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends(metadata),
        "dtype": _dtype(headers),
        "quantization_config": {"quant_method": GGUF},
    }


class _Said:
    """What metadata has of a model of its architecture, by the name behind that of the architecture."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.name = metadata["general.architecture"]
        self.values = {
            key.removeprefix(f"{self.name}."): value
            for key, value in metadata.items()
            if key.startswith(f"{self.name}.")
        }

    def get(self, name: str, default: Any = None) -> Any:
        """Raises ValueError where layers differ."""
        value = self.values.get(name, default)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise ValueError(f"has layers that differ in {self.name}.{name}: {value}")
        return value[0]


def _tell_unread(said: _Said, architecture: Architecture) -> None:
    known = _UNREAD | set(_ATTENDS_OTHERWISE) | set(architecture.fields)
    unread = [name for name in said.values if name not in known and not name.startswith("rope.scal")]
    unread = [name for name in unread if said.values[name] not in (0, 0.0, False)]
    if unread:
        logger.warning("of the GGUF file's metadata is not applied: %s", ", ".join(sorted(unread)))


def _class_of(architecture: Architecture, said: _Said) -> str:
    """Return the class of the model: one without a head, where vectors of texts are asked of it."""
    pooling = said.get("pooling_type", 0)
    if pooling == _POOLS_LAST:
        return architecture.architecture.replace("ForCausalLM", "Model")
    if pooling:
        raise ValueError(f"pools by pooling_type {pooling}; only {_POOLS_LAST}, the last token's, is served")
    return architecture.architecture


def _dtype(headers: Headers) -> str:
    """Return the type of matrices that are not quantised, and bfloat16 for those that are."""
    kinds = {each.kind for header in headers.files for each in header.tensors if len(each.shape) > 1}
    if kinds == {_F32}:
        return "float32"
    return "float16" if kinds <= {_F32, _F16} else "bfloat16"


def _heads(headers: Headers, said: _Said, architecture: Architecture) -> dict[str, Any]:
    """Return what is told of heads and of their rotary positions."""
    if "attention.head_count_kv" not in architecture.fields:  # positions are learned
        return {}
    heads = said.get("attention.head_count")
    usual = said.get("embedding_length") // heads
    queries = headers.find("blk.0.attn_q.weight")
    found = usual if queries is None else queries.shape[0] // heads
    head_dim = said.get("attention.key_length", found)
    if said.get("attention.value_length", head_dim) != head_dim:
        raise ValueError(f"has keys of {head_dim} numbers, and values of another number")
    rotated = said.get("rope.dimension_count", head_dim)
    rope = _rope(headers, said, rotated)
    if rotated != head_dim:
        if not architecture.partly_rotated:
            raise ValueError(f"rotates {rotated} of the {head_dim} numbers of a head, which is not served")
        rope["partial_rotary_factor"] = rotated / head_dim
    fields: dict[str, Any] = {} if head_dim == usual else {"head_dim": head_dim}
    if architecture.model_type == "gemma3_text":  # layers with a window have another base
        local = {"rope_type": "default", "rope_theta": said.get("rope.freq_base_swa", 10_000.0)}
        return fields | {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    if rope["rope_type"] == "longrope":  # Phi-3's own code looks for it here
        fields["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return fields | {"rope_parameters": rope}


def _rope(headers: Headers, said: _Said, rotated: int) -> dict[str, Any]:
    """Return `rope_parameters`. Raises ValueError for a scaling that is not known."""
    usual = 1_000_000.0 if said.name == "gemma3" else 10_000.0
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": said.get("rope.freq_base", usual)}
    kind = said.get("rope.scaling.type", "none")
    factor = said.get("rope.scaling.factor", said.get("rope.scale_linear", 1.0))
    if kind == "none" and "rope.scale_linear" in said.values:
        kind = "linear"
    long, short = headers.numbers("rope_factors_long.weight"), headers.numbers("rope_factors_short.weight")
    original = said.get("rope.scaling.original_context_length")
    if long is not None and short is not None:
        if original is None:
            raise ValueError(f"has no {said.name}.rope.scaling.original_context_length beside its factors")
        attention = said.get("rope.scaling.attn_factor")
        told = {} if attention is None else {"attention_factor": attention}
        rope |= {"rope_type": "longrope", "long_factor": long, "short_factor": short} | told
        return rope | {"original_max_position_embeddings": original}
    factors = headers.numbers("rope_freqs.weight")
    if factors is not None:
        return rope | _llama3(factors, rope["rope_theta"], rotated)
    if kind == "linear" and factor != 1.0:
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return rope | _yarn(said, factor, original)
    if kind not in ("none", "linear"):
        raise ValueError(f"has rope.scaling.type {kind!r}; known are none, linear and yarn")
    return rope


def _yarn(said: _Said, factor: float, original: int | None) -> dict[str, Any]:
    further = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier")
    other = [name for name in further if said.get(f"rope.scaling.{name}", 1.0) != 1.0]
    if original is None or other:
        why = f"with {', '.join(other)}" if other else "without rope.scaling.original_context_length"
        raise ValueError(f"has rotary positions by YaRN {why}, which is not served")
    names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    found = {field: said.get(f"rope.scaling.{name}") for name, field in names.items()}
    told = {field: value for field, value in found.items() if value is not None}
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original} | told


def _llama3(factors: list[float], theta: float, rotated: int) -> dict[str, Any]:
    """Return the scaling of Llama 3.1 that a file's factors of frequencies are of. Raises ValueError."""
    factor, expected = max(factors), []
    for pair in range(rotated // 2):
        turns = _TRAINED * theta ** (-2 * pair / rotated) / (2 * math.pi)
        smooth = (turns - _LOW) / (_HIGH - _LOW)
        expected.append(1 / ((1 - smooth) / factor + smooth) if _LOW <= turns <= _HIGH else factor)
        if turns > _HIGH:
            expected[-1] = 1.0
    close = (math.isclose(one, other, rel_tol=1e-3) for one, other in zip(factors, expected, strict=False))
    if len(factors) != len(expected) or not all(close):
        raise ValueError("has factors of rotary positions (rope_freqs.weight) that are not Llama 3.1's")
    told = {"low_freq_factor": _LOW, "high_freq_factor": _HIGH, "original_max_position_embeddings": _TRAINED}
    return {"rope_type": "llama3", "factor": factor} | told


def _of_gemma(fields: dict[str, Any], said: _Said) -> dict[str, Any]:
    """Return by what scores are scaled: of heads' width, but for the largest models."""
    largest = {"gemma2": 46, "gemma3": 62}[said.name]  # layers of 27B, by which llama.cpp knows them, too
    of_width = fields["hidden_size"] // fields["num_attention_heads"]
    head_dim = said.get("attention.key_length")
    return {"query_pre_attn_scalar": of_width if fields["num_hidden_layers"] == largest else head_dim}
