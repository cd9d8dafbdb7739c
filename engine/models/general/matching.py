"""Parts of a model that are what kernels here compute: found by name and shape, and proved by their numbers.

Each function runs a module, or takes what it was seen to do, and compares; it returns None for what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quire.engine.models.general.division.modules import Summed
from quire.engine.models.general.observed import Passage, SeenLayer
from quire.kernels.attention.batch import AttentionLayer
from quire.kernels.attention.write_kv import rotate
from quire.kernels.experts.routing import route_reference
from quire.kernels.linear.linear import Linear
from quire.kernels.pointwise.activation import ACTIVATIONS, UNGATED, Activation, UngatedActivation
from quire.kernels.pointwise.layer_norm import layer_norm_reference
from quire.kernels.pointwise.norm import rms_norm_reference

Name = TypeVar("Name", bound=str)
# Of a vector, by its length: what other places of rounding leave, and nothing else does.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_ROWS = 4
_LARGE = 100.0  # of a gate: more than any limit that models have, and its square is within fp16
_QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("query", "key", "value"), ("wq", "wk", "wv"))
_OUTPUT = ("o_proj", "out_proj", "dense", "wo")
_HEAD_NORMS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"), ("q_layernorm", "k_layernorm"))
_GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",), ("w1", "w3"))
_DOWN = ("down_proj", "w2")
_UNGATED = (
    ("c_fc", "c_proj"), ("fc1", "fc2"), ("fc_in", "fc_out"), ("up_proj", "down_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
)  # fmt: skip
_ACTIVATION = ("act_fn", "activation_fn", "act", "gelu_impl")


def alike(ours: Tensor, theirs: Tensor, *, times: float = 1.0) -> bool:
    """Return whether vectors [..., N] differ by rounding only."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    wide = theirs.float()
    apart = (ours.float() - wide).norm(dim=-1)
    return bool((apart <= times * _TOLERANCE[theirs.dtype] * wide.norm(dim=-1)).all())  # NaN never is


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor
    eps: float


