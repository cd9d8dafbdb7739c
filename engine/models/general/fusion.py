"""Kernels in place of a decoder's own code, where they are proved to compute the same.

A decoder whose layers are all pre-norm ones runs as native decoders do, by `quire.engine.models.pre_norm`,
with what it has behind a layer's second norm as it is if that is no gated MLP. Of another decoder modules
are replaced one by one: norms, gated MLPs, and attention from its projections on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models.config import ModelConfig
from quire.engine.models.general import matching
from quire.engine.models.general.attention import give
from quire.engine.models.general.matching import Attending, Norm, alike
from quire.engine.models.general.modules import (
    AttentionModule,
    CentredNormModule,
    FusedMLP,
    GatedModule,
    ModuleMLP,
    NormModule,
    RouterModule,
    UngatedModule,
)
from quire.engine.models.general.observed import Noise, Passage, Seen, SeenLayer, observe
from quire.engine.models.layers import LayerPlans
from quire.engine.models.pre_norm import MLP, GatedMLP, PreNormLayer, run_layers
from quire.engine.models.vocabulary import embed, embed_part
from quire.kernels.attention.batch import ForwardBatch
from quire.kernels.backend import Backend
from quire.kernels.formats.cache_spec import CacheSpec
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.parallel.ranks import Ranks
from quire.kernels.plan import plan_layer
from quire.kernels.shapes import LayerShape

_TOKENS = 8  # of a run in which the decoder is looked at
_ROUNDINGS = 2  # of `matching.alike`'s tolerances, that a layer may differ by from what it was


class FusedDecoder:
    """A decoder of pre-norm layers, without any of its own code between them."""

    def __init__(
        self,
        layers: list[PreNormLayer],
        final_norm: Norm,
        embed: Callable[[Tensor], Tensor],
        shapes: list[LayerShape],
        backend: Backend,
        device: torch.device,
    ) -> None:
        self.layers, self._final_norm, self._embed, self._backend = layers, final_norm, embed, backend
        self._plans = LayerPlans(shapes, device, plan_layer)

    def run(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Compute as `GeneralModel.forward` does."""
        norm, plans, rms_norm = self._final_norm, self._plans.of(batch, caches), self._backend.rms_norm
        embedded = self._embed(batch.tokens)
        return run_layers(self.layers, norm.weight, norm.eps, embedded, batch, caches, plans, rms_norm)


@dataclass(slots=True)
class Fusion:
    """What was fused: the decoder as a whole but for MLPs, and modules, which have another `forward`."""

    decoder: FusedDecoder | None
    modules: list[nn.Module]

    def undo(self) -> None:
        """Have the decoder's own code run again."""
        self.decoder = None
        for module in self.modules:
            del module.forward
        self.modules = []


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
    noise = Noise()

    def once() -> Tensor:
        return run(tokens, positions)

    with torch.no_grad():
        seen = observe(decoder, noise, once, tokens, positions)
        if seen is None:
            return Fusion(None, [])
        attending = _attention(seen, config, max_len, _agreement(ranks, device))
        whole = _whole(causal, seen, attending, config, backend, ranks)
        if whole is not None:
            mlps = [layer.mlp.module for layer in whole.layers if isinstance(layer.mlp, ModuleMLP)]
            return Fusion(whole, _replace((part for mlp in mlps for part in mlp.modules()), backend))
        attention = _replace_attention(seen, attending)
        others = (module for module in decoder.modules() if module not in attention)
        fusion = Fusion(None, attention + _replace(others, backend))
        give(decoder, noise)
        roundings = _ROUNDINGS * len(seen.layers) ** 0.5
        if fusion.modules and not _gives(once, seen.out, roundings):
            fusion.undo()
        return fusion


def _gives(run: Callable[[], Tensor], expected: Tensor, roundings: float) -> bool:
    try:
        return alike(run(), expected, times=roundings)
    except Exception:  # a module may be called in a way that it was not tried in
        return False


def _agreement(ranks: Ranks | None, device: torch.device) -> Callable[[bool], bool]:
    """Return what tells whether something is so on all ranks."""
    if ranks is None:
        return bool
    return lambda found: bool(ranks.all_gather(torch.full((1, 1), float(found), device=device)).all())


def _attention(
    seen: Seen, config: ModelConfig, max_len: int, agree: Callable[[bool], bool]
) -> list[Attending | None]:
    """Return each layer's attention where kernels take it from the projection on."""
    if config.in_call_order:  # a layer attends several times
        return [None] * len(seen.layers)
    tables: dict[int, Tensor | None] = {}  # by the rotation's place, since many layers share one
    found: list[Attending | None] = []
    for layer, window, shape in zip(seen.layers, config.windows, config.attention, strict=True):
        if (len(layer.call.q), len(layer.call.k)) != (shape.heads, shape.kv_heads):
            found.append(None)  # all heads, of which a rank takes its own
            continue
        given = layer.attention.keywords.get("position_embeddings")
        table = None
        if isinstance(given, tuple):
            for place, rotation in enumerate(seen.rotations):
                if isinstance(rotation.result, tuple) and rotation.result[0] is given[0]:
                    if place not in tables:
                        tables[place] = matching.rope_table(rotation, seen.positions, max_len)
                    table = tables[place]
        chunked = shape.chunked and window > 0
        found.append(matching.attention_of(layer, seen.positions, table, window, agree, chunked=chunked))
    return found


