"""Which tensors of a folder's files make the weights of a model's experts, and how they can be kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from quire.engine.models.copies import Copy, copies_to
from quire.engine.models.doubts import Doubts
from quire.engine.models.float8_files import STACKS, Float8Tensor
from quire.engine.models.fours_files import FoursTensor
from quire.engine.models.general.division.plan import experts_by_name
from quire.engine.models.general.expert_modules import DOWN, GATE_UP
from quire.engine.models.general.naming import Named, names_in
from quire.engine.models.kept_weights import Stored, fused
from quire.engine.models.mxfp4_files import Mxfp4Matrix, Mxfp4Tensor
from quire.engine.models.packed_files import PackedTensor
from quire.engine.models.rounded_files import RoundedTensor
from quire.engine.parallel.share import Range
from quire.kernels.quantised.weight import Numbers, WeightFormat

OTHERWISE_MERGED = "matrices that are merged in another way"
_OTHER_WAY_ROUND = "outputs and inputs the other way round"
MISSHAPEN = "other shapes than config.json asks for"  # which is told where they are loaded


class Matrix(Protocol):
    """A matrix of files, of which any part is read as it can be kept."""

    def get_shape(self) -> list[int]: ...

    def numbers(self, outputs: Range, inputs: Range, doubts: Doubts) -> Numbers:
        """Read a part; note there, or raise ValueError, what its numbers cannot be."""


@dataclass(frozen=True, slots=True)
class Source:
    """What files have of a weight of all experts of a layer.

    names: of their tensors. form: how it can be kept, or why it cannot. matrices: of each expert its gate and
    its up projection, or one matrix; there are none that cannot be kept.
    """

    names: tuple[str, ...]
    form: WeightFormat | str
    matrices: tuple[tuple[Matrix, ...], ...] = ()


def stored_experts(model: Any, slices: Mapping[str, Any], mapping: list[Any]) -> Stored:
    """Return how files have weights of experts, by the names of parameters; or why they are not kept.

    model: undivided; its parameters need not be anywhere. slices: tensors by their names in files. mapping:
    as transformers' loader has it. Of GPTQ's, which group each input is in is read too.
    """
    names, device = names_in(model, slices, mapping), torch.device("cpu")
    sources = _sources(names, model, slices, mapping, device, copies_to(device), {})
    return {name: source.form for name, source in sources.items()}


def sources_of(
    model: Any,
    slices: Mapping[str, Any],
    mapping: list[Any],
    device: torch.device,
    formats: Mapping[str, WeightFormat],
) -> dict[str, Source]:
    """Return what makes the weights of experts that are kept in these formats, to be read to a device.

    formats: by the names of parameters, as `stored_experts` told them: files are not asked again.
    """
    every = names_in(model, slices, mapping)
    names = {key: (name, pattern) for key, (name, pattern) in every.items() if name in formats}
    return _sources(names, model, slices, mapping, device, copies_to(device), formats)


def _sources(
    names: Mapping[str, Named],
    model: Any,
    slices: Mapping[str, Any],
    mapping: list[Any],
    device: torch.device,
    copy: Copy,
    formats: Mapping[str, WeightFormat],
) -> dict[str, Source]:
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    known = model.state_dict()
    modules = {
        f"{name}.{weight}": module
        for name, module in experts_by_name(model).items()
        for weight in (GATE_UP, DOWN)
        if module.has_gate
    }
    found: dict[str, Source] = {}
    merged: dict[str, dict[str, list[str]]] = {}
    for key, (name, pattern) in names.items():
        if name not in modules:
            continue
        if pattern is not None:
            merged.setdefault(name, {}).setdefault(pattern, []).append(key)
        elif isinstance(slices[key], Mxfp4Tensor):
            found[name] = _stacked(key, slices[key], list(known[name].shape), modules[name], device, copy)
        elif isinstance(slices[key], Float8Tensor):
            found[name] = Source((key,), str(slices[key].kept_format))
    for name, keys in merged.items():
        converter = by_pattern[next(iter(keys))]
        source = _merged(
            keys, converter, slices, list(known[name].shape), modules[name], device, copy, formats.get(name)
        )
        if source is not None:
            found[name] = source
    return found


def why_not_kept(name: str, module: Any, mapping: list[Any], *, stacked: bool) -> str:
    """Return why no file's weight of experts can be kept, by how transformers' loader makes it; "" if it can.

    name: of the parameter of a module. stacked: whether it is quantised as a stack of all experts' matrices,
    as MXFP4 is, and not each matrix.
    """
    converters = (each for each in mapping if isinstance(each, WeightConverter))
    patterns = ((each, pattern) for each in converters for pattern in each.target_patterns)
    converter = next((each for each, pattern in patterns if re.search(f"{pattern}$", name)), None)
    if converter is not None:
        return "" if not stacked and _merges(converter, module) else OTHERWISE_MERGED
    if not stacked:
        return STACKS
    return "" if module.is_transposed else _OTHER_WAY_ROUND


def _merges(converter: Any, module: Any) -> bool:
    return merges_experts(converter) and not module.is_transposed and module.is_concatenated


def merges_experts(converter: Any) -> bool:
    """Return whether a conversion does no more than to stack experts, gate and up of each together."""
    merge, *others = converter.operations
    if not isinstance(merge, MergeModulelist) or merge.dim != 0 or len(converter.target_patterns) > 1:
        return False
    return not others or (len(others) == 1 and isinstance(others[0], Concatenate) and others[0].dim == 1)


def _stacked(
    key: str, stack: Mxfp4Tensor, shape: list[int], module: Any, device: torch.device, copy: Copy
) -> Source:
    if not module.is_transposed:
        return Source((key,), _OTHER_WAY_ROUND)
    if stack.get_shape() != shape:
        return Source((key,), MISSHAPEN)
    matrices = [Mxfp4Matrix(stack, place, device, copy) for place in range(shape[0])]
    form = fused([each.kept_format for each in matrices[:1]], shape[1])
    return Source((key,), form, tuple((each,) for each in matrices))


def _merged(
    keys: Mapping[str, list[str]],
    converter: Any,
    slices: Mapping[str, Any],
    shape: list[int],
    module: Any,
    device: torch.device,
    copy: Copy,
    form: WeightFormat | None,
) -> Source | None:
    """Return what a matrix for each expert makes; None if none is in few bits.

    keys: of tensors, in the order of experts, by the pattern of the conversion. form: None, if files are yet
    to tell how it can be kept.
    """
    patterns = [pattern for pattern in converter.source_patterns if pattern in keys]
    names = tuple(key for pattern in patterns for key in keys[pattern])
    kinds = Float8Tensor | PackedTensor | FoursTensor | RoundedTensor
    if not any(isinstance(slices[name], kinds) for name in names):
        return None
    count, outputs, inputs = shape
    if not _merges(converter, module):
        return Source(names, OTHERWISE_MERGED)
    wanted = [outputs // len(patterns), inputs]
    fit = all(len(keys[pattern]) == count for pattern in patterns)
    if len(patterns) > 2 or not fit or any(slices[name].get_shape() != wanted for name in names):
        return Source(names, MISSHAPEN)
    if form is None:
        forms = [slices[name].kept_format if isinstance(slices[name], kinds) else None for name in names]
        told = fused(forms, inputs)
        if isinstance(told, str):
            return Source(names, told)
        form = told
    by_expert = zip(*(keys[pattern] for pattern in patterns), strict=True)
    return Source(
        names, form, tuple(tuple(slices[name].on(device, copy) for name in each) for each in by_expert)
    )
