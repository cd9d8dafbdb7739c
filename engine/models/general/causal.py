"""A causal model of transformers with the weights of a folder, whole or of one rank, or with drawn ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping

from quire.engine.models.config import ModelConfig
from quire.engine.models.copies import copies_to
from quire.engine.models.general.attention import NAME
from quire.engine.models.general.described import read_described
from quire.engine.models.general.division.divide import Division, divide
from quire.engine.models.general.division.loading import drawing_shares, reading_shares
from quire.engine.models.general.division.shares import Held
from quire.engine.models.general.dry_run import auto_of, build
from quire.engine.models.general.dummy import draw_matrices, draw_rounded_matrices, draw_vectors
from quire.engine.models.general.experts import give_experts
from quire.engine.models.general.kept_parts import KeptParts
from quire.engine.models.general.latent import give_latents
from quire.engine.models.general.loading import reading_expanded, reading_whole
from quire.engine.models.general.model import GeneralModel
from quire.engine.models.general.own_attention import adapt, register_classes
from quire.engine.models.general.quantised import without
from quire.engine.models.general.rotary import settle
from quire.engine.models.general.rounded_parts import rounded_names
from quire.engine.models.general.text_part import is_beside_text
from quire.engine.models.quantisation import ROUNDED, weights_of
from quire.engine.models.weight_files import listed, open_weights, weight_files
from quire.kernels.backend import Backend
from quire.kernels.parallel.ranks import Ranks
from quire.kernels.quantised.weight import WeightFormat

# Weights that a folder has besides those of a model of its text alone (Llama 4).
_FOR_IMAGES = ("vision_model.", "multi_modal_projector.")
# Masks and tables of positions, which older code kept in files, and the model's own makes.
_BUFFERS = {
    "codegen": r"attn\.causal_mask",
    "gpt2": r"attn\.masked_bias",
    "gpt_bigcode": r"attn\.(masked_)?bias",
    "gpt_neo": r"attn\.attention\.(masked_)?bias",
    "gptj": r"attn\.(masked_)?bias",
    "openai-gpt": r"attn\.bias",
    "xglm": r"embed_positions\.weights",
}


def load_general(
    folder: Path,
    config: ModelConfig,
    backend: Backend,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    dummy_seed: int | None,
    ranks: Ranks | None = None,
    kept: Mapping[str, WeightFormat] = MappingProxyType({}),
) -> tuple[GeneralModel, int]:
    """Load the model on `device` in `dtype`; return its weights' bytes, too.

    dummy_seed: reads no weights, but draws them. ranks: those that it is divided among, config being that of
    one. kept: weights that stay in few bits, as `kept_choice` chose them. Raises ValueError for
    missing and unknown weights, by name.
    """
    auto, parts = auto_of(config), KeptParts(kept, device)
    splits: frozenset[int] = frozenset()
    described = _described(folder, config)
    register_classes(described.model_type)
    if dummy_seed is None:
        for path in weight_files(folder):
            open_weights(path)
    if ranks is not None:
        causal, splits = _load_shares(folder, auto, config, device, dtype, dummy_seed, ranks, parts)
    elif dummy_seed is None:
        causal = _load_whole(folder, auto, config, device, dtype, described, parts)
        _leave_files(causal, device)
    elif kept or _rounds(config):
        causal = _draw_beside(auto, config, device, dtype, described, dummy_seed, parts)
    else:
        with torch.device(device):
            causal = auto.from_config(
                described,
                dtype=dtype,
                attn_implementation=NAME,
                experts_implementation=_experts(device),
            )
        draw_matrices(causal, dummy_seed, device)
        draw_vectors(causal, dummy_seed, device, {})
    causal.eval().requires_grad_(False)
    adapt(causal)
    settle(causal, max_model_len)
    if ranks is None:
        give_latents(causal)
    if device.type == "cuda":
        give_experts(causal)
    parts.experts.give(causal, dtype)
    weights = {weight.data_ptr(): weight.nbytes for weight in causal.parameters()}
    model = GeneralModel(config, backend, causal, dtype, device, max_model_len, ranks, splits, kept)
    return model, sum(weights.values()) + parts.num_bytes


def _described(folder: Path, config: ModelConfig) -> PreTrainedConfig:
    """Return the folder's configuration, whose head and embedding are tied if they still are."""
    described = read_described(folder)
    if config.adapter is not None and config.adapter.unties:
        for part in (described, described.get_text_config(decoder=True)):
            part.tie_word_embeddings = False
    return described


def _load_whole(
    folder: Path,
    auto: Any,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    described: PreTrainedConfig,
    kept: KeptParts,
) -> Any:
    """Load the causal model of a configuration into host memory, but for what stays in few bits."""
    built = build(described, auto)
    cls, shape = type(built), without(built.config)
    given: dict[str, Any] = {
        "config": shape,
        "dtype": dtype,
        "attn_implementation": NAME,
        "experts_implementation": _experts(device, kept),
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # so that they are told
    }
    if config.quantised is None and config.adapter is None:
        given |= {"local_files_only": True, "use_safetensors": True}
        causal, told = reading_whole(cls, folder).from_pretrained(folder, **given)  # type: ignore[attr-defined]
    else:
        reader = reading_expanded(cls, weight_files(folder), config, dtype, kept)
        causal, told = reader.from_pretrained(None, state_dict={}, **given)  # type: ignore[attr-defined]
    _check(folder, told, config, described)
    causal.__class__ = cls
    return causal


