"""Rows with top-k, top-p and min-p, the vocabulary divided among ranks: the tokens are those of one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.engine.device.vocabulary_parts import Searched, VocabularyParts
from quire.engine.models.config import rows_of_rank
from quire.kernels.backend import Backend, torch_backend, triton_backend
from quire.kernels.sampling.state import SamplingState

QUARTER = st.integers(-12, 12).map(lambda i: i / 4)  # exact in every dtype, and ties often
ROW = st.one_of(
    st.tuples(st.just("ties"), st.lists(QUARTER, min_size=1, max_size=5)),
    st.tuples(st.just("random"), st.floats(0.01, 9.0)),
    st.tuples(st.just("few"), st.integers(0, 3)),
)
FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-30, 0.6, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 3, 20, 64, 65, 1000]),
        "top_p": st.sampled_from([1e-6, 0.3, 0.71, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.013, 0.21, 1.0]),
        "seed": st.integers(-(2**63), 2**63 - 1),
    }
)


class InTurn:
    """Ranks that are threads of which one runs at a time, up to where it waits for the others."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Lock()
        self.all_here = threading.Barrier(size)
        self.given: dict[int, Tensor] = {}

    def run(self, work: Callable[[Any], Tensor]) -> list[Tensor]:
        """Have every rank do the work; return what each has."""

        def one(rank: int) -> Tensor:
            with self.turn:
                try:
                    return work(OneInTurn(rank, self))
                except Exception:
                    self.all_here.abort()
                    raise

        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(one, range(self.size)))

    def meet(self) -> None:
        self.turn.release()
        try:
            self.all_here.wait()
        finally:
            self.turn.acquire()


class OneInTurn:
    """What a rank gathers by."""

    def __init__(self, rank: int, ranks: InTurn) -> None:
        self.rank = rank
        self.size = ranks.size
        self._ranks = ranks

    def all_gather(self, x: Tensor) -> Tensor:
        self._ranks.given[self.rank] = x
        self._ranks.meet()
        gathered = torch.stack([self._ranks.given[rank] for rank in range(self.size)])
        self._ranks.meet()
        return gathered


def state_of(rows: list[dict[str, float]], device: torch.device | str) -> SamplingState:
    state = SamplingState.allocate(len(rows), device)
    for row, values in enumerate(rows):
        for name, value in values.items():
            getattr(state, name)[row] = value
    return state


def logits_of(kind: tuple[str, Any], vocabulary: int, seed: int) -> Tensor:
    """Draw a row: of a few values that tie, of any, or with so few tokens that can be."""
    generator = torch.Generator().manual_seed(seed)
    name, value = kind
    if name == "ties":
        return torch.tensor(value)[torch.randint(len(value), (vocabulary,), generator=generator)]
    logits = torch.randn(vocabulary, generator=generator)
    if name == "random":
        return value * logits
    possible = torch.randint(vocabulary, (value,), generator=generator)
    return torch.full_like(logits, -torch.inf).index_copy(0, possible, logits[possible])


def drawn_in_parts(backend: Backend, logits: Tensor, state: SamplingState, size: int) -> list[list[int]]:
    """Return the tokens of all rows, then what the rows' last tokens are, as every rank has them."""
    samples, vocabulary = logits.shape
    width = rows_of_rank(vocabulary, size)
    padded = torch.full((samples, size * width), 99.0, dtype=logits.dtype, device=logits.device)
    padded[:, :vocabulary] = logits
    searched = Searched(bool((state.top_k > 0).any()), bool((state.top_p < 1).any()))
    rows, positions = places(samples, logits.device)

    def draw(rank: Any) -> Tensor:
        parts = VocabularyParts(vocabulary, backend, rank if size > 1 else None)
        own = padded[:, rank.rank * width : (rank.rank + 1) * width].contiguous()
        last = torch.full((samples,), -7, dtype=torch.int32, device=logits.device)
        drawn = parts.sample_filtered(own, rows, positions, state, last, searched)
        return torch.cat((drawn, last))

    return [drawn.tolist() for drawn in InTurn(size).run(draw)]


def places(samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rows = torch.arange(samples, dtype=torch.int32, device=device)
    return rows, 40 + 3 * rows


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([2, 4]),
    st.sampled_from([17, 40, 199, 1000]),
    st.lists(st.tuples(ROW, FILTERS), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 2**31),
)
def test_references_draw_what_one_rank_draws(size, vocabulary, kinds, dtype, seed):
    """Also greedy rows beside them, rows that nothing can be drawn from, and ranks without a token."""
    rows = [logits_of(row, vocabulary, seed + i) for i, (row, _) in enumerate(kinds)]
    logits, state = torch.stack(rows).to(dtype), state_of([filters for _, filters in kinds], "cpu")
    (expected,) = drawn_in_parts(torch_backend(), logits, state, 1)
    assert drawn_in_parts(torch_backend(), logits, state, size) == [expected] * size


def test_kernels_draw_what_one_rank_draws(dtype, device):
    """Over several chunks, and with ties."""
    filters = [{"top_k": 40, "min_p": 1e-4}, {"top_p": 0.9}, {"top_k": 300, "top_p": 0.8}]
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(len(filters), 8500, generator=generator)).to(device, dtype)
    logits[1, ::2] = 12.5
    rows = [{"temperature": 1.3, "seed": 7 * i} | filtered for i, filtered in enumerate(filters)]
    state = state_of(rows, device)
    (expected,) = drawn_in_parts(triton_backend(), logits, state, 1)
    assert drawn_in_parts(triton_backend(), logits, state, 2) == [expected] * 2


def test_kernels_end_where_nothing_can_be_drawn(device):
    """A greedy row beside them has its filters in vain."""
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(2)).to(device, torch.float16)
    logits[0, 99] = torch.nan
    logits[1, 5] = torch.inf
    logits[2] = -torch.inf
    rows = [{"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}] * 3
    state = state_of([*rows, {"temperature": 0.0, "top_k": 3, "top_p": 0.5}], device)
    tokens = [-1, -1, -1, int(logits[3].argmax())]
    last = [0, 0, 0, tokens[3]]
    assert drawn_in_parts(triton_backend(), logits, state, 2) == [tokens + last] * 2
