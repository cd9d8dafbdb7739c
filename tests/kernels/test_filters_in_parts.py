"""Rows with top-k, top-p and min-p, the vocabulary divided among ranks: the tokens are those of one rank."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import DTYPES, HAS_GPU, with_dtypes
from torch import Tensor

from quire.engine.device.vocabulary_parts import Searched, VocabularyParts
from quire.engine.models.config import rows_of_rank
from quire.engine.parallel.share import of_vocabulary
from quire.kernels.backend import Backend, torch_backend, triton_backend
from quire.kernels.parallel.buffers import EMPTY, SymmetricBuffers, buffers_on_one_device
from quire.kernels.sampling import part_thresholds, peer_thresholds
from quire.kernels.sampling.parts import best_of_chunks
from quire.kernels.sampling.peer_sampling import best_of_ranks, draw
from quire.kernels.sampling.peer_thresholds import keep_thresholds, phases_of
from quire.kernels.sampling.state import SamplingState

HALF, FLOAT = torch.float16, torch.float32
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

    buffers = None

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


def drawn_by_peers(logits: Tensor, state: SamplingState, buffers: list[SymmetricBuffers]) -> list[list[int]]:
    """Do the same with ranks that write into each other's memory, all of which do one phase after another."""
    (samples, vocabulary), size = logits.shape, len(buffers)
    width = rows_of_rank(vocabulary, size)
    padded = torch.full((samples, size * width), 99.0, dtype=logits.dtype, device=logits.device)
    padded[:, :vocabulary] = logits
    owned = [padded[:, rank * width : (rank + 1) * width].contiguous() for rank in range(size)]
    spans = [of_vocabulary(vocabulary, rank, size) for rank in range(size)]
    rows, positions = places(samples, logits.device)
    last = [torch.full((samples,), -7, dtype=torch.int32, device=logits.device) for _ in range(size)]
    thresholds, drawn = list(last), list(last)
    for phase in range(phases_of(logits.dtype)):
        for rank, own in enumerate(owned):
            begin, end = spans[rank]
            phases = (phase, phase + 1)
            thresholds[rank] = keep_thresholds(own, rows, state, end - begin, buffers[rank], phases)
    for phase in range(2):
        for rank, own in enumerate(owned):
            begin, end = spans[rank]
            kept = best_of_chunks(own, rows, positions, state, begin, end - begin, thresholds[rank])
            drawn[rank] = best_of_ranks(*kept, rows, last[rank], buffers[rank], (phase, phase + 1))
    return [torch.cat(both).tolist() for both in zip(drawn, last, strict=True)]


def peers(size: int, device: torch.device, programs: int) -> list[SymmetricBuffers]:
    return buffers_on_one_device(size, 1 << 17, device, programs=programs, most_polls=3)


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


@pytest.mark.parametrize("programs", [6, 3], ids=["two to a row", "one to a row"])
def test_kernels_draw_what_one_rank_draws(programs, dtype, device, monkeypatch):
    """Over several chunks, and with ties."""
    monkeypatch.setattr(part_thresholds, "PROGRAMS", programs)
    filters = [{"top_k": 40, "min_p": 1e-4}, {"top_p": 0.9}, {"top_k": 300, "top_p": 0.8}]
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(len(filters), 8500, generator=generator)).to(device, dtype)
    logits[1, ::2] = 12.5
    rows = [{"temperature": 1.3, "seed": 7 * i} | filtered for i, filtered in enumerate(filters)]
    state = state_of(rows, device)
    (expected,) = drawn_in_parts(triton_backend(), logits, state, 1)
    assert drawn_in_parts(triton_backend(), logits, state, 2) == [expected] * 2


# Row after row, or two programs to a row; in the interpreter each in one type.
@pytest.mark.parametrize(
    ("programs", "dtype"),
    [(programs, dtype) for programs in (2, 5) for dtype in DTYPES] if HAS_GPU else [(2, FLOAT), (5, HALF)],
)
def test_peers_draw_what_one_rank_draws(programs, dtype, device, monkeypatch):
    """One call after the other, of which the last leaves nothing for the next."""
    monkeypatch.setattr(peer_thresholds, "CHUNK", 128)
    filters = [{"top_k": 40, "min_p": 1e-4}, {"top_k": 170, "top_p": 0.8}]
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(len(filters), 400, generator=generator)).to(device, dtype)
    logits[1, ::2] = 12.5
    buffers = peers(2, device, programs)
    for seed in range(2):
        rows = [{"temperature": 1.3, "seed": seed + 7 * i} | filtered for i, filtered in enumerate(filters)]
        state = state_of(rows, device)
        (expected,) = drawn_in_parts(triton_backend(), logits, state, 1)
        assert drawn_by_peers(logits, state, buffers) == [expected] * 2


