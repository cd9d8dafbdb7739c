"""Which weights stay in few bits of a folder's model by transformers' code: linear layers' and experts'."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping

from quire.engine.config import QuantizedWeights
from quire.engine.models.adapter_tensors import read_changes
from quire.engine.models.config import ModelConfig
from quire.engine.models.general.described import read_described
from quire.engine.models.general.division.divide import divide
from quire.engine.models.general.division.shares import Held
from quire.engine.models.general.dry_run import auto_of, build
from quire.engine.models.general.expert_sources import stored_experts
from quire.engine.models.general.kept_experts import described_experts, keep_experts, proved
from quire.engine.models.general.kept_products import described_products, keep_products
from quire.engine.models.general.loading import expanded_slices
from quire.engine.models.general.naming import names_in
from quire.engine.models.general.product_sources import stored_products
from quire.engine.models.general.rounded_parts import experts_as_they_are, round_slices
from quire.engine.models.kept_weights import ADAPTED, Keep, Kept, Stored, as_asked, may_keep, of_experts_alone
from quire.engine.models.quantisation import ROUNDED, of_files, weights_of
from quire.engine.parallel.group import OneOfRanks
from quire.kernels.backend import Backend


def keep_parts_of(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    backend: Backend,
    files: list[Any],
    quantized_weights: QuantizedWeights,
) -> Keep:
    """Return what chooses which weights a rank keeps of a folder's model, by open files.

    files: none, if they are not here, or not read: config.json tells. Layers' code is looked at here, once.
    """
    if not may_keep(config):
        return lambda part: Kept()
    model = build(read_described(folder), auto_of(config))
    mapping, rounds = get_model_conversion_mapping(model), weights_of(config.quantised) == ROUNDED
    if files:
        slices = expanded_slices(files, of_files(config.quantised), dtype)
        if rounds:
            slices = round_slices(model, slices, mapping, dtype)
        experts = stored_experts(model, slices, mapping)
        products = stored_products(model, slices, names_in(model, slices, mapping), experts)
    else:
        experts = described_experts(model, config, mapping)
        products = described_products(model, config, mapping)
    if config.adapter is not None and not rounds:  # else it is merged before
        changed = {name for name, _ in names_in(model, read_changes(config.adapter), mapping).values()}
        experts, products = _without(experts, changed), _without(products, changed)
    experts = proved(model, as_asked(experts, quantized_weights), dtype, backend.keeps_experts)
    products = as_asked(products, quantized_weights)
    if rounds:
        others = experts_as_they_are(model, mapping)
        experts = {**experts, **dict.fromkeys(others, "experts, which are not rounded")}
    return partial(
        keep_parts,
        folder=folder,
        model=model,
        experts=experts,
        products=products,
        dtype=dtype,
        backend=backend,
    )


def keep_parts(
    part: ModelConfig,
    folder: Path,
    model: Any,
    experts: Stored,
    products: Stored,
    dtype: torch.dtype,
    backend: Backend,
) -> Kept:
    """Choose which are kept for products in dtype.

    part: the configuration of a rank. model: undivided, of that folder; its parameters need not be anywhere.
    experts, products: as `stored_experts` and `stored_products` have them. Raises Undividable.
    """
    kept = keep_experts(part, model, experts, dtype, backend.keeps_experts)
    beside = keep_products(model, products, dtype, backend.keeps, _held(folder, part) if products else {})
    formats = {**kept.formats, **beside.formats}
    of = "experts" if of_experts_alone(formats) else "layers"
    return Kept(formats, {**kept.reasons, **beside.reasons}, of)


def _without(stored: Stored, changed: set[str]) -> Stored:
    """Return the formats of weights, of which an adapter changes some."""
    adapted = {name for name, form in stored.items() if name in changed and not isinstance(form, str)}
    return {**stored, **dict.fromkeys(adapted, ADAPTED)}


def _held(folder: Path, part: ModelConfig) -> Mapping[str, Held]:
    """Return a rank's shares of parameters, by their names."""
    if part.ranks == 1:
        return {}
    return divide(build(read_described(folder), auto_of(part)), part, OneOfRanks(0, part.ranks)).held
