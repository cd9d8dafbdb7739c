"""Attention as transformers' modelling code calls it: handed on to what each attention module is given.

`ALL_ATTENTION_FUNCTIONS` finds a function by a name that a config has. No mask function is registered under
that name, so that no mask is made: causality, windows and block tables are the cache's own business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quire.engine.models.attention_shape import AttentionShape
from quire.engine.models.config import MAX_GROUP
from quire.engine.models.general.indexer import Indexer
from quire.engine.models.general.latent import latent_of
from quire.engine.models.general.unsupported import UnsupportedAttention
from quire.kernels.attention.batch import AttentionLayer
from quire.kernels.attention.chosen import Chosen
from quire.kernels.attention.chosen_by_head import ChosenByHead
from quire.kernels.attention.latent.expansion import Expansion

NAME = "quire"
# Keywords that say nothing of what attention is, or what `Call` has fields for.
_KNOWN = {
    "scaling", "sliding_window", "dropout", "is_causal", "position_ids", "use_cache", "cache_position",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "softcap", "s_aux",
    "alibi_slopes", "biased_keys", "indices", "block_indices",
}  # fmt: skip


class _Every:
    """Stands for a mask, or for chosen tokens, that leaves nothing out, whatever part of it is taken."""

    def __getitem__(self, part: object) -> _Every:
        return self


EVERY: Any = _Every()


@dataclass(frozen=True, slots=True)
class Call:
    """A module's attention: q [Hq, T, D], k [Hkv, T, D] and v [Hkv, T, Dv], normed and rotated.

    softcap, sinks [Hq] and slopes [Hq] as `quire.kernels.attention.batch.AttentionLayer` has them. expansion:
    makes k and v of each query head of what k and v are, latents, of which Hkv is 1 and v are the first
    numbers of k. chosen: what is attended to, None: all that is seen. biased: as `AttentionShape` has it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    window: int  # 0: none was given
    softcap: float = 0.0
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    expansion: Expansion | None = None
    chosen: Chosen | ChosenByHead | None = None
    biased: bool = False

    @property
    def head_dim(self) -> int:
        """Return how many numbers a vector in the cache has: a key as many as a value, and no odd number."""
        most = max(self.q.shape[-1], self.v.shape[-1]) if self.expansion is None else self.k.shape[-1]
        return most + most % 2

    @property
    def value_dim(self) -> int:
        """Return how many numbers a query head attends to."""
        return self.v.shape[-1] if self.expansion is None else self.expansion.value

    @property
    def plain(self) -> bool:
        """Return whether weights are the softmax of scaled scores."""
        return not self.softcap and self.sinks is None and self.slopes is None

    @property
    def shape(self) -> AttentionShape:
        """Return what the attention is, whatever the tokens."""
        heads, kv_heads = self.q.shape[0], self.k.shape[0]
        shape = AttentionShape(heads, kv_heads, self.head_dim, self.scale, self.plain, biased=self.biased)
        if self.expansion is None:
            return shape
        projected = max(self.q.shape[-1], self.expansion.value)
        return replace(shape, latent=self.expansion.latent, projected=projected)


class Attention(Protocol):
    """What a module's attention is handed to; returns [1, T, Hq, Dv]."""

    def __call__(self, layer: int, call: Call) -> Tensor: ...

    def attend(self, layer: int, qkv: Tensor, attention: AttentionLayer) -> Tensor:
        """Return [T, Hq · D] of a projection [T, (Hq + 2 Hkv) D], neither normed nor rotated yet."""

    def choose(self, layer: int, indexer: Indexer) -> Any:
        """Return what a layer's indexer chooses, Chosen, ChosenByHead or EVERY."""


def give(model: nn.Module, attention: Attention) -> None:
    """Have the model's attention modules call `attention`."""
    for module in attention_modules(model):
        module.quire = attention  # type: ignore[assignment]


