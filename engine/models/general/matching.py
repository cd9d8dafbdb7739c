"""Attention of a model that is what kernels here compute: found by name and shape, and proved.

Each function runs a module, or takes what it was seen to do, and compares; it returns None for what differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.models.general.agreement import Agree
from quire.engine.models.general.norms import norm_of
from quire.engine.models.general.observed import Passage, SeenLayer
from quire.engine.models.general.proof import alike, linears, merged
from quire.engine.models.general.row_orders import (
    Reordered,
    order_of_head,
    order_of_rows,
    reordered,
    whole_table,
)
from quire.kernels.attention.batch import AttentionLayer
from quire.kernels.attention.splits import SplitPartials
from quire.kernels.attention.write_kv import rotate
from quire.kernels.backend import Backend
from quire.kernels.linear.operations import AnyLinear, whole
from quire.kernels.pointwise.gate import sigmoid_gate_reference
from quire.kernels.pointwise.norm import rms_norm_reference

QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("query", "key", "value"), ("wq", "wk", "wv"))
_OUTPUT = ("o_proj", "out_proj", "dense", "wo")
_HEAD_NORMS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"), ("q_layernorm", "k_layernorm"))


@dataclass(frozen=True, slots=True)
class Attending:
    """The projections of a layer's attention, and what is between them.

    gated: behind queries, keys and values the first one has gates, by whose sigmoids what is attended to is
    multiplied. reordered: where its rows are not in the order of the module's own layers.
    """

    qkv: AnyLinear
    layer: AttentionLayer
    output: AnyLinear
    gated: bool = False
    reordered: Reordered | None = None

    def attend(
        self, product: Tensor, by: Callable[[Tensor], Tensor | SplitPartials], backend: Backend
    ) -> Tensor | SplitPartials:
        """Return what goes into the output's projection, of what the first one gives [T, …].

        by: attends, of queries, keys and values alone, whose rows are strided then.
        """
        if not self.gated:
            return by(product)
        gates = self.layer.num_heads * self.layer.head_dim
        return backend.sigmoid_gate(whole(by(product[:, :-gates])), product[:, -gates:])


@dataclass(frozen=True, slots=True)
class Rope:
    """table [max_pos, D]: for heads of D numbers, of which the model's code rotates so many."""

    table: Tensor
    rotated: int


def attention_of(
    seen: SeenLayer,
    positions: Tensor,
    rope: Rope | None,
    window: int,
    agree: Agree = bool,
    *,
    chunked: bool = False,
) -> Attending | None:
    """Return the attention of a layer as it was seen, if it is projections, norms of heads and rope.

    rope: what the layer's code was given, or None; it need not have used it. window and chunked as
    `AttentionLayer` has them. agree: tells whether all ranks, of which each sees its own heads, find the
    same.
    """
    module, call, into = seen.attention.module, seen.call, seen.attention.into
    qkv, output = linears(module, QKV), linears(module, [(name,) for name in _OUTPUT])
    head_dim, heads, kv_heads = call.q.shape[-1], len(call.q), len(call.k)
    if qkv is None or output is None or {call.k.shape[-1], call.v.shape[-1]} != {head_dim} or head_dim % 2:
        return None
    norms = _head_norms(module, head_dim)
    if norms is None or getattr(getattr(module, "config", None), "clip_qkv", None) is not None:
        return None  # OLMo's limit, which few tokens may not reach
    q_norm, k_norm, eps = norms
    product, out = merged(qkv), merged(output)
    rows, plain = product.weight.shape[0], (heads + 2 * kv_heads) * head_dim
    gated = rows == plain + heads * head_dim
    if not gated and rows != plain:
        return None
    attended = _gated(seen.attended, product(into), heads) if gated else seen.attended
    if not alike(out(attended), seen.attention.out):
        return None
    for tried in (None,) if rope is None else (rope, None):
        of_head = order_of_head(head_dim if tried is None else tried.rotated, head_dim, into.device)
        layer = AttentionLayer(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=call.scale,
            window=window,
            rope=None if tried is None else tried.table,
            q_norm=None if q_norm is None else q_norm[of_head],
            k_norm=None if k_norm is None else k_norm[of_head],
            eps=eps,
            softcap=call.softcap,
            sinks=call.sinks,
            slopes=call.slopes,
            chunked=chunked,
        )
        order = order_of_rows(heads, kv_heads, of_head, gated=gated)
        kept = torch.equal(order, torch.arange(len(order), device=order.device))
        if not kept and not all(isinstance(part, nn.Linear) for part in qkv):
            continue
        ours = _heads(product(into)[:, order], layer, positions)
        theirs = [part.transpose(0, 1) for part in (call.q, call.k, call.v)]
        theirs[:2] = (part[..., of_head] for part in theirs[:2])
        if agree(all(map(alike, ours, theirs))):
            taken = None if kept else reordered(qkv, product, order)
            return Attending(product if taken is None else taken.product, layer, out, gated, taken)
    return None


