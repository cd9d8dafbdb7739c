"""What top-k and top-p keep of rows of which each rank has some logits: `thresholds`, in parts.

Ranks search together for the largest value that enough logits reach, 4 bits of it a round: each tells how
many of its own reach 15 values, or what those weigh, and by the sums all of them take the next 4 bits. A
round is 16 numbers a chunk of a row, and the rounds are as many as a value's bits ask for, so nothing waits
for the device, and no list can be too short. Masses are whole numbers, so that their sums do not depend on
how a row is cut: `peer_thresholds` does the same in one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.sampling.thresholds import MIN_TEMPERATURE, from_order

CHUNK = 4096  # tokens of a row that a program looks at at a time
PROGRAMS = 256  # for all rows: with many rows each takes several chunks of one, and adds up lanes once
MASSES = 16  # numbers of a program: the mass that reaches the limit, then those of 15 values
UNIT = 2.0**40  # the mass of the highest logit where logits are weighted
INFINITY = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # in `to_order`'s order
NAMES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class Search:
    """One value for each row, the same on all ranks: tensors [S].

    Weighted, a logit's mass is exp((logit - highest) / temperature) UNITs, rounded down, and what is wanted
    is a share of the mass of all that reach the limit. Else it is 1, and a number of logits is wanted.
    """

    low: Tensor  # int64, in the order of `to_order`: the digits found so far, and zeros
    wanted: Tensor  # fp32; 0: this row has nothing to search for
    limit: Tensor  # fp32
    highest: Tensor  # fp32, of all the row's logits
    temperature: Tensor  # fp32
    dtype: torch.dtype  # of the logits
    weighted: bool

    @property
    def steps(self) -> list[int]:
        """Return what a digit counts in each round, from the first to the last."""
        rounds = 2 * self.dtype.itemsize
        return [MASSES ** (rounds - 1 - i) for i in range(rounds)]


def search_count(dtype: torch.dtype, count: Tensor, highest: Tensor) -> Search:
    """Begin to search for the largest values that `count` logits reach, a number for each row."""
    return Search(_lowest(count, dtype), count.float(), highest, highest, highest, dtype, weighted=False)


def search_share(
    dtype: torch.dtype, share: Tensor, limit: Tensor, highest: Tensor, temperature: Tensor
) -> Search:
    """Begin to search for the largest values whose mass is a share of the mass that reaches the limit."""
    return Search(_lowest(share, dtype), share, limit, highest, temperature, dtype, weighted=True)


def peaks_of_part(logits: Tensor, count: int) -> Tensor:
    """Return the largest of columns [0, count) of each row of logits [S, W]: [S] fp32, -inf of none."""
    if count == 0:
        return torch.full((len(logits),), -torch.inf, device=logits.device)
    return logits[:, :count].amax(dim=1).float()


def masses_of_part(logits: Tensor, count: int, search: Search, step: int) -> Tensor:
    """Return the masses of columns [0, count) of logits [S, W] that a round asks for: [S, P, 16] i64.

    P programs to a row; of the chunks of each the mass that reaches the limit, then those that reach
    low + i step.
    """
    samples, width = logits.shape
    parts = max(min(triton.cdiv(width, CHUNK), PROGRAMS // max(samples, 1)), 1)
    masses = torch.empty(samples, parts, MASSES, dtype=torch.int64, device=logits.device)
    masses_kernel[(samples, parts)](
        logits, search.low, search.wanted, search.limit, search.highest, search.temperature, masses,
        logits.stride(0), step, count, MIN_TEMPERATURE, INFINITY[search.dtype], search.weighted, MASSES,
        CHUNK, num_warps=8,
    )  # fmt: skip
    return masses


def narrow(gathered: Tensor, search: Search, step: int) -> Tensor:
    """Take the next digit by every rank's `masses_of_part`, gathered [R, S, P, 16] -> [S] fp32.

    After the last round these are the values: the highest logit at most, and -inf where nothing is wanted, or
    no value has enough.
    """
    ranks, samples, parts, _ = gathered.shape
    found = torch.empty(samples, dtype=torch.float32, device=gathered.device)
    narrow_kernel[(samples,)](
        gathered, search.low, search.wanted, search.highest, found, step, ranks, parts,
        INFINITY[search.dtype], NAMES[search.dtype], search.weighted, MASSES,
    )  # fmt: skip
    return found


def masses_of_part_reference(logits: Tensor, count: int, search: Search, step: int) -> Tensor:
    """Do the same as `masses_of_part` in plain torch, with one chunk to a row."""
    wide = logits[:, :count].float()
    weights = torch.ones_like(wide, dtype=torch.int64)
    if search.weighted:
        temperature = search.temperature.clamp(min=MIN_TEMPERATURE).unsqueeze(1)
        shares = ((wide - search.highest.unsqueeze(1)) / temperature).double().exp()
        weights = (shares.nan_to_num(0.0).clamp(max=1.0) * UNIT).long()
    values = [search.limit, *(_value(search.low + i * step, search.dtype) for i in range(1, MASSES))]
    reached = [torch.where(wide >= value.unsqueeze(1), weights, 0).sum(dim=1) for value in values]
    return torch.stack(reached, dim=1).unsqueeze(1)


def narrow_reference(gathered: Tensor, search: Search, step: int) -> Tensor:
    """Do the same as `narrow` in plain torch."""
    masses = gathered.sum(dim=(0, 2)).double()
    target = search.wanted.double()
    if search.weighted:
        target = target * masses[:, 0]
    search.low.add_(step * (masses[:, 1:] >= target.unsqueeze(1)).sum(dim=1))
    found = torch.fmin(_value(search.low, search.dtype), search.highest)
    return torch.where(search.wanted > 0, found, -torch.inf)


def _lowest(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return where -inf stands among the values of a dtype, for each row."""
    return torch.full_like(like, -INFINITY[dtype] - 1, dtype=torch.int64)


