"""Kernels in place of a decoder's own code, where they are proved to compute the same.

A decoder whose layers are all pre-norm ones runs without its own code between them, see `general.whole`. Of
another decoder modules are replaced one by one: norms, MLPs, and attention from its projections on; of one
with layers that keep states all but attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from quire.engine.models.config import ModelConfig
from quire.engine.models.general import matching
from quire.engine.models.general.agreement import Agree, agreement
from quire.engine.models.general.attention import give
from quire.engine.models.general.branched import branched_of
from quire.engine.models.general.branches import BranchDecoder
from quire.engine.models.general.gated_norms import GatedNormModule, gated_norm_of
from quire.engine.models.general.kept_linear import let_stand_alone
from quire.engine.models.general.matching import Attending
from quire.engine.models.general.mlps import gated_of, ungated_of
from quire.engine.models.general.modules import (
    AttentionModule,
    GatedModule,
    LayerNormModule,
    LinearModule,
    ModuleMLP,
    NormModule,
    RouterModule,
    UngatedModule,
    UnreadRotation,
)
from quire.engine.models.general.norms import layer_norm_of, norm_of
from quire.engine.models.general.observed import Mixed, Noise, Seen, SeenLayer, observe
from quire.engine.models.general.plain import PlainDecoder
from quire.engine.models.general.proof import alike, linear_of
from quire.engine.models.general.routers import router_of
from quire.engine.models.general.row_orders import Reordered
from quire.engine.models.general.sandwich import ModuleBranch, SandwichDecoder
from quire.engine.models.general.whole import FusedDecoder, whole_of
from quire.kernels.backend import Backend
from quire.kernels.parallel.ranks import Ranks

_TOKENS = 8  # of a run in which the decoder is looked at
_ROUNDINGS = 2  # of `proof.alike`'s tolerances, that a layer may differ by from what it was


@dataclass(slots=True)
class Fusion:
    """What was fused: the decoder as a whole but for MLPs, and modules, which have another `forward`."""

    decoder: FusedDecoder | PlainDecoder | SandwichDecoder | BranchDecoder | None
    modules: list[nn.Module]
    reordered: list[Reordered] = field(default_factory=list)

    @property
    def attends_by_modules(self) -> bool:
        """Return whether modules hand attention on, and have to be told of a step."""
        return self.decoder is None or (
            isinstance(self.decoder, BranchDecoder) and self.decoder.attends_by_module
        )

    def undo(self) -> None:
        """Have the decoder's own code run again."""
        self.decoder = None
        for module in self.modules:
            vars(module).pop("forward", None)
        for each in self.reordered:
            each.give_back()
        for module in self.modules:
            let_stand_alone(module)
        self.modules, self.reordered = [], []