@pytest.mark.parametrize(("programs", "chunk", "dtype"), with_dtypes([(6, 128), (1, 4096)]))
def test_peers_find_the_thresholds_that_gathered_rounds_find(programs, chunk, dtype, device, monkeypatch):
    """To the last bit, also of masses that top-p sums up, with however many programs to a row."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 400, generator=generator).to(device, dtype)
    state = state_of([{"temperature": 0.7, "top_p": p, "min_p": 0.01} for p in (0.1, 0.9, 1.0)], device)
    state.top_k[1:] = torch.tensor([300, 77])
    rows, _ = places(3, device)
    width = rows_of_rank(400, 2)
    owned = [logits[:, :width].contiguous(), logits[:, width:].contiguous()]

    def gathered(rank: Any) -> Tensor:
        parts = VocabularyParts(400, triton_backend(), rank)
        return parts._thresholds(owned[rank.rank], state, Searched(top_k=True, top_p=True))

    expected, _ = InTurn(2).run(gathered)
    monkeypatch.setattr(peer_thresholds, "CHUNK", chunk)
    buffers, found = peers(2, device, programs), []
    for phase in range(phases_of(dtype)):
        phases = (phase, phase + 1)
        found = [
            keep_thresholds(own, rows, state, own.shape[1], each, phases)
            for own, each in zip(owned, buffers, strict=True)
        ]
    assert [each.tolist() for each in found] == [expected.tolist()] * 2


def test_any_number_of_rows_takes_the_same_kernel(monkeypatch):
    """Mixed steps draw for any: what is compiled at start serves all, and nobody waits for a compiler."""
    names, constants = list(inspect.signature(peer_thresholds._keep_kernel.fn).parameters), set()

    class Noted:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *given, **_: constants.add(
                tuple((name, value) for name, value in zip(names, given, strict=False) if name.isupper())
            )

    monkeypatch.setattr(peer_thresholds, "_keep_kernel", Noted())
    (first, _) = peers(2, torch.device("cpu"), 128)
    for samples in (1, 2, 5, 8, 40, 200):
        rows, _ = places(samples, first.own.device)
        state = SamplingState.allocate(samples, "cpu")
        keep_thresholds(torch.zeros(1, 70_000).expand(samples, -1), rows, state, 70_000, first)
    assert len(constants) == 1


def test_rows_without_filters_send_nothing_for_them(device):
    """Nor do greedy rows: a call leaves the buffers as they are, and those that draw go on with these."""
    buffers = peers(2, device, 4)
    rows, _ = places(3, device)
    state = state_of([{"temperature": 0.0, "top_k": 3}, {"temperature": 1.0}, {"temperature": 0.3}], device)
    for rank in buffers:
        found = keep_thresholds(torch.randn(3, 100, device=device), rows, state, 100, rank)
        assert found.tolist() == [-torch.inf] * 3
        assert (rank.own == EMPTY).all()
        assert not rank.state.any()


def test_what_never_arrives_draws_nothing(device):
    (first, _) = peers(2, device, 4)
    rows, positions = places(2, device)
    state = state_of([{"temperature": 1.0, "top_k": 3}, {"temperature": 0.0}], device)
    last = torch.zeros(2, dtype=torch.int32, device=device)
    logits = torch.randn(2, 100, device=device)
    assert draw(logits, rows, positions, state, last, 0, 100, first).tolist() == [-1, -1]


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
    assert drawn_by_peers(logits, state, peers(2, device, 4)) == [tokens + last] * 2


if HAS_GPU:

    @pytest.mark.parametrize("ranks", [2, 4])
    @pytest.mark.parametrize("samples", [1, 5, 33])
    def test_ranks_as_streams_draw_what_gathered_rounds_draw(samples, ranks, dtype, monkeypatch):
        """Ranks of one GPU look for what others have yet to send, in graphs that are replayed.

        All their programs must fit at once, and those that wait behind them: so rows are few and short.
        """
        monkeypatch.setattr(peer_thresholds, "CHUNK", 512)
        device, vocabulary, units = torch.device("cuda"), 12_000, 1 << 20
        width = rows_of_rank(vocabulary, ranks)
        logits = (3 * torch.randn(samples, ranks * width, device=device)).to(dtype)
        owned = [part.contiguous() for part in logits.split(width, dim=1)]
        filters = [{"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}, {}]
        rows, positions = places(samples, device)
        state = state_of(
            [{"temperature": 0.9, "seed": 31 * i} | filters[i % len(filters)] for i in range(samples)], device
        )
        last = torch.zeros(ranks, samples, dtype=torch.int32, device=device)

        def drawn(rank: int, buffers: SymmetricBuffers) -> Tensor:
            begin, end = of_vocabulary(vocabulary, rank, ranks)
            return draw(owned[rank], rows, positions, state, last[rank], begin, end - begin, buffers)

        # A look at these finds nothing and ends: so kernels are loaded, which could hang while one waits.
        idle = buffers_on_one_device(ranks, units, device, programs=96 // ranks, most_polls=1)
        for rank, each in enumerate(idle):
            drawn(rank, each)
        torch.cuda.synchronize()
        buffers = buffers_on_one_device(ranks, units, device, programs=96 // ranks)
        streams, graphs, found = [torch.cuda.Stream() for _ in buffers], [], []
        for rank, stream in enumerate(streams):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[rank], stream=stream):
                found.append(drawn(rank, buffers[rank]))
        for _ in range(8):
            state.seed.add_(1)
            expected, *_ = drawn_in_parts(triton_backend(), logits[:, :vocabulary], state, ranks)
            torch.cuda.synchronize()
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            torch.cuda.synchronize()
            assert [each.tolist() for each in found] == [expected[:samples]] * ranks
