"""Products as of fp32 numbers, by a weight and of tokens that are held in fewer bits.

Those of two 16-bit numbers are exact in fp32; sums differ from those of copies by their order only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.gpu import gpu_of
from quire.kernels.linear import skinny
from quire.kernels.linear.gemv import linear_of_one
from quire.kernels.linear.linear import Linear


def exact_linear(x: Tensor, layer: Linear) -> Tensor:
    """Multiply x [T, K] by the weight [N, K], both as fp32 -> [T, N] fp32."""
    weight, bias = layer.weight, layer.bias
    if not len(x) or not weight.is_contiguous():
        return exact_linear_reference(x, layer)
    x = x.contiguous()
    same = x.dtype == weight.dtype
    few = same and skinny.supports(gpu_of(x.device), x.dtype, len(x), layer.matrix, gated=False)
    if len(x) == 1 or few:
        out = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
        product = linear_of_one if len(x) == 1 else skinny.linear_of_few
        product(out, x, weight, bias, None, 0.0, gated=False, added=False)
        return out
    if same and x.is_cuda and x.element_size() == 2:
        out = torch.mm(x, weight.T, out_dtype=torch.float32)
        return out if bias is None else out + bias
    return exact_linear_reference(x, layer)


def exact_linear_reference(x: Tensor, layer: Linear) -> Tensor:
    """Do the same as `exact_linear` in plain torch."""
    bias = None if layer.bias is None else layer.bias.float()
    return F.linear(x.float(), layer.weight.float(), bias)
