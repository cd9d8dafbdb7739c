"""The weights of experts that stay in few bits: in place of parameters, filled from files or with noise."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from quire.engine.models.doubts import Doubts
from quire.engine.models.drawn_weights import draw_rounded
from quire.engine.models.general.division.plan import experts_by_name
from quire.engine.models.general.division.shares import Held
from quire.engine.models.general.expert_modules import DOWN, GATE_UP, bare_of, matrices_of
from quire.engine.models.general.expert_proof import are_computed, quantised_of
from quire.engine.models.general.expert_sources import Matrix, Source, sources_of
from quire.engine.parallel.share import Range, Share
from quire.kernels.quantised.weight import Numbers, QuantisedWeight, WeightFormat


@dataclass(frozen=True, slots=True)
class _Place:
    """The experts of a layer. gate_up, down: as `QuantisedExperts` has them.

    experts, inner: which are here of the whole model's, and of their width. width: of one that is whole.
    interleaved: files have rows of gate and up in turns.
    """

    gate_up: QuantisedWeight
    down: QuantisedWeight
    experts: Range
    inner: Range
    width: int
    interleaved: bool

    @property
    def count(self) -> int:
        return self.experts[1] - self.experts[0]

    def rows_of(self, expert: int) -> tuple[QuantisedWeight, QuantisedWeight]:
        """Return the views of an expert's own, of which `expert` is the number in the whole model."""
        at = expert - self.experts[0]
        rows = [weight.shape[0] // self.count for weight in (self.gate_up, self.down)]
        gate_up, down = (
            weight.rows(at * each, (at + 1) * each)
            for weight, each in zip((self.gate_up, self.down), rows, strict=True)
        )
        return gate_up, down

    @property
    def shares(self) -> tuple[Share, Share] | tuple[None, None]:
        """Return which part of each expert's matrices is here, a gate's rows first; None: all."""
        (begin, end), width, hidden = self.inner, self.width, self.gate_up.inputs
        if end - begin == width:
            return None, None
        of_up = Share((2 * width, hidden), 0, ((begin, end), (width + begin, width + end)))
        return of_up, Share((hidden, width), 1, ((begin, end),))


class ExpertWeights:
    """Those of a model. Of a few at a time alone numbers are made, to prove that kernels compute by them."""

    def __init__(self, formats: Mapping[str, WeightFormat], device: torch.device) -> None:
        """formats: of the weights that are kept, by their parameters' names, as `Kept` has them."""
        self.formats = formats
        self._device = device
        self._places: dict[str, _Place] = {}
        self._sources: dict[str, Source] = {}

    @property
    def num_bytes(self) -> int:
        return sum(place.gate_up.nbytes + place.down.nbytes for place in self._places.values())

    def take(self, model: nn.Module, held: Mapping[str, Held]) -> None:
        """Take parameters of these, which are nowhere yet, from a model; allocate what is kept instead.

        held: which share of them a rank has; the others are whole.
        """
        for name, module in experts_by_name(model).items():
            forms = [self.formats.get(f"{name}.{weight}") for weight in (GATE_UP, DOWN)]
            of_up, of_down = forms
            if of_up is None or of_down is None:
                continue
            (outputs, hidden), (_, inner) = matrices_of(module).values()
            count = len(module.down_proj)
            experts, columns, width = (0, count), (0, inner), inner
            if (share := held.get(f"{name}.{DOWN}")) is not None:
                (part,) = share.share.ranges
                if share.share.dim == 0:
                    experts = part
                else:
                    columns, width = part, share.share.shape[share.share.dim]
            self._places[name] = _Place(
                QuantisedWeight.empty(of_up, count * outputs, hidden, self._device),
                QuantisedWeight.empty(of_down, count * hidden, inner, self._device),
                experts,
                columns,
                width,
                interleaved=not module.is_concatenated,
            )
            for weight in (GATE_UP, DOWN):
                delattr(module, weight)
            module._is_hf_initialized = True  # which transformers' code would see to by these names

    def take_sources(self, model: nn.Module, slices: dict[str, Any], mapping: list[Any]) -> dict[str, Any]:
        """Return those tensors of files that these are not made of. The model is as before `take`."""
        if not self.formats:
            return slices
        sources = sources_of(model, slices, mapping, self._device, self.formats)
        self._sources = {name: sources[name] for name in self.formats}
        taken = {name for source in self._sources.values() for name in source.names}
        return {name: tensor for name, tensor in slices.items() if name not in taken}

    def fill(self) -> None:
        """Copy codes and scales out of files, which are open. Raises ValueError by name.

        The host waits for the device once for a layer.
        """
        for name, place in self._places.items():
            doubts = Doubts()
            of_up, of_down = (self._sources[f"{name}.{weight}"].matrices for weight in (GATE_UP, DOWN))
            for expert in range(*place.experts):
                gate_up, down = place.rows_of(expert)
                _fill(gate_up, _halves(of_up[expert], place, doubts), f"{name}.{GATE_UP}[{expert}]")
                numbers = of_down[expert][0].numbers((0, down.shape[0]), place.inner, doubts)
                _fill(down, iter((numbers,)), f"{name}.{DOWN}[{expert}]")
            doubts.settle()
        self._sources = {}

    def draw(self, seed: int, dtype: torch.dtype) -> None:
        """Fill them with normal noise in a dtype, rounded: the same for a seed on any rank."""
        for name, place in self._places.items():
            for expert in range(*place.experts):
                own = seed + zlib.crc32(f"{name}.{expert}".encode())
                generator = torch.Generator(self._device).manual_seed(own)
                for weight, share in zip(place.rows_of(expert), place.shares, strict=True):
                    draw_rounded(weight, weight.format, share, dtype, generator)

    def give(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Have kernels compute experts by these, in a model that is on the device.

        Raises ValueError if they do not compute what transformers' code does of the numbers of a few.
        """
        for name, place in self._places.items():
            module: Any = model.get_submodule(name)
            bare = bare_of(module, self._device)
            assert bare is not None  # `kept_experts` has looked
            biases = None
            if module.has_bias:
                of_up = module.gate_up_proj_bias
                if place.interleaved:
                    of_up.data = torch.cat((of_up.data[:, ::2], of_up.data[:, 1::2]), 1)
                biases = of_up.data, module.down_proj_bias.data
            found = quantised_of(bare, place.gate_up, place.down, place.count, biases)
            if not are_computed(module, found, dtype):
                raise ValueError(
                    f"{name}: kernels by weights in few bits do not compute what transformers' code does: "
                    "give --quantized-weights expand"
                )
            module.quire_experts = found


def _halves(matrices: tuple[Matrix, ...], place: _Place, doubts: Doubts) -> Iterator[Numbers]:
    """Read an expert's gate projection, and then what is above it, of one matrix or two."""
    (begin, end), inputs = place.inner, (0, place.gate_up.inputs)
    if place.interleaved:
        both = matrices[0].numbers((2 * begin, 2 * end), inputs, doubts)
        yield from (_every_other(both, first) for first in (0, 1))
        return
    for half in (0, 1):
        before = half * place.width if len(matrices) == 1 else 0
        yield matrices[half % len(matrices)].numbers((before + begin, before + end), inputs, doubts)


def _every_other(numbers: Numbers, first: int) -> Numbers:
    zeros = None if numbers.zeros is None else numbers.zeros[first::2]
    return replace(numbers, codes=numbers.codes[first::2], scales=numbers.scales[first::2], zeros=zeros)


def _fill(weight: QuantisedWeight, parts: Iterator[Numbers], name: str) -> None:
    """Put parts of rows below each other. Raises ValueError by name."""
    begin = 0
    for numbers in parts:
        end = begin + len(numbers.codes)
        try:
            weight.rows(begin, end).fill(numbers)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error
        begin = end
