"""GGUF files of random models, written as llama.cpp's convert_hf_to_gguf.py writes those of trained ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from safetensors.torch import load_file

from tests.models.any_model import tiny_model, two_layers

Metadata: TypeAlias = Mapping[str, Any]

# By a type of transformers: the architecture that files name, and what makes a tiny model of it.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "mixtral": ("llama", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen2_moe": ("qwen2moe", {}),
    "qwen3_moe": ("qwen3moe", {"norm_topk_prob": True}),
    "phi3": ("phi3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3_text": (
        "gemma3",
        {
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 7,
            "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
        },
    ),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 3.0,
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    "starcoder2": ("starcoder2", {}),
    "gpt2": ("gpt2", {}),
}
_PERMUTED = ("llama", "granite", "smollm3")
_KEYS = {  # of metadata, by what they are of a configuration
    "context_length": ("max_position_embeddings", "n_positions"),
    "block_count": ("num_hidden_layers", "n_layer"),
    "embedding_length": ("hidden_size", "n_embd"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\.\w+)\.weight")


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Have folders that describe files be made in one of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def save_gguf(
    kind: str,
    folder: Path,
    quantised: Kind = Kind.F32,
    *,
    parts: int = 1,
    metadata: Metadata = MappingProxyType({}),
    tensors: Mapping[str, np.ndarray[Any, Any] | None] = MappingProxyType({}),
) -> tuple[Path, Any]:
    """Save a random model of a type of transformers in a GGUF file; return it, and transformers' model.

    parts: files that it is split among. metadata, tensors: further ones, or others; None: it is left out.
    """
    architecture, changes = MODELS[kind]
    reference = tiny_model(kind, folder / "folder", **(two_layers(kind) | changes))
    config = json.loads((folder / "folder" / "config.json").read_text())
    said: dict[str, Any] = {}
    for key, names in _KEYS.items():
        value = next((config[name] for name in names if config.get(name) is not None), None)
        if value is not None:
            said[f"{architecture}.{key}"] = value
    said.setdefault(f"{architecture}.feed_forward_length", 4 * config.get("n_embd", 0))
    rope = config.get("rope_parameters", {})
    theta = rope.get("rope_theta", rope.get("full_attention", {}).get("rope_theta"))
    if theta is not None:
        said[f"{architecture}.rope.freq_base"] = theta
    said |= byte_level(config["vocab_size"]) | {**metadata}
    said = {name: value for name, value in said.items() if value is not None}
    written = dict(_tensors(folder / "folder", architecture, config)) | {**tensors}
    held = {name: array for name, array in written.items() if array is not None}
    path = folder / (f"tiny-00001-of-{parts:05}.gguf" if parts > 1 else "tiny.gguf")
    write(path, architecture, said, held, quantised, parts)
    return path, reference


def byte_level(vocab_size: int) -> dict[str, Any]:
    """Return what files say of a tokenizer of bytes, of which merges make a few more tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet = sorted(bytes_to_unicode().values())
    tokens = [*("<s>", "</s>", "<|im_end|>", *alphabet)[: vocab_size - 2], "th", "the"]
    kinds = [3 if token in ("<s>", "</s>", "<|im_end|>") else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["t h", "th e"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def sentence_pieces() -> dict[str, Any]:
    """Return what files say of a SentencePiece model: pieces with scores, and bytes for what has none."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3, *[6] * 256]
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz0123456789.,", "▁t", "he", "▁the", "lo", "llo", "▁a"]
    scores = [0.0] * len(tokens) + [-float(rank) for rank in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def write(
    path: Path,
    architecture: str,
    metadata: Metadata,
    tensors: Mapping[str, np.ndarray[Any, Any]],
    quantised: Kind = Kind.F32,
    parts: int = 1,
) -> None:
    """Write a file, or several. Matrices are quantised, but for routers."""
    names = [*tensors]
    for part in range(parts):
        file = path.with_name(path.name.replace("-00001-of-", f"-{part + 1:05}-of-"))
        writer = gguf.GGUFWriter(file, architecture if part == 0 else "")
        if part == 0:
            for name, value in metadata.items():
                _add(writer, name, value)
        if parts > 1:
            writer.add_uint16("split.no", part)
            writer.add_uint16("split.count", parts)
        for name in names[part::parts]:
            array, kind = tensors[name], quantised
            if array.ndim < 2 or "gate_inp" in name or quantised == Kind.F32:
                kind = Kind.F32
            data = quantize(np.ascontiguousarray(array), kind)
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def _tensors(folder: Path, architecture: str, config: dict[str, Any]) -> Any:
    """Yield names and numbers of what a file has of the weights in a folder."""
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, layers)
    experts: dict[str, list[np.ndarray[Any, Any]]] = {}
    weights = load_file(folder / "model.safetensors")
    for name in sorted(weights, key=_numbers):
        array = weights[name].float().numpy()
        if (expert := _EXPERT.fullmatch(name)) is not None:
            experts.setdefault(expert[1] + expert[3], []).append(array)
            continue
        base, _, suffix = name.rpartition(".")
        yield f"{names.get_name(base)}.{suffix}", _as_written(name, array, architecture, config)
    for base, arrays in experts.items():
        yield f"{names.get_name(base)}.weight", np.stack(arrays)


def _numbers(name: str) -> list[int]:
    return [int(part) if part.isdecimal() else 0 for part in name.split(".")]


def _as_written(
    name: str, array: np.ndarray[Any, Any], architecture: str, config: dict[str, Any]
) -> np.ndarray[Any, Any]:
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return array + 1
    if architecture == "gpt2" and array.ndim == 2 and ".h." in name:
        return array.T
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if architecture in _PERMUTED and f".{part}." in name:
            halves = array.reshape(config[heads], 2, len(array) // config[heads] // 2, *array.shape[1:])
            return halves.swapaxes(1, 2).reshape(array.shape)
    if name.endswith("shared_expert_gate.weight"):
        return array[0]
    return array
