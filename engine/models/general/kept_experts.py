"""Which experts' weights stay in few bits of a model by transformers' code, and why others do not.

All of a layer's are kept, or none: its code is proved to compute what kernels do by weights in such formats.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.engine.models.config import ModelConfig
from quire.engine.models.float8 import Float8
from quire.engine.models.general.division.plan import experts_by_name
from quire.engine.models.general.expert_modules import DOWN, GATE_UP, kind_of, matrices_of
from quire.engine.models.general.expert_proof import is_computed
from quire.engine.models.general.expert_sources import why_not_kept
from quire.engine.models.kept_weights import (
    Kept,
    Stored,
    Supports,
    described_format,
    fused,
    unsupported,
    untaken,
)
from quire.engine.models.mxfp4_files import MXFP4_FORMAT
from quire.engine.models.packed import Packed
from quire.engine.models.quantisation import MXFP4, ROUNDED, weights_of
from quire.engine.models.rounded_files import ROUNDED_FORMAT
from quire.kernels.quantised.weight import WeightFormat


def described_experts(model: Any, config: ModelConfig, mapping: list[Any]) -> Stored:
    """Return how files have weights of experts as far as config.json tells, which need not be there.

    mapping: as transformers' loader has it, which tells whether they are stacks or matrices of each expert.
    """
    quantised = weights_of(config.quantised)
    stored: dict[str, WeightFormat | str] = {}
    for name, module in experts_by_name(model).items():
        for weight, (_, inputs) in matrices_of(module).items():
            form: WeightFormat | str = MXFP4_FORMAT
            if why := why_not_kept(f"{name}.{weight}", module, mapping, stacked=quantised == MXFP4):
                form = why
            elif isinstance(quantised, Float8 | Packed):
                form = described_format(quantised, inputs)
            elif quantised == ROUNDED:
                form = ROUNDED_FORMAT
            stored[f"{name}.{weight}"] = form if isinstance(form, str) else fused([form], inputs)
    return stored


def keep_experts(
    part: ModelConfig, model: Any, stored: Stored, dtype: torch.dtype, supports: Supports
) -> Kept:
    """Choose which are kept for products in dtype.

    part: the configuration of a rank. model: undivided; its parameters need not be anywhere. stored: as
    `expert_sources.stored_experts` has it, but for what kernels do not compute.
    """
    formats: dict[str, WeightFormat] = {}
    reasons: dict[str, str] = {}
    for name, module in experts_by_name(model).items():
        names = [f"{name}.{weight}" for weight in (GATE_UP, DOWN)]
        found = [stored.get(each) for each in names]
        forms = [each for each in found if isinstance(each, WeightFormat)]
        if not any(found):
            continue
        why = _why_not(part, module, found, dtype, supports)
        if why:
            reasons |= {each: why for each, form in zip(names, found, strict=True) if form is not None}
        else:
            formats |= dict(zip(names, forms, strict=True))
    others = stored.keys() - formats.keys() - reasons.keys()
    reasons |= {name: str(form) for name, form in stored.items() if name in others}
    return Kept(formats, reasons)


def proved(model: Any, stored: Stored, dtype: torch.dtype, supports: Supports) -> Stored:
    """Return the formats of experts, or why they are not kept: kernels do not compute what their code does.

    Layers that are alike, in the same formats, are looked at once.
    """
    found: dict[Any, bool] = {}
    reasons: dict[str, str] = {}
    for name, module in experts_by_name(model).items():
        names = [f"{name}.{weight}" for weight in (GATE_UP, DOWN)]
        forms = [form for each in names if isinstance(form := stored.get(each), WeightFormat)]
        if len(forms) < len(names) or not all(supports(form, dtype) for form in forms):
            continue
        kind = kind_of(module), *forms
        if kind not in found:
            found[kind] = is_computed(module, forms)
        if not found[kind]:
            reasons |= dict.fromkeys(names, "experts of a kind that kernels do not compute")
    return {**stored, **reasons}


def _why_not(
    part: ModelConfig,
    module: Any,
    found: list[WeightFormat | str | None],
    dtype: torch.dtype,
    supports: Supports,
) -> str:
    """Return why a layer's experts are not kept, as far as formats tell; "" if they may be."""
    if reasons := [each for each in found if isinstance(each, str)]:
        return reasons[0]
    forms = [each for each in found if isinstance(each, WeightFormat)]
    if len(forms) < len(found):
        return "next to weights that are not quantised"
    if not all(supports(form, dtype) for form in forms):
        return unsupported(dtype)
    (_, hidden), (_, inner) = matrices_of(module).values()
    share = inner // (1 if part.expert_parallel else part.ranks)
    of_up, of_down = forms
    if not of_up.takes(hidden):
        return untaken(of_up, hidden)
    if not of_down.takes(share):
        whole = " (kept with --enable-expert-parallel)" if of_down.takes(inner) else ""
        return untaken(of_down, share) + whole
    return ""
