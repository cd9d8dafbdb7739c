"""A step's tokens as kernels take them that keep states: made on the device, so that CUDA graphs hold any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.attention.batch import ForwardBatch, PrefillBatch
from quire.kernels.attention.block_tables import stacked
from quire.kernels.recurrence.operations import Recurrences
from quire.kernels.recurrence.step import CARRIED, CHUNK, NO_STATE, StateStep


@dataclass(frozen=True, slots=True)
class Chunks:
    """A step's prompts in chunks that end where positions are a multiple of a block or of CHUNK.

    All tensors are [C], of each chunk: its row, its first position and the one behind its last, its first
    token in the step, whether it follows another one of its row, and whether it is the last of these. One
    that pads ends where it begins: all behind the first `used` [1] do.
    """

    row: Tensor
    begin: Tensor
    end: Tensor
    token: Tensor
    follows: Tensor
    ends_row: Tensor
    used: Tensor


def chunks_of(prefill: PrefillBatch, tokens: int, block_size: int) -> Chunks:
    """Cut the prompts of a step, of so many tokens.

    Rows come in rising order of their first positions, so that who shares a block that another row computes
    in the same step comes after that.
    """
    size = min(CHUNK, block_size)
    starts, lens = prefill.query_starts.long(), prefill.context_lens.long()
    queries = starts.diff()
    first = lens - queries
    used = (lens > 0) & (queries > 0)
    order = torch.where(used, first, torch.iinfo(torch.int64).max).argsort(stable=True)
    starts, lens, first, used = (each[order] for each in (starts[:-1], lens, first, used))
    counts = torch.where(used, -(-lens // size) - first // size, 0)
    until = counts.cumsum(0)
    number = torch.arange(tokens // size + 2 * len(lens), device=lens.device)
    at = torch.searchsorted(until, number, right=True).clamp(max=len(lens) - 1)
    nth = number - (until - counts)[at]
    real = number < until[-1]
    edge = (first[at] // size + nth) * size
    begin = torch.where(real, torch.maximum(first[at], edge), 0)
    end = torch.where(real, torch.minimum(lens[at], edge + size), 0)
    token = starts[at] + begin - first[at]
    return Chunks(prefill.rows.long()[order][at], begin, end, token, nth > 0, end == lens[at], until[-1:])


def state_steps(groups: Sequence[ForwardBatch], block_size: int, recurrences: Recurrences) -> list[StateStep]:
    """Return a step with blocks of each cache group, made of all at once: a launch is not for one alone.

    groups: the step with the tables of each, which lie one behind the other.
    """
    batch = groups[0]
    decode, prefill = batch.decode, batch.prefill
    tables = stacked([group.decode.block_tables for group in groups])
    before, after = recurrences.decode_blocks(tables, decode.rows, decode.context_lens, block_size)
    if prefill is None:
        none = before.new_empty(0, 4)
        return [StateStep(*blocks, none) for blocks in zip(before, after, strict=True)]
    chunks = chunks_of(prefill, len(batch.tokens), block_size)
    begin, end = chunks.begin, chunks.end
    found = tables[:, chunks.row, (begin - 1).clamp(min=0) // block_size]
    found = torch.where(begin > 0, torch.where(chunks.follows, CARRIED, found), NO_STATE)
    leaves = (end > begin) & (chunks.ends_row | (end % block_size == 0))
    left = torch.where(leaves, tables[:, chunks.row, (end - 1).clamp(min=0) // block_size], -1)
    described = torch.stack(
        [chunks.token.expand_as(found), (end - begin).expand_as(found), found, left], dim=2
    ).int()
    used = chunks.used.int()
    return [StateStep(*blocks, used) for blocks in zip(before, after, described, strict=True)]
