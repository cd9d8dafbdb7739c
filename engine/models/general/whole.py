"""A decoder of pre-norm layers as a whole, by kernels, where they are proved to compute all that it does.

With RMSNorms its layers are those of native decoders, `quire.engine.models.pre_norm`, with what is behind the
second norm as it is if that is no gated MLP; with layer norms and an MLP of two products they are
`general.plain`'s. Layers that norm what they add, or whose norms are Gemma's, are `general.sandwich`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models.config import ModelConfig
from quire.engine.models.general.agreement import Agree
from quire.engine.models.general.matching import Attending
from quire.engine.models.general.mlps import gated_of, ungated_of
from quire.engine.models.general.modules import FusedMLP, ModuleMLP
from quire.engine.models.general.norms import layer_norm_of, norm_of
from quire.engine.models.general.observed import Mixed, Seen, SeenLayer, following
from quire.engine.models.general.plain import PlainDecoder, PlainLayer
from quire.engine.models.general.sandwich import SandwichDecoder, sandwich_of
from quire.engine.models.layers import LayerPlans
from quire.engine.models.pre_norm import MLP, GatedMLP, PreNormLayer, run_layers
from quire.engine.models.vocabulary import embed, embed_part
from quire.kernels.attention.batch import ForwardBatch
from quire.kernels.backend import Backend
from quire.kernels.formats.cache_spec import CacheSpec
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.parallel.ranks import Ranks
from quire.kernels.plan import plan_layer
from quire.kernels.pointwise.norm import Norm
from quire.kernels.shapes import LayerShape

Part = TypeVar("Part")


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


def whole_of(
    causal: nn.Module,
    seen: Seen,
    attending: list[Attending | None],
    config: ModelConfig,
    backend: Backend,
    ranks: Ranks | None,
    agree: Agree,
) -> FusedDecoder | PlainDecoder | SandwichDecoder | None:
    """Return the decoder as it was seen, if each layer's attention and all else is what kernels compute."""
    last = following(seen.around, seen.layers[-1].whole.out)
    look_up = look_up_of(causal, seen, backend, ranks)
    known = _all(attending)
    if last is None or look_up is None or known is None or not torch.equal(last.out, seen.out):
        return None
    if any(each.gated for each in known):
        return None
    parts = _all([_parts(*each) for each in zip(seen.layers, known, strict=True)])
    device, dtype, specs = seen.tokens.device, seen.out.dtype, config.cache_specs
    if (norm := norm_of(last.module)) is not None:
        layers = None if parts is None else _all([_pre_norm(*each, norm, dtype, backend) for each in parts])
        if layers is None:
            return sandwich_of(seen, known, norm, look_up, specs, backend, agree)
        shapes = [_shape(*each, dtype, gated=True) for each in zip(layers, specs, strict=True)]
        return FusedDecoder(layers, norm, look_up, shapes, backend, device)
    layer_norm = layer_norm_of(last.module)
    plain = None if layer_norm is None or parts is None else _all([_plain(*each) for each in parts])
    if layer_norm is None or plain is None:
        return None
    shapes = [_shape(*each, dtype, gated=False) for each in zip(plain, specs, strict=True)]
    return PlainDecoder(plain, layer_norm, look_up, shapes, backend, device)


def _all(found: list[Part | None]) -> list[Part] | None:
    """Return what was found if all was."""
    parts = [each for each in found if each is not None]
    return parts if len(parts) == len(found) else None


def _parts(seen: SeenLayer, attending: Attending) -> tuple[Attending, nn.Module, nn.Module, nn.Module] | None:
    """Return a layer's attention, norms and MLP, if what passes between these does so there, to the bit."""
    whole, attention = seen.whole, seen.attention
    before = following(seen.children, whole.into)
    if before is None or not torch.equal(before.out, attention.into):
        return None
    residual = whole.into + attention.out
    between = following(seen.children, residual)
    mlp = None if between is None else following(seen.children, between.out)
    if between is None or mlp is None or mlp.out.shape != residual.shape:
        return None
    if not torch.equal(residual + mlp.out, whole.out):
        return None
    return attending, before.module, between.module, mlp.module


def _pre_norm(
    attending: Attending,
    before: nn.Module,
    between: nn.Module,
    mlp: nn.Module,
    final: Norm,
    dtype: torch.dtype,
    backend: Backend,
) -> PreNormLayer | None:
    norms, layer = [norm_of(before), norm_of(between)], attending.layer
    weights = [norm.weight for norm in norms if norm is not None and norm.eps == final.eps]
    every = (*weights, final.weight, layer.q_norm, layer.k_norm)
    plain = all(weight is None or weight.dtype == dtype for weight in every)
    if len(weights) != 2 or not plain or (layer.q_norm is not None and layer.eps != final.eps):
        return None
    return PreNormLayer(weights[0], attending.qkv, layer, attending.output, weights[1], _mlp(mlp, backend))


def _plain(attending: Attending, before: nn.Module, between: nn.Module, mlp: nn.Module) -> PlainLayer | None:
    norms, ungated = (layer_norm_of(before), layer_norm_of(between)), ungated_of(mlp)
    if norms[0] is None or norms[1] is None or ungated is None or ungated.adds:
        return None
    return PlainLayer(norms[0], attending.qkv, attending.layer, attending.output, norms[1], ungated)


def _mlp(module: nn.Module, backend: Backend) -> MLP:
    gated = gated_of(module)
    if gated is None:
        return ModuleMLP(module, backend)
    if gated.activation == "silu":
        return GatedMLP(gated.gate_up, gated.down)
    return FusedMLP(gated, backend)


def _shape(
    layer: PreNormLayer | PlainLayer, cache: CacheSpec, dtype: torch.dtype, *, gated: bool
) -> LayerShape:
    up, down = layer.mlp.matrices or (None, None)
    return LayerShape(
        dtype=dtype,
        num_heads=layer.attention.num_heads,
        cache=cache,
        qkv=layer.qkv.matrix,
        output=layer.output.matrix,
        up=up,
        down=down,
        gated=gated,
        plain=layer.attention.plain,
        chunked=layer.attention.chunked,
    )


def look_up_of(
    causal: nn.Module, seen: Seen | Mixed, backend: Backend, ranks: Ranks | None
) -> Callable[[Tensor], Tensor] | None:
    """Return what gives the first layer its input [T, H] of tokens [T]."""
    first, module = seen.layers[0].whole.into, causal.get_input_embeddings()  # type: ignore[operator]
    rows = embed(seen.tokens, module.weight, F.embedding, ranks)
    for scale in (None, _scale(module)):
        if torch.equal(rows if scale is None else rows * scale, first):
            look_up = partial(backend.embed, scale=scale)
            return lambda tokens: embed_part(tokens, module.weight.data, look_up, ranks)
    if torch.equal(module(seen.tokens[None])[0], first):  # it may do more
        return lambda tokens: module(tokens.long()[None])[0]
    return None


def _scale(module: nn.Module) -> float | None:
    """Return what a module says that its rows are multiplied by, as its dtype has it."""
    scale = getattr(module, "embed_scale", None)
    if not isinstance(scale, Tensor | float) or (isinstance(scale, Tensor) and scale.numel() != 1):
        return None
    weight: Tensor = module.weight  # type: ignore[assignment]
    return float(torch.as_tensor(scale).to(weight.dtype))
