"""In which formats a folder's files have the weights of layers, by their headers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from quire.engine.config import EngineConfig, QuantizedWeights
from quire.engine.models.config import ModelConfig
from quire.engine.models.expansion import expand_files
from quire.engine.models.float8_files import Float8Tensor
from quire.engine.models.kept_weights import (
    ADAPTED,
    Keep,
    Stored,
    as_asked,
    described,
    keep,
    may_keep,
)
from quire.engine.models.packed_files import PackedTensor
from quire.engine.models.quantisation import ROUNDED, weights_of
from quire.engine.models.rounded_files import RoundedTensor
from quire.engine.models.weight_files import open_weights, weight_files
from quire.kernels.backend import Backend


def stored_in(files: list[Any], config: ModelConfig) -> Stored:
    """Return the formats of weights in files that `expand_files` gave, where a model may keep them.

    Of GPTQ's, which group each input is in is read too. Raises ValueError where there is none of a group.
    """
    if not may_keep(config):
        return {}
    tensors = ((name, file.get_slice(name)) for file in files for name in file.offset_keys())
    kinds = Float8Tensor | PackedTensor | RoundedTensor
    found = {name: each for name, each in tensors if isinstance(each, kinds)}
    if config.adapter is not None and weights_of(config.quantised) != ROUNDED:
        return dict.fromkeys(found, ADAPTED)
    return {name: each.kept_format for name, each in found.items()}


def keep_in_folder(
    folder: Path,
    model: ModelConfig,
    dtype: torch.dtype,
    backend: Backend,
    *,
    dummy: bool = False,
    quantized_weights: QuantizedWeights = "keep",
) -> Keep:
    """Return what chooses which of a folder's weights are kept; dummy: those are drawn, and none read.

    backend: whose products and experts may be by weights in few bits.
    """
    if model.implementation == "transformers":
        from quire.engine.models.general.kept_choice import keep_parts_of  # transformers takes seconds

        opened = _opened(folder, dummy=dummy) if may_keep(model) else []
        return keep_parts_of(folder, model, dtype, backend, opened, quantized_weights)
    stored = as_asked(_stored_in_folder(folder, model, dummy=dummy), quantized_weights)
    return partial(keep, stored=stored, dtype=dtype, supports=backend.keeps)


def are_here(folder: Path) -> bool:
    """Tell whether a folder has its files of weights, whose headers tell more than config.json."""
    try:
        return bool(weight_files(folder))
    except ValueError:  # which is told where they are loaded
        return False


def keep_by_flags(
    config: EngineConfig, folder: Path, model: ModelConfig, dtype: torch.dtype, backend: Backend
) -> Keep:
    """Return what chooses which of a folder's weights an engine with these flags keeps.

    backend: as `keep_in_folder` has it.
    """
    dummy, asked = config.load_format == "dummy", config.quantized_weights
    return keep_in_folder(folder, model, dtype, backend, dummy=dummy, quantized_weights=asked)


def _stored_in_folder(folder: Path, config: ModelConfig, *, dummy: bool) -> Stored:
    """Return the formats of a folder's weights; of those that are not here, or drawn, by config.json."""
    if not may_keep(config):
        return {}
    opened = _opened(folder, dummy=dummy)
    if not opened:
        return described(config)
    files = expand_files(opened, config.quantised, torch.float32, torch.device("cpu"))
    return stored_in(files, config)


def _opened(folder: Path, *, dummy: bool) -> list[Any]:
    """Return a folder's files of weights, open; none that are not to be read, not here yet, or not whole."""
    try:
        return [] if dummy else [open_weights(path) for path in weight_files(folder)]
    except ValueError:  # which is told where they are loaded
        return []
