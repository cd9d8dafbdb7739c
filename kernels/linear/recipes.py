"""The recipes of a layer's products: into attention, out of it, into the MLP and its activation, and down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quire.kernels.gpu import Gpu
from quire.kernels.linear import hopper_gemv, hopper_matmul, hopper_stream, operations, sandwich, skinny
from quire.kernels.linear.gemv import linear_of_one
from quire.kernels.linear.hopper_gemv import linear_of_one_held
from quire.kernels.linear.hopper_stream import Tiling
from quire.kernels.linear.linear import Matrix
from quire.kernels.linear.operations import AddLayerNorm, ProjectIn, ProjectOut
from quire.kernels.linear.sandwich import AddSandwich
from quire.kernels.linear.skinny import linear_of_few
from quire.kernels.recipes import Recipe, always
from quire.kernels.tuning import H100, Tuning


@dataclass(frozen=True, slots=True)
class Product:
    """`tokens` times a layer's weight.

    fused: few enough tokens for norms and sums to be part of the products' kernels, in all of the layer.
    unmerged: attention left the merging of its splits to this. streamed: `linear.hopper_stream` is quicker
    even so, where that can be.
    """

    gpu: Gpu
    dtype: torch.dtype
    tokens: int
    weight: Matrix
    tuning: Tuning = H100
    fused: bool = False
    unmerged: bool = False
    streamed: bool = False

    def tiling(self, *, gated: bool = False, divided: bool = False) -> Tiling | None:
        """Return the tiles of `linear.hopper_stream`, None where others are quicker."""
        outputs, inputs = self.weight.outputs, self.weight.inputs
        return hopper_stream.tiling(self.tokens, outputs, inputs, gated=gated, divided=divided)

    def tiles(self, *, gated: bool = False, divided: bool = False) -> Tiling:
        """Return `tiling` of what that is there for."""
        tiles = self.tiling(gated=gated, divided=divided)
        assert tiles is not None
        return tiles

    @property
    def fills_in_parts_alone(self) -> bool:
        """Tell whether `linear.hopper_stream` gives all multiprocessors as much only if sums are divided.

        Whole, the programs are too few, or the last of them have multiprocessors to themselves; then parts
        must be a third of the weight's bytes at most, to write and to read.
        """
        parts, whole = self.tiling(divided=True), self.tiling()
        if parts is None or parts.splits == 1:
            return False
        programs = 0 if whole is None else whole.programs(self.tokens, self.weight.outputs)
        if programs < hopper_stream.BUSY:
            return True
        moved = 2 * torch.float32.itemsize * self.tokens * parts.splits  # for each output
        return (
            programs > hopper_stream.MULTIPROCESSORS and 3 * moved <= self.dtype.itemsize * self.weight.inputs
        )

    def many(self, *, spared: int) -> bool:
        """Tell whether `linear.hopper_matmul` is quick, see `is_quick`."""
        outputs, inputs, gpu = self.weight.outputs, self.weight.inputs, self.gpu
        return hopper_matmul.is_quick(self.tokens, outputs, inputs, gpu.multiprocessors, spared=spared)


def _has_kernels(case: Product) -> bool:
    return case.gpu.has_kernels


def _prefers_skinny(case: Product) -> bool:
    return case.tokens > 1 or skinny.prefers_one(case.weight, case.tuning)


def _streams(case: Product) -> bool:
    return hopper_stream.supports(case.gpu, case.dtype)


def _streams_unbiased(case: Product) -> bool:
    return _streams(case) and not case.weight.biased


def _multiplies_many(case: Product) -> bool:
    return hopper_matmul.supports(case.gpu, case.dtype, case.weight)


def _of_few(
    name: str, fused: Callable[..., Any], *, gated: bool = False, out: bool = False
) -> tuple[Recipe[Product, Any], ...]:
    """Return the recipes of few tokens and of one, whose kernels do what is around a product, too.

    out: the product is one into the residual.
    """

    def prefers(case: Product) -> bool:
        """Tell whether kernels of few tokens are quicker than those of more."""
        takes = _streams_unbiased if gated or out else _streams
        streams = case.streamed and takes(case) and case.tiling(gated=gated, divided=out) is not None
        return case.fused and not streams

    def prefers_held(case: Product) -> bool:
        hidden = case.weight.outputs if out else case.weight.inputs
        return prefers(case) and hopper_gemv.prefers(case.weight, case.tuning, gated=gated, hidden=hidden)

    return (
        Recipe(
            name.format(product="product of one token", kernel="linear.hopper_gemv"),
            lambda case: (
                case.tokens == 1 and hopper_gemv.supports(case.gpu, case.dtype, case.weight, gated=gated)
            ),
            prefers_held,
            lambda case: partial(fused, by=linear_of_one_held),
        ),
        Recipe(
            name.format(product="skinny product", kernel="linear.skinny"),
            lambda case: skinny.supports(case.gpu, case.dtype, case.tokens, case.weight, gated=gated),
            lambda case: prefers(case) and _prefers_skinny(case),
            lambda case: partial(fused, by=linear_of_few),
        ),
        Recipe(
            name.format(product="product of one token", kernel="linear.gemv"),
            lambda case: case.gpu.has_kernels and case.tokens == 1,
            prefers,
            lambda case: partial(fused, by=linear_of_one),
        ),
    )


PROJECT_IN: tuple[Recipe[Product, ProjectIn], ...] = (
    *_of_few("norm and {product} ({kernel})", operations.fused_linear),
    Recipe(
        "product with weights asked for ahead (linear.hopper_stream)",
        _streams,
        lambda case: case.tiling() is not None,
        lambda case: partial(operations.streamed_linear, tiles=case.tiles()),
    ),
    Recipe(
        "product of many tokens (linear.hopper_matmul)",
        _multiplies_many,
        lambda case: case.many(spared=0),
        lambda case: operations.matmul_linear,
    ),
    Recipe("cuBLAS", _has_kernels, always, lambda case: operations.library_linear),
    Recipe("torch", always, always, lambda case: operations.reference_linear),
)

GATE: tuple[Recipe[Product, ProjectIn], ...] = (
    *_of_few("norm, {product} and silu ({kernel})", operations.fused_gate, gated=True),
    Recipe(
        "product with weights asked for ahead and silu (linear.hopper_stream)",
        _streams_unbiased,
        lambda case: case.tiling(gated=True) is not None,
        lambda case: partial(operations.streamed_gate, tiles=case.tiles(gated=True)),
    ),
    Recipe(
        "product of many tokens and silu (linear.hopper_matmul)",
        _multiplies_many,
        lambda case: case.many(spared=2),  # cuBLAS writes gate and up, and `silu_mul` reads them
        lambda case: operations.matmul_gate,
    ),
    Recipe("cuBLAS, then silu", _has_kernels, always, lambda case: operations.library_gate),
    Recipe("torch", always, always, lambda case: operations.reference_gate),
)

PROJECT_OUT: tuple[Recipe[Product, ProjectOut], ...] = (
    Recipe(
        "merging product and sum (linear.split_output)",
        lambda case: case.unmerged,
        always,
        lambda case: operations.merging_add,
    ),
    *_of_few("{product} and sum ({kernel})", operations.fused_add, out=True),
    Recipe(
        "product of many tokens and sum (linear.hopper_matmul), then norm",
        _multiplies_many,
        # What cuBLAS gives is written, and read by `add_rms_norm`; the sum is read by a norm of its own.
        lambda case: case.many(spared=1),
        lambda case: operations.matmul_add,
    ),
    Recipe(
        "product in parts with weights asked for ahead (linear.hopper_stream), then sum and norm",
        _streams_unbiased,
        lambda case: case.tiling(divided=True) is not None,
        lambda case: partial(operations.streamed_add, tiles=case.tiles(divided=True)),
    ),
    Recipe("cuBLAS, then sum and norm", _has_kernels, always, lambda case: operations.library_add),
    Recipe("torch", always, always, lambda case: operations.reference_add),
)

# Products into the residual, of which a layer norm follows: a kernel of its own.
ADD_LAYER_NORM: tuple[Recipe[Product, AddLayerNorm], ...] = (
    *_of_few("{product} and sum ({kernel}), then layer norm", operations.fused_add_layer_norm, out=True),
    Recipe(
        "product of many tokens and sum (linear.hopper_matmul), then layer norm",
        _multiplies_many,
        lambda case: case.many(spared=1),
        lambda case: operations.matmul_add_layer_norm,
    ),
    Recipe(
        "product in parts with weights asked for ahead (linear.hopper_stream), then sum and layer norm",
        _streams,
        lambda case: case.tiling(divided=True) is not None,
        lambda case: partial(operations.streamed_add_layer_norm, tiles=case.tiles(divided=True)),
    ),
    Recipe(
        "cuBLAS, then sum and layer norm",
        _has_kernels,
        always,
        lambda case: operations.library_add_layer_norm,
    ),
    Recipe("torch", always, always, lambda case: operations.reference_add_layer_norm),
)

# Products of which a norm goes into the residual, and of that another one follows: one kernel for both.
ADD_SANDWICH: tuple[Recipe[Product, AddSandwich], ...] = (
    *_of_few("{product} ({kernel}), then norm, sum and norm", sandwich.fused_add, out=True),
    Recipe(
        "product of many tokens (linear.hopper_matmul), then norm, sum and norm",
        _multiplies_many,
        lambda case: case.many(spared=0),
        lambda case: sandwich.matmul_add,
    ),
    Recipe(
        "product in parts with weights asked for ahead (linear.hopper_stream), then norm, sum and norm",
        _streams_unbiased,
        lambda case: case.tiling(divided=True) is not None,
        lambda case: partial(sandwich.streamed_add, tiles=case.tiles(divided=True)),
    ),
    Recipe("cuBLAS, then norm, sum and norm", _has_kernels, always, lambda case: sandwich.library_add),
    Recipe("torch", always, always, lambda case: sandwich.reference_add),
)

# Products of which every rank has a part: what follows is their sum over the ranks.
PROJECT_OUT_OF_RANKS: tuple[Recipe[Product, ProjectOut], ...] = (
    *_of_few("{product} ({kernel}), then sum over ranks and norm", operations.fused_add_over_ranks, out=True),
    Recipe(
        "product of many tokens (linear.hopper_matmul), then sum over ranks and norm",
        _multiplies_many,
        lambda case: case.many(spared=0),
        lambda case: operations.matmul_add_over_ranks,
    ),
    Recipe(
        "product in parts with weights asked for ahead (linear.hopper_stream), then sum over ranks and norm",
        _streams_unbiased,
        lambda case: case.fills_in_parts_alone,
        lambda case: partial(operations.streamed_parts_over_ranks, tiles=case.tiles(divided=True)),
    ),
    Recipe(
        "product with weights asked for ahead (linear.hopper_stream), then sum over ranks and norm",
        _streams,
        lambda case: case.tiling() is not None,
        lambda case: partial(operations.streamed_add_over_ranks, tiles=case.tiles()),
    ),
    Recipe(
        "cuBLAS, then sum over ranks and norm", _has_kernels, always, lambda case: operations.add_over_ranks
    ),
    Recipe("torch, then sum over ranks", always, always, lambda case: operations.add_over_ranks),
)
