"""A step's tokens as kernels take them that keep states: made on the device, so that CUDA graphs hold any."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.attention.batch import ForwardBatch, PrefillBatch
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


def state_step(
    batch: ForwardBatch, chunks: Chunks | None, block_size: int, recurrences: Recurrences
) -> StateStep:
    """Return a step with blocks of the cache group that `batch` has the tables of."""
    decode = batch.decode
    given = decode.block_tables, decode.rows, decode.context_lens
    before, after = recurrences.decode_blocks(*given, block_size)
    if chunks is None or batch.prefill is None:
        return StateStep(before, after, before.new_empty(0, 4))
    begin, end = chunks.begin, chunks.end
    tables = batch.prefill.block_tables
    found = tables[chunks.row, (begin - 1).clamp(min=0) // block_size]
    found = torch.where(begin > 0, torch.where(chunks.follows, CARRIED, found), NO_STATE)
    leaves = (end > begin) & (chunks.ends_row | (end % block_size == 0))
    left = torch.where(leaves, tables[chunks.row, (end - 1).clamp(min=0) // block_size], -1)
    return StateStep(
        before, after, torch.stack([chunks.token, end - begin, found, left], dim=1).int(), chunks.used.int()
    )
