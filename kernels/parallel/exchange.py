"""How kernels of ranks write to each other's buffers and read their own: see `buffers`."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.parallel.buffers import BUFFERS, EMPTY, MOST_PROGRAMS

_BUFFERS = tl.constexpr(BUFFERS)
_EMPTY = tl.constexpr(EMPTY)
_EMPTY_PAIR = tl.constexpr(-0x7FFF8000)  # EMPTY in both halves
_STATES = tl.constexpr(MOST_PROGRAMS)


@triton.jit
def sendable(x):  # type: ignore[no-untyped-def]
    """Return the bits of x, where those of EMPTY are 0."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True)
        bits = tl.where(bits == _EMPTY, 0, bits).to(tl.int16)
    else:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(bits == _EMPTY_PAIR, 0, bits).to(tl.int32)
    return bits


@triton.jit
def send(x, at, inside, addresses_ptr, word: tl.constexpr, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write x to place `at` of every rank's memory."""
    bits = sendable(x)
    for peer in tl.static_range(RANKS):
        there = tl.multiple_of(tl.load(addresses_ptr + peer).to(word), 16)
        tl.store(there + at, bits, inside)


@triton.jit
def send_words(words, at, addresses_ptr, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write 32-bit words to place `at` of every rank's memory."""
    send(words, at, at >= 0, addresses_ptr, tl.pointer_type(tl.int32), RANKS)


@triton.jit
def received(at, stride, inside, most_polls, element: tl.constexpr, TERMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sum in fp32 of TERMS terms `stride` apart, once all have arrived; NaN after most_polls."""
    total = tl.zeros(at.shape, tl.float32)
    missing = 1
    polls = 0
    while (missing > 0) & (polls < most_polls):
        total = tl.zeros(at.shape, tl.float32)
        empty = tl.zeros(at.shape, tl.int32)
        for term in tl.static_range(TERMS):
            bits = tl.load(at + term * stride, inside, other=0, volatile=True)
            empty = empty | _is_empty(bits)
            total += bits.to(element, bitcast=True).to(tl.float32)
        missing = tl.max(empty)
        polls += 1
    return tl.where(missing > 0, float("nan"), total)


@triton.jit
def arrived(at, inside, most_polls):  # type: ignore[no-untyped-def]
    """Return the words at `at`, once all have arrived, and 0; after most_polls what is there, and 1."""
    bits = tl.load(at, inside, other=0, volatile=True)
    missing = tl.max(_is_empty(bits))
    polls = 1
    while (missing > 0) & (polls < most_polls):
        bits = tl.load(at, inside, other=0, volatile=True)
        missing = tl.max(_is_empty(bits))
        polls += 1
    return bits, missing


@triton.jit
def _is_empty(bits):  # type: ignore[no-untyped-def]
    empty: tl.constexpr = _EMPTY if bits.dtype.primitive_bitwidth == 16 else _EMPTY_PAIR
    return (bits == empty).to(tl.int32)


@triton.jit
def begin_call(state_ptr):  # type: ignore[no-untyped-def]
    """Return which buffer to use, and how many units of the one before it the last call used, rounded up."""
    state = state_ptr + 2 * tl.program_id(0)
    return tl.load(state), tl.load(state + 1) * 8


@triton.jit
def clear(own_ptr, index, used, buffer_units, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Empty what the last call used of the buffer before `index`."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    before = ((index + _BUFFERS - 1) % _BUFFERS).to(tl.int64) * buffer_units
    last = own_ptr + tl.multiple_of(before, 8)
    for start in range(program * BLOCK, used, programs * BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(last + place, tl.full([BLOCK], _EMPTY, tl.int16), place < used)


@triton.jit
def end_call(state_ptr, index, used):  # type: ignore[no-untyped-def]
    """Note what this call used, for programs too that it has not but a later one may have.

    Each program writes its own state and that of some of those: nobody's that this call reads.
    """
    state = tl.program_id(0) + tl.arange(0, _STATES) * tl.num_programs(0)
    tl.store(state_ptr + 2 * state, (index + 1) % _BUFFERS, state < _STATES)
    tl.store(state_ptr + 2 * state + 1, (used + 7) // 8, state < _STATES)
