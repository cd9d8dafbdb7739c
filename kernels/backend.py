"""The kernels a model and a runner call, as one value: Triton on a GPU, plain-torch references on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention.decode import decode_attention
from quire.kernels.attention.decode_reference import decode_attention_reference
from quire.kernels.attention.prefill import prefill_attention, prefill_attention_reference
from quire.kernels.attention.token_places import token_places, token_places_reference
from quire.kernels.attention.write_kv import qkv_to_cache, qkv_to_cache_reference
from quire.kernels.decode_layer import (
    add_decoded,
    add_decoded_reference,
    decode_new_tokens,
    decode_new_tokens_reference,
)
from quire.kernels.linear.fused import (
    add_linear,
    add_linear_reference,
    most_fused_tokens,
    norm_linear,
    norm_linear_reference,
    norm_silu_linear,
    norm_silu_linear_reference,
)
from quire.kernels.linear.linear import (
    Linear,
    add_linear_norm,
    add_linear_norm_reference,
    linear,
    linear_reference,
    silu_linear,
    silu_linear_reference,
    wide_linear,
)
from quire.kernels.pointwise.block_copy import copy_blocks, copy_blocks_reference
from quire.kernels.pointwise.embedding import embed
from quire.kernels.pointwise.norm import rms_norm, rms_norm_reference
from quire.kernels.sampling.logprobs import logprobs, logprobs_reference
from quire.kernels.sampling.masks import mask_tokens, mask_tokens_reference
from quire.kernels.sampling.sample import sample, sample_reference


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation of each kernel; the functions' own docstrings give shapes."""

    name: str
    embed: Callable[[Tensor, Tensor], Tensor]
    decode_attention: Callable[..., None]
    decode_new_tokens: Callable[..., None]
    add_decoded: Callable[..., None]
    prefill_attention: Callable[..., None]
    qkv_to_cache: Callable[..., None]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    linear: Callable[[Tensor, Linear], Tensor]
    silu_linear: Callable[[Tensor, Linear], Tensor]
    add_linear_norm: Callable[[Tensor, Tensor, Linear, Tensor, float], tuple[Tensor, Tensor]]
    most_fused_tokens: Callable[[int, tuple[int, ...], int, torch.dtype], int]
    norm_linear: Callable[[Tensor, Tensor, float, Tensor, Tensor | None], Tensor]
    norm_silu_linear: Callable[[Tensor, Tensor, float, Tensor, Tensor | None], Tensor]
    add_linear: Callable[[Tensor, Tensor, Tensor, Tensor | None], None]
    wide_linear: Callable[[Tensor, Tensor], Tensor]
    copy_blocks: Callable[[Tensor, Tensor], None]
    sample: Callable[..., Tensor]
    logprobs: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor, Tensor]]
    mask_tokens: Callable[[Tensor, Tensor, Tensor], None]
    token_places: Callable[..., tuple[Tensor, Tensor, Tensor]]


def torch_backend() -> Backend:
    """The references: any device, any dtype."""
    return Backend(
        name="torch",
        embed=F.embedding,
        decode_attention=decode_attention_reference,
        decode_new_tokens=decode_new_tokens_reference,
        add_decoded=add_decoded_reference,
        prefill_attention=prefill_attention_reference,
        qkv_to_cache=qkv_to_cache_reference,
        rms_norm=rms_norm_reference,
        linear=linear_reference,
        silu_linear=silu_linear_reference,
        add_linear_norm=add_linear_norm_reference,
        most_fused_tokens=lambda hidden_size, inner_sizes, qkv_size, dtype: 1,
        norm_linear=norm_linear_reference,
        norm_silu_linear=norm_silu_linear_reference,
        add_linear=add_linear_reference,
        wide_linear=F.linear,
        copy_blocks=copy_blocks_reference,
        sample=sample_reference,
        logprobs=logprobs_reference,
        mask_tokens=mask_tokens_reference,
        token_places=token_places_reference,
    )


def triton_backend() -> Backend:
    """The Triton kernels: a CUDA device; fp32, fp16 and bf16, the KV cache in fp8 and fp12, too."""
    return Backend(
        name="triton",
        embed=embed,
        decode_attention=decode_attention,
        decode_new_tokens=decode_new_tokens,
        add_decoded=add_decoded,
        prefill_attention=prefill_attention,
        qkv_to_cache=qkv_to_cache,
        rms_norm=rms_norm,
        linear=linear,
        silu_linear=silu_linear,
        add_linear_norm=add_linear_norm,
        most_fused_tokens=most_fused_tokens,
        norm_linear=norm_linear,
        norm_silu_linear=norm_silu_linear,
        add_linear=add_linear,
        wide_linear=wide_linear,
        copy_blocks=copy_blocks,
        sample=sample,
        logprobs=logprobs,
        mask_tokens=mask_tokens,
        token_places=token_places,
    )
