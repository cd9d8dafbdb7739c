"""The weights of linear layers that stay in few bits: instead of parameters, from files or drawn."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quire.engine.models.copies import copies_to
from quire.engine.models.drawn_weights import draw_rounded
from quire.engine.models.filling import fill_kept
from quire.engine.models.general.division.shares import Held
from quire.engine.models.general.kept_linear import keep_in
from quire.engine.models.general.naming import names_in
from quire.engine.models.general.product_sources import WEIGHT
from quire.engine.parallel.share import Share
from quire.kernels.quantised.weight import QuantisedWeight, WeightFormat


class ProductWeights:
    """Those of a model, by the names of parameters."""

    def __init__(self, formats: Mapping[str, WeightFormat], device: torch.device) -> None:
        """formats: of the weights that are kept, as `Kept` has them."""
        self._formats = formats
        self._device = device
        self._places: dict[str, QuantisedWeight] = {}
        self._shares: dict[str, Share] = {}
        self._sources: dict[str, Any] = {}

    @property
    def num_bytes(self) -> int:
        return sum(place.nbytes for place in self._places.values())

    def take(self, model: nn.Module, held: Mapping[str, Held]) -> None:
        """Take parameters of these, which are nowhere yet, from a model; allocate what is kept instead.

        held: which share of them a rank has; the others are whole.
        """
        for name, form in self._formats.items():
            module = model.get_submodule(name.removesuffix(WEIGHT))
            assert isinstance(module, nn.Linear)
            outputs, inputs = module.weight.shape
            self._places[name] = QuantisedWeight.empty(form, outputs, inputs, self._device)
            keep_in(module, self._places[name])
            if module.bias is None or self._sources:  # else transformers' code makes a bias
                module._is_hf_initialized = True  # type: ignore[assignment]
            if name in held:
                self._shares[name] = held[name].share

    def take_sources(self, model: nn.Module, slices: dict[str, Any], mapping: list[Any]) -> dict[str, Any]:
        """Return those tensors of files that these are not made of. The model is as before `take`."""
        if not self._formats:
            return slices
        named = {key: name for key, (name, _) in names_in(model, slices, mapping).items()}
        taken = {key for key, name in named.items() if name in self._formats}
        self._sources = {named[key]: slices[key] for key in taken}
        return {key: tensor for key, tensor in slices.items() if key not in taken}

    def fill(self) -> None:
        """Copy codes and scales out of files, which are open. Raises ValueError by name."""
        copy = copies_to(self._device)
        for name, place in self._places.items():
            fill_kept(place, self._sources[name].on(self._device, copy), self._shares.get(name))
        self._sources = {}

    def draw(self, seed: int, dtype: torch.dtype) -> None:
        """Fill them with normal noise in a dtype, rounded: the same for a seed on any rank."""
        for name, place in self._places.items():
            generator = torch.Generator(self._device).manual_seed(seed + zlib.crc32(name.encode()))
            draw_rounded(place, place.format, self._shares.get(name), dtype, generator)
