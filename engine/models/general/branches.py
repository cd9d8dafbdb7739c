"""Decoders of which some layers keep states, without their own code between what they add to the residual.

A layer is one branch or several, each x + norm(branch(norm(x))), of which norms may be missing. A branch that
mixes tokens is attention as kernels compute it, or the model's own module up to its last product; the others
are MLPs. That product is added to the residual, and the sum's norm is computed, by the kernels of
`general.sandwich`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from quire.engine.models.general.matching import Attending
from quire.engine.models.general.mlps import Ungated
from quire.engine.models.general.sandwich import Branch
from quire.engine.models.layers import LayerPlans
from quire.kernels.attention.batch import ForwardBatch, of_newest
from quire.kernels.attention.splits import SplitPartials
from quire.kernels.backend import Backend
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.linear.operations import AnyLinear
from quire.kernels.plan import plan_attention
from quire.kernels.pointwise.norm import Norm
from quire.kernels.shapes import LayerShape


@dataclass(frozen=True, slots=True)
class AttentionBranch:
    """place: of its layer among those that attend."""

    attending: Attending
    place: int

    def add(
        self,
        normed: Tensor,
        residual: Tensor,
        inner: Norm | None,
        outer: Norm | None,
        by: Callable[[Tensor], Tensor | SplitPartials],
        backend: Backend,
    ) -> Tensor:
        """Do as `Branch.add`. by: attends, see `Attending.attend`."""
        attending = self.attending
        attended = attending.attend(backend.linear(normed, attending.qkv), by, backend)
        return backend.add_normed_linear(residual, attended, attending.output, inner, outer)


class HandedOn:
    """In place of a product that its module's branch adds to the residual: returns what it is given."""

    def __call__(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """A module that gives angles of positions, as the model's own code was seen to call it."""

    module: nn.Module
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    tokens: int  # that it was seen with

    def of(self, positions: Tensor) -> Any:
        """Return what it gives of other positions [T]; of hidden states it reads dtype and device alone."""

        def replaced(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.is_floating_point():
                return value[:, :1]
            asked = value.shape[-1:] == (self.tokens,)
            return positions.expand(*value.shape[:-1], -1) if asked else value

        named = {name: replaced(each) for name, each in self.keywords.items()}
        return self.module(*map(replaced, self.arguments), **named)


class StepPlaces:
    """A step's positions [T], and the angles that rotations give of them, each computed once."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self._angles: dict[Rotation, Any] = {}

    def angles(self, rotation: Rotation) -> Any:
        if rotation not in self._angles:
            self._angles[rotation] = rotation.of(self.positions)
        return self._angles[rotation]


@dataclass(frozen=True, slots=True)
class MixerBranch:
    """A module that mixes tokens, called as the model's own code calls it.

    arguments and keywords are without its hidden states, and without `places`: keywords that are the step's
    positions, None, or what a rotation gives of these. output: what is multiplied with what the module gives;
    None: nothing is.
    """

    module: nn.Module
    by_name: bool
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    places: dict[str, Rotation | None]
    output: AnyLinear | None
    attends: bool

    def add(
        self,
        normed: Tensor,
        residual: Tensor,
        inner: Norm | None,
        outer: Norm | None,
        places: StepPlaces,
        backend: Backend,
    ) -> Tensor:
        """Do as `Branch.add`, of a step."""
        given, hidden = dict(self.keywords), normed[None]
        for name, rotation in self.places.items():
            given[name] = places.positions[None] if rotation is None else places.angles(rotation)
        if self.by_name:
            out = self.module(*self.arguments, hidden_states=hidden, **given)
        else:
            out = self.module(hidden, *self.arguments, **given)
        x = (out[0] if isinstance(out, tuple) else out)[0]
        if self.output is None:
            return backend.sandwich_norm(x, residual, inner, outer)
        return backend.add_normed_linear(residual, x, self.output, inner, outer)


class UngatedBranch:
    def __init__(self, ungated: Ungated, backend: Backend) -> None:
        self._ungated, self._backend = ungated, backend

    def add(self, normed: Tensor, residual: Tensor, inner: Norm | None, outer: Norm | None) -> Tensor:
        ungated, backend = self._ungated, self._backend
        x = backend.activated_linear(normed, ungated.up, ungated.activation)
        return backend.add_normed_linear(residual, x, ungated.down, inner, outer)


@dataclass(frozen=True, slots=True)
class Part:
    """A branch of a layer, with the norm before it and that of what it adds."""

    before: Norm | None
    branch: AttentionBranch | MixerBranch | Branch
    behind: Norm | None

    @property
    def mixes(self) -> bool:
        """Return whether a token's result depends on other tokens."""
        return isinstance(self.branch, AttentionBranch | MixerBranch)

    @property
    def has_places(self) -> bool:
        return isinstance(self.branch, MixerBranch) and bool(self.branch.places)


Attends: TypeAlias = Callable[[AttentionBranch], Callable[[Tensor], Tensor | SplitPartials]]


def run_parts(
    parts: Iterable[tuple[Part, Norm | None]],
    residual: Tensor,
    normed: Tensor,
    attends: Attends,
    places: StepPlaces,
    backend: Backend,
) -> Tensor:
    """Add what each part gives to the residual [T, H] in place; return the last one's outer norm [T, H].

    parts: with the norm of the sum behind each. normed: of the residual before them, by the first one's norm.
    attends: gives what a branch attends by, see `Attending.attend`.
    """
    for part, outer in parts:
        branch, inner = part.branch, part.behind
        if isinstance(branch, AttentionBranch):
            normed = branch.add(normed, residual, inner, outer, attends(branch), backend)
        elif isinstance(branch, MixerBranch):
            normed = branch.add(normed, residual, inner, outer, places, backend)
        else:
            normed = branch.add(normed, residual, inner, outer)
    return normed


def normed_before(part: Part, residual: Tensor, backend: Backend) -> Tensor:
    """Return what a part takes of the residual."""
    norm = part.before
    return residual if norm is None else backend.rms_norm(residual, norm.weight, norm.eps)


class BranchDecoder:
    """Such a decoder; attention that is the model's own code has to be given what it attends by."""

    def __init__(
        self,
        parts: Sequence[Part],
        final_norm: Norm,
        embed: Callable[[Tensor], Tensor],
        shapes: dict[int, LayerShape],
        places: int,
        backend: Backend,
        device: torch.device,
    ) -> None:
        """shapes: of layers with an `AttentionBranch`, by place. places: how many layers attend."""
        self.parts, self._embed, self._backend, self._places = parts, embed, backend, places
        every = [*zip(parts, [part.before for part in parts[1:]] + [final_norm], strict=True)]
        mixing = 1 + max(at for at, part in enumerate(parts) if part.mixes)
        self._mixing, self._rest = every[:mixing], every[mixing:]
        self._known = [*shapes]
        self._plans = LayerPlans([*shapes.values()], device, plan_attention) if shapes else None
        self._has_places = any(part.has_places for part in parts)
        self.attends_by_module = any(
            isinstance(part.branch, MixerBranch) and part.branch.attends for part in parts
        )

    def run(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Compute as `GeneralModel.forward` does."""
        backend, batches = self._backend, batch.by_layer(self._places)
        chosen = [] if self._plans is None else self._plans.of(_of_all(batch), caches)
        plans = dict(zip(self._known, chosen, strict=True))

        def attends(branch: AttentionBranch) -> Callable[[Tensor], Tensor | SplitPartials]:
            place, layer = branch.place, branch.attending.layer
            attend, own, cache = plans[place].run, _of_all(batches[place]), caches[place]
            return lambda qkv: attend(qkv, own, layer, cache)

        positions = batch.positions
        if self._has_places:
            positions = positions.long().clamp(min=0)  # padding has -1
        places, residual = StepPlaces(positions), self._embed(batch.tokens)
        normed = normed_before(self.parts[0], residual, backend)
        normed = run_parts(self._mixing, residual, normed, attends, places, backend)
        residual, normed = of_newest(residual, batch.newest), of_newest(normed, batch.newest)
        return run_parts(self._rest, residual, normed, attends, places, backend)


def _of_all(batch: ForwardBatch) -> ForwardBatch:
    """Return a step of which layers compute all tokens."""
    return batch if batch.newest is None else replace(batch, newest=None)
