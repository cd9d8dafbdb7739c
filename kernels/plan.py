"""The choice of kernels for a decoder layer: tables of recipes, the first that is right and quick wins.

A layer is five operations: project in, attend, project out, gate, and project out again (down). `plan_layer`
is a pure function of descriptions, so that it can be asked about any GPU anywhere: see `quire doctor --plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Generic, TypeVar

import torch
import triton

from quire.kernels.attention import attend
from quire.kernels.attention.attend import Attend
from quire.kernels.attention.decode import DecodeKernel, has_room_for_new_heads
from quire.kernels.attention.hopper_decode import decode as hopper_decode
from quire.kernels.attention.hopper_prefill import prefill as hopper_prefill
from quire.kernels.attention.kv_tile import tile_keys
from quire.kernels.attention.prefill import PrefillKernel
from quire.kernels.attention.splits import plan_small_splits, runs_at_once
from quire.kernels.formats.kv_format import KVFormat
from quire.kernels.gpu import Gpu
from quire.kernels.linear import hopper_matmul, hopper_stream, operations, skinny, split_output
from quire.kernels.linear.gemv import linear_of_one
from quire.kernels.linear.hopper_stream import Tiling
from quire.kernels.linear.linear import Matrix
from quire.kernels.linear.operations import ProjectIn, ProjectOut
from quire.kernels.linear.skinny import linear_of_few
from quire.kernels.shapes import LayerShape, StepShape
from quire.kernels.tuning import H100, Tuning

Case = TypeVar("Case")
Op = TypeVar("Op")


@dataclass(frozen=True, slots=True)
class Recipe(Generic[Case, Op]):
    """One way of an operation.

    supports: whether it is right for a case, never tuned. prefers: whether it is quicker than those behind
    it. make: the function that does it.
    """

    name: str
    supports: Callable[[Case], bool]
    prefers: Callable[[Case], bool]
    make: Callable[[Case], Op]


@dataclass(frozen=True, slots=True)
class Chosen(Generic[Op]):
    """An operation's function, and the name of its recipe."""

    name: str
    run: Op


@dataclass(frozen=True, slots=True)
class Product:
    """`tokens` times a layer's weight.

    fused: few enough tokens for norms and sums to be part of the products' kernels, in all of the layer.
    unmerged: attention left the merging of its splits to this.
    """

    gpu: Gpu
    dtype: torch.dtype
    tokens: int
    weight: Matrix
    tuning: Tuning = H100
    fused: bool = False
    unmerged: bool = False

    def tiling(self, *, gated: bool = False, divided: bool = False) -> Tiling | None:
        """Return the tiles of `linear.hopper_stream`, None where others are quicker."""
        outputs, inputs = self.weight.outputs, self.weight.inputs
        return hopper_stream.tiling(self.tokens, outputs, inputs, gated=gated, divided=divided)

    def tiles(self, *, gated: bool = False, divided: bool = False) -> Tiling:
        """Return `tiling` of what that is there for."""
        tiles = self.tiling(gated=gated, divided=divided)
        assert tiles is not None
        return tiles

    def many(self, *, spared: int) -> bool:
        """Tell whether `linear.hopper_matmul` is quick, see `is_quick`."""
        outputs, inputs, gpu = self.weight.outputs, self.weight.inputs, self.gpu
        return hopper_matmul.is_quick(self.tokens, outputs, inputs, gpu.multiprocessors, spared=spared)


@dataclass(frozen=True, slots=True)
class Attending:
    """Attention of a layer in a step, with the cache in a format."""

    gpu: Gpu
    layer: LayerShape
    format: KVFormat
    step: StepShape
    tuning: Tuning = H100
    fused: bool = False  # as `Product` has it

    @property
    def decode_by(self) -> DecodeKernel:
        layer, cache = self.layer, self.layer.cache
        takes = hopper_decode.supports(
            self.gpu, layer.dtype, self.format, cache.head_dim, layer.group, self.step.block_size
        )
        return DecodeKernel.HOPPER if takes and layer.plain else DecodeKernel.SPLIT

    @property
    def prefill_by(self) -> PrefillKernel:
        layer, cache = self.layer, self.layer.cache
        takes = hopper_prefill.supports(
            self.gpu, layer.dtype, self.format, cache.head_dim, layer.group, self.step.block_size
        )
        quick = not cache.window and hopper_prefill.prefers(self.step.longest_query, layer.group)
        takes = takes and layer.plain
        return PrefillKernel.HOPPER if takes and quick else PrefillKernel.TRITON

    @property
    def small_splits(self) -> int:
        """Return how many splits of a row fill the device with programs of little shared memory."""
        cache, step = self.layer.cache, self.step
        tile = tile_keys(triton.next_power_of_2(cache.head_dim), self.layer.dtype.itemsize)
        return plan_small_splits(step.decodes, cache.heads, triton.cdiv(step.longest_context, tile))


