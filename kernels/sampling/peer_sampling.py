"""Drawing tokens of logits of which each rank has some, by ranks that write into each other's memory.

Two kernels and the one between them do what `part_thresholds` and `parts` do with a gather after each round:
`peer_thresholds` finds what rows keep, and here the best of each rank's tokens are compared.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch
from quire.kernels.parallel.buffers import SymmetricBuffers
from quire.kernels.parallel.exchange import arrived, begin_call, clear, end_call, send_words
from quire.kernels.sampling.parts import NO_TOKEN, best_of_chunks
from quire.kernels.sampling.peer_thresholds import CLEARED, WHOLE, keep_thresholds
from quire.kernels.sampling.state import SamplingState

_CLEARED = tl.constexpr(CLEARED)
_NO_TOKEN = tl.constexpr(NO_TOKEN)


def draw(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: SamplingState,
    last_tokens: Tensor,
    first: int,
    count: int,
    buffers: SymmetricBuffers,
) -> Tensor:
    """Draw as `sample` does, of every rank's logits [S, W]: [S] i32, the same on all ranks.

    first, count: this rank's tokens, as in `parts.best_of_part`.
    """
    thresholds = keep_thresholds(logits, rows, state, count, buffers)
    best, best_tokens = best_of_chunks(logits, rows, positions, state, first, count, thresholds)
    return best_of_ranks(best, best_tokens, rows, last_tokens, buffers)


def best_of_ranks(
    best: Tensor,
    best_tokens: Tensor,
    rows: Tensor,
    last_tokens: Tensor,
    buffers: SymmetricBuffers,
    phases: tuple[int, int] = WHOLE,
) -> Tensor:
    """Return the token of each row [S] i32 by every rank's `best_of_chunks`, as `parts.best_of_all` does.

    phases: of [0, 2), which of sending (0) and receiving (1) to do.
    """
    samples, chunks = best.shape
    tokens = torch.empty(samples, dtype=torch.int32, device=best.device)
    if samples:
        _best_kernel[(min(samples, buffers.programs),)](
            best,
            best_tokens,
            rows,
            tokens,
            last_tokens,
            buffers.own,
            buffers.addresses,
            buffers.state,
            buffers.units,
            samples,
            buffers.rank,
            buffers.most_polls,
            chunks,
            triton.next_power_of_2(chunks),
            buffers.ranks,
            triton.next_power_of_2(buffers.ranks),
            *phases,
            num_warps=4,
            **dependent_launch(best.device),
        )
    return tokens


@triton.jit(do_not_specialize=["buffer_units", "samples", "rank", "most_polls"])
def _best_kernel(
    best_ptr: tl.tensor,
    best_tokens_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    own_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    state_ptr: tl.tensor,
    buffer_units: tl.tensor,
    samples: tl.tensor,
    rank: tl.tensor,
    most_polls: tl.tensor,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_PADDED: tl.constexpr,
    BEGIN: tl.constexpr,
    END: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Send a row's best score and its token, which all ranks then compare."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    index, used = begin_call(state_ptr)
    buffer = tl.multiple_of(index.to(tl.int64) * (buffer_units // 2), 4)
    first, step = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    if BEGIN <= 0:
        chunk = tl.arange(0, CHUNKS_PADDED)
        inside = chunk < CHUNKS
        for sample in range(first, samples, step):
            slot = sample * CHUNKS + chunk
            scores = tl.load(best_ptr + slot, inside, other=float("-inf"))
            best = tl.max(scores)
            tokens = tl.load(best_tokens_ptr + slot, inside & (scores == best), other=_NO_TOKEN)
            at = buffer + (rank * samples + sample) * 2
            send_words(best.to(tl.int32, bitcast=True), at, addresses_ptr, RANKS)
            send_words(tl.min(tokens), at + 1, addresses_ptr, RANKS)
        clear(own_ptr, index, used, buffer_units, _CLEARED)
    if END > 1:
        other = tl.arange(0, RANKS_PADDED)
        inside = other < RANKS
        for sample in range(first, samples, step):
            at = own_ptr.to(tl.pointer_type(tl.int32)) + buffer + (other * samples + sample) * 2
            bits, missing = arrived(at, inside, most_polls)
            tokens, lost = arrived(at + 1, inside, most_polls)
            scores = tl.where(inside, bits.to(tl.float32, bitcast=True), float("-inf"))
            best = tl.max(scores)
            token = tl.min(tl.where(inside & (scores == best), tokens, _NO_TOKEN))
            token = tl.where((tl.abs(best) < float("inf")) & (missing == 0) & (lost == 0), token, -1)
            tl.store(tokens_ptr + sample, token)
            tl.store(last_tokens_ptr + tl.load(rows_ptr + sample), tl.maximum(token, 0))
        end_call(state_ptr, index, RANKS * samples * 4)
