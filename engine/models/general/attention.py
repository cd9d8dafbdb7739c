"""Attention as transformers' modelling code calls it: handed on to what each attention module is given.

`ALL_ATTENTION_FUNCTIONS` finds a function by a name that a config has. No mask function is registered under
that name, so that no mask is made: causality, windows and block tables are the cache's own business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quire.engine.models.attention_shape import AttentionShape
from quire.kernels.attention.batch import AttentionLayer

NAME = "quire"
# Keywords that say nothing of what attention is, or what `Call` has fields for.
_KNOWN = {
    "scaling", "sliding_window", "dropout", "is_causal", "position_ids", "use_cache", "cache_position",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "softcap", "s_aux",
}  # fmt: skip


class UnsupportedAttention(ValueError):
    """A model's attention is more than the cache's kernels compute; the message says what."""


@dataclass(frozen=True, slots=True)
class Call:
    """A module's attention: q [Hq, T, D], k [Hkv, T, D] and v [Hkv, T, Dv], normed and rotated.

    softcap and sinks [Hq] as `quire.kernels.attention.batch.AttentionLayer` has them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    window: int  # 0: none was given
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def head_dim(self) -> int:
        """Numbers of a vector in the cache: as many for a key as for a value, and no odd number."""
        most = max(self.q.shape[-1], self.v.shape[-1])
        return most + most % 2

    @property
    def shape(self) -> AttentionShape:
        """Return what the attention is, whatever the tokens."""
        plain = not self.softcap and self.sinks is None
        return AttentionShape(self.q.shape[0], self.k.shape[0], self.head_dim, self.scale, plain)


class Attention(Protocol):
    """What a module's attention is handed to; returns [1, T, Hq, Dv]."""

    def __call__(self, layer: int, call: Call) -> Tensor: ...

    def attend(self, layer: int, qkv: Tensor, attention: AttentionLayer) -> Tensor:
        """Return [T, Hq · D] of a projection [T, (Hq + 2 Hkv) D], neither normed nor rotated yet."""


def give(model: nn.Module, attention: Attention) -> None:
    """Have the model's attention modules call `attention`."""
    for module in attention_modules(model):
        module.quire = attention  # type: ignore[assignment]


def attention_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield those modules that have the number of a layer."""
    return (module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int))


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Hand a call of transformers' on. Raises UnsupportedAttention."""
    if attention_mask is not None:
        raise UnsupportedAttention("it masks more than what comes later and what a window leaves")
    unknown = sorted(name for name, value in given.items() if name not in _KNOWN and value is not None)
    if unknown:
        raise UnsupportedAttention(f"its attention takes {', '.join(unknown)}, which no kernel here does")
    causal = getattr(module, "is_causal", True) or getattr(module, "is_decoder", False)
    if given.get("is_causal") is False or not causal:
        raise UnsupportedAttention("it sees what comes later")
    scale = given.get("scaling")
    call = Call(
        q=query[0],
        k=key[0],
        v=value[0],
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window=given.get("sliding_window") or 0,
        softcap=given.get("softcap") or 0.0,
        sinks=given.get("s_aux"),
    )
    attention: Callable[[int, Call], Tensor] | None = getattr(module, "quire", None)
    if attention is None:
        raise UnsupportedAttention("its attention does not know which layer it is of")
    layer: int = module.layer_idx  # type: ignore[assignment]
    return attention(layer, call), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)


class Recorder:
    """Notes each layer's call, and computes nothing."""

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}

    def __call__(self, layer: int, call: Call) -> Tensor:
        if layer in self.calls:
            raise UnsupportedAttention(f"it attends more than once in layer {layer}")
        self.calls[layer] = call
        heads, tokens, _ = call.q.shape
        return call.v.new_empty(1, tokens, heads, call.v.shape[-1])

    def attend(self, layer: int, qkv: Tensor, attention: AttentionLayer) -> Tensor:
        raise NotImplementedError("a dry run is of the model's own code")