def rope_of(rotation: Passage, positions: Tensor, max_len: int, head_dim: int) -> Rope | None:
    """Return a rotation's table for heads of so many numbers; None if theirs are not what it rotates."""
    table = rope_table(rotation, positions, max_len)
    if table is None or table.shape[1] > head_dim or table.shape[1] % 2:
        return None
    return Rope(whole_table(table, head_dim), table.shape[1])


def rope_table(rotation: Passage, positions: Tensor, max_len: int) -> Tensor | None:
    """Return the cosines and sines [max_len, D] that a module gives, fp32, if a position alone decides.

    None, too, for angles that are not those of one half of a head, each twice.
    """
    module = rotation.module
    kinds = getattr(module, "rope_type", "default")
    if {"dynamic", "longrope"} & set(kinds.values() if isinstance(kinds, dict) else (kinds,)):
        return None

    def longer(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            return torch.zeros(1, dtype=torch.float32, device=value.device)
        asked = value.shape[-1:] == positions.shape
        return torch.arange(max_len, device=value.device)[None] if asked else value

    given = [longer(each) for each in rotation.arguments]
    try:
        cos, sin = module(*given, **{name: longer(each) for name, each in rotation.keywords.items()})
        few_cos, few_sin = (part[0] for part in rotation.result)
    except Exception:  # modelling code may want anything
        return None
    if cos.shape[:2] != (1, max_len) or cos.dtype != torch.float32:
        return None
    for many, few in ((cos[0], few_cos), (sin[0], few_sin)):
        if not torch.equal(many[positions].to(few.dtype), few):
            return None
    half = cos.shape[-1] // 2
    if torch.equal(cos[..., :half], cos[..., half:]) and torch.equal(sin[..., :half], sin[..., half:]):
        cos, sin = cos[..., :half], sin[..., :half]
    return torch.cat((cos[0], sin[0]), dim=1)


def _heads(qkv: Tensor, layer: AttentionLayer, positions: Tensor) -> tuple[Tensor, ...]:
    """Return q [T, Hq, D], k and v [T, Hkv, D], normed and rotated."""
    heads = qkv.unflatten(1, (-1, layer.head_dim))
    counts = layer.num_heads, layer.num_kv_heads, layer.num_kv_heads
    q, k, v = heads[:, : sum(counts)].split(counts, dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm_reference(q, layer.q_norm, layer.eps), rms_norm_reference(k, layer.k_norm, layer.eps)
    if layer.rope is not None:
        angles = layer.rope[positions].unsqueeze(1)
        q, k = rotate(q, angles), rotate(k, angles)
    return q, k, v


def _gated(attended: Tensor, product: Tensor, heads: int) -> Tensor:
    """Gate [T, Hq · D] as a module does whose projection has each head's gate behind its query."""
    head_dim = attended.shape[1] // heads
    gates = product[:, : 2 * heads * head_dim].view(len(product), heads, 2, head_dim)[:, :, 1]
    return sigmoid_gate_reference(attended, gates.flatten(1))


def _head_norms(module: nn.Module, head_dim: int) -> tuple[Tensor | None, Tensor | None, float] | None:
    for names in _HEAD_NORMS:
        norms = [getattr(module, name, None) for name in names]
        if norms[0] is None and norms[1] is None:
            continue
        found = [None if each is None else norm_of(each) for each in norms]
        q_norm, k_norm = found
        if q_norm is None or k_norm is None or q_norm.eps != k_norm.eps:
            return None
        if len(q_norm.weight) != head_dim or len(k_norm.weight) != head_dim:
            return None
        return q_norm.weight, k_norm.weight, q_norm.eps
    return None, None, 0.0