def fuse(
    causal: nn.Module,
    decoder: nn.Module,
    config: ModelConfig,
    backend: Backend,
    run: Callable[[Tensor, Tensor], Tensor],
    max_len: int,
    ranks: Ranks | None = None,
) -> Fusion:
    """Put kernels in the place of what they are proved to compute; attention has to be given again then.

    run: calls the decoder with tokens [T] and positions [T] -> [T, H]. ranks: those that it is divided among,
    which all see the same, but for their heads.
    """
    device = next(decoder.parameters()).device
    tokens = torch.arange(1, _TOKENS + 1, device=device) * 37 % config.vocab_size
    positions = torch.arange(_TOKENS, device=device)
    positions[_TOKENS // 2 :] = torch.linspace(_TOKENS, max_len - 1, _TOKENS // 2, device=device).long()
    positions = positions.clamp(max=max_len - 1)
    noise, agree = Noise(), agreement(ranks, device)

    def once() -> Tensor:
        return run(tokens, positions)

    with torch.no_grad():
        seen = observe(decoder, noise, once, tokens, positions)
        if seen is None and not config.states:
            return Fusion(None, [])
        if not isinstance(seen, Seen):
            give(decoder, noise)
            fusion = None
            if isinstance(seen, Mixed):
                fusion = _fuse_branches(causal, seen, config, backend, max_len, ranks, agree)
            return fusion or _fuse_apart(decoder, backend, once, agree)
        attending = _attention(seen, seen.layers, config, max_len, agree)
        whole = whole_of(causal, seen, attending, config, backend, ranks, agree)
        if whole is not None:
            mlps = [layer.mlp for layer in whole.layers]
            own = [mlp.module for mlp in mlps if isinstance(mlp, ModuleMLP | ModuleBranch)]
            return Fusion(whole, _replace(_parts_of(own), backend, seen.out.dtype), _reordered(attending))
        attention, reordered = _replace_attention(seen, attending, backend)
        known = {part for module in attention for part in module.modules()}
        others = (module for module in decoder.modules() if module not in known)
        fusion = Fusion(None, attention + _replace(others, backend, seen.out.dtype), reordered)
        give(decoder, noise)
        roundings = _ROUNDINGS * len(seen.layers) ** 0.5
        if not _gives(once, seen.out, roundings, agree):
            fusion.undo()
        elif len(attention) == len(seen.layers):
            gives = partial(_gives, once, seen.out, roundings, agree)
            fusion.modules += _leave_rotations_out(seen, gives)
        return fusion


def _fuse_branches(
    causal: nn.Module,
    seen: Mixed,
    config: ModelConfig,
    backend: Backend,
    max_len: int,
    ranks: Ranks | None,
    agree: Agree,
) -> Fusion | None:
    """Return a decoder of which some layers keep states, if it is all that `general.branches` is of."""
    if config.in_call_order:
        return None
    layers = {number: layer for number, layer in enumerate(seen.layers) if isinstance(layer, SeenLayer)}
    found = _attention(seen, [*layers.values()], config, max_len, agree)
    known = {number: each for number, each in zip(layers, found, strict=True) if each is not None}

    def replace(modules: Sequence[nn.Module]) -> list[nn.Module]:
        return _replace(_parts_of(modules), backend, seen.out.dtype)

    branched = branched_of(causal, seen, known, config, backend, ranks, agree, replace)
    if branched is None:
        _give_back(found)
        return None
    decoder, replaced = branched
    return Fusion(decoder, replaced, _reordered(found))


def _parts_of(modules: Iterable[nn.Module]) -> Iterable[nn.Module]:
    return (part for module in modules for part in module.modules())


def _reordered(attending: Iterable[Attending | None]) -> list[Reordered]:
    return [each.reordered for each in attending if each is not None and each.reordered is not None]


def _give_back(attending: Iterable[Attending | None]) -> None:
    """Let modules whose attention stays their own code have their weights again."""
    for each in _reordered(attending):
        each.give_back()


def _fuse_apart(decoder: nn.Module, backend: Backend, once: Callable[[], Tensor], agree: Agree) -> Fusion:
    """Replace modules of a decoder of which nothing is known but what it gives with noise for attention."""
    expected = once()
    fusion = Fusion(None, _replace(decoder.modules(), backend, expected.dtype))
    if not _gives(once, expected, _ROUNDINGS * len(fusion.modules) ** 0.5, agree):
        fusion.undo()
    return fusion


def _gives(run: Callable[[], Tensor], expected: Tensor, roundings: float, agree: Agree) -> bool:
    try:
        found = alike(run(), expected, times=roundings)
    except Exception:  # a module may be called in a way that it was not tried in
        found = False
    return agree(found)


def _attention(
    seen: Seen | Mixed,
    layers: Sequence[SeenLayer],
    config: ModelConfig,
    max_len: int,
    agree: Agree,
) -> list[Attending | None]:
    """Return the attention of each layer that attends, where kernels take it from the projection on."""
    if config.in_call_order:  # a layer attends several times
        return [None] * len(layers)
    ropes: dict[tuple[int, int], matching.Rope | None] = {}  # which layers share, of a rotation and a width
    found: list[Attending | None] = []
    for layer, window, shape in zip(layers, config.windows, config.attention, strict=True):
        if (len(layer.call.q), len(layer.call.k)) != (shape.heads, shape.kv_heads):
            found.append(None)  # all heads, of which a rank takes its own
            continue
        if shape.index:
            found.append(None)  # its own code says what an indexer is asked
            continue
        given, head_dim = layer.attention.keywords.get("position_embeddings"), layer.call.q.shape[-1]
        rope = None
        if isinstance(given, tuple):
            for place, rotation in enumerate(seen.rotations):
                if isinstance(rotation.result, tuple) and rotation.result[0] is given[0]:
                    key = place, head_dim
                    if key not in ropes:
                        ropes[key] = matching.rope_of(rotation, seen.positions, max_len, head_dim)
                    rope = ropes[key]
        chunked = shape.chunked and window > 0
        found.append(matching.attention_of(layer, seen.positions, rope, window, agree, chunked=chunked))
    if seen.tokens.is_cuda and _reordered(found):  # memory that layers had is none that they fit in
        torch.cuda.empty_cache()
    return found


# -- modules one by one -------------------------------------------------------------------------------------


def _replace_attention(
    seen: Seen, attending: list[Attending | None], backend: Backend
) -> tuple[list[nn.Module], list[Reordered]]:
    """Give attention modules a `forward` of kernels; return them, and what then has their weights."""
    replaced, taken = [], []
    for layer, found in zip(seen.layers, attending, strict=True):
        passage = layer.attention
        if found is not None and isinstance(passage.result, tuple) and len(passage.result) == 2:
            passage.module.forward = AttentionModule(passage.module, found, backend)
            replaced.append(passage.module)
            taken += _reordered([found])
        else:
            _give_back([found])
    return replaced, taken


def _leave_rotations_out(seen: Seen, gives: Callable[[], bool]) -> list[nn.Module]:
    """Have rotations compute no angles if nothing reads these any more: they give NaN; return them.

    gives: runs the decoder, and tells whether it gives what it did.
    """
    rotations = [*dict.fromkeys(rotation.module for rotation in seen.rotations)]
    for rotation in seen.rotations:
        rotation.module.forward = UnreadRotation(rotation.result)
    if not rotations or gives():
        return rotations
    for module in rotations:
        del module.forward
    return []


def _replace(modules: Iterable[nn.Module], backend: Backend, dtype: torch.dtype) -> list[nn.Module]:
    """Give norms, MLPs and routers, and products outside of these, a `forward` of kernels; return them.

    A module comes before its parts. dtype: of hidden states.
    """
    replaced: dict[nn.Module, Callable[..., object]] = {}
    parts: set[nn.Module] = set()
    for module in modules:
        # What ranks do together there is no part of it.
        if module in parts or "forward" in vars(module):
            continue
        if (forward := _replacement(module, backend, dtype)) is not None:
            replaced[module] = forward
            parts.update(module.modules())
    for module, forward in replaced.items():
        module.forward = forward
    return [*replaced]


def _replacement(module: nn.Module, backend: Backend, dtype: torch.dtype) -> Callable[..., object] | None:
    if (gated_norm := gated_norm_of(module)) is not None:
        return GatedNormModule(gated_norm, backend)
    if (norm := norm_of(module)) is not None:
        return NormModule(norm, backend)
    if (layer_norm := layer_norm_of(module)) is not None:
        return LayerNormModule(layer_norm, backend)
    if (gated := gated_of(module)) is not None:
        return GatedModule(gated, backend)
    if (ungated := ungated_of(module)) is not None:
        return UngatedModule(ungated, backend)
    if (router := router_of(module, dtype)) is not None:
        return RouterModule(router, backend)
    layer = linear_of(module)
    return None if layer is None else LinearModule(layer, backend)
