"""Which weights of a model by transformers' code are rounded to 8-bit floats as they are loaded.

The model alone tells, and neither a device nor a number of ranks: answers are those of the same weights
anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from quire.engine.models.config import ModelConfig
from quire.engine.models.general.described import read_described
from quire.engine.models.general.division.plan import experts_by_name
from quire.engine.models.general.dry_run import auto_of, build
from quire.engine.models.general.expert_modules import DOWN, GATE_UP
from quire.engine.models.general.expert_sources import why_not_kept
from quire.engine.models.general.naming import names_in
from quire.engine.models.general.product_sources import WEIGHT, products_of, read_elsewhere
from quire.engine.models.rounded_files import NUMBERS, RoundedTensor
from quire.kernels.quantised.few import ROWS

_OF_ROUTERS = re.compile(r"router|\.gate\.\w+\.")  # layers in one, beside what `read_elsewhere` finds


def rounds_any(folder: Path, config: ModelConfig) -> bool:
    """Tell whether a folder's model has weights that are rounded."""
    model = build(read_described(folder), auto_of(config))
    return bool(rounded_names(model, get_model_conversion_mapping(model)))


def rounded_names(model: Any, mapping: list[Any]) -> set[str]:
    """Return the parameters that are rounded: linear layers' and experts'.

    model: whole; its parameters need not be anywhere. mapping: as transformers' loader has it.
    """
    return rounded_products(model, mapping) | rounded_experts(model, mapping)


def rounded_products(model: Any, mapping: list[Any]) -> set[str]:
    """Return those of linear layers but of a few outputs, as gates have them: no kernel has these in 8 bits.

    What the loader makes of several stays as it is, too.
    """
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    made = [pattern for each in converters for pattern in each.target_patterns]
    names = {name for group in products_of(model) for name in group} - read_elsewhere(model).keys()
    return {
        name
        for name in names
        if model.get_parameter(name).shape[0] % ROWS == 0
        and not _OF_ROUTERS.search(name)
        and not any(re.search(pattern, name) for pattern in made)
    }


def rounded_experts(model: Any, mapping: list[Any]) -> set[str]:
    """Return those of experts, of which the loader stacks a matrix of each and does no more."""
    return {
        f"{name}.{weight}"
        for name, module in experts_by_name(model).items()
        if module.has_gate
        and not any(
            why_not_kept(f"{name}.{each}", module, mapping, stacked=False) for each in (GATE_UP, DOWN)
        )
        for weight in (GATE_UP, DOWN)
    }


def experts_as_they_are(model: Any, mapping: list[Any]) -> set[str]:
    """Return the parameters of experts that are not rounded, each of which has those of all of a layer."""
    matrices = {
        name: weight.dim()
        for name, weight in model.named_parameters()
        if "experts" in name.split(".") and weight.dim() > 1 and not name.endswith("bias")
    }
    of_all = {name for name, dims in matrices.items() if dims > 2 or not name.endswith(WEIGHT)}
    return of_all - rounded_experts(model, mapping)


def round_slices(
    model: Any, slices: Mapping[str, Any], mapping: list[Any], dtype: torch.dtype
) -> dict[str, Any]:
    """Return tensors of files with those rounded that are to be, to be read as numbers of a dtype.

    Raises ValueError by name for what cannot be: holds no numbers, or has experts otherwise than the model's
    files have them, of which numbers would not be those of other files.
    """
    products, experts = rounded_products(model, mapping), rounded_experts(model, mapping)
    found = dict(slices)
    for key, (name, pattern) in names_in(model, slices, mapping).items():
        base = slices[key]
        if pattern is None and name in experts:
            raise ValueError(
                f"{key} has the experts of a layer in one stack, and they are rounded of files with a matrix "
                "of each alone: leave out --quantization fp8"
            )
        if name not in (products if pattern is None else experts) or len(base.get_shape()) != 2:
            continue  # whose shape does not fit is told where it is loaded
        if base.get_dtype() not in NUMBERS:
            raise ValueError(
                f"{key} holds {base.get_dtype()}; only {', '.join(NUMBERS)} are rounded: leave out "
                "--quantization fp8"
            )
        found[key] = RoundedTensor(key, base, dtype, torch.device("cpu"))
    return found