def attention_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield those modules that have the number of a layer."""
    return (module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int))


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Hand a call of transformers' on. Raises UnsupportedAttention."""
    if attention_mask is not None and attention_mask is not EVERY:
        raise UnsupportedAttention("it masks more than what comes later and what a window leaves")
    said = {name: value for name, value in given.items() if value is not None and value is not EVERY}
    unknown = sorted(said.keys() - _KNOWN)
    if unknown:
        raise UnsupportedAttention(f"its attention takes {', '.join(unknown)}, which no kernel here does")
    chosen = said.get("indices", said.get("block_indices"))
    if chosen is not None and not isinstance(chosen, Chosen | ChosenByHead):
        raise UnsupportedAttention("how it chooses tokens is not known")
    causal = getattr(module, "is_causal", True) or getattr(module, "is_decoder", False)
    if given.get("is_causal") is False or not causal:
        raise UnsupportedAttention("it sees what comes later")
    scale, latent = given.get("scaling"), latent_of(module)
    call = Call(
        q=query[0],
        k=key[0],
        v=value[0],
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window=given.get("sliding_window") or 0,
        softcap=given.get("softcap") or 0.0,
        sinks=given.get("s_aux"),
        slopes=given.get("alibi_slopes"),
        expansion=None if latent is None else latent.expansion(query.shape[1]),
        chosen=chosen,
        biased=said.get("biased_keys", False),
    )
    attention: Callable[[int, Call], Tensor] | None = getattr(module, "quire", None)
    if attention is None:
        raise UnsupportedAttention("its attention does not know which layer it is of")
    layer: int = module.layer_idx  # type: ignore[assignment]
    if latent is not None:
        return attention(layer, call), None
    spread = _spread(call)
    out = attention(layer, spread)
    if spread is not call:
        out = out.unflatten(2, (len(call.k), -1))[:, :, :, : len(call.q) // len(call.k)].flatten(2, 3)
    return out, None


def _spread(call: Call) -> Call:
    """Return a call of which no KV head serves more query heads than kernels take: it has copies then.

    Query heads that are zeros fill up what the last copy serves (Falcon-7B has 71 for one).
    """
    group = len(call.q) // len(call.k)
    copies = -(-group // MAX_GROUP)
    if copies == 1:
        return call
    missing = -group % copies

    def filled(heads: Tensor | None) -> Tensor | None:
        if heads is None:
            return None
        return (
            F.pad(heads.unflatten(0, (-1, group)).movedim(1, -1), (0, missing)).movedim(-1, 1).flatten(0, 1)
        )

    k, v = (part.repeat_interleave(copies, 0) for part in (call.k, call.v))
    q = filled(call.q)
    assert q is not None
    chosen = call.chosen.repeated(copies) if isinstance(call.chosen, ChosenByHead) else call.chosen
    return replace(call, q=q, k=k, v=v, sinks=filled(call.sinks), slopes=filled(call.slopes), chosen=chosen)


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


class Recorder:
    """Notes each call and the layer it is of, in their order, and computes nothing.

    indexed: numbers of an indexer's key, of the layers that have one.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[int, Call]] = []
        self.indexed: dict[int, int] = {}

    def __call__(self, layer: int, call: Call) -> Tensor:
        heads, tokens, _ = call.q.shape
        if call.k.shape[1] != tokens:
            raise UnsupportedAttention(f"it attends to something else than its tokens in layer {layer}")
        self.calls.append((layer, call))
        return call.v.new_empty(1, tokens, heads, call.value_dim)

    def attend(self, layer: int, qkv: Tensor, attention: AttentionLayer) -> Tensor:
        raise NotImplementedError("a dry run is of the model's own code")

    def choose(self, layer: int, indexer: Indexer) -> Any:
        if layer in self.indexed:
            raise UnsupportedAttention(f"it chooses tokens more than once in layer {layer}")
        self.indexed[layer] = indexer.width
        return EVERY