def most_fused_tokens(gpu: Gpu, layer: LayerShape, tuning: Tuning = H100) -> int:
    """Return up to how many tokens the layer is quicker with norms and sums in the products' kernels."""
    if not layer.gated or not gpu.has_kernels:
        return 0
    narrow = layer.qkv.inputs <= tuning.fused_columns
    matrices = ((layer.qkv, False), (layer.output, False), (layer.up, True), (layer.down, False))
    fit = all(
        matrix is None or skinny.supports(gpu, layer.dtype, 1, matrix, gated=gated)
        for matrix, gated in matrices
    )
    return skinny.MOST_TOKENS if narrow and fit else 1


# -- the tables ---------------------------------------------------------------------------------------------


def _always(case: object) -> bool:
    return True


def _has_kernels(case: Product | Attending) -> bool:
    return case.gpu.has_kernels


def _prefers_skinny(case: Product) -> bool:
    return case.fused and (case.tokens > 1 or skinny.prefers_one(case.weight, case.tuning))


def _takes_one(case: Product) -> bool:
    return case.gpu.has_kernels and case.tokens == 1


def _is_fused(case: Product) -> bool:
    return case.fused


def _streams(case: Product) -> bool:
    return hopper_stream.supports(case.gpu, case.dtype)


def _streams_unbiased(case: Product) -> bool:
    return _streams(case) and not case.weight.biased


def _multiplies_many(case: Product) -> bool:
    return hopper_matmul.supports(case.gpu, case.dtype, case.weight)


PROJECT_IN: tuple[Recipe[Product, ProjectIn], ...] = (
    Recipe(
        "norm and skinny product (linear.skinny)",
        lambda case: skinny.supports(case.gpu, case.dtype, case.tokens, case.weight, gated=False),
        _prefers_skinny,
        lambda case: partial(operations.fused_linear, by=linear_of_few),
    ),
    Recipe(
        "norm and product of one token (linear.gemv)",
        _takes_one,
        _is_fused,
        lambda case: partial(operations.fused_linear, by=linear_of_one),
    ),
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
    Recipe("cuBLAS", _has_kernels, _always, lambda case: operations.library_linear),
    Recipe("torch", _always, _always, lambda case: operations.reference_linear),
)

GATE: tuple[Recipe[Product, ProjectIn], ...] = (
    Recipe(
        "norm, skinny product and silu (linear.skinny)",
        lambda case: skinny.supports(case.gpu, case.dtype, case.tokens, case.weight, gated=True),
        _prefers_skinny,
        lambda case: partial(operations.fused_gate, by=linear_of_few),
    ),
    Recipe(
        "norm, product of one token and silu (linear.gemv)",
        _takes_one,
        _is_fused,
        lambda case: partial(operations.fused_gate, by=linear_of_one),
    ),
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
    Recipe("cuBLAS, then silu", _has_kernels, _always, lambda case: operations.library_gate),
    Recipe("torch", _always, _always, lambda case: operations.reference_gate),
)

PROJECT_OUT: tuple[Recipe[Product, ProjectOut], ...] = (
    Recipe(
        "merging product and sum (linear.split_output)",
        lambda case: case.unmerged,
        _always,
        lambda case: operations.merging_add,
    ),
    Recipe(
        "skinny product and sum (linear.skinny)",
        lambda case: skinny.supports(case.gpu, case.dtype, case.tokens, case.weight, gated=False),
        _prefers_skinny,
        lambda case: partial(operations.fused_add, by=linear_of_few),
    ),
    Recipe(
        "product of one token and sum (linear.gemv)",
        _takes_one,
        _is_fused,
        lambda case: partial(operations.fused_add, by=linear_of_one),
    ),
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
    Recipe("cuBLAS, then sum and norm", _has_kernels, _always, lambda case: operations.library_add),
    Recipe("torch", _always, _always, lambda case: operations.reference_add),
)


# Products of which every rank has a part: what follows is their sum over the ranks.
PROJECT_OUT_OF_RANKS: tuple[Recipe[Product, ProjectOut], ...] = (
    Recipe(
        "skinny product (linear.skinny), then sum over ranks and norm",
        lambda case: skinny.supports(case.gpu, case.dtype, case.tokens, case.weight, gated=False),
        _prefers_skinny,
        lambda case: partial(operations.fused_add_over_ranks, by=linear_of_few),
    ),
    Recipe(
        "product of one token (linear.gemv), then sum over ranks and norm",
        _takes_one,
        _is_fused,
        lambda case: partial(operations.fused_add_over_ranks, by=linear_of_one),
    ),
    Recipe(
        "product of many tokens (linear.hopper_matmul), then sum over ranks and norm",
        _multiplies_many,
        lambda case: case.many(spared=0),
        lambda case: operations.matmul_add_over_ranks,
    ),
    Recipe(
        "product with weights asked for ahead (linear.hopper_stream), then sum over ranks and norm",
        _streams,
        lambda case: case.tiling() is not None,
        lambda case: partial(operations.streamed_add_over_ranks, tiles=case.tiles()),
    ),
    Recipe(
        "cuBLAS, then sum over ranks and norm", _has_kernels, _always, lambda case: operations.add_over_ranks
    ),
    Recipe("torch, then sum over ranks", _always, _always, lambda case: operations.add_over_ranks),
)


def _is_newest(case: Attending) -> bool:
    return case.step.newest is not None


