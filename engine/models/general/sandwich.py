"""Decoders whose layers norm what they add to the residual (Gemma 2 and 3, EXAONE 4), by kernels.

A layer is x + norm(attention(norm(x))), then the same of an MLP; each of the norms may be missing, and have
an epsilon and a rounding of its own. A norm of what is added, the sum and the norm of that are one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from quire.engine.models.general.agreement import Agree
from quire.engine.models.general.matching import Attending
from quire.engine.models.general.mlps import Gated, gated_of
from quire.engine.models.general.norms import norm_of
from quire.engine.models.general.observed import Passage, Seen, SeenLayer, following
from quire.engine.models.general.proof import alike
from quire.engine.models.layers import LayerPlans
from quire.kernels.attention.batch import ForwardBatch, of_newest
from quire.kernels.backend import Backend
from quire.kernels.formats.cache_spec import CacheSpec
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.plan import plan_attention
from quire.kernels.pointwise.norm import Norm, rms_norm_reference
from quire.kernels.shapes import LayerShape

_ROUNDINGS = 2.0  # of `proof.alike`'s tolerances, that what is behind attention may differ by


class Branch(Protocol):
    """What a layer adds to the residual behind its attention."""

    def add(self, normed: Tensor, residual: Tensor, inner: Norm | None, outer: Norm | None) -> Tensor:
        """Add the inner norm of what comes of `normed` to the residual; return the outer norm of the sum."""


class GatedBranch:
    def __init__(self, gated: Gated, backend: Backend) -> None:
        self._gated, self._backend = gated, backend

    def add(self, normed: Tensor, residual: Tensor, inner: Norm | None, outer: Norm | None) -> Tensor:
        gated, backend = self._gated, self._backend
        x = backend.gated_linear(normed, gated.gate_up, gated.activation)
        return backend.add_normed_linear(residual, x, gated.down, inner, outer)


class ModuleBranch:
    """An MLP as transformers' code computes it, with kernels for its parts: experts mostly."""

    def __init__(self, module: nn.Module, backend: Backend) -> None:
        self.module, self._backend = module, backend

    def add(self, normed: Tensor, residual: Tensor, inner: Norm | None, outer: Norm | None) -> Tensor:
        out = self.module(normed[None])
        x = out[0] if isinstance(out, tuple) else out
        return self._backend.sandwich_norm(x.reshape(normed.shape), residual, inner, outer)


@dataclass(frozen=True, slots=True)
class SandwichLayer:
    """Norms in their order: before attention and of what that adds, before the MLP and of what that adds."""

    before: Norm | None
    attending: Attending
    attended: Norm | None
    between: Norm | None
    mlp: Branch
    behind: Norm | None


