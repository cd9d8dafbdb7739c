"""Which weights of linear layers stay in few bits of a model by transformers' code, and why others do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.engine.models.config import ModelConfig
from quire.engine.models.float8 import Float8
from quire.engine.models.general.division.shares import Held
from quire.engine.models.general.product_sources import products_of, read_elsewhere
from quire.engine.models.general.rounded_parts import rounded_products
from quire.engine.models.kept_weights import Kept, Stored, Supports, described_format, fused, unsupported
from quire.engine.models.packed import Packed
from quire.engine.models.quantisation import ROUNDED, weights_of
from quire.engine.models.rounded_files import ROUNDED_FORMAT
from quire.kernels.quantised.few import ROWS
from quire.kernels.quantised.weight import WeightFormat


def described_products(model: Any, config: ModelConfig, mapping: list[Any]) -> Stored:
    """Return how files have weights of linear layers as far as config.json tells, which need not be there.

    mapping: as transformers' loader has it.
    """
    quantised, elsewhere = weights_of(config.quantised), read_elsewhere(model)
    if quantised == ROUNDED:
        return dict.fromkeys(rounded_products(model, mapping), ROUNDED_FORMAT)
    if not isinstance(quantised, Float8 | Packed):
        return {}
    return {
        name: described_format(quantised, model.get_parameter(name).shape[1])
        for group in products_of(model)
        for name in group
        if name not in elsewhere
    }


def keep_products(
    model: Any, stored: Stored, dtype: torch.dtype, supports: Supports, held: Mapping[str, Held]
) -> Kept:
    """Choose which are kept for products in dtype.

    model: undivided; its parameters need not be anywhere. stored: as `product_sources.stored_products` has
    it. held: a rank's shares of parameters, by their names; the others are whole.
    """
    formats: dict[str, WeightFormat] = {}
    reasons: dict[str, str] = {}
    for names in products_of(model):
        found = [stored.get(name) for name in names]
        if not any(found):
            continue
        shapes = [_shape(name, model, held) for name in names]
        form = _format(found, shapes, dtype, supports)
        if isinstance(form, WeightFormat):
            formats |= dict.fromkeys(names, form)
        else:
            reasons |= {name: form for name, each in zip(names, found, strict=True) if each is not None}
    others = stored.keys() - formats.keys() - reasons.keys()
    return Kept(formats, reasons | {name: str(stored[name]) for name in others})


def _shape(name: str, model: Any, held: Mapping[str, Held]) -> tuple[int, int] | str:
    """Return outputs and inputs of what a rank has of a weight, or why that is no part that can be kept."""
    share = held.get(name)
    if share is None:
        outputs, inputs = model.get_parameter(name).shape
        return outputs, inputs
    if share.size != share.share.length or (share.share.dim == 1 and len(share.share.ranges) > 1):
        return "divided in a way of its own"
    outputs, inputs = share.shape
    return outputs, inputs


def _format(
    found: list[WeightFormat | str | None],
    shapes: list[tuple[int, int] | str],
    dtype: torch.dtype,
    supports: Supports,
) -> WeightFormat | str:
    """Return the format of a product by weights in these, of such shapes on a rank; or why none is."""
    whole = [each for each in shapes if not isinstance(each, str)]
    if reasons := [each for each in shapes if isinstance(each, str)]:
        return reasons[0]
    form = fused(found, whole[0][1])
    if isinstance(form, WeightFormat) and not supports(form, dtype):
        return unsupported(dtype)
    if isinstance(form, WeightFormat) and any(outputs % ROWS for outputs, _ in whole):
        odd = next(outputs for outputs, _ in whole if outputs % ROWS)
        return f"{odd} outputs, no multiple of {ROWS}"
    return form
