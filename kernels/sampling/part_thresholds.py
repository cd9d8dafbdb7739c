"""What top-k and top-p keep of rows of which each rank has some logits: `thresholds`, in parts.

Ranks search together for the largest value that enough logits reach, 4 bits of it a round: each tells how
many of its own reach 15 values, or what those weigh, and by the sums all of them take the next 4 bits. A
round is 16 numbers a chunk of a row, and the rounds are as many as a value's bits ask for, so nothing waits
for the device, and no list can be too short. Masses are whole numbers, so that their sums do not depend on
how a row is cut: `peer_sampling` does the same in one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.sampling.thresholds import MIN_TEMPERATURE, from_order

CHUNK = 4096  # tokens of a row that one program looks at
MASSES = 16  # numbers of a chunk: the mass that reaches the limit, then those of 15 values
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
        """What a digit counts in each round, from the first to the last."""
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
    """Return the masses of columns [0, count) of logits [S, W] that a round asks for: [S, C, 16] i64.

    C chunks to a row; of each the mass that reaches the limit, then those that reach low + i step.
    """
    samples, width = logits.shape
    chunks = triton.cdiv(width, CHUNK)
    masses = torch.empty(samples, chunks, MASSES, dtype=torch.int64, device=logits.device)
    masses_kernel[(samples, chunks)](
        logits, search.low, search.wanted, search.limit, search.highest, search.temperature, masses,
        logits.stride(0), step, count, MIN_TEMPERATURE, INFINITY[search.dtype], search.weighted, MASSES,
        CHUNK, num_warps=8,
    )  # fmt: skip
    return masses


def narrow(gathered: Tensor, search: Search, step: int) -> Tensor:
    """Take the next digit by every rank's `masses_of_part`, gathered [R, S, C, 16] -> [S] fp32.

    After the last round these are the values: the highest logit at most, and -inf where nothing is wanted, or
    no value has enough.
    """
    ranks, samples, chunks, _ = gathered.shape
    found = torch.empty(samples, dtype=torch.float32, device=gathered.device)
    narrow_kernel[(samples,)](
        gathered, search.low, search.wanted, search.highest, found, step, samples * chunks, chunks,
        ranks * chunks, triton.next_power_of_2(ranks * chunks), INFINITY[search.dtype], NAMES[search.dtype],
        search.weighted, MASSES,
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


@triton.jit
def masses_of_chunk(
    logits: tl.tensor,
    chunk: tl.tensor,
    low: tl.tensor,
    step: tl.tensor,
    limit: tl.tensor,
    highest: tl.tensor,
    sharpness: tl.tensor,
    VOCABULARY: tl.constexpr,
    INFINITY: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MASSES: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """Return the masses of a chunk of a row's VOCABULARY logits that reach the limit, and low + i step."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < VOCABULARY
    x = tl.load(logits + token, inside, other=float("-inf")).to(tl.float32)
    weights = inside.to(tl.int32)
    if WEIGHTED:
        shares = tl.exp((x - highest) * sharpness)
        weights = (tl.where(inside & (shares <= 1.0), shares, 0.0) * _UNIT).to(tl.int64)  # NaN is nothing
    i = tl.arange(0, MASSES)
    masses = tl.where(i == 0, tl.sum(tl.where(x >= limit, weights, 0)), 0).to(tl.int64)
    order = low
    for digit in tl.static_range(1, MASSES):
        order += step
        value = from_order(tl.minimum(order, INFINITY + 1), logits.dtype.element_ty)
        masses += tl.where(i == digit, tl.sum(tl.where(x >= value, weights, 0)), 0)
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
    chunk = tl.program_id(1)
    masses = tl.zeros((MASSES,), tl.int64)
    if tl.load(wanted_ptr + row) > 0:
        masses = masses_of_chunk(
            logits_ptr + row * stride,
            chunk,
            tl.load(low_ptr + row),
            step,
            tl.load(limit_ptr + row),
            tl.load(highest_ptr + row),
            1.0 / tl.maximum(tl.load(temperature_ptr + row), MIN_TEMPERATURE),
            VOCABULARY,
            INFINITY,
            WEIGHTED,
            MASSES,
            CHUNK,
        )
    place = (row * tl.num_programs(1) + chunk) * MASSES + tl.arange(0, MASSES)
    tl.store(masses_ptr + place, masses)


@triton.jit(do_not_specialize=["step", "rank_stride"])
def narrow_kernel(
    masses_ptr: tl.tensor,
    low_ptr: tl.tensor,
    wanted_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    found_ptr: tl.tensor,
    step: tl.tensor,
    rank_stride: tl.tensor,
    CHUNKS: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    INFINITY: tl.constexpr,
    DTYPE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MASSES: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS_PADDED)
    i = tl.arange(0, MASSES)
    start = (chunk // CHUNKS) * rank_stride + row * CHUNKS + chunk % CHUNKS
    inside = (chunk < ALL_CHUNKS)[:, None] & (i >= 0)[None, :]
    masses = tl.sum(tl.load(masses_ptr + start[:, None] * MASSES + i[None, :], inside, other=0), 0)
    wanted = tl.load(wanted_ptr + row)
    low = tl.load(low_ptr + row) + step * next_digit(masses, wanted, WEIGHTED, MASSES)
    tl.store(low_ptr + row, low)
    found = found_value(low, tl.load(highest_ptr + row), INFINITY, DTYPE)
    tl.store(found_ptr + row, tl.where(wanted > 0, found, float("-inf")))
