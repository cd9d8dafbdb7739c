"""The recipes of a layer's attention: K and V written by a kernel of their own or not, and what attends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import triton

from quire.kernels.attention import attend
from quire.kernels.attention.attend import Attend
from quire.kernels.attention.decode import DecodeKernel, has_room_for_new_heads
from quire.kernels.attention.hopper_decode import decode as hopper_decode
from quire.kernels.attention.hopper_decode.tiles import WIDEST
from quire.kernels.attention.hopper_prefill import prefill as hopper_prefill
from quire.kernels.attention.kv_tile import tile_keys
from quire.kernels.attention.latent import attend as latent
from quire.kernels.attention.prefill import PrefillKernel
from quire.kernels.attention.splits import (
    most_tiles,
    plan_hopper_splits,
    plan_small_hopper_splits,
    plan_small_splits,
    runs_at_once,
)
from quire.kernels.formats.kv_format import KVFormat
from quire.kernels.gpu import Gpu
from quire.kernels.linear import split_output
from quire.kernels.recipes import Recipe, always
from quire.kernels.shapes import LayerShape, StepShape
from quire.kernels.tuning import H100, Tuning


@dataclass(frozen=True, slots=True)
class Attending:
    """Attention of a layer in a step, with the cache in a format."""

    gpu: Gpu
    layer: LayerShape
    format: KVFormat
    step: StepShape
    tuning: Tuning = H100
    fused: bool = False  # as `linear.recipes.Product` has it

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
        quick = not cache.window and hopper_prefill.prefers(
            self.step.longest_query, layer.group, dequantized=self.format.scaled
        )
        takes = takes and layer.plain
        return PrefillKernel.HOPPER if takes and quick else PrefillKernel.TRITON

    @property
    def small_by(self) -> DecodeKernel:
        """Return which kernel attends from few rows, in little shared memory if heads are not too large."""
        if self.decode_by is not DecodeKernel.HOPPER:
            return DecodeKernel.SPLIT_SMALL
        small = self.layer.cache.head_dim <= WIDEST.value
        return DecodeKernel.HOPPER_SMALL if small else DecodeKernel.HOPPER

    @property
    def small_splits(self) -> int:
        """Return how many splits of a row fill the device with programs of `small_by`."""
        layer, cache, step = self.layer, self.layer.cache, self.step
        dim = triton.next_power_of_2(cache.head_dim)
        if self.decode_by is DecodeKernel.HOPPER:
            programs = cache.heads * hopper_decode.programs_of_group(layer.group)
            tiles = most_tiles(step.longest_context, cache.window, hopper_decode.TILE)
            small = self.small_by is DecodeKernel.HOPPER_SMALL
            plan = plan_small_hopper_splits if small else plan_hopper_splits
            return plan(step.decodes, programs, dim, tiles)
        tile = tile_keys(dim, layer.dtype.itemsize)
        tiles = most_tiles(step.longest_context, cache.window, tile)
        return plan_small_splits(step.decodes, cache.heads, tiles)


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


def _has_small_heads(case: Attending) -> bool:
    return case.small_by is DecodeKernel.HOPPER_SMALL and case.layer.cache.head_dim <= 64


def _prefers_unmerged(case: Attending) -> bool:
    output, tokens = case.layer.output, case.step.tokens
    quick = split_output.prefers(tokens, output, case.tuning) and case.small_splits > 1
    return case.fused and _few_rows(case) and quick


def _attend_few(case: Attending) -> Attend:
    splits = case.small_splits
    by = case.small_by if splits > 1 else case.decode_by
    return partial(attend.attend_new, decode_by=by, splits=splits)


UNMERGED = "K, V and attention in one kernel, left in splits"
ATTEND: tuple[Recipe[Attending, Attend], ...] = (
    Recipe(
        UNMERGED,
        lambda case: (
            _decodes_new(case)
            and not case.layer.chunked  # whose splits what merges them does not reckon
            and case.layer.output.share == "whole"
            and split_output.supports(case.gpu, case.layer.dtype, case.layer.output, case.layer.num_heads)
        ),
        _prefers_unmerged,
        lambda case: partial(
            attend.attend_unmerged,
            decode_by=case.small_by,
            splits=min(case.small_splits, split_output.MOST_SPLITS),
        ),
    ),
    Recipe(
        "K, V and attention in one kernel in many splits, merged",
        _decodes_new,
        lambda case: _few_rows(case) and (case.fused or _has_small_heads(case)),
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
        lambda case: case.gpu.has_kernels and case.step.newest is not None,
        always,
        lambda case: partial(attend.attend_newest, decode_by=case.decode_by),
    ),
    Recipe(
        "K and V, then attention of decodes",
        lambda case: case.gpu.has_kernels and case.step.phase == "decode",
        always,
        lambda case: partial(attend.attend_known, decode_by=case.decode_by),
    ),
    Recipe(
        "K and V, then attention of chunks and of decodes",
        lambda case: case.gpu.has_kernels,
        always,
        lambda case: partial(attend.attend_mixed, decode_by=case.decode_by, prefill_by=case.prefill_by),
    ),
    Recipe(
        "torch, of newest tokens",
        lambda case: case.step.newest is not None,
        always,
        lambda case: attend.attend_newest_reference,
    ),
    Recipe("torch", always, always, lambda case: attend.attend_reference),
)
LATENT: tuple[Recipe[Attending, Attend], ...] = (  # of layers whose caches are of latents
    Recipe(
        "latents, then attention of newest tokens to them",
        lambda case: case.gpu.has_kernels and case.step.newest is not None,
        always,
        lambda case: latent.attend_newest_to_latents,
    ),
    Recipe(
        "latents, then attention to them",
        lambda case: case.gpu.has_kernels,
        always,
        lambda case: latent.attend_to_latents,
    ),
    *ATTEND[-2:],
)
