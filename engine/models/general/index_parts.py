"""What an indexer's module makes of a token, its key and its queries, found by what its own code chooses.

The indexers of transformers' models differ in how they rotate and in what they rotate. One that is proved to
be of a known kind is scored by kernels, inside CUDA graphs; of another the own code chooses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.attention.index.rotation import rotate_index_reference
from quire.kernels.attention.index.scores import MOST_HEADS

Rotate = Callable[..., Tensor]

# Of the small module by which a kind is proved.
_TOKENS, _KEYS, _HIDDEN, _RANK, _HEADS, _WIDTH, _ROTATED = 6, 40, 24, 20, 16, 12, 8
_TOLERANCE = 1e-4
_LINEAR = {"wq_b": (_RANK, _HEADS * _WIDTH), "wk": (_HIDDEN, _WIDTH), "weights_proj": (_HIDDEN, _HEADS)}


@dataclass(frozen=True, slots=True)
class Kind:
    """interleaved: neighbours rotate together, else halves. last: the last numbers do, else the first."""

    interleaved: bool
    last: bool


@dataclass(frozen=True, slots=True)
class IndexParts:
    """Computes what a module of a kind would of tokens: of hidden [T, H], of the residual of its queries, and
    of cosines and sines [T, R]."""

    kind: Kind
    module: Any
    hidden: Tensor
    residual: Tensor
    cos: Tensor
    sin: Tensor

    @property
    def scale(self) -> float:
        """Return what a query's product with a key is multiplied by."""
        scale: float = self.module.softmax_scale
        return scale

    def keys(self, rotate: Rotate) -> Tensor:
        """Return the tokens' keys [T, D]. rotate: as `IndexOperations` has it."""
        norm = self.module.k_norm
        keys: Tensor = norm(self.module.wk(self.hidden).to(norm.weight.dtype)).to(self.hidden.dtype)
        return self._rotated(keys[:, None], rotate)[:, 0]

    def queries(self, rotate: Rotate) -> Tensor:
        """Return the tokens' queries [T, heads, D]."""
        q = self.module.wq_b(self.residual).unflatten(-1, (self.module.n_heads, self.module.head_dim))
        return self._rotated(q, rotate)

    def _rotated(self, x: Tensor, rotate: Rotate) -> Tensor:
        return rotate(x, self.cos, self.sin, interleaved=self.kind.interleaved, last=self.kind.last)

    def weights(self) -> Tensor:
        """Return the weights of heads [T, heads] in fp32."""
        project = self.module.weights_proj
        weights: Tensor = project(self.hidden.to(project.weight.dtype)).float()
        return weights * self.module.n_heads**-0.5


KINDS = tuple(Kind(interleaved, last) for interleaved in (False, True) for last in (False, True))


def give_kinds(model: nn.Module, is_indexer: Callable[[nn.Module], bool]) -> bool:
    """Tell adapted indexers what kind they are of, and return whether all are of a known one."""
    proved: dict[type, Kind | None] = {}
    indexers: list[Any] = [module for module in model.modules() if is_indexer(module)]
    for module in indexers:
        if type(module) not in proved:
            proved[type(module)] = _kind_of(module)
        module.quire_kind = proved[type(module)] if module.n_heads <= MOST_HEADS else None
    return all(module.quire_kind is not None for module in indexers)


def _kind_of(module: Any) -> Kind | None:
    """Return of what kind a module is by what a small one like it keeps and chooses; None: of no known."""
    generator = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    own = copy.copy(module)
    own.__dict__["_modules"] = dict(module._modules)
    try:
        for name, (inputs, outputs) in _LINEAR.items():
            if type(getattr(module, name)) is not nn.Linear or getattr(module, name).bias is not None:
                return None
            linear = nn.Linear(inputs, outputs, False, "cpu", torch.float32)
            linear.weight.data = noise(outputs, inputs)
            setattr(own, name, linear)
        own.k_norm = nn.LayerNorm(_WIDTH, module.k_norm.eps, device="cpu", dtype=torch.float32)
        own.k_norm.weight.data, own.k_norm.bias.data = noise(_WIDTH), noise(_WIDTH)
        own.n_heads, own.head_dim, own.qk_rope_head_dim, own.index_topk = _HEADS, _WIDTH, _ROTATED, _KEYS
        own.softmax_scale = _WIDTH**-0.5
        hidden, residual = noise(_TOKENS, _HIDDEN), noise(_TOKENS, _RANK)
        angles = 3.0 * noise(_TOKENS, _ROTATED // 2).repeat(1, 2)
        cos, sin, kept = angles.cos(), angles.sin(), _Kept(noise(1, _KEYS, _WIDTH))
        seen = torch.ones(1, _TOKENS, _KEYS, dtype=torch.bool)
        with torch.no_grad():
            theirs = super(type(module), own).forward(
                hidden[None], residual[None], (cos[None], sin[None]), seen, None, past_key_values=kept
            )
            for kind in KINDS:
                parts = IndexParts(kind, own, hidden, residual, cos, sin)
                keys, queries = (make(rotate_index_reference) for make in (parts.keys, parts.queries))
                if kept.given is None or not torch.allclose(keys, kept.given[0], atol=_TOLERANCE):
                    continue
                products = (queries @ kept.keys[0].T * parts.scale).relu()
                scores = (parts.weights()[:, None] @ products)[:, 0]
                if torch.equal(scores.argsort(dim=-1, descending=True), theirs[0].long()):
                    return kind
    except Exception:  # modelling code may want anything
        return None
    return None


class _Kept:
    """Stands for a cache of transformers' that has other keys than it is given."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        self.given: Tensor | None = None

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        self.given = keys
        return self.keys