def _draw_beside(
    auto: Any,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    described: PreTrainedConfig,
    seed: int,
    kept: KeptParts,
) -> Any:
    """Draw the weights of the causal model of a configuration, some of them in few bits, or rounded."""

    def prepare(model: Any) -> dict[str, Held]:
        kept.take(model, {})
        return {}

    built = build(described, auto)
    cls, shape = type(built), without(built.config)
    rounded = _rounded_names(built, config)
    causal = drawing_shares(cls, prepare, seed, device, rounded).from_pretrained(  # type: ignore[attr-defined]
        None,
        state_dict={},
        config=shape,
        dtype=dtype,
        attn_implementation=NAME,
        experts_implementation=_experts(device, kept),
    )
    draw_vectors(causal, seed, device, {})
    causal.__class__ = cls
    kept.draw(seed, dtype)
    draw_rounded_matrices(causal, rounded, seed, dtype, {})
    return causal.to(device)


def _rounds(config: ModelConfig) -> bool:
    return weights_of(config.quantised) == ROUNDED


def _rounded_names(undivided: Any, config: ModelConfig) -> set[str]:
    """Return the parameters of a model that are rounded as they are loaded, or drawn."""
    mapping = get_model_conversion_mapping(undivided)
    return rounded_names(undivided, mapping) if _rounds(config) else set()


def _leave_files(causal: Any, device: torch.device) -> None:
    """Copy weights to the device, out of the folder's files, which are mapped and may be written meanwhile.

    On a CPU they are copied, too: where a number stands in a file would change last bits, by its alignment.
    """
    copy = copies_to(device)
    for weight in (*causal.parameters(), *causal.buffers()):
        copied = torch.empty_like(weight.data, device=device)
        copy(copied, weight.data)
        weight.data = copied


def _load_shares(
    folder: Path,
    auto: Any,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    dummy_seed: int | None,
    ranks: Ranks,
    kept: KeptParts,
) -> tuple[Any, frozenset[int]]:
    """Load this rank's shares; return the causal model, and as `Division` has it `splits`."""
    found: list[Division] = []

    def prepare(model: Any) -> dict[str, Held]:
        give_latents(model)  # while all heads are there: those of a rank alone may keep less than a latent
        found.append(divide(model, config, ranks))
        kept.take(model, found[0].held)
        return found[0].held

    described = _described(folder, config)
    undivided = build(described, auto)
    cls, shape = type(undivided), without(undivided.config)
    given: dict[str, Any] = {
        "config": shape,
        "dtype": dtype,
        "attn_implementation": NAME,
        "experts_implementation": _experts(device, kept),
    }
    if dummy_seed is None:
        reader = reading_shares(cls, prepare, weight_files(folder), config, dtype, kept)
        causal, told = reader.from_pretrained(  # type: ignore[attr-defined]
            None, state_dict={}, output_loading_info=True, ignore_mismatched_sizes=True, **given
        )
        _check(folder, told, config, described)
        _leave_files(causal, device)
    else:
        rounded = _rounded_names(undivided, config)
        drawing = drawing_shares(cls, prepare, dummy_seed, device, rounded)
        causal = drawing.from_pretrained(None, state_dict={}, **given)  # type: ignore[attr-defined]
        draw_vectors(causal, dummy_seed, device, found[0].held)
        kept.draw(dummy_seed, dtype)
        draw_rounded_matrices(causal, rounded, dummy_seed, dtype, found[0].held)
    causal.__class__ = cls
    if ranks.rank:
        parameters = dict(causal.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name in found[0].added_once:
                parameters[name].zero_()
    return causal.to(device), found[0].splits


def _experts(device: torch.device, kept: KeptParts | None = None) -> str:
    """Return what computes experts: kernels, or on a CPU a loop over those that are asked.

    kept: those that stay in few bits are none that a loop knows.
    """
    in_few_bits = kept is not None and kept.experts.formats
    return NAME if device.type == "cuda" or in_few_bits else "eager"


def _is_spare(name: str, described: PreTrainedConfig) -> bool:
    """Return whether a weight of a folder's files is one that its text is not computed by."""
    if hasattr(described, "vision_config") and name.startswith(_FOR_IMAGES):
        return True
    if is_beside_text(name, described):
        return True
    buffers = _BUFFERS.get(described.model_type)
    if buffers is not None and re.search(rf"(^|\.){buffers}$", name):
        return True
    config = described.get_text_config(decoder=True)
    layers = config.num_hidden_layers
    guessing = range(layers, layers + (getattr(config, "num_nextn_predict_layers", None) or 0))
    return name.startswith(tuple(f"model.layers.{layer}." for layer in guessing))  # further tokens (V3)


def _check(folder: Path, loaded: dict[str, Any], config: ModelConfig, described: PreTrainedConfig) -> None:
    told = SimpleNamespace(**loaded)
    if config.pooling is not None and not config.pooling.labels:  # its head is not used, and may not be there
        told.missing_keys = set(told.missing_keys) - {"lm_head.weight", "lm_head.bias", "embed_out.weight"}
    told.unexpected_keys = {name for name in told.unexpected_keys if not _is_spare(name, described)}
    problems = [f"{name} is missing" for name in sorted(told.missing_keys)]
    problems += [f"{name} is no weight of the model" for name in sorted(told.unexpected_keys)]
    problems += [
        f"{name} has shape {[*found]}, but config.json asks for {[*wanted]}"
        for name, found, wanted in sorted(told.mismatched_keys)
    ]
    if problems:
        raise ValueError(f"{folder} does not fit its config.json: {listed(problems)}")
