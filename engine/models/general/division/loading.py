"""Loads a rank's shares of a model by transformers' loader, which renames and merges what files have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, Transpose, WeightConverter

from quire.engine.models.config import ModelConfig
from quire.engine.models.general.division.shares import Held
from quire.engine.models.general.expert_sources import merges_experts
from quire.engine.models.general.kept_parts import KeptParts
from quire.engine.models.general.loading import loading_by, slices_of
from quire.engine.models.general.naming import names_in
from quire.engine.parallel.share import Range, Share

Prepare = Callable[[Any], Mapping[str, Held]]  # divides a model; returns the shares by parameters' names


def reading_shares(
    cls: type,
    prepare: Prepare,
    files: list[Path],
    model_config: ModelConfig,
    dtype: torch.dtype,
    kept: KeptParts,
) -> type:
    """Return a class of models that reads no more of files than a rank's shares.

    files, model_config, dtype: as `slices_of` has them. kept: those that stay in few bits, which `prepare`
    takes. Of transformers' own files it is given none.
    """

    def load(
        model: Any, state: Any, none: Any, config: Any, expected: list[str] | None = None
    ) -> tuple[Any, Any]:
        mapping = config.weight_mapping or []
        with slices_of(files, model_config, dtype, model, mapping) as slices:
            others = kept.take_sources(model, slices, mapping)
            parts = _parts(model, others, prepare(model), mapping)
            loaded: tuple[Any, Any] = cls._load_pretrained_model(model, parts, None, config, expected)  # type: ignore[attr-defined]
            kept.fill()
            return loaded

    return loading_by(cls, load, files[0].parent)


def drawing_shares(
    cls: type, prepare: Prepare, seed: int, device: torch.device, apart: Collection[str] = ()
) -> type:
    """Return a class of models that reads nothing: matrices are noise, the same as one rank would draw.

    apart: names of those that are drawn elsewhere.
    """

    def load(
        model: Any, state: Any, files: Any, config: Any, expected: list[str] | None = None
    ) -> tuple[Any, Any]:
        held = prepare(model)
        told, other = cls._load_pretrained_model(model, {}, None, config, expected)  # type: ignore[attr-defined]
        generator = torch.Generator(device).manual_seed(seed)
        tied = set(model.all_tied_weights_keys)
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if name in tied or name not in told.missing_keys:
                continue
            here = torch.empty(weight.shape, dtype=weight.dtype, device=device)
            if isinstance(weight, torch.nn.Parameter):
                here = torch.nn.Parameter(here, requires_grad=False)
                share = held.get(name)
                shape = tuple(weight.shape) if share is None else share.share.shape
                if len(shape) > 1 and name not in apart:
                    whole = torch.empty(shape, dtype=weight.dtype, device=device)
                    whole.normal_(std=0.02, generator=generator)
                    here.data.copy_(whole if share is None else share.of(whole))
                if len(shape) > 1:
                    here._is_hf_initialized = True  # type: ignore[attr-defined]
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, here)
        told.missing_keys &= tied
        return told, other

    return loading_by(cls, load)


class Part:
    """A tensor of a file, as transformers' loader takes it: of what it reads, only some ranges are."""

    def __init__(self, name: str, whole: Any, share: Share, held: Held | None = None) -> None:
        """held: fills what is read with zeros."""
        self._name, self._whole, self._share, self._held = name, whole, share, held

    def get_shape(self) -> list[int]:
        shape: list[int] = self._whole.get_shape()
        return shape

    def get_dtype(self) -> str:
        dtype: str = self._whole.get_dtype()
        return dtype

    def __getitem__(self, _: object) -> Tensor:
        """Read the part. Raises ValueError if the tensor has another shape than it should."""
        shape, share = self.get_shape(), self._share
        if shape != list(share.shape):
            raise ValueError(f"{self._name} has shape {shape}, but config.json asks for {list(share.shape)}")
        before = (slice(None),) * share.dim
        ranges = share.ranges if share.length else ((0, 1),)
        found = [self._whole[(*before, slice(begin, end))] for begin, end in ranges]
        part = torch.cat(found, share.dim) if len(found) > 1 else found[0]
        if not share.length:
            part = part.narrow(share.dim, 0, 0)
        return part if self._held is None else self._held.filled(part)


