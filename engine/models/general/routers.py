"""Routers of experts that are what kernels here compute: found by shapes, and proved on logits of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from quire.engine.models.general.proof import ROWS, TOLERANCE, alike, noise
from quire.kernels.experts.routing import (
    Divisor,
    Routing,
    chosen_by,
    route_reference,
    scores_of,
    weights_of,
)
from quire.kernels.linear.exact import exact_linear_reference
from quire.kernels.linear.linear import Linear

_GROUPS = (("num_group", "topk_group"), ("n_group", "topk_group"))
_PROBES = 48  # rows of logits that a router is tried on, at most
_LOW = -50.0  # sigmoids there are so small that anything added to their sum shows
_DIVISORS = (Divisor(), Divisor(added=1e-20), Divisor(added=1e-6), Divisor(least=1e-12))
_SMALLEST, _LARGEST = 0x3E80, 0x4100  # 0.25 and 8 in bf16
_SIGMOIDS = (torch.sigmoid, torch.Tensor.sigmoid, torch.special.expit, torch.nn.functional.sigmoid)
_Kind: TypeAlias = Literal["small", "large", "spread"]


@dataclass(frozen=True, slots=True)
class Router:
    """Which of a token's experts count, and how much.

    exact: the product is one of fp32 numbers, though weight and tokens may be others. bias [E]: of the
    choice; None, too, if the module is given it with each call. dtype: of weights. gives: "logits", "weights"
    and "index", in the order of what the module returns.
    """

    product: Linear
    exact: bool
    routing: Routing
    bias: Tensor | None
    dtype: torch.dtype
    gives: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _State:
    """A module's tensors that a router has: the names of all, and whose a choice's bias is."""

    weight: str
    bias: str | None
    correction: str | None


def router_of(module: nn.Module, dtype: torch.dtype) -> Router | None:
    """Return the router of experts that a module is, for hidden states of a dtype."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    top, state = getattr(module, "top_k", None), _state_of(tensors)
    if state is None or not isinstance(top, int) or not 0 < top <= len(tensors[state.weight]):
        return None
    weight = tensors[state.weight].data
    if weight.dtype not in TOLERANCE or any("forward" in vars(part) for part in module.modules()):
        return None
    product = Linear(weight, None if state.bias is None else tensors[state.bias].data)
    bias = None if state.correction is None else tensors[state.correction].data.flatten()
    for call in _ways(module, _correction(len(weight), weight.device)):
        try:
            routing = _routing(call, top, state, tensors, dtype)
            x = 4 * noise(ROWS, weight.shape[1], weight).float() / weight.float().norm(dim=1).mean()
            theirs = call.run({}, x.to(dtype))  # logits well apart
        except Exception:  # modelling code may want anything
            continue
        if routing is None:
            return None
        found = Router(product, False, routing, bias, torch.float32, ())
        return _as_given(found, x.to(dtype), theirs, call.bias)
    return None


def _state_of(tensors: dict[str, Tensor]) -> _State | None:
    """Return which tensors are the weight of a product and its bias, and the bias of a choice."""
    matrices = [name for name, each in tensors.items() if each.dim() == 2 and name.endswith("weight")]
    if len(matrices) != 1:
        return None
    weight = matrices[0]
    bias = f"{weight.removesuffix('weight')}bias"
    vectors = [name for name in tensors if name not in (weight, bias)]
    if len(vectors) > 1 or any(tensors[name].numel() != len(tensors[weight]) for name in vectors):
        return None
    return _State(weight, bias if bias in tensors else None, vectors[0] if vectors else None)


@dataclass(frozen=True, slots=True)
class _Call:
    """A way in which a module may want its tokens; `bias`: what it is given with them."""

    module: nn.Module
    leading: bool
    bias: Tensor | None

    def run(self, state: dict[str, Tensor], x: Tensor) -> Any:
        """Call it with tokens [T, H], and with other tensors in place of some of its own."""
        given = (x[None] if self.leading else x, *(() if self.bias is None else (self.bias,)))
        return functional_call(self.module, state, given)


def _ways(module: nn.Module, bias: Tensor) -> Iterator[_Call]:
    for given in (None, bias):
        for leading in (False, True):
            yield _Call(module, leading, given)


# -- what a router makes of logits ---------------------------------------------------------------------------


def _routing(
    call: _Call, top: int, state: _State, tensors: dict[str, Tensor], dtype: torch.dtype
) -> Routing | None:
    """Return how a module chooses and weighs, tried on logits that its weight is made to give."""
    weight = tensors[state.weight]
    experts, columns = weight.shape
    rows = min(_PROBES, columns)
    kinds: tuple[_Kind, ...] = ("small", "large", "spread", "small", "spread", "spread")
    logits = torch.stack([_even(experts, weight.device, seed, kinds[seed % 6]) for seed in range(rows)])
    high = rows - rows // 4
    logits[high:] += _LOW
    logits[high::2, 0] = 0.0  # so that others are small beside it, where scores add up to one
    logits = logits.to(weight.dtype)
    other = torch.zeros_like(weight)
    other[:, :rows] = logits.T
    changed = {state.weight: other}
    if state.bias is not None:
        changed[state.bias] = torch.zeros_like(tensors[state.bias])
    bias = call.bias
    if state.correction is not None:
        own = tensors[state.correction]
        bias = _correction(experts, weight.device).to(own.dtype)
        changed[state.correction] = bias.view(own.shape)
    with _Sigmoids() as sigmoids:
        theirs = call.run(changed, torch.eye(rows, columns, dtype=dtype, device=weight.device))
    index, weights = _parts(theirs, top)
    if index is None or weights is None or not sigmoids.dtypes <= {torch.float32}:
        return None
    for routing in _choices(call.module, top, experts):
        scores = scores_of(logits, routing)
        ours = chosen_by(scores[:high], routing, bias)
        if not torch.equal(ours.sort(dim=-1).values, index[:high].sort(dim=-1).values):
            continue
        chosen = scores.gather(1, index)
        for weighing in _weighings(call.module, routing):
            if alike(weights_of(chosen, weighing).to(weights.dtype), weights):
                return weighing
    return None


