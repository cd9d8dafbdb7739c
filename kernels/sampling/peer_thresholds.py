"""What top-k, top-p and min-p keep of rows, by ranks with some logits each that write to each other's memory.

One kernel does what `part_thresholds` does with a gather after each round: so the host has nothing to say,
and a CUDA graph holds all of it, whatever rows ask for. Rows without filters send nothing for them. What is
sent and how it arrives is `kernels.parallel.buffers`'.
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
from quire.kernels.sampling.part_thresholds import (
    CHUNK,
    INFINITY,
    MASSES,
    found_value,
    next_digit,
    no_masses,
    values_of,
    with_chunk,
)
from quire.kernels.sampling.state import SamplingState
from quire.kernels.sampling.thresholds import MIN_TEMPERATURE

WORDS = 2 * MASSES  # of 32 bits, that a program sends in a round: halves of the masses
CLEARED = 2048  # 16-bit numbers of a buffer that a program empties at a time
WHOLE = (0, 1 << 30)  # the phases of a call: all of them


def phases_of(dtype: torch.dtype) -> int:
    """Return the phases of `keep_thresholds`: peaks, the digits of top-k and top-p, and the last look."""
    return 2 * _rounds(dtype) + 2


def keep_thresholds(
    logits: Tensor,
    rows: Tensor,
    state: SamplingState,
    count: int,
    buffers: SymmetricBuffers,
    phases: tuple[int, int] = WHOLE,
) -> Tensor:
    """Return the lowest logit that each row keeps of all ranks' logits [S, W]: [S] fp32.

    phases: of [0, `phases_of`), which to do; each sends one round's numbers, having looked at those before.
    """
    samples, width = logits.shape
    thresholds = torch.empty(samples, dtype=torch.float32, device=logits.device)
    most = buffers.units // _units(buffers.ranks, 1, logits.dtype)
    if samples > most:
        pieces = zip(logits.split(most), rows.split(most), strict=True)
        return torch.cat([keep_thresholds(*piece, state, count, buffers, phases) for piece in pieces])
    if samples == 0:
        return thresholds
    # Programs of a row share its chunks; they wait for each other, so all must fit at once.
    most_parts = min(triton.cdiv(width, CHUNK), buffers.programs)
    parts = max(min(most_parts, buffers.programs // samples, most // samples), 1)
    lanes = min(samples, buffers.programs // parts)
    _keep_kernel[(lanes * parts,)](
        logits,
        rows,
        state.temperature,
        state.top_p,
        state.top_k,
        state.min_p,
        thresholds,
        buffers.own,
        buffers.addresses,
        buffers.state,
        buffers.units,
        logits.stride(0),
        samples,
        parts,
        buffers.rank,
        buffers.most_polls,
        *phases,
        count,
        buffers.ranks,
        # Of the most parts: one kernel, compiled at start, is that of any number of samples.
        triton.next_power_of_2(buffers.ranks * most_parts),
        _rounds(logits.dtype),
        INFINITY[logits.dtype],
        MIN_TEMPERATURE,
        MASSES,
        CHUNK,
        num_warps=8,
        **dependent_launch(logits.device),
    )
    return thresholds


def _rounds(dtype: torch.dtype) -> int:
    """Return how many digits a value has."""
    return 2 * dtype.itemsize


def _units(ranks: int, senders: int, dtype: torch.dtype) -> int:
    """Return how much of a buffer so many programs of each rank take, in units of 16 bits."""
    return (2 * _rounds(dtype) + 1) * ranks * senders * 2 * WORDS


# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("rows_ptr", "temperature_ptr", "top_p_ptr", "top_k_ptr", "min_p_ptr"))
_CLEARED = tl.constexpr(CLEARED)
_ROWS = tl.constexpr(256)  # that a program looks at in one go


@triton.jit(do_not_specialize=["buffer_units", "samples", "parts", "rank", "most_polls", "begin", "end"])
def _keep_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    thresholds_ptr: tl.tensor,
    own_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    state_ptr: tl.tensor,
    buffer_units: tl.tensor,
    stride: tl.tensor,
    samples: tl.tensor,
    parts: tl.tensor,
    rank: tl.tensor,
    most_polls: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    VOCABULARY: tl.constexpr,
    RANKS: tl.constexpr,
    SENDERS_PADDED: tl.constexpr,
    ROUNDS: tl.constexpr,
    INFINITY: tl.constexpr,
    MIN_TEMPERATURE: tl.constexpr,
    MASSES: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Search for a row's threshold in `parts` programs of each rank, all of which get every program's masses.

    A buffer holds, for each round, each rank's masses of each row by each part.
    """
    some = 0
    for start in range(0, samples, _ROWS):
        each = start + tl.arange(0, _ROWS)
        rows = tl.load(rows_ptr + each, each < samples, other=0)
        filtered = (tl.load(top_p_ptr + rows) < 1) | (tl.load(top_k_ptr + rows) > 0)
        filtered = (filtered | (tl.load(min_p_ptr + rows) > 0)) & (tl.load(temperature_ptr + rows) > 0)
        some += tl.max((filtered & (each < samples)).to(tl.int32))
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0) % parts
    lane, lanes = (tl.program_id(0) // parts).to(tl.int64), tl.num_programs(0) // parts
    words: tl.constexpr = 2 * MASSES
    last: tl.constexpr = 2 * ROUNDS + 1
    if some > 0:
        index, used = begin_call(state_ptr)
        buffer = tl.multiple_of(index.to(tl.int64) * (buffer_units // 2), 4)
        own = own_ptr.to(tl.pointer_type(tl.int32)) + buffer
        senders = RANKS * parts
        sender = tl.arange(0, SENDERS_PADDED)
        round_words = senders * samples * words
        if begin <= 0:
            clear(own_ptr, index, used, buffer_units, _CLEARED)
        for sample in range(lane, samples, lanes):
            row = tl.load(rows_ptr + sample)
            temperature = tl.load(temperature_ptr + row)
            top_p = tl.load(top_p_ptr + row)
            top_k = tl.load(top_k_ptr + row)
            min_p = tl.load(min_p_ptr + row)
            threshold = float("-inf")
            if (temperature > 0) & ((top_p < 1) | (top_k > 0) | (min_p > 0)):
                logits = logits_ptr + sample * stride
                mine = buffer + ((rank * samples + sample) * parts + part) * words
                place = ((sender // parts) * samples + sample) * parts + sender % parts
                theirs = own + place * words
                if begin <= 0:
                    peaks = tl.full((CHUNK,), float("-inf"), tl.float32)
                    for chunk in range(part, tl.cdiv(VOCABULARY, CHUNK), parts):
                        token = chunk * CHUNK + tl.arange(0, CHUNK)
                        x = tl.load(logits + token, token < VOCABULARY, other=float("-inf"))
                        peaks = tl.maximum(peaks, x.to(tl.float32))
                    send_words(tl.max(peaks).to(tl.int32, bitcast=True), mine, addresses_ptr, RANKS)
                if end > 1:
                    bits, missing = arrived(theirs, sender < senders, most_polls)
                    heard = bits.to(tl.float32, bitcast=True)
                    highest = tl.max(tl.where(sender < senders, heard, float("-inf")))
                    sharpness = 1.0 / tl.maximum(temperature, MIN_TEMPERATURE)
                    if min_p > 0:
                        threshold = highest + temperature * tl.log(min_p)
                    if top_k > 0:
                        kth, lost = _search(
                            logits, mine, theirs, sender < senders, round_words, 1, addresses_ptr,
                            top_k.to(tl.float32), threshold, highest, sharpness, part, parts, most_polls,
                            begin, end, False, VOCABULARY, RANKS, ROUNDS, INFINITY, MASSES, CHUNK,
                        )  # fmt: skip
                        threshold = tl.maximum(threshold, kth)
                        missing = missing | lost
                    if top_p < 1:
                        nucleus, lost = _search(
                            logits, mine, theirs, sender < senders, round_words, 1 + ROUNDS, addresses_ptr,
                            top_p, threshold, highest, sharpness, part, parts, most_polls,
                            begin, end, True, VOCABULARY, RANKS, ROUNDS, INFINITY, MASSES, CHUNK,
                        )  # fmt: skip
                        threshold = tl.maximum(threshold, nucleus)
                        missing = missing | lost
                    threshold = tl.where(missing > 0, float("nan"), threshold)
            if end > last:
                tl.store(thresholds_ptr + sample, threshold, part == 0)
        if end > last:
            end_call(state_ptr, index, (2 * ROUNDS + 1) * round_words * 2)
    else:
        for sample in range(lane, samples, lanes):
            tl.store(thresholds_ptr + sample, float("-inf"), part == 0)


@triton.jit
def _search(  # type: ignore[no-untyped-def]
    logits, mine, theirs, inside, round_words, first, addresses_ptr, wanted, limit, highest, sharpness, part,
    parts, most_polls, begin, end,
    WEIGHTED: tl.constexpr, VOCABULARY: tl.constexpr, RANKS: tl.constexpr, ROUNDS: tl.constexpr,
    INFINITY: tl.constexpr, MASSES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the largest value that enough logits reach, see `part_thresholds`, and whether masses got lost.

    first: the number of the search's first round.
    """
    i = tl.arange(0, MASSES)
    low = tl.full((), -INFINITY - 1, tl.int64)
    step = tl.full((), MASSES ** (ROUNDS - 1), tl.int64)
    missing = 0
    for number in range(first, first + ROUNDS):
        if (number >= begin) & (number < end):
            values = values_of(low, step, limit, INFINITY, MASSES, logits.dtype.element_ty)
            by_lane = no_masses(WEIGHTED, MASSES, CHUNK)
            for chunk in range(part, tl.cdiv(VOCABULARY, CHUNK), parts):
                by_lane = with_chunk(
                    by_lane, logits, chunk, values, highest, sharpness, VOCABULARY, WEIGHTED, CHUNK
                )
            masses = tl.sum(by_lane, 1).to(tl.int64)
            at = mine + number * round_words + i
            send_words((masses & 0x7FFFFFFF).to(tl.int32), at, addresses_ptr, RANKS)
            send_words(((masses >> 31) & 0x7FFFFFFF).to(tl.int32), at + MASSES, addresses_ptr, RANKS)
        if number + 1 < end:
            at = (theirs + number * round_words)[:, None] + i[None, :]
            there = inside[:, None] & (i >= 0)[None, :]
            low_half, lost = arrived(at, there, most_polls)
            missing = missing | lost
            high_half, lost = arrived(at + MASSES, there, most_polls)
            missing = missing | lost
            masses = tl.sum(low_half.to(tl.int64) + (high_half.to(tl.int64) << 31), 0)
            low += step * next_digit(masses, wanted, WEIGHTED, MASSES)
        step = step // MASSES
    return found_value(low, highest, INFINITY, logits.dtype.element_ty), missing
