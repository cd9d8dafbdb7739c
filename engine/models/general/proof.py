"""What proves parts of a model: their products, noise, and whether numbers differ by rounding only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quire.engine.models.general.division.modules import Summed
from quire.engine.models.general.kept_linear import KeptLinear, like_of
from quire.kernels.linear.linear import Linear
from quire.kernels.linear.operations import AnyLinear
from quire.kernels.quantised.linear import QuantisedLinear
from quire.kernels.quantised.rows import joined
from quire.kernels.quantised.weight import QuantisedWeight

ROWS = 4  # of noise
# Of a vector, by its length: what other places of rounding leave, and nothing else does.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def alike(ours: Tensor, theirs: Tensor, *, times: float = 1.0) -> bool:
    """Return whether vectors [..., N] differ by rounding only."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    wide = theirs.float()
    apart = (ours.float() - wide).norm(dim=-1)
    return bool((apart <= times * TOLERANCE[theirs.dtype] * wide.norm(dim=-1)).all())  # NaN never is


def linear_of(module: nn.Module) -> AnyLinear | None:
    """Return the linear layer that a module is."""
    if not isinstance(module, nn.Linear | Conv1D) or like_of(module).dtype not in TOLERANCE:
        return None
    part: Any = module
    layer = merged([part])
    x = noise(ROWS, layer.weight.shape[1], like_of(module))
    theirs = called(module, x)
    return None if theirs is None or not alike(layer(x), theirs) else layer


def merged(parts: Sequence[nn.Linear]) -> AnyLinear:
    """Return layers of one input as one, whose memory they share from then on.

    Those whose weights stay in few bits have them in the same format, see `kept_products`.
    """
    first = parts[0]
    if isinstance(first, Conv1D):  # one that has its weight transposed
        weight = first.weight.data.T.contiguous()
        first.weight.data = weight.T
        return Linear(weight, first.bias.data)
    if len(parts) == 1:
        summed: Any = first.forward
        ranks = summed.ranks if isinstance(summed, Summed) else None
        vector = None if first.bias is None else first.bias.data
        if isinstance(first, KeptLinear):
            return QuantisedLinear(first.product.weight, vector, ranks)
        return Linear(first.weight.data, vector, ranks)
    kept, like = [each.kept for each in parts if isinstance(each, KeptLinear)], like_of(first)
    weight = joined(kept) if kept else torch.cat([each.weight.data for each in parts])
    bias = None
    if any(each.bias is not None for each in parts):
        bias = torch.cat(
            [like.new_zeros(each.out_features) if each.bias is None else each.bias.data for each in parts]
        )
    begin = 0
    for each in parts:
        rows = slice(begin, begin + each.out_features)
        if isinstance(each, KeptLinear):
            assert isinstance(weight, QuantisedWeight)
            each.kept = weight.rows(rows.start, rows.stop)
        else:
            assert isinstance(weight, Tensor)
            each.weight.data = weight[rows]
        if each.bias is not None and bias is not None:
            each.bias.data = bias[rows]
        begin = rows.stop
    if like.is_cuda:  # memory that layers had apart is none that they fit in together
        torch.cuda.empty_cache()
    return Linear(weight, bias) if isinstance(weight, Tensor) else QuantisedLinear(weight, bias)


def unbiased(part: nn.Linear) -> AnyLinear:
    """Return a layer's product without its bias."""
    layer = merged([part])
    if isinstance(layer, QuantisedLinear):
        return QuantisedLinear(layer.weight, None, layer.ranks)
    return Linear(layer.weight, None, layer.ranks)


def linears(module: nn.Module, names: Sequence[tuple[str, ...]]) -> list[nn.Linear] | None:
    """Return the plain linear layers that a module has under one of the names; None: there are none."""
    for each in names:
        found: Any = [getattr(module, name, None) for name in each]
        kinds = nn.Linear | Conv1D if len(each) == 1 else nn.Linear
        if all(isinstance(part, kinds) and like_of(part).dtype in TOLERANCE for part in found):
            # Of divided ones, those that are summed alone are what they are by their weights.
            forwards = [vars(part).get("forward") for part in found]
            last = isinstance(forwards[0], Summed) and len(found) == 1
            return found if last or not any(forwards) else None
    return None


def noise(rows: int, columns: int, like: Tensor) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(columns)
    return torch.randn(rows, columns, device=like.device, generator=generator).to(like.dtype)


def called(module: nn.Module, *given: Tensor) -> Tensor | None:
    """Return what a module gives of tensors; None where it takes or gives something else."""
    try:
        out = module(*given)
    except Exception:  # modelling code may want anything
        return None
    return out if isinstance(out, Tensor) else None