class TransposeWhole(Transpose):
    """A transposition of tensors that are not as the model has them, by the shape of all ranks' shares."""

    def __init__(self, given: Transpose, held: Mapping[str, Held]) -> None:
        super().__init__(given.dim0, given.dim1)
        self._held = held

    def __deepcopy__(self, memo: object) -> TransposeWhole:
        return self

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **given: Any
    ) -> dict[str, Any]:
        name: str = given["full_layer_name"]
        held = self._held.get(name)
        shape = given["model"].get_parameter(name).shape if held is None else held.share.shape
        (value,) = input_dict.values()
        tensor = value[0] if isinstance(value, list) else value
        if tuple(tensor.shape) != tuple(shape):
            tensor = tensor.transpose(self.dim0, self.dim1).contiguous()
        return {self.get_target_pattern(input_dict, source_patterns, target_patterns): tensor}


class TakeShares(ConversionOps):
    """The last step of a conversion: of what it makes, only a rank's shares."""

    def __init__(self, held: Mapping[str, Held]) -> None:
        self._held = held

    def __deepcopy__(self, memo: object) -> TakeShares:
        return self

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **given: Any,
    ) -> dict[str, Any]:
        full = str(given["full_layer_name"]).replace("*.", "0.")
        known = next((each for each in input_dict if each in full), None)
        before, behind = "", ""
        if known is not None:
            before, _, behind = full.partition(known)
        taken = {}
        for pattern, value in input_dict.items():
            held, whole = self._held.get(before + pattern + behind), value
            if isinstance(whole, list):
                whole = whole[0]
            taken[pattern] = value if held is None else held.of(whole)
        return taken


def _parts(
    model: Any, slices: dict[str, Any], held: Mapping[str, Held], mapping: list[Any]
) -> dict[str, Any]:
    """Return what transformers' loader is to read, by the names that files have."""
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    for converter in converters:
        if not merges_experts(converter):
            converter.operations = [
                TransposeWhole(each, held) if isinstance(each, Transpose) and each.check_dims else each
                for each in converter.operations
            ]
            converter.operations.append(TakeShares(held))
    found = dict(slices)
    merged: dict[str, dict[str, list[str]]] = {}
    for key, (name, pattern) in names_in(model, slices, mapping).items():
        share = held.get(name)
        if share is None:
            continue
        if pattern is None:
            found[key] = Part(key, slices[key], share.share, share)
        elif merges_experts(by_pattern[pattern]):
            merged.setdefault(name, {}).setdefault(pattern, []).append(key)
    for name, keys in merged.items():
        converter = by_pattern[next(iter(keys))]
        for key, part in _of_experts(keys, converter, slices, held[name].share).items():
            if part is None:
                del found[key]
            else:
                found[key] = part
    return found


def _of_experts(
    keys: dict[str, list[str]], converter: Any, slices: dict[str, Any], share: Share
) -> dict[str, Part | None]:
    """Return the part of each expert's tensor that goes into a share of all; None: nothing does.

    keys: of tensors, in the order of experts, by the pattern of the conversion.
    """
    count, dim = share.shape[0], share.dim - 1
    found: dict[str, Part | None] = {}
    begin = 0
    for pattern in [each for each in converter.source_patterns if each in keys]:
        inner = list(share.shape[1:])
        ranges: Iterable[Range] = share.ranges
        if len(converter.operations) > 1:  # gate and up stand one behind the other then
            inner[0] = slices[keys[pattern][0]].get_shape()[0]
            if dim == 0:
                end = begin + inner[0]
                inside = ((max(first, begin), min(last, end)) for first, last in share.ranges)
                ranges = [(first - begin, last - begin) for first, last in inside if first < last]
                begin = end
        for at, key in enumerate(keys[pattern]):
            if share.dim == 0:
                own = any(first <= at % count < last for first, last in share.ranges)
                found[key] = Part(key, slices[key], Share(tuple(inner), 0, ((0, inner[0]),))) if own else None
            else:
                found[key] = Part(key, slices[key], Share(tuple(inner), dim, tuple(ranges)))
    return found
