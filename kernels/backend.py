"""The operations of a step outside its layers, as one value: Triton's on a GPU, plain torch's on a CPU.

Those of layers are chosen by `kernels.plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention.token_places import token_places, token_places_reference
from quire.kernels.experts.quantised import takes
from quire.kernels.experts.routing import route, route_reference
from quire.kernels.gpu import Gpu
from quire.kernels.linear.alone import (
    activated_linear,
    activated_linear_reference,
    add_linear,
    add_linear_reference,
    add_normed_linear,
    add_normed_linear_reference,
    gated_linear,
    gated_linear_reference,
    linear,
    linear_reference,
)
from quire.kernels.linear.exact import exact_linear, exact_linear_reference
from quire.kernels.linear.linear import Linear
from quire.kernels.linear.operations import AddLayerNorm, AnyLinear, wide_linear
from quire.kernels.pointwise.activation import Activation, UngatedActivation
from quire.kernels.pointwise.block_copy import copy_blocks, copy_blocks_reference
from quire.kernels.pointwise.embedding import embed, embed_reference
from quire.kernels.pointwise.gate import sigmoid_gate, sigmoid_gate_reference
from quire.kernels.pointwise.gated_norm import gated_norm, gated_norm_reference
from quire.kernels.pointwise.layer_norm import layer_norm, layer_norm_reference
from quire.kernels.pointwise.norm import (
    Norm,
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from quire.kernels.pointwise.sandwich_norm import sandwich_norm, sandwich_norm_reference
from quire.kernels.quantised.supports import keeps, keeps_none
from quire.kernels.quantised.weight import WeightFormat
from quire.kernels.recurrence.operations import KERNELS, Recurrences
from quire.kernels.sampling.logprobs import logprobs, logprobs_reference
from quire.kernels.sampling.masks import mask_tokens, mask_tokens_reference
from quire.kernels.sampling.part_logprobs import (
    logprobs_of_all,
    logprobs_of_all_reference,
    logprobs_of_part,
    logprobs_of_part_reference,
)
from quire.kernels.sampling.part_thresholds import (
    Search,
    masses_of_part,
    masses_of_part_reference,
    narrow,
    narrow_reference,
)
from quire.kernels.sampling.parts import (
    best_of_all,
    best_of_all_reference,
    best_of_part,
    best_of_part_reference,
)
from quire.kernels.sampling.sample import sample, sample_reference


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation of each, at first the reference; the functions' own docstrings give shapes."""

    embed: Callable[..., Tensor] = embed_reference
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm_reference
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = add_rms_norm_reference
    sandwich_norm: Callable[[Tensor, Tensor, Norm | None, Norm | None], Tensor] = sandwich_norm_reference
    gated_norm: Callable[..., Tensor] = gated_norm_reference
    sigmoid_gate: Callable[[Tensor, Tensor], Tensor] = sigmoid_gate_reference
    layer_norm: Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor] = layer_norm_reference
    linear: Callable[[Tensor, AnyLinear], Tensor] = linear_reference
    activated_linear: Callable[[Tensor, AnyLinear, UngatedActivation], Tensor] = activated_linear_reference
    add_linear: AddLayerNorm = add_linear_reference
    add_normed_linear: Callable[..., Tensor] = add_normed_linear_reference
    gated_linear: Callable[[Tensor, AnyLinear, Activation], Tensor] = gated_linear_reference
    exact_linear: Callable[[Tensor, Linear], Tensor] = exact_linear_reference
    route: Callable[..., tuple[Tensor, Tensor]] = route_reference
    wide_linear: Callable[[Tensor, Tensor], Tensor] = F.linear
    copy_blocks: Callable[[Tensor, Tensor], None] = copy_blocks_reference
    sample: Callable[..., Tensor] = sample_reference
    logprobs: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor, Tensor]] = logprobs_reference
    mask_tokens: Callable[[Tensor, Tensor, Tensor, int], None] = mask_tokens_reference
    token_places: Callable[..., tuple[Tensor, Tensor, Tensor]] = token_places_reference
    best_of_part: Callable[..., Tensor] = best_of_part_reference
    best_of_all: Callable[[Tensor, Tensor, Tensor], Tensor] = best_of_all_reference
    logprobs_of_part: Callable[[Tensor, Tensor, int, int, int], Tensor] = logprobs_of_part_reference
    logprobs_of_all: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor, Tensor]] = (
        logprobs_of_all_reference
    )
    masses_of_part: Callable[[Tensor, int, Search, int], Tensor] = masses_of_part_reference
    narrow: Callable[[Tensor, Search, int], Tensor] = narrow_reference
    recurrences: Recurrences | None = None  # None: transformers' own code computes them
    keeps: Callable[[WeightFormat, torch.dtype], bool] = keeps_none  # weights in few bits, in their products
    keeps_experts: Callable[[WeightFormat, torch.dtype], bool] = keeps_none  # likewise, of experts


def torch_backend() -> Backend:
    """Return the references: any device, any dtype."""
    return Backend()


def triton_backend(gpu: Gpu | None = None) -> Backend:
    """Return the kernels, for a CUDA device; gpu: which, or None: one that all of them run on.

    On a GPU that they do not run on no experts are kept in few bits: each step would expand all of them.
    """
    return Backend(
        embed,
        rms_norm,
        add_rms_norm,
        sandwich_norm,
        gated_norm,
        sigmoid_gate,
        layer_norm,
        linear,
        activated_linear,
        add_linear,
        add_normed_linear,
        gated_linear,
        exact_linear,
        route,
        wide_linear,
        copy_blocks,
        sample,
        logprobs,
        mask_tokens,
        token_places,
        best_of_part,
        best_of_all,
        logprobs_of_part,
        logprobs_of_all,
        masses_of_part,
        narrow,
        KERNELS,
        keeps,
        takes if gpu is None or gpu.has_kernels else keeps_none,
    )
