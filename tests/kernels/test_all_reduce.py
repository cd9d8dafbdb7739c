"""Sums over ranks that share a device: one process sends for all, then receives; on a GPU ranks are streams.

Each rank's kernels see its own buffers and everybody's addresses, as they do with a GPU for each.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from apart import run_apart
from paged import HAS_GPU
from torch import Tensor

from quire.kernels.parallel.all_reduce import (
    TILE,
    all_reduce_norm_reference,
    all_reduce_reference,
    one_shot,
    one_shot_norm,
    two_shot,
)
from quire.kernels.parallel.buffers import EMPTY, SymmetricBuffers, buffers_on_one_device, make_buffers
from quire.kernels.parallel.peer_sums import Limits, PeerKernels
from quire.kernels.pointwise.norm import add_rms_norm, rms_norm_reference

POLLS = 1_000_000 if HAS_GPU else 3  # looks of tests: what never comes is NaN, not a hang


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def ranks_of(ranks: int, units: int, device: torch.device, programs: int = 3) -> list[SymmetricBuffers]:
    return buffers_on_one_device(ranks, units, device, programs=programs, most_polls=POLLS)


def terms_of(ranks: int, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Random terms, strided, with zeros of both signs."""
    terms = torch.randn(ranks, rows, hidden + 8, device=device).to(dtype)[:, :, :hidden]
    terms[0, 0, 0] = terms[:, -1, -1] = -0.0
    return list(terms)


def in_phases(phases: int, call: Callable[[int, tuple[int, int]], object], ranks: int) -> list[object]:
    """Have each rank do a phase before any of them begins the next; return what the last one gives."""
    given: list[object] = []
    for phase in range(phases):
        given = [call(rank, (phase, phase + 1)) for rank in range(ranks)]
    return given


def one_shot_of(terms: list[Tensor], buffers: list[SymmetricBuffers]) -> list[object]:
    return in_phases(2, lambda rank, phases: one_shot(terms[rank], buffers[rank], phases), len(terms))


def two_shot_of(terms: list[Tensor], buffers: list[SymmetricBuffers]) -> list[object]:
    flat = [term.contiguous() for term in terms]
    return in_phases(3, lambda rank, phases: two_shot(flat[rank], buffers[rank], phases), len(terms))


def test_every_rank_gets_the_sum_whatever_came_before(device, dtype):
    """Calls of other sizes, kinds and numbers of programs go before, so that no number of theirs may stay."""
    for ranks in (2, 3):
        buffers = ranks_of(ranks, 4 * ranks * TILE, device)
        for rows, hidden, way in [
            (5, 96, one_shot_of),
            (1, 64, one_shot_of),
            (7, 64, two_shot_of),
            (1, 8, two_shot_of),
            (4, 64, one_shot_of),
        ]:
            terms = terms_of(ranks, rows, hidden, dtype, device)
            expected = all_reduce_reference(terms)
            for total in way(terms, buffers):
                assert torch.equal(total, expected), (ranks, rows, hidden, way)


def test_two_shot_sums_several_tiles_of_each_slice(device, dtype):
    buffers = ranks_of(2, 12 * TILE * 2, device, programs=2)
    terms = terms_of(2, 5, TILE + 8, dtype, device)
    for total in two_shot_of(terms, buffers):
        assert torch.equal(total, all_reduce_reference(terms))