def _decodes_new(case: Attending) -> bool:
    """Tell whether one kernel can write K and V and attend."""
    layer, cache, step = case.layer, case.layer.cache, case.step
    return (
        case.gpu.has_kernels
        and step.newest is None
        and step.phase == "decode"
        and not step.shared
        and case.format.written_by_decode
        and has_room_for_new_heads(case.gpu, layer.group, cache.head_dim, layer.dtype)
    )


def _few_rows(case: Attending) -> bool:
    return runs_at_once(case.step.decodes, case.layer.cache.heads)


def _prefers_unmerged(case: Attending) -> bool:
    output, tokens = case.layer.output, case.step.tokens
    quick = split_output.prefers(tokens, output, case.tuning) and case.small_splits > 1
    return case.fused and _few_rows(case) and quick


def _attend_few(case: Attending) -> Attend:
    splits = case.small_splits
    by = DecodeKernel.SMALL if splits > 1 else case.decode_by
    return partial(attend.attend_new, decode_by=by, splits=splits)


UNMERGED = "K, V and attention in one kernel, left in splits"
ATTEND: tuple[Recipe[Attending, Attend], ...] = (
    Recipe(
        UNMERGED,
        lambda case: (
            _decodes_new(case)
            and case.layer.output.share == "whole"
            and split_output.supports(case.gpu, case.layer.dtype, case.layer.output, case.layer.num_heads)
        ),
        _prefers_unmerged,
        lambda case: partial(
            attend.attend_unmerged,
            decode_by=DecodeKernel.SMALL,
            splits=min(case.small_splits, split_output.MOST_SPLITS),
        ),
    ),
    Recipe(
        "K, V and attention in one kernel in many splits, merged",
        _decodes_new,
        lambda case: case.fused and _few_rows(case),
        _attend_few,
    ),
    Recipe(
        "K, V and attention in one kernel",
        _decodes_new,
        _few_rows,
        lambda case: partial(attend.attend_new, decode_by=case.decode_by),
    ),
    Recipe(
        "K and V, then attention of newest tokens",
        lambda case: case.gpu.has_kernels and _is_newest(case),
        _always,
        lambda case: partial(attend.attend_newest, decode_by=case.decode_by),
    ),
    Recipe(
        "K and V, then attention of decodes",
        lambda case: case.gpu.has_kernels and case.step.phase == "decode",
        _always,
        lambda case: partial(attend.attend_known, decode_by=case.decode_by),
    ),
    Recipe(
        "K and V, then attention of chunks and of decodes",
        _has_kernels,
        _always,
        lambda case: partial(attend.attend_mixed, decode_by=case.decode_by, prefill_by=case.prefill_by),
    ),
    Recipe("torch, of newest tokens", _is_newest, _always, lambda case: attend.attend_newest_reference),
    Recipe("torch", _always, _always, lambda case: attend.attend_reference),
)


# -- the choice ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerOps:
    """The five operations of a layer in a step; gate and down are None where an MLP computes itself."""

    project_in: Chosen[ProjectIn]
    attend: Chosen[Attend]
    project_out: Chosen[ProjectOut]
    gate: Chosen[ProjectIn] | None
    down: Chosen[ProjectOut] | None


def choose(table: tuple[Recipe[Case, Op], ...], case: Case) -> Chosen[Op]:
    """Return the first recipe that supports and prefers the case."""
    for recipe in table:
        if recipe.supports(case) and recipe.prefers(case):
            return Chosen(recipe.name, recipe.make(case))
    raise LookupError(f"no recipe takes {case}")


@lru_cache(maxsize=4096)  # steps without a graph have any number of tokens
def plan_attention(
    gpu: Gpu, layer: LayerShape, held: KVFormat, step: StepShape, tuning: Tuning = H100
) -> Chosen[Attend]:
    """Return how a layer attends in a step, with its cache held in a format."""
    fused = step.tokens <= most_fused_tokens(gpu, layer, tuning)
    return choose(ATTEND, Attending(gpu, layer, held, step, tuning, fused))


@lru_cache(maxsize=4096)
def plan_layer(
    gpu: Gpu, layer: LayerShape, held: KVFormat, step: StepShape, tuning: Tuning = H100
) -> LayerOps:
    """Return what computes a gated layer in a step, with its cache held in a format."""
    attending = plan_attention(gpu, layer, held, step, tuning)
    fused = step.tokens <= most_fused_tokens(gpu, layer, tuning)

    def product(tokens: int, weight: Matrix, *, unmerged: bool = False) -> Product:
        return Product(gpu, layer.dtype, tokens, weight, tuning, fused, unmerged)

    wanted = step.wanted
    project_out = PROJECT_OUT if layer.output.share == "whole" else PROJECT_OUT_OF_RANKS
    return LayerOps(
        project_in=choose(PROJECT_IN, product(step.tokens, layer.qkv)),
        attend=attending,
        project_out=choose(project_out, product(wanted, layer.output, unmerged=attending.name == UNMERGED)),
        gate=None if layer.up is None else choose(GATE, product(wanted, layer.up)),
        down=None if layer.down is None else choose(project_out, product(wanted, layer.down)),
    )