class _Sigmoids(TorchFunctionMode):
    """Notes the dtypes of sigmoids: where a bias is added to them, few choices show that they are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _SIGMOIDS:
            self.dtypes.add(result.dtype)
        return result


@cache  # for routers of all layers; nothing writes to it
def _even(experts: int, device: torch.device, seed: int = 0, kind: _Kind = "spread") -> Tensor:
    """Return numbers [experts] fp32 from -8 to 8 in any order, of which bf16 tells each from the others.

    small, large: they are above 0 and as near to each other as bf16 allows, so that scores in bf16 are the
    same of several; sigmoids of large ones are all near 1.
    """
    first = _LARGEST - experts if kind == "large" else _SMALLEST
    last = min(_SMALLEST + experts, _LARGEST) if kind == "small" else _LARGEST
    bits = torch.linspace(max(first, _SMALLEST), last, experts).round().to(torch.int16)
    sizes = bits.view(torch.bfloat16).float()
    if kind == "spread":
        sizes[::2] *= -1  # of other sizes than those above 0, lest two sums be the same
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(seed))
    return sizes[order].to(device)


def _correction(experts: int, device: torch.device) -> Tensor:
    """Return a choice's bias [experts], by which the first expert is hardly ever chosen."""
    bias = _even(experts, device) / 400
    bias[0] = -4.0
    return bias


def _parts(theirs: Any, top: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the index, and the weights, that are among what a module gives."""
    given = theirs if isinstance(theirs, tuple) else ()
    tensors = [each for each in given if isinstance(each, Tensor) and each.shape[1:] == (top,)]
    index = next((each for each in tensors if each.dtype == torch.int64), None)
    weights = [each for each in tensors if each.dtype in TOLERANCE]
    return index, weights[-1] if weights else None  # logits stand before them, if there are as many


def _choices(module: nn.Module, top: int, experts: int) -> Iterator[Routing]:
    names: tuple[Literal["softmax"], Literal["sigmoid"]] = ("softmax", "sigmoid")
    for name in names:
        yield (alone := Routing(top, name))
        for groups, kept in {tuple(getattr(module, each, None) for each in pair) for pair in _GROUPS}:
            if not isinstance(groups, int) or not isinstance(kept, int) or not 0 < kept < groups:
                continue
            if experts % groups == 0 and top <= experts // groups * kept:
                yield replace(alone, groups=groups, kept=kept, group_by="two")
                yield replace(alone, groups=groups, kept=kept, group_by="best")


def _weighings(module: nn.Module, routing: Routing) -> Iterator[Routing]:
    """Yield ways of weighing, with the numbers that the module has for it."""
    own = [float(each) for each in vars(module).values() if isinstance(each, int | float) and each > 0]
    small = [each for each in own if each < 1e-3]
    divisors = (
        *_DIVISORS,
        *(Divisor(added=each) for each in small),
        *(Divisor(least=each) for each in small),
    )
    for scale in dict.fromkeys((1.0, *own)):
        for divisor in (None, *divisors):
            yield replace(routing, divisor=divisor, scale=scale)


# -- what it gives of tokens ---------------------------------------------------------------------------------


def _as_given(router: Router, x: Tensor, theirs: Any, bias: Tensor | None) -> Router | None:
    """Return the router with the product that it has, and what it gives in which order."""
    products: list[tuple[bool, Callable[[Tensor, Linear], Tensor]]] = [(True, exact_linear_reference)]
    if x.dtype == router.product.weight.dtype:
        products.insert(0, (False, lambda x, layer: layer(x)))
    for exact, product in products:
        logits = product(x, router.product)
        used = router.bias if bias is None else bias
        weights, index = route_reference(logits, router.routing, used, torch.float32)
        gives = [_part_of_router(each, logits, weights, index) for each in theirs]
        if {"weights", "index"} <= {*gives} <= {"logits", "weights", "index"}:
            dtype = theirs[gives.index("weights")].dtype
            return replace(router, exact=exact, dtype=dtype, gives=tuple(map(str, gives)))
    return None


def _part_of_router(theirs: Any, logits: Tensor, weights: Tensor, index: Tensor) -> str | None:
    """Return which part it is. Experts may stand in another order than ours: they are added up."""
    if not isinstance(theirs, Tensor):
        return None
    if theirs.dtype == torch.int64:
        same = theirs.shape == index.shape and torch.equal(theirs.sort(-1).values, index.sort(-1).values)
        return "index" if same else None
    if theirs.dtype not in TOLERANCE:
        return None
    for name, ours in (("weights", weights.sort(-1).values), ("logits", logits)):
        if alike(ours.to(theirs.dtype), theirs.sort(-1).values if name == "weights" else theirs):
            return name
    return None
