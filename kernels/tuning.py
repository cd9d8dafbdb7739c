"""Sizes up to which kernels are quicker, measured on a card: what `kernels.plan` prefers by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """The defaults are an H100's.

    fused_columns: of a layer's input, up to which few tokens are quicker by `linear.skinny`, whose programs
    all read all of it, than by cuBLAS. streamed_columns and streamed_tokens: up to which so many tokens are
    quicker there than by `linear.hopper_stream`, where that can be. skinny_weights_of_one: elements of a
    weight, up to which even one token is quicker there than by `linear.gemv`. held_columns: of a layer's
    input, from and up to which one token is quicker by `linear.hopper_gemv`, where that can be, and into
    attention if a weight has no more elements than held_weights. merging_weights: elements of the output
    projection's weight, up to which that merges a token's split attention itself; beyond, and of more tokens,
    its programs are so many that they read more of splits than of weights.
    """

    fused_columns: int = 2048
    streamed_columns: int = 1024
    streamed_tokens: int = 8
    skinny_weights_of_one: int = 1 << 23
    held_columns: tuple[int, int] = (1536, 5120)
    held_weights: int = 1 << 23
    merging_weights: int = 1 << 21


H100 = Tuning()
