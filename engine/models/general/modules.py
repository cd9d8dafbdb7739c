"""What stands for a module of transformers' code: the same by kernels, called as that is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.models.general.matching import Attending
from quire.engine.models.general.mlps import Gated, Ungated
from quire.engine.models.general.routers import Router
from quire.engine.models.layers import LayerNorm
from quire.kernels.backend import Backend
from quire.kernels.linear.linear import Matrix
from quire.kernels.linear.operations import AnyLinear, Hidden, whole
from quire.kernels.plan import LayerOps
from quire.kernels.pointwise.norm import Norm


class NormModule:
    """x [..., H] -> [..., H]."""

    def __init__(self, norm: Norm, backend: Backend) -> None:
        self._norm, self._backend = norm, backend

    def __call__(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self._backend.rms_norm(rows, self._norm.weight, self._norm.eps).view(hidden_states.shape)


class LayerNormModule:
    """x [..., H] -> [..., H]."""

    def __init__(self, norm: LayerNorm, backend: Backend) -> None:
        self._norm, self._layer_norm = norm, backend.layer_norm

    def __call__(self, hidden_states: Tensor) -> Tensor:
        norm, rows = self._norm, hidden_states.reshape(-1, hidden_states.shape[-1])
        return self._layer_norm(rows, norm.weight, norm.bias, norm.eps).view(hidden_states.shape)


class UngatedModule:
    """x [..., H] -> [..., H], plus what it is given besides, if it is one that adds."""

    def __init__(self, ungated: Ungated, backend: Backend) -> None:
        self._ungated, self._backend = ungated, backend

    def __call__(self, hidden_states: Tensor, residual: Tensor | None = None) -> Tensor:
        out = self.of(hidden_states.reshape(-1, hidden_states.shape[-1])).view(hidden_states.shape)
        return out if residual is None else out + residual

    def of(self, x: Tensor) -> Tensor:
        """Compute x [T, H] -> [T, H]."""
        ungated, backend = self._ungated, self._backend
        return backend.linear(backend.activated_linear(x, ungated.up, ungated.activation), ungated.down)


class GatedModule:
    """x [..., H] -> [..., H]."""

    def __init__(self, gated: Gated, backend: Backend) -> None:
        self._gated, self._backend = gated, backend

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return self.of(hidden_states.reshape(-1, hidden_states.shape[-1])).view(hidden_states.shape)

    def of(self, x: Tensor) -> Tensor:
        """Compute x [T, H] -> [T, H]."""
        gated, backend = self._gated, self._backend
        return backend.linear(backend.gated_linear(x, gated.gate_up, gated.activation), gated.down)


class LinearModule:
    """x [..., K] -> [..., N]."""

    def __init__(self, layer: AnyLinear, backend: Backend) -> None:
        self._layer, self._linear = layer, backend.linear

    def __call__(self, x: Tensor) -> Tensor:
        out = self._linear(x.reshape(-1, x.shape[-1]), self._layer)
        return out.view(*x.shape[:-1], out.shape[-1])


class AttentionModule:
    """hidden_states [1, T, H] -> ([1, T, H], None); cosines and sines that it is given are known already."""

    def __init__(self, module: nn.Module, attending: Attending, backend: Backend) -> None:
        self._module: Any = module
        self._attending, self._backend = attending, backend

    def __call__(self, hidden_states: Tensor, *others: Any, **given: Any) -> tuple[Tensor, None]:
        attending, backend = self._attending, self._backend
        product = backend.linear(hidden_states[0], attending.qkv)
        attended = whole(attending.attend(product, self._attend, backend))
        return backend.linear(attended, attending.output)[None], None

    def _attend(self, qkv: Tensor) -> Tensor:
        attended: Tensor = self._module.quire.attend(self._module.layer_idx, qkv, self._attending.layer)
        return attended


class UnreadRotation:
    """Gives as many tensors as a rotation did, of NaN: a table has the angles that attention takes."""

    def __init__(self, result: Any) -> None:
        """`result`: what the rotation gave, [1, T, …] each."""
        several = isinstance(result, tuple)
        parts = [part[:, :1].mul(torch.nan) for part in (result if several else (result,))]
        self._result = tuple(parts) if several else parts[0]

    def __call__(self, *others: Any, **given: Any) -> Any:
        return self._result


class RouterModule:
    """x [..., H] -> what the router gives in its order: logits [T, E], weights and index [T, top]."""

    def __init__(self, router: Router, backend: Backend) -> None:
        self._router, self._route = router, backend.route
        self._linear = backend.exact_linear if router.exact else backend.linear

    def __call__(self, hidden_states: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        """bias: of the choice, where the module around keeps it."""
        router, x = self._router, hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self._linear(x, router.product)
        weights, index = self._route(
            logits, router.routing, router.bias if bias is None else bias, router.dtype
        )
        parts = {"logits": logits, "weights": weights, "index": index}
        return tuple(parts[name] for name in router.gives)


class HeadModule:
    """hidden_states [1, S, H] -> [1, S, V]."""

    def __init__(self, weight: Tensor, backend: Backend) -> None:
        self._weight, self._backend = weight, backend

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return self._backend.wide_linear(hidden_states[0], self._weight)[None]


class FusedMLP:
    """A gated MLP whose activation `LayerOps` does not have."""

    matrices: tuple[Matrix, Matrix] | None = None

    def __init__(self, gated: Gated, backend: Backend) -> None:
        self._gated, self._backend = GatedModule(gated, backend), backend

    def run(self, ops: LayerOps, hidden: Hidden, norm: Tensor, norm_after: Tensor, eps: float) -> Hidden:
        out = self._gated.of(_normed(hidden, norm, eps, self._backend))
        return _added(out, hidden.residual, norm_after, eps, self._backend)


class ModuleMLP:
    """What a layer has behind its second norm, as transformers' code computes it: experts mostly."""

    matrices: tuple[Matrix, Matrix] | None = None

    def __init__(self, module: nn.Module, backend: Backend) -> None:
        self.module, self._backend = module, backend

    def run(self, ops: LayerOps, hidden: Hidden, norm: Tensor, norm_after: Tensor, eps: float) -> Hidden:
        out = self.module(_normed(hidden, norm, eps, self._backend)[None])
        out = out[0] if isinstance(out, tuple) else out
        return _added(out[0], hidden.residual, norm_after, eps, self._backend)


def _normed(hidden: Hidden, norm: Tensor, eps: float, backend: Backend) -> Tensor:
    return backend.rms_norm(hidden.residual, norm, eps) if hidden.normed is None else hidden.normed


def _added(out: Tensor, residual: Tensor, norm_after: Tensor, eps: float, backend: Backend) -> Hidden:
    normed, total = backend.add_rms_norm(out, residual, norm_after, eps)
    return Hidden(total, normed)