def test_the_fused_sum_is_the_sum_then_the_norm(device, dtype):
    buffers = ranks_of(2, 2 * 5 * 96 * 2, device)
    for rows in (5, 2):
        terms = terms_of(2, rows, 96, dtype, device)
        residual = torch.randn(rows, 96, device=device).to(dtype)
        weight = torch.randn(96, device=device).to(dtype)
        norm, total = all_reduce_norm_reference(terms, residual.clone(), weight, 1e-6)
        unfused = [add_rms_norm(sums, residual.clone(), weight, 1e-6) for sums in one_shot_of(terms, buffers)]
        own = [residual.clone() for _ in terms]

        def fused(rank: int, phases: tuple[int, int], terms=terms, own=own, weight=weight) -> object:
            return one_shot_norm(terms[rank], own[rank], weight, 1e-6, buffers[rank], phases)

        for rank, (y, updated) in enumerate(in_phases(2, fused, 2)):
            assert updated is own[rank]
            assert torch.equal(updated, total)
            assert torch.equal(unfused[rank][1], total)
            tolerance = max(1e-5, 4 * torch.finfo(dtype).eps)
            torch.testing.assert_close(y, norm, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(y, unfused[rank][0], rtol=tolerance, atol=tolerance)


def test_parts_of_a_term_are_added_up_and_rounded_before_they_are_sent(device):
    buffers = ranks_of(2, 2 * 5 * 96, device)
    parts = torch.randn(2, 3, 5, 96, device=device)
    residual, weight = torch.randn(5, 96, device=device).half(), torch.randn(96, device=device).half()
    own = [residual.clone(), residual.clone()]
    _, total = all_reduce_norm_reference([each.sum(0).half() for each in parts], residual, weight, 1e-6)

    def fused(rank: int, phases: tuple[int, int]) -> object:
        return one_shot_norm(parts[rank], own[rank], weight, 1e-6, buffers[rank], phases)

    for y, updated in in_phases(2, fused, 2):
        torch.testing.assert_close(updated, total, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(y, rms_norm_reference(updated, weight, 1e-6), rtol=4e-3, atol=4e-3)
    assert torch.equal(own[0], own[1])
    with pytest.raises(ValueError, match="contiguous fp32"):
        one_shot_norm(parts[0].half(), own[0], weight, 1e-6, buffers[0])


def test_a_call_leaves_empty_what_the_one_before_it_used(device):
    buffers = ranks_of(2, 1024, device)
    for rows in (4, 1, 2, 3):
        one_shot_of(terms_of(2, rows, 64, torch.float16, device), buffers)
    for rank in buffers:
        assert (rank.own != EMPTY).sum(1).tolist() == [2 * 3 * 64, 0, 0], "the last used the first again"


def test_what_never_arrives_is_nan_in_its_rows_only(device):
    first, _ = buffers_on_one_device(2, 1024, device, programs=2, most_polls=3)
    total = one_shot(torch.ones(2, 64, device=device), first)
    assert total.isnan().all()


def test_what_does_not_fit_is_refused(device):
    buffers = ranks_of(2, 256, device)
    with pytest.raises(ValueError, match="takes 512 units of a buffer, which has 256"):
        one_shot(torch.zeros(2, 64, device=device), buffers[0])
    with pytest.raises(ValueError, match="contiguous"):
        two_shot(torch.zeros(1, 2, device=device).expand(2, 2), ranks_of(2, 16 * TILE, device)[0])
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        one_shot(torch.zeros(1, 8, device=device, dtype=torch.float64), buffers[0])
    with pytest.raises(ValueError, match="1 to 128 programs"):
        ranks_of(2, 256, device, programs=0)
    with pytest.raises(ValueError, match="multiple of 8 units"):
        make_buffers(0, torch.zeros(3, 12, dtype=torch.int16), [0])


def test_ways_are_chosen_by_bytes(device):
    (buffers, _) = ranks_of(2, 4 * 2 * TILE, device)
    kernels = PeerKernels(buffers, Limits(one_shot=1024, fused=512, two_shot=4096))

    def takes(rows: int) -> bool:
        return kernels.supports(torch.empty(rows, 64, dtype=torch.bfloat16, device=device))

    assert [takes(rows) for rows in (1, 8, 32, 33)] == [True, True, True, False]
    assert not kernels.supports(torch.empty(1, 64, dtype=torch.float64, device=device))
    kernels.close()
    with pytest.raises(RuntimeError, match="given back"):
        takes(1)


COMPILED = """
import sys
from quire.kernels.parallel import all_reduce
from triton.compiler import ASTSource
sys.path.insert(0, "tests/kernels")
from compiled import Case, compiled_for
from early_reads import read_early
for dtype in ("bf16", "fp32"):
    for ranks in (2, 8):
        pointers = {name: f"*{dtype}" for name in ("x_ptr", "y_ptr", "residual_ptr", "weight_ptr")}
        pointers |= {"own_ptr": "*i16", "addresses_ptr": "*i64", "state_ptr": "*i32", "eps": "fp32"}
        aligned = [name for name in pointers if name != "eps"] + ["x_stride", "residual_stride"]
        every = {"RANKS": ranks, "BEGIN": 0, "END": 9, "DEPENDENT": True}
        for kernel, constants, warps in (
            (all_reduce._one_shot_kernel, {"HIDDEN": 4096, "BLOCK": 4096, "PARTS": 0}, 16),
            (all_reduce._two_shot_kernel, {"TILE": all_reduce.TILE}, 8),
        ):
            case = Case(ASTSource, kernel, constants | every, pointers, aligned, {"num_warps": warps})
            built = compiled_for(case, 90)
            ptx = built.asm["ptx"]
            vectors = ptx.count("st.global.v4.b32"), ptx.count("ld.volatile.global.v4.b32")
            early = sorted(read_early(ptx, case))
            vectors += (ptx.count("global.b16") + ptx.count("global.v2"),)
            print(kernel.fn.__name__, dtype, ranks, *vectors, ",".join(early) or "nothing")
"""


def test_compiled_kernels_send_and_look_in_whole_vectors(tmp_path):
    """As they are on sm_90: 16 bytes a store to a peer and a look, and early reads as declared."""
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED)
    for line in run_apart(script).splitlines():
        name, _, ranks, stores, looks, narrow, early = line.split()
        assert int(stores) >= int(ranks) and int(looks) >= int(ranks), line
        assert narrow == "0", line
        assert early == ("weight_ptr" if name == "_one_shot_kernel" else "nothing"), line


if HAS_GPU:  # ranks as streams of one GPU, which wait for each other
    SIZES = [(1, 1024), (1, 8192), (7, 4096), (64, 4096), (128, 8192), (513, 5120), (4096, 1024)]
    Steps = Callable[[int, SymmetricBuffers], Tensor]

    class Streams:
        """Ranks of one GPU, a stream and a graph for each. All their programs must fit at once.

        So an ordinary kernel, like a clone, has to stand behind each sum: sums launch each other early, and a
        chain of them that waits for another rank would leave that one no room.
        """

        def __init__(self, ranks: int, units: int) -> None:
            device, programs = torch.device("cuda"), 96 // ranks
            self.buffers = ranks_of(ranks, units, device, programs)
            self.streams = [torch.cuda.Stream() for _ in range(ranks)]
            # A look at these finds nothing and ends: so kernels are loaded, which could hang while one waits.
            self.idle = buffers_on_one_device(ranks, units, device, programs=programs, most_polls=1)

        def graphs(self, steps: Steps) -> tuple[list[torch.cuda.CUDAGraph], list[Tensor]]:
            steps(0, self.idle[0])
            torch.cuda.synchronize()
            made, results = [], []
            for rank, stream in enumerate(self.streams):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    results.append(steps(rank, self.buffers[rank]))
                made.append(graph)
            return made, results

        def replay(self, graphs: list[torch.cuda.CUDAGraph]) -> None:
            for graph, stream in zip(graphs, self.streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("ranks", [2, 3, 4, 8])
    def test_ranks_as_streams(ranks, dtype):
        wide = 2 if dtype == torch.float32 else 1
        most = max(rows * hidden for rows, hidden in SIZES)
        streams = Streams(ranks, wide * ranks * (2 * most + 2 * TILE))
        for rows, hidden in SIZES:
            terms = list(torch.randn(ranks, rows, hidden, device="cuda").to(dtype))
            residual = torch.randn(rows, hidden, device="cuda").to(dtype)
            weight = torch.randn(hidden, device="cuda").to(dtype)
            expected = all_reduce_reference(terms)
            norm, total = all_reduce_norm_reference(terms, residual.clone(), weight, 1e-5)

            def steps(rank, buffers, terms=terms, residual=residual, weight=weight):
                x = terms[rank]
                sums = [one_shot(x, buffers).clone(), two_shot(x, buffers).clone()]
                return torch.stack([*sums, *one_shot_norm(x, residual.clone(), weight, 1e-5, buffers)])

            graphs, results = streams.graphs(steps)
            for _ in range(3):
                streams.replay(graphs)
            torch.cuda.synchronize()
            tolerance = max(1e-5, 4 * torch.finfo(dtype).eps)
            for rank, (one, two, normed, updated) in enumerate(results):
                where = f"{rows} x {hidden}, rank {rank}"
                assert torch.equal(one, expected), f"one-shot, {where}"
                assert torch.equal(two, expected), f"two-shot, {where}"
                assert torch.equal(updated, total), f"residual, {where}"
                torch.testing.assert_close(normed, norm, rtol=tolerance, atol=tolerance, msg=where)
                assert torch.equal(normed, results[0][2]), f"ranks differ, {where}"

    @pytest.mark.parametrize("ranks", [2, 4, 8])
    def test_a_thousand_replays_of_mixed_sizes_give_the_same(ranks):
        streams = Streams(ranks, ranks * 64 * 4096 + 4 * ranks * TILE)
        sizes = [(1, 4096), (64, 4096), (3, 1024), (17, 2048), (1, 8192)]
        terms = [list(torch.randn(ranks, *size, device="cuda").bfloat16()) for size in sizes]
        expected = torch.cat([all_reduce_reference(each).flatten() for each in terms])
        wrong = torch.zeros(ranks, dtype=torch.int64, device="cuda")

        def steps(rank, buffers):
            ways = (one_shot, two_shot)
            found = [ways[i % 2](each[rank], buffers).clone() for i, each in enumerate(terms)]
            wrong[rank] += (torch.cat([result.flatten() for result in found]) != expected).sum()
            return found[0]

        graphs, _ = streams.graphs(steps)
        wrong.zero_()
        torch.cuda.synchronize()
        for _ in range(1000):
            streams.replay(graphs)
        torch.cuda.synchronize()
        assert wrong.tolist() == [0] * ranks
