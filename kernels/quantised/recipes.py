"""The recipes of a layer's products by weights in few bits, as `linear.recipes` has those by others."""

from __future__ import annotations

from functools import partial

import torch

from quire.kernels.gpu import Gpu
from quire.kernels.linear import hopper_stream, sandwich
from quire.kernels.linear import operations as dense
from quire.kernels.linear.operations import AddLayerNorm, ProjectIn, ProjectOut
from quire.kernels.linear.recipes import Product
from quire.kernels.linear.sandwich import AddSandwich
from quire.kernels.quantised import few, operations, stream
from quire.kernels.quantised.stream import Tiling
from quire.kernels.recipes import Recipe, always


def most_fused_tokens(gpu: Gpu, dtype: torch.dtype) -> int:
    """Return up to how many tokens norms and sums are part of the products' kernels.

    None where Hopper's kernel asks for weights ahead: to norm the tokens in each program takes longer.
    """
    streams = hopper_stream.supports(gpu, dtype)
    return few.MOST_TOKENS if gpu.has_kernels and dtype == torch.bfloat16 and not streams else 0


def _tiling(case: Product, *, gated: bool = False, divided: bool = False) -> Tiling | None:
    form, outputs = case.weight.format, case.weight.outputs // 2 if gated else case.weight.outputs
    if form == "dense" or not hopper_stream.supports(case.gpu, case.dtype):
        return None
    return stream.tiling(form, case.tokens, outputs, case.weight.inputs, gated=gated, divided=divided)


def _tiles(case: Product, *, gated: bool = False, divided: bool = False) -> Tiling:
    tiles = _tiling(case, gated=gated, divided=divided)
    assert tiles is not None
    return tiles


def _of_few(case: Product, *, gated: bool = False) -> bool:
    form = case.weight.format
    return (
        form != "dense"
        and case.gpu.has_kernels
        and 0 < case.tokens <= few.most_tokens(form)
        and few.suits(case.weight, case.dtype, gated=gated)
    )


def _of_few_fused(case: Product, *, gated: bool = False) -> bool:
    return _of_few(case, gated=gated) and case.dtype == torch.bfloat16


def _streams_parts(case: Product) -> bool:
    return _tiling(case, divided=True) is not None and not case.weight.biased


def _is_fused(case: Product) -> bool:
    return case.fused


def _prefers_few(case: Product) -> bool:
    """Tell whether so few programs as a product that is not divided has are quicker by `quantised.few`.

    As measured on an H200 (loadtest/results/quantised-products.json).
    """
    form = case.weight.format
    most = 8 if form != "dense" and form.codes == "int4" else 1
    return case.tokens <= most


QUANTISED_IN: tuple[Recipe[Product, ProjectIn], ...] = (
    Recipe(
        "norm and product of few bits (quantised.few)",
        _of_few_fused,
        _is_fused,
        lambda case: operations.few_linear,
    ),
    Recipe(
        "norm, then product of few bits (quantised.few)",
        _of_few,
        _prefers_few,
        lambda case: operations.normed_few_linear,
    ),
    Recipe(
        "product of few bits asked for ahead (quantised.stream)",
        lambda case: _tiling(case) is not None,
        always,
        lambda case: partial(operations.streamed_linear, tiles=_tiles(case)),
    ),
    Recipe(
        "norm, then product of few bits (quantised.few)",
        _of_few,
        always,
        lambda case: operations.normed_few_linear,
    ),
    Recipe(
        "expanded, then library", lambda case: case.gpu.has_kernels, always, lambda case: dense.library_linear
    ),
    Recipe("expanded, then torch", always, always, lambda case: dense.reference_linear),
)

QUANTISED_GATE: tuple[Recipe[Product, ProjectIn], ...] = (
    Recipe(
        "norm, product of few bits and silu (quantised.few)",
        partial(_of_few_fused, gated=True),
        _is_fused,
        lambda case: operations.few_gate,
    ),
    Recipe(
        "product of few bits asked for ahead and silu (quantised.stream)",
        lambda case: _tiling(case, gated=True) is not None,
        always,
        lambda case: partial(operations.streamed_gate, tiles=_tiles(case, gated=True)),
    ),
    Recipe(
        "norm, then product of few bits and silu (quantised.few)",
        partial(_of_few, gated=True),
        always,
        lambda case: operations.normed_few_gate,
    ),
    Recipe(
        "expanded, then library and silu",
        lambda case: case.gpu.has_kernels,
        always,
        lambda case: dense.library_gate,
    ),
    Recipe("expanded, then torch", always, always, lambda case: dense.reference_gate),
)