def norm_of(module: nn.Module) -> Norm | None:
    """Return the RMSNorm that a module is; fp32 weights are one more than the module's."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    named = [name for name, _ in module.named_parameters()]
    if named != ["weight"] or weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if weight.dtype not in _TOLERANCE:
        return None
    # Small ones show the epsilon, and what they have in common tells it from a layer norm.
    sizes = torch.tensor([[1e-3], [1e-2], [1.0], [30.0]], device=weight.device)
    x = (sizes * (_noise(_ROWS, len(weight), weight).float() + 0.5)).to(weight.dtype)
    theirs = _called(module, x)
    for candidate in (weight.data, 1.0 + weight.data.float()):
        if theirs is not None and alike(rms_norm_reference(x, candidate, eps), theirs):
            return Norm(candidate, eps)
    return None


@dataclass(frozen=True, slots=True)
class CentredNorm:
    weight: Tensor
    bias: Tensor | None
    eps: float


def centred_norm_of(module: nn.Module) -> CentredNorm | None:
    """Return the layer norm that a module is."""
    weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    named = {name for name, _ in module.named_parameters()}
    if not {"weight"} <= named <= {"weight", "bias"} or weight is None or weight.dim() != 1:
        return None
    if weight.dtype not in _TOLERANCE or not isinstance(eps, float):
        return None
    sizes = torch.tensor([[1e-3], [1e-2], [1.0], [30.0]], device=weight.device)  # as above
    x = (sizes * (_noise(_ROWS, len(weight), weight).float() + 0.5)).to(weight.dtype)
    theirs = _called(module, x)
    for candidate in (weight.data, weight.data + 1):
        if theirs is not None and alike(layer_norm_reference(x, candidate, bias, eps), theirs):
            return CentredNorm(candidate, None if bias is None else bias.data, eps)
    return None


@dataclass(frozen=True, slots=True)
class Gated:
    """down(activation(gate) · up)."""

    gate_up: Linear
    down: Linear
    activation: Activation


def gated_of(module: nn.Module) -> Gated | None:
    """Return the gated MLP that a module is. Its gate and up projection are one matrix then."""
    into, down = _linears(module, _GATE_UP), _linears(module, [(name,) for name in _DOWN])
    activation = _activation_of(module, ACTIVATIONS)
    if into is None or down is None or activation is None:
        return None
    gated = Gated(merged(into), merged(down), activation)
    x = _noise(_ROWS, into[0].in_features, into[0].weight)
    largest = gated.gate_up(x).abs().max().float().clamp(min=1e-2)
    for each in (x, x * (_LARGE / largest).to(x.dtype)):  # large ones show what limits them
        theirs = _called(module, each)
        gate, up = gated.gate_up(each).chunk(2, dim=-1)
        ours = gated.down(ACTIVATIONS[activation](gate) * up)
        if theirs is None or not alike(ours, theirs):
            return None
    return gated


@dataclass(frozen=True, slots=True)
class Ungated:
    """down(activation(up)), and what the module is given besides, which it adds, if `adds`."""

    up: Linear
    down: Linear
    activation: UngatedActivation
    adds: bool


def ungated_of(module: nn.Module) -> Ungated | None:
    """Return the MLP of two products that a module is."""
    found = next((parts for names in _UNGATED if (parts := _linears(module, [names]))), None)
    activation = _activation_of(module, UNGATED)
    if found is None or activation is None:
        return None
    up, down = (merged([part]) for part in found)
    x = _noise(_ROWS, up.weight.shape[1], up.weight)
    residual = _noise(_ROWS, len(down.weight), x)
    largest = up(x).abs().max().float().clamp(min=1e-2)
    adds = _called(module, x) is None
    for each in (x, x * (_LARGE / largest).to(x.dtype)):  # large ones show what limits them
        ours = down(UNGATED[activation](up(each)))
        theirs = _called(module, each, residual) if adds else _called(module, each)
        if theirs is None or not alike(ours + residual if adds else ours, theirs):
            return None
    return Ungated(up, down, activation, adds)


@dataclass(frozen=True, slots=True)
class Attending:
    qkv: Linear
    layer: AttentionLayer
    output: Linear


def attention_of(
    seen: SeenLayer,
    positions: Tensor,
    rope: Tensor | None,
    window: int,
    agree: Callable[[bool], bool] = bool,
    *,
    chunked: bool = False,
) -> Attending | None:
    """Return the attention of a layer as it was seen, if it is projections, norms of heads and rope.

    rope [max_pos, D]: what the layer's code was given, or None; it need not have used it. window and chunked
    as `AttentionLayer` has them. agree: tells whether all ranks, of which each sees its own heads, find the
    same.
    """
    module, call, into = seen.attention.module, seen.call, seen.attention.into
    qkv, output = _linears(module, _QKV), _linears(module, [(name,) for name in _OUTPUT])
    head_dim = call.q.shape[-1]
    if qkv is None or output is None or {call.k.shape[-1], call.v.shape[-1]} != {head_dim} or head_dim % 2:
        return None
    norms = _head_norms(module, head_dim)
    if norms is None or getattr(getattr(module, "config", None), "clip_qkv", None) is not None:
        return None  # OLMo's limit, which few tokens may not reach
    q_norm, k_norm, eps = norms
    product, out = merged(qkv), merged(output)
    if product.weight.shape[0] != (len(call.q) + 2 * len(call.k)) * head_dim:
        return None
    if not alike(out(seen.attended), seen.attention.out):
        return None
    for table in dict.fromkeys((rope, None)):
        if table is not None and table.shape[1] != head_dim:
            continue
        layer = AttentionLayer(
            num_heads=len(call.q),
            num_kv_heads=len(call.k),
            head_dim=head_dim,
            scale=call.scale,
            window=window,
            rope=table,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            softcap=call.softcap,
            sinks=call.sinks,
            slopes=call.slopes,
            chunked=chunked,
        )
        ours = _heads(product(into), layer, positions)
        theirs = (part.transpose(0, 1) for part in (call.q, call.k, call.v))
        if agree(all(map(alike, ours, theirs))):
            return Attending(product, layer, out)
    return None


@dataclass(frozen=True, slots=True)
class Router:
    """Which of a token's experts count, and how much: softmax of logits, of the `top` ones if normalized.

    gives: "logits", "weights" and "index", in the order of what the module returns.
    """

    product: Linear
    top: int
    normalized: bool
    dtype: torch.dtype  # of weights
    gives: tuple[str, ...]


def router_of(module: nn.Module) -> Router | None:
    """Return the router of experts that a module is."""
    weight, bias, top = (getattr(module, name, None) for name in ("weight", "bias", "top_k"))
    state = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    if not isinstance(top, int) or not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    if weight.dtype not in _TOLERANCE or not state <= {"weight", "bias"} or not 0 < top <= len(weight):
        return None
    product = Linear(weight.data, None if bias is None else bias.data)
    x = 4 * _noise(_ROWS, weight.shape[1], weight) / weight.float().norm(dim=1).mean()  # logits well apart
    x = x.to(weight.dtype)
    try:
        theirs = module(x)
    except Exception:  # modelling code may want anything
        return None
    logits = product(x)
    for normalized in (True, False):
        weights, index = route_reference(logits, top, torch.float32, all_first=True, normalized=normalized)
        gives = [_part_of_router(each, logits, weights, index) for each in theirs]
        if isinstance(theirs, tuple) and {"weights", "index"} <= {*gives} <= {"logits", "weights", "index"}:
            dtype = theirs[gives.index("weights")].dtype
            return Router(product, top, normalized, dtype, tuple(map(str, gives)))
    return None


def _part_of_router(theirs: Any, logits: Tensor, weights: Tensor, index: Tensor) -> str | None:
    if not isinstance(theirs, Tensor):
        return None
    if theirs.dtype == torch.int64:
        return "index" if torch.equal(theirs, index) else None
    if theirs.dtype not in _TOLERANCE:
        return None
    for name, ours in (("weights", weights), ("logits", logits)):
        if alike(ours.to(theirs.dtype), theirs):
            return name
    return None


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


def merged(parts: Sequence[nn.Linear]) -> Linear:
    """Return layers of one input as one, whose memory they share from then on."""
    first = parts[0]
    if isinstance(first, Conv1D):  # one that has its weight transposed
        weight = first.weight.data.T.contiguous()
        first.weight.data = weight.T
        return Linear(weight, first.bias.data)
    if len(parts) == 1:
        summed: Any = first.forward
        ranks = summed.ranks if isinstance(summed, Summed) else None
        return Linear(first.weight.data, None if first.bias is None else first.bias.data, ranks)
    weight, bias = torch.cat([each.weight.data for each in parts]), None
    if any(each.bias is not None for each in parts):
        bias = torch.cat(
            [weight.new_zeros(each.out_features) if each.bias is None else each.bias.data for each in parts]
        )
    begin = 0
    for each in parts:
        rows = slice(begin, begin + each.out_features)
        each.weight.data = weight[rows]
        if each.bias is not None and bias is not None:
            each.bias.data = bias[rows]
        begin = rows.stop
    if weight.is_cuda:  # memory that layers had apart is none that they fit in together
        torch.cuda.empty_cache()
    return Linear(weight, bias)


def _heads(qkv: Tensor, layer: AttentionLayer, positions: Tensor) -> tuple[Tensor, ...]:
    """Return q [T, Hq, D], k and v [T, Hkv, D], normed and rotated."""
    heads = qkv.unflatten(1, (-1, layer.head_dim))
    q, k, v = heads.split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm_reference(q, layer.q_norm, layer.eps), rms_norm_reference(k, layer.k_norm, layer.eps)
    if layer.rope is not None:
        angles = layer.rope[positions].unsqueeze(1)
        q, k = rotate(q, angles), rotate(k, angles)
    return q, k, v


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


def _linears(module: nn.Module, names: Sequence[tuple[str, ...]]) -> list[nn.Linear] | None:
    """Return the plain linear layers that a module has under one of the names; None: there are none."""
    for each in names:
        found: Any = [getattr(module, name, None) for name in each]
        if all(isinstance(part, nn.Linear | Conv1D) and part.weight.dtype in _TOLERANCE for part in found):
            # Of divided ones, those that are summed alone are what they are by their weights.
            forwards = [vars(part).get("forward") for part in found]
            last = isinstance(forwards[0], Summed) and len(found) == 1
            return found if last or not any(forwards) else None
    return None


def _activation_of(module: nn.Module, among: Mapping[Name, Callable[[Tensor], Tensor]]) -> Name | None:
    function: Callable[[Tensor], Tensor] | None = next(
        (getattr(module, name) for name in _ACTIVATION if callable(getattr(module, name, None))), None
    )
    if function is None:
        return None
    x = torch.linspace(-6, 6, 997)
    try:
        theirs = function(x)
    except Exception:  # it may want anything
        return None
    for name, ours in among.items():
        if isinstance(theirs, Tensor) and torch.allclose(ours(x), theirs, rtol=0, atol=2e-6):
            return name
    return None


def _noise(rows: int, columns: int, like: Tensor) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(columns)
    return torch.randn(rows, columns, device=like.device, generator=generator).to(like.dtype)


def _called(module: nn.Module, *given: Tensor) -> Tensor | None:
    """Return what a module gives of tensors; None where it takes or gives something else."""
    try:
        out = module(*given)
    except Exception:  # modelling code may want anything
        return None
    return out if isinstance(out, Tensor) else None