# -- the decoder as a whole ---------------------------------------------------------------------------------


def _whole(
    causal: nn.Module,
    seen: Seen,
    attending: list[Attending | None],
    config: ModelConfig,
    backend: Backend,
    ranks: Ranks | None,
) -> FusedDecoder | None:
    last = _following(seen.around, seen.layers[-1].whole.out)
    final_norm = None if last is None else matching.norm_of(last.module)
    look_up = _embedding(causal, seen, backend, ranks)
    if last is None or final_norm is None or look_up is None or not torch.equal(last.out, seen.out):
        return None
    layers, shapes = [], []
    for layer, each, cache in zip(seen.layers, attending, config.cache_specs, strict=True):
        found = None if each is None else _pre_norm(layer, each, final_norm, backend)
        if found is None:
            return None
        layers.append(found)
        shapes.append(_shape(found, cache))
    device = seen.tokens.device
    return FusedDecoder(layers, final_norm, look_up, shapes, backend, device)


def _pre_norm(seen: SeenLayer, attending: Attending, final: Norm, backend: Backend) -> PreNormLayer | None:
    """Return a layer as one of ours, if what passes between its parts is what does there, to the bit."""
    whole, attention = seen.whole, seen.attention
    before = _following(seen.children, whole.into)
    if before is None or not torch.equal(before.out, attention.into):
        return None
    residual = whole.into + attention.out
    between = _following(seen.children, residual)
    mlp = None if between is None else _following(seen.children, between.out)
    if between is None or mlp is None or not torch.equal(residual + mlp.out, whole.out):
        return None
    norms = [matching.norm_of(before.module), matching.norm_of(between.module)]
    weights = [norm.weight for norm in norms if norm is not None and norm.eps == final.eps]
    layer = attending.layer
    every = (*weights, final.weight, layer.q_norm, layer.k_norm)
    plain = all(weight is None or weight.dtype == whole.out.dtype for weight in every)
    if len(weights) != 2 or not plain or (layer.q_norm is not None and layer.eps != final.eps):
        return None
    return PreNormLayer(
        weights[0], attending.qkv, layer, attending.output, weights[1], _mlp(mlp.module, backend)
    )


def _mlp(module: nn.Module, backend: Backend) -> MLP:
    gated = matching.gated_of(module)
    if gated is None:
        return ModuleMLP(module, backend)
    if gated.activation == "silu":
        return GatedMLP(gated.gate_up, gated.down)
    return FusedMLP(gated, backend)


def _shape(layer: PreNormLayer, cache: CacheSpec) -> LayerShape:
    up, down = layer.mlp.matrices or (None, None)
    return LayerShape(
        dtype=layer.input_norm.dtype,
        num_heads=layer.attention.num_heads,
        cache=cache,
        qkv=layer.qkv.matrix,
        output=layer.output.matrix,
        up=up,
        down=down,
        gated=True,
        plain=layer.attention.plain,
        chunked=layer.attention.chunked,
    )


def _following(passages: Sequence[Passage], state: Tensor) -> Passage | None:
    """Return the first call of a module that took a state, but for those that only hand it on."""
    for passage in passages:
        same = passage.into.dtype == state.dtype and torch.equal(passage.into, state)
        if same and not isinstance(passage.module, nn.Dropout | nn.Identity):
            return passage
    return None


def _embedding(
    causal: nn.Module, seen: Seen, backend: Backend, ranks: Ranks | None
) -> Callable[[Tensor], Tensor] | None:
    """Return what gives the first layer its input [T, H] of tokens [T]."""
    first, module = seen.layers[0].whole.into, causal.get_input_embeddings()  # type: ignore[operator]
    if torch.equal(embed(seen.tokens, module.weight, F.embedding, ranks), first):
        return lambda tokens: embed_part(tokens, module.weight.data, backend.embed, ranks)
    if torch.equal(module(seen.tokens[None])[0], first):  # it may scale, too
        return lambda tokens: module(tokens.long()[None])[0]
    return None


# -- modules one by one -------------------------------------------------------------------------------------


def _replace_attention(seen: Seen, attending: list[Attending | None]) -> list[nn.Module]:
    """Give attention modules a `forward` of kernels; return them."""
    replaced = []
    for layer, found in zip(seen.layers, attending, strict=True):
        passage = layer.attention
        if found is not None and isinstance(passage.result, tuple) and len(passage.result) == 2:
            passage.module.forward = AttentionModule(passage.module, found)
            replaced.append(passage.module)
    return replaced


def _replace(modules: Iterable[nn.Module], backend: Backend) -> list[nn.Module]:
    """Give norms, MLPs and routers a `forward` of kernels; return them."""
    replaced: dict[nn.Module, Callable[..., object]] = {}
    for module in modules:
        if "forward" in vars(module):  # what ranks do together there is no part of it
            continue
        if (norm := matching.norm_of(module)) is not None:
            replaced[module] = NormModule(norm, backend)
        elif (gated := matching.gated_of(module)) is not None:
            replaced[module] = GatedModule(gated, backend)
        elif (centred := matching.centred_norm_of(module)) is not None:
            replaced[module] = CentredNormModule(centred, backend)
        elif (ungated := matching.ungated_of(module)) is not None:
            replaced[module] = UngatedModule(ungated, backend)
        elif (router := matching.router_of(module)) is not None:
            replaced[module] = RouterModule(router, backend)
    for module, forward in replaced.items():
        module.forward = forward
    return [*replaced]