QUANTISED_OUT: tuple[Recipe[Product, ProjectOut], ...] = (
    Recipe(
        "product of few bits and sum (quantised.few)",
        _of_few,
        lambda case: case.fused or case.tokens == 1,
        lambda case: operations.few_add,
    ),
    Recipe(
        "product in parts of few bits asked for ahead (quantised.stream), then sum and norm",
        _streams_parts,
        always,
        lambda case: partial(operations.streamed_add, tiles=_tiles(case, divided=True)),
    ),
    Recipe(
        "product of few bits and sum (quantised.few), then norm",
        _of_few,
        always,
        lambda case: operations.few_add,
    ),
    Recipe(
        "expanded, then library, sum and norm",
        lambda case: case.gpu.has_kernels,
        always,
        lambda case: dense.library_add,
    ),
    Recipe("expanded, then torch", always, always, lambda case: dense.reference_add),
)

# Products of which every rank has a part: what follows is their sum over the ranks.
QUANTISED_OUT_OF_RANKS: tuple[Recipe[Product, ProjectOut], ...] = (
    Recipe(
        "product of few bits (quantised.few), then sum over ranks and norm",
        _of_few,
        lambda case: case.fused or not _streams_parts(case),
        lambda case: operations.few_add_over_ranks,
    ),
    Recipe(
        "product in parts of few bits asked for ahead (quantised.stream), then sum over ranks and norm",
        _streams_parts,
        always,
        lambda case: partial(operations.streamed_add_over_ranks, tiles=_tiles(case, divided=True)),
    ),
    Recipe(
        "expanded, then library, sum over ranks and norm",
        lambda case: case.gpu.has_kernels,
        always,
        lambda case: dense.add_over_ranks,
    ),
    Recipe("expanded, then torch, sum over ranks", always, always, lambda case: dense.add_over_ranks),
)

# Products into the residual, of which a layer norm follows.
QUANTISED_ADD_LAYER_NORM: tuple[Recipe[Product, AddLayerNorm], ...] = (
    Recipe(
        "product of few bits and sum (quantised.few), then layer norm",
        _of_few,
        lambda case: case.fused or case.tokens == 1,
        lambda case: operations.few_add_layer_norm,
    ),
    Recipe(
        "product in parts of few bits asked for ahead (quantised.stream), then sum and layer norm",
        lambda case: _tiling(case, divided=True) is not None,
        always,
        lambda case: partial(operations.streamed_add_layer_norm, tiles=_tiles(case, divided=True)),
    ),
    Recipe(
        "product of few bits and sum (quantised.few), then layer norm",
        _of_few,
        always,
        lambda case: operations.few_add_layer_norm,
    ),
    Recipe(
        "expanded, then library, sum and layer norm",
        lambda case: case.gpu.has_kernels,
        always,
        lambda case: dense.library_add_layer_norm,
    ),
    Recipe("expanded, then torch", always, always, lambda case: dense.reference_add_layer_norm),
)

# Products of which a norm goes into the residual, and of that another one follows.
QUANTISED_ADD_SANDWICH: tuple[Recipe[Product, AddSandwich], ...] = (
    Recipe(
        "product of few bits (quantised.few), then norm, sum and norm",
        _of_few,
        lambda case: case.fused or case.tokens == 1,
        lambda case: operations.few_add_sandwich,
    ),
    Recipe(
        "product in parts of few bits asked for ahead (quantised.stream), then norm, sum and norm",
        _streams_parts,
        always,
        lambda case: partial(operations.streamed_add_sandwich, tiles=_tiles(case, divided=True)),
    ),
    Recipe(
        "product of few bits (quantised.few), then norm, sum and norm",
        _of_few,
        always,
        lambda case: operations.few_add_sandwich,
    ),
    Recipe(
        "expanded, then library, norm, sum and norm",
        lambda case: case.gpu.has_kernels,
        always,
        lambda case: sandwich.library_add,
    ),
    Recipe("expanded, then torch", always, always, lambda case: sandwich.reference_add),
)
