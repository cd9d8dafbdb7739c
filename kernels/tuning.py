"""Sizes up to which kernels are quicker, measured on a card: what `kernels.plan` prefers by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from quire.kernels.gpu import Gpu

Streamed: TypeAlias = tuple[int, range]  # a number of tokens, and columns


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
    its programs are so many that they read more of splits than of weights. streamed: how many tokens, and of
    which columns of a layer's input, are quicker by `linear.hopper_stream` in all products of a layer, though
    so few; streamed_in and streamed_out: in those alone, into a branch and out of it, whose norms are kernels
    of their own anyway.
    """

    fused_columns: int = 2048
    streamed_columns: int = 1024
    streamed_tokens: int = 8
    skinny_weights_of_one: int = 1 << 23
    held_columns: tuple[int, int] = (1536, 5120)
    held_weights: int = 1 << 23
    merging_weights: int = 1 << 21
    streamed: tuple[Streamed, ...] = ()
    streamed_in: tuple[Streamed, ...] = ()
    streamed_out: tuple[Streamed, ...] = ()


H100 = Tuning()
# In steps of Llama-3.2-1B and LFM2-1.2B, Qwen3-0.6B, and Qwen3.5-4B (loadtest/results/streamed-of-few.json).
H200 = Tuning(
    streamed=((1, range(2048, 2049)), (8, range(1024, 1025))),
    streamed_in=((1, range(2048, 2561)),),
    streamed_out=((1, range(2048, 2049)),),
)


def streams(streamed: tuple[Streamed, ...], tokens: int, columns: int) -> bool:
    """Return whether so many tokens, of a layer with so many columns, are among those that are `streamed`."""
    return any(tokens == count and columns in wide for count, wide in streamed)


def tuning_of(gpu: Gpu) -> Tuning:
    """Return what was measured on a card, or on the one that is most like it."""
    return H200 if gpu.has_quick_memory else H100