class SandwichDecoder:
    """Such a decoder, without any of its own code between its layers."""

    def __init__(
        self,
        layers: list[SandwichLayer],
        final_norm: Norm,
        embed: Callable[[Tensor], Tensor],
        shapes: list[LayerShape],
        backend: Backend,
        device: torch.device,
    ) -> None:
        self.layers, self._embed, self._backend = layers, embed, backend
        self._norms_after = [layer.before for layer in layers[1:]] + [final_norm]
        self._plans = LayerPlans(shapes, device, plan_attention)

    def run(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Compute as `GeneralModel.forward` does."""
        count, backend = len(self.layers), self._backend
        residual, first = self._embed(batch.tokens), self.layers[0].before
        normed = residual if first is None else backend.rms_norm(residual, first.weight, first.eps)
        for layer, norm_after, cache, attend, newest, own in zip(
            self.layers,
            self._norms_after,
            caches,
            self._plans.of(batch, caches),
            batch.newest_by_layer(count),
            batch.by_layer(count),
            strict=True,
        ):
            qkv = backend.linear(normed, layer.attending.qkv)
            x = attend.run(qkv, own, layer.attending.layer, cache)
            residual, output = of_newest(residual, newest), layer.attending.output
            normed = backend.add_normed_linear(residual, x, output, layer.attended, layer.between)
            normed = layer.mlp.add(normed, residual, layer.behind, norm_after)
        return normed


def sandwich_of(
    seen: Seen,
    attending: list[Attending],
    final_norm: Norm,
    embed: Callable[[Tensor], Tensor],
    specs: Sequence[CacheSpec],
    backend: Backend,
    agree: Agree,
) -> SandwichDecoder | None:
    """Return the decoder as it was seen, if what passes between its parts does so here, to the bit."""
    layers = []
    for each, found in zip(seen.layers, attending, strict=True):
        layer = _layer(each, found, backend)
        if not agree(layer is not None) or layer is None or not _gives(layer, each, backend, agree):
            return None
        layers.append(layer)
    shapes = [
        shape_of(each.attending, spec, seen.out.dtype) for each, spec in zip(layers, specs, strict=True)
    ]
    return SandwichDecoder(layers, final_norm, embed, shapes, backend, seen.tokens.device)


def _layer(seen: SeenLayer, attending: Attending, backend: Backend) -> SandwichLayer | None:
    children, attention, residual = seen.children, seen.attention, seen.whole.into
    before, into = normed_by(children, residual)
    if not torch.equal(into, attention.into):
        return None
    attended, added = normed_by(children, attention.out)
    residual = residual + added
    between, into = normed_by(children, residual)
    mlp = following(children, into)
    if mlp is None or not takes_one(mlp) or mlp.out.shape != residual.shape:
        return None
    behind, added = normed_by(children, mlp.out)
    if not torch.equal(residual + added, seen.whole.out):
        return None
    gated = gated_of(mlp.module)
    branch = ModuleBranch(mlp.module, backend) if gated is None else GatedBranch(gated, backend)
    return SandwichLayer(before, attending, attended, between, branch, behind)


def _gives(layer: SandwichLayer, seen: SeenLayer, backend: Backend, agree: Agree) -> bool:
    """Return whether a layer's kernels behind its attention give what was seen, of all tokens and of one."""
    return all(agree(_computes(layer, seen, rows, backend)) for rows in (slice(None), slice(1)))


def _computes(layer: SandwichLayer, seen: SeenLayer, rows: slice, backend: Backend) -> bool:
    total, expected = seen.whole.into[rows].clone(), seen.whole.out[rows]
    attended, output, outer = seen.attended[rows], layer.attending.output, layer.between
    try:
        normed = backend.add_normed_linear(total, attended, output, layer.attended, layer.between)
        normed = layer.mlp.add(normed, total, layer.behind, outer)
    except Exception:  # a kernel may not compile for a device that nobody has tried
        return False
    if not alike(total, expected, times=_ROUNDINGS):
        return False
    if outer is not None:
        expected = rms_norm_reference(expected, outer.weight, outer.eps)
    return alike(normed, expected, times=_ROUNDINGS)


def normed_by(children: Sequence[Passage], state: Tensor) -> tuple[Norm | None, Tensor]:
    """Return the norm that takes a state, and what that gives; without one the state as it is."""
    passage = following(children, state)
    norm = None if passage is None else norm_of(passage.module)
    return (None, state) if passage is None or norm is None else (norm, passage.out)


def takes_one(passage: Passage) -> bool:
    """Tell whether a module was called with hidden states alone."""
    return len(passage.arguments) + len(passage.keywords) == 1


def shape_of(attending: Attending, cache: CacheSpec, dtype: torch.dtype) -> LayerShape:
    """Return a layer of which only attention is chosen by its shape."""
    return LayerShape(
        dtype=dtype,
        num_heads=attending.layer.num_heads,
        cache=cache,
        qkv=attending.qkv.matrix,
        output=attending.output.matrix,
        up=None,
        down=None,
        gated=True,
        plain=attending.layer.plain,
        chunked=attending.layer.chunked,
    )
