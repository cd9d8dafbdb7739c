"""How decode attention divides long contexts over an idle device (Flash-Decoding, Dao et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.attention.cascade import PrefixWorkspace
from quire.kernels.launch import dependent_launch

MAX_SPLITS = 64
PART = 32  # dimensions of a head that a warp merges: the warps of a head need not wait for each other
MAX_SMALL_SPLITS = 32  # as far as measured
CHEAP_SPLITS = 16  # of a row, to merge
FULL_DEVICE = 256  # programs: about two on every multiprocessor
LONG_ROW_SPLITS = 3
# Of rows that do not run at once with the others: more than FEW where so many parts fill at most half the
# device. A graph's batch is padded, to 40 or 48 from 33 on: there it is four parts or two.
FEW_SPLITS_OF_LEFT, MOST_SPLITS_OF_LEFT = 4, 8
# Programs of `attention.hopper_decode.decode` that a multiprocessor has registers for; with heads of 64 twice
# as many.
RESIDENT = 2

Sparing: TypeAlias = Literal["merging", "room"]  # see `tiles_of_split`


class Division(NamedTuple):
    """How many programs rows are given, by falling length; those that a row is not divided into only end.

    The first `long_rows` have `long_splits` each, for being longer than others. The first `undivided` but
    these have one. Those behind them do not run at once with the others, and are so few that they would end
    nearly alone: they have `left_splits`, whatever the others are. 34, 40 and 48 rows of 1,024 keys bring
    2.97, 2.94 and 2.95 TB/s on an H100; when none were divided it was 2.43, 2.67 and 2.91.
    """

    long_rows: int
    long_splits: int
    undivided: int
    left_splits: int

    @property
    def most(self) -> int:
        """Programs of the row that has most: room for so many parts of each row is in the workspace."""
        return max(self.long_splits, self.left_splits)

    def programs(self, batch: int) -> int:
        """Return the programs of all rows, for each kv head."""
        return (
            self.long_rows * self.long_splits
            + (self.undivided - self.long_rows)
            + (batch - self.undivided) * self.left_splits
        )


@dataclass(frozen=True)
class DecodeWorkspace:
    """Scratch of split decode attention, made once and reused by every layer and step.

    partials [rows × splits, num_q_heads, head_dim] f32, log-sum-exps lse [rows × splits, num_q_heads] f32.
    arrivals [≥ rows × kv heads] i32: zero, but while a kernel counts in it.
    """

    partials: torch.Tensor
    lse: torch.Tensor
    arrivals: torch.Tensor
    prefix: PrefixWorkspace

    @classmethod
    def allocate(
        cls,
        max_batch: int,
        num_q_heads: int,
        head_dim: int,
        device: torch.device | str,
        *,
        shares: bool = True,
    ) -> DecodeWorkspace:
        """Return enough for every batch up to `max_batch`, since of many rows at most long ones are split.

        shares: whether rows may share prefixes.
        """
        count = min(max_batch * MAX_SPLITS, 2 * FULL_DEVICE)
        return cls(
            torch.empty(count, num_q_heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(count, num_q_heads, dtype=torch.float32, device=device),
            torch.zeros(max_batch * num_q_heads, dtype=torch.int32, device=device),
            PrefixWorkspace.allocate(max_batch if shares else 0, num_q_heads, head_dim, device),
        )


def full_device(dim: int) -> int:
    """Return FULL_DEVICE of `attention.hopper_decode` with heads of up to dim, a power of two.

    Those of 64 take half as much of a multiprocessor as those of 128; of 256 one program asks for as much at
    once as two do of these.
    """
    return FULL_DEVICE * 128 // dim


def runs_at_once(batch: int, num_kv_heads: int) -> bool:
    """Tell whether so many rows have room on the device at the same time."""
    return batch * num_kv_heads <= FULL_DEVICE


def most_tiles(tokens: int, window: int, tile: int) -> int:
    """Return in how many tiles lie what a row reads, at most, of so many tokens; window 0: of all of them."""
    whole = triton.cdiv(tokens, tile)
    return min(triton.cdiv(window - 1, tile) + 1, whole) if window else whole


def plan_splits(batch: int, num_kv_heads: int, max_tiles: int) -> int:
    """Return how many splits of each row fill the device, as known without looking at the lengths."""
    return max(min(FULL_DEVICE // (batch * num_kv_heads), MAX_SPLITS, max_tiles), 1)


def plan_small_splits(batch: int, num_kv_heads: int, max_tiles: int) -> int:
    """Return that of programs in little shared memory: twice as many, if those make four of a row."""
    splits = min(2 * FULL_DEVICE // (batch * num_kv_heads), MAX_SMALL_SPLITS, max_tiles)
    return max(splits if splits >= 4 else 1, plan_splits(batch, num_kv_heads, max_tiles))


def plan_hopper_splits(batch: int, programs: int, dim: int, max_tiles: int) -> int:
    """Return that of `attention.hopper_decode`, with so many programs for a split of a row."""
    return max(min(full_device(dim) // (batch * programs), MAX_SPLITS, max_tiles), 1)


def plan_small_hopper_splits(batch: int, programs: int, dim: int, max_tiles: int) -> int:
    """Return that of the same in little shared memory.

    Merging takes a good part of a quick layer: heads of 64, too, have more than FULL_DEVICE programs only in
    up to CHEAP_SPLITS of a row, and one row more than MAX_SMALL_SPLITS only if these leave most of the device
    idle.
    """
    at_once = batch * programs
    most = max(FULL_DEVICE // at_once, CHEAP_SPLITS)
    if at_once * MAX_SMALL_SPLITS >= FULL_DEVICE // 2:
        most = min(most, MAX_SMALL_SPLITS)
    return min(plan_hopper_splits(batch, programs, dim, max_tiles), most)


def plan_division(
    batch: int, num_kv_heads: int, dim: int, multiprocessors: int, workspace: DecodeWorkspace
) -> Division:
    """Return how a batch is divided whose rows have one program for each kv head, but for some."""
    programs = batch * num_kv_heads
    long_rows = (
        batch * 3 // 8
    )  # the one behind them is what `attention.hopper_decode.division.divide` calls usual
    if programs > min(2 * FULL_DEVICE, len(workspace.arrivals)):
        return Division(long_rows, 1, batch, 1)  # so many are work enough until the last one is done
    room = max(len(workspace.lse) // batch, 1)
    long_splits = min(LONG_ROW_SPLITS, room)
    at_once = RESIDENT * 128 // min(dim, 128) * multiprocessors
    left = programs - at_once
    if not 0 < left <= at_once // 2:
        return Division(long_rows, long_splits, batch, 1)
    wanted = max(at_once // (2 * left), FEW_SPLITS_OF_LEFT)
    left_splits = min(wanted, MOST_SPLITS_OF_LEFT, at_once // left, room)
    return Division(long_rows, long_splits, at_once // num_kv_heads, left_splits)


@dataclass(frozen=True, slots=True)
class SplitPartials:
    """Attention of B rows whose contexts were split, before the splits are merged.

    They are in the workspace, `tile` keys to a tile and up to `max_splits` of a row, fewer if `sparing` (see
    `tiles_of_split`); merged they are the first B tokens of `out` [T, Hq, D].
    """

    out: torch.Tensor
    context_lens: torch.Tensor
    window: int
    max_splits: int
    tile: int
    workspace: DecodeWorkspace
    chunked: bool = False
    sparing: Sparing | None = None

    def merged(self) -> torch.Tensor:
        """Merge the splits of each row; return `out` as [T, Hq D]."""
        merge_splits(self)
        return self.out.flatten(1)


def merge_splits(partials: SplitPartials) -> None:
    """Merge the splits of each row to the first B tokens of `out`."""
    num_q_heads, head_dim = partials.out.shape[1:]
    dim = triton.next_power_of_2(head_dim)
    part = min(dim, PART)
    _merge_kernel[num_q_heads, partials.context_lens.shape[0], dim // part](
        partials.out, partials.workspace.partials, partials.workspace.lse, partials.context_lens,
        partials.window, partials.max_splits,
        HEAD_DIM=head_dim, PART=part, TILE=partials.tile, CHUNKED=partials.chunked, SPARING=partials.sparing,
        SPLITS=triton.next_power_of_2(partials.max_splits), num_warps=1,
        **dependent_launch(partials.out.device),
    )  # fmt: skip


def spares_room(batch: int, programs: int, dim: int, splits: int) -> bool:
    """Tell whether so many splits of rows with so many programs each may crowd the device.

    Of fewer than eight splits one less would be too much.
    """
    return splits >= 8 and 4 * batch * programs * splits > 3 * full_device(dim)


@triton.jit
def tiles_of_split(tiles: tl.tensor, max_splits: tl.tensor, SPARING: tl.constexpr) -> tl.tensor:
    """Return how many of a row's tiles each of its splits has, at least one.

    SPARING merging: each program of the output projection merges the splits for itself, in a time that grows
    with them. Of 1,000 and 2,000 keys one token of Qwen3-0.6B takes 22.3 and 25.8 µs a layer on an H100 in as
    many splits as tiles, 20.7 and 22.5 in 8 and 11.
    SPARING room: of as many programs as the device holds some begin late, behind products that still have
    theirs. Where they have one tile or two each, fewer with a tile more are quicker: two rows of 1,000 keys
    of Qwen3-0.6B take 23.5 instead of 24.7 µs, of Qwen3-4B 81.8 instead of 85.4. With more tiles they are
    not.
    """
    split_tiles = tl.maximum(tl.cdiv(tiles, max_splits), 1)
    if SPARING == "merging":
        least = 1 + (tiles >= 14).to(tl.int32) + (tiles >= 32).to(tl.int32) + (tiles >= 56).to(tl.int32)
        return tl.maximum(split_tiles, least)
    elif SPARING == "room":
        crowded = (split_tiles <= 2) & (4 * tl.cdiv(tiles, split_tiles) > 3 * max_splits)
        return split_tiles + crowded.to(tl.int32)
    else:
        return split_tiles


@triton.jit
def tiles_and_splits(
    context_len: tl.tensor,
    shared_len: tl.tensor,
    window: tl.tensor,
    max_splits: tl.tensor,
    TILE: tl.constexpr,
    CHUNKED: tl.constexpr,
    SPARING: tl.constexpr,
) -> tl.tensor:
    """Return a row's first visible key of its own, its tile, tiles, tiles in a split, splits with work."""
    if CHUNKED:
        first_key = tl.maximum(context_len - 1, 0) // window * window
    else:
        first_key = tl.where(window > 0, tl.maximum(context_len - window, 0), shared_len)
    first_tile = first_key // TILE
    tiles = tl.cdiv(context_len, TILE) - first_tile
    split_tiles = tiles_of_split(tiles, max_splits, SPARING)
    return first_key, first_tile, tiles, split_tiles, tl.cdiv(tiles, split_tiles)


# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("context_lens",))


@triton.jit(do_not_specialize=["window", "max_splits"])
def _merge_kernel(
    out: tl.tensor,
    partials: tl.tensor,
    lse: tl.tensor,
    context_lens: tl.tensor,
    window: tl.tensor,
    max_splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    CHUNKED: tl.constexpr,
    SPARING: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Merge PART dimensions of a head's split results by their log-sum-exps (base 2)."""
    head = tl.program_id(0)
    index = tl.program_id(1)
    num_q_heads = tl.num_programs(0)
    context_len = tl.load(context_lens + index)
    _, _, _, _, splits = tiles_and_splits(context_len, 0, window, max_splits, TILE, CHUNKED, SPARING)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if splits == 0:  # the context is empty
        return
    split = tl.arange(0, SPLITS)
    dim = tl.program_id(2) * PART + tl.arange(0, PART)
    partial = (index.to(tl.int64) * max_splits + split) * num_q_heads + head
    split_lse = tl.load(lse + partial, mask=split < splits, other=float("-inf"))
    weights = tl.exp2(split_lse - tl.max(split_lse, 0))
    mask = (split < splits)[:, None] & (dim < HEAD_DIM)[None, :]
    values = tl.load(partials + partial[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    merged = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    offset = (index.to(tl.int64) * num_q_heads + head) * HEAD_DIM + dim
    tl.store(out + offset, merged.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