def _value(order: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the fp32 values that stand there among those of a dtype; NaN beyond the largest."""
    bits = order.clamp(max=INFINITY[dtype] + 1).to(torch.int32 if dtype.itemsize == 4 else torch.int16)
    largest = torch.iinfo(bits.dtype).max
    return torch.where(bits < 0, bits ^ largest, bits).view(dtype).float()


_UNIT = tl.constexpr(UNIT)
_BLOCKS = tl.constexpr(4)  # of a chunk
_AT_ONCE = tl.constexpr(32)  # programs of all ranks whose masses are added up


@triton.jit
def values_of(
    low: tl.tensor,
    step: tl.tensor,
    limit: tl.tensor,
    INFINITY: tl.constexpr,
    MASSES: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Return what masses of a round have to reach: the limit, then low + i step, as fp32."""
    i = tl.arange(0, MASSES)
    values = from_order(tl.minimum(low + i.to(tl.int64) * step, INFINITY + 1), dtype)
    return tl.where(i == 0, limit, values)


@triton.jit
def no_masses(WEIGHTED: tl.constexpr, MASSES: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    """Return what `with_chunk` adds to: a column for each lane, so that they are added up once a round."""
    return tl.zeros((MASSES, CHUNK // _BLOCKS), tl.int64 if WEIGHTED else tl.int32)


@triton.jit
def with_chunk(
    masses: tl.tensor,
    logits: tl.tensor,
    chunk: tl.tensor,
    values: tl.tensor,
    highest: tl.tensor,
    sharpness: tl.tensor,
    VOCABULARY: tl.constexpr,
    WEIGHTED: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """Add those masses of a chunk of a row's VOCABULARY logits that reach values [16]."""
    BLOCK: tl.constexpr = CHUNK // _BLOCKS
    token = chunk * CHUNK + tl.arange(0, BLOCK)
    blocks: tl.tuple = ()
    for i in tl.static_range(_BLOCKS):  # all are asked for at once
        x = tl.load(logits + token + i * BLOCK, token + i * BLOCK < VOCABULARY, other=float("-inf"))
        blocks += (x.to(tl.float32),)
    for i in tl.static_range(_BLOCKS):
        inside = token + i * BLOCK < VOCABULARY
        weights = inside.to(tl.int32)
        if WEIGHTED:
            shares = tl.exp((blocks[i] - highest) * sharpness)
            weights = (tl.where(inside & (shares <= 1.0), shares, 0.0) * _UNIT).to(tl.int64)  # NaN: nothing
        masses += tl.where(blocks[i][None, :] >= values[:, None], weights[None, :], 0)
    return masses


@triton.jit
def next_digit(
    masses: tl.tensor, wanted: tl.tensor, WEIGHTED: tl.constexpr, MASSES: tl.constexpr
) -> tl.tensor:
    """Return how many of the 15 values enough masses [16] of all ranks reach."""
    i = tl.arange(0, MASSES)
    target = wanted.to(tl.float64)
    if WEIGHTED:
        target *= tl.sum(tl.where(i == 0, masses, 0)).to(tl.float64)
    return tl.sum(((i > 0) & (masses.to(tl.float64) >= target)).to(tl.int64))


@triton.jit
def found_value(low: tl.tensor, highest: tl.tensor, INFINITY: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Return the value that all digits together say, the highest logit at most."""
    return tl.minimum(from_order(tl.minimum(low, INFINITY + 1), dtype), highest)


@triton.jit(do_not_specialize=["step"])
def masses_kernel(
    logits_ptr: tl.tensor,
    low_ptr: tl.tensor,
    wanted_ptr: tl.tensor,
    limit_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    stride: tl.tensor,
    step: tl.tensor,
    VOCABULARY: tl.constexpr,
    MIN_TEMPERATURE: tl.constexpr,
    INFINITY: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MASSES: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    masses = no_masses(WEIGHTED, MASSES, CHUNK)
    if tl.load(wanted_ptr + row) > 0:
        low, limit = tl.load(low_ptr + row), tl.load(limit_ptr + row)
        values = values_of(low, step, limit, INFINITY, MASSES, logits_ptr.dtype.element_ty)
        sharpness = 1.0 / tl.maximum(tl.load(temperature_ptr + row), MIN_TEMPERATURE)
        highest = tl.load(highest_ptr + row)
        logits = logits_ptr + row * stride
        for chunk in range(part, tl.cdiv(VOCABULARY, CHUNK), parts):
            masses = with_chunk(
                masses, logits, chunk, values, highest, sharpness, VOCABULARY, WEIGHTED, CHUNK
            )
    place = (row * parts + part) * MASSES + tl.arange(0, MASSES)
    tl.store(masses_ptr + place, tl.sum(masses, 1).to(tl.int64))


@triton.jit(do_not_specialize=["step", "ranks", "parts"])
def narrow_kernel(
    masses_ptr: tl.tensor,
    low_ptr: tl.tensor,
    wanted_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    found_ptr: tl.tensor,
    step: tl.tensor,
    ranks: tl.tensor,
    parts: tl.tensor,
    INFINITY: tl.constexpr,
    DTYPE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MASSES: tl.constexpr,
) -> None:
    row, samples = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    i = tl.arange(0, MASSES)
    masses = tl.zeros((MASSES,), tl.int64)
    for begin in range(0, ranks * parts, _AT_ONCE):
        part = begin + tl.arange(0, _AT_ONCE)
        place = ((part // parts) * samples + row) * parts + part % parts
        inside = (part < ranks * parts)[:, None] & (i >= 0)[None, :]
        masses += tl.sum(tl.load(masses_ptr + place[:, None] * MASSES + i[None, :], inside, other=0), 0)
    wanted = tl.load(wanted_ptr + row)
    low = tl.load(low_ptr + row) + step * next_digit(masses, wanted, WEIGHTED, MASSES)
    tl.store(low_ptr + row, low)
    found = found_value(low, tl.load(highest_ptr + row), INFINITY, DTYPE)
    tl.store(found_ptr + row, tl.where(wanted > 0, found, float("-inf")))
