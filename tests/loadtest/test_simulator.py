"""The simulator: all systems give the same tokens, no memory is given twice, and time is what steps cost."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.arrays import empty_int32
from quire.engine.schedule.plan import Runner, StepHandle, StepPlan, StepResult
from quire.loadtest.client.arrivals import arrival_times
from quire.loadtest.client.lengths import Fixed, LogNormal, Shape
from quire.loadtest.client.sessions import Recipe, Session, Turn, draw_sessions, due_at
from quire.loadtest.simulator.geometry import A100_40GB, OPT_13B, OPT_66B, SERVERS, Ranks, kv_slots
from quire.loadtest.simulator.recording import RecordingRunner
from quire.loadtest.simulator.serving import Run
from quire.loadtest.simulator.simulation import simulate
from quire.loadtest.simulator.step_costs import (
    StepCosts,
    StepRecord,
    fit,
    read_records,
    roofline,
    step_features,
    write_records,
)
from quire.loadtest.simulator.systems import NAMES, Kind, System

COSTS = roofline(OPT_13B, A100_40GB, block_size=4)


@st.composite
def workloads(draw: st.DrawFn) -> list[Session]:
    rng = random.Random(draw(st.integers(0, 2**32)))
    sessions = []
    for _ in range(draw(st.integers(1, 12))):
        width = rng.choice([0, 0, 2, 3])
        turn = Turn(
            prompt=[rng.randrange(100) for _ in range(rng.randint(1, 20))],
            output_len=rng.randint(1, 20),
            n=1 if width else rng.choice([1, 1, 3]),
            beam_width=width,
        )
        sessions.append(Session(turns=[turn], at=rng.uniform(0, 0.5)))
    return sessions


@settings(deadline=None, max_examples=25)
@given(workloads(), st.booleans(), st.integers(192, 400))
def test_all_systems_give_the_same_tokens(sessions: list[Session], caching: bool, slots: int) -> None:
    tokens = []
    for kind in [kind for kind in NAMES if kind != "padded"]:  # padding moves tokens to other positions
        system = System(kind, slots, 40, block_size=4, max_num_seqs=8, prefix_caching=caching)
        run = simulate(sessions, system, COSTS, keep_tokens=True)
        check_run(run, sessions, system)
        tokens.append(run.tokens)
    assert all(each == tokens[0] for each in tokens[1:])


def check_run(run: Run, sessions: list[Session], system: System) -> None:
    assert [record.session for record in run.records] == list(range(len(sessions)))
    for record, session in zip(run.records, sessions, strict=True):
        (turn,) = session.turns
        assert record.output_tokens == turn.output_len * turn.n
        assert session.at == record.due < record.first <= record.last <= run.seconds
    for use in run.uses:
        assert use.tokens + use.reserved + use.internal + use.others == system.slots
        assert min(use.tokens, use.reserved, use.internal, use.others) >= 0, f"over-committed: {use}"
    busy = sum(use.seconds for use in run.uses)
    assert busy <= run.seconds + 1e-9


def steady(count: int, rate: float, shape: Shape) -> list[Session]:
    sessions = draw_sessions(Recipe(shape, count, seed=5))
    return due_at(sessions, arrival_times(count, rate, 1.0, seed=6))


def test_reservation_holds_less_at_once_and_waits_longer() -> None:
    """The order of the paper's Fig. 2, 12 and 13, in miniature."""
    shape = Shape(LogNormal(40, 1.0, 4, 250), LogNormal(80, 0.9, 4, 250))
    sessions = steady(80, 40.0, shape)
    runs = {kind: simulate(sessions, System(kind, 4096, 512), COSTS) for kind in NAMES}
    order: list[Kind] = ["padded", "request-level", "max", "pow2", "oracle", "paged"]
    for worse, better in pairwise(order[2:]):
        assert runs[worse].mean_requests() < runs[better].mean_requests()
        assert runs[worse].shares_under_load()["tokens"] < runs[better].shares_under_load()["tokens"]
    for worse, better in pairwise(order):
        assert runs[worse].normalized_latency() > runs[better].normalized_latency()
    assert runs["paged"].shares_under_load()["tokens"] > 90
    assert max(use.requests for use in runs["max"].uses) == 8  # 4096 slots, 512 for each
    assert max(use.requests for use in runs["request-level"].uses) == 8


def test_answers_of_a_batch_go_out_together() -> None:
    turns = [Turn(prompt=[1] * 4, output_len=length) for length in (2, 9, 5, 3)]
    sessions = [Session(turns=[turn], at=0.0) for turn in turns]
    run = simulate(sessions, System("request-level", 3 * 16, 16, block_size=4), COSTS)
    assert len({record.last for record in run.records[:3]}) == 1
    assert run.records[3].first > run.records[0].last


def test_a_batch_is_padded_to_its_longest_prompt_and_output() -> None:
    """Every row is computed as long as the longest, and each request keeps the tokens that it asked for."""
    costs = StepCosts(seconds=[0.0, 1.0, 1e-3, 0.0, 0.0, 0.0, 0.0], source="a token of a prompt, a decode")
    turns = [Turn(prompt=[7] * length, output_len=output) for length, output in ((2, 9), (6, 3), (4, 2))]
    sessions = [Session(turns=[turn], at=0.0) for turn in turns]
    kinds: tuple[Kind, ...] = ("padded", "request-level")
    padded, plain = (simulate(sessions, System(kind, 3 * 16, 16, block_size=4), costs) for kind in kinds)
    assert [record.output_tokens for record in padded.records] == [9, 3, 2]
    assert padded.seconds == pytest.approx(3 * 6 * 1.0 + 3 * (9 - 1) * 1e-3)
    assert plain.seconds == pytest.approx((2 + 6 + 4) * 1.0 + (8 + 2 + 1) * 1e-3)
    assert sum(count for _, count in padded.decoded) <= 9 + 3 + 2, "padding is no answer"
    for use in padded.uses:
        assert min(use.tokens, use.reserved, use.internal, use.others) >= 0


def test_a_padded_sequence_stays_within_what_the_model_takes() -> None:
    turns = [Turn(prompt=[7] * length, output_len=output) for length, output in ((12, 4), (2, 14))]
    sessions = [Session(turns=[turn], at=0.0) for turn in turns]
    run = simulate(sessions, System("padded", 2 * 16, 16, block_size=4), COSTS)
    assert [record.output_tokens for record in run.records] == [4, 14]


def test_a_request_that_reserves_too_much_is_refused() -> None:
    sessions = [Session(turns=[Turn(prompt=[1] * 4, output_len=4, n=3)])]
    with pytest.raises(ValueError, match="reserves 3 × 16"):
        simulate(sessions, System("max", 40, 16), COSTS)


def test_time_is_what_steps_cost() -> None:
    """One request alone: a prefill, then decodes over a growing context."""
    costs = StepCosts(seconds=[1.0, 0.1, 0.01, 0.001, 0.0, 0.0, 0.0], source="made up")
    sessions = [Session(turns=[Turn(prompt=[1] * 10, output_len=4)], at=5.0)]
    run = simulate(sessions, System("paged", 64, 64, block_size=4), costs)
    (record,) = run.records
    assert record.ttft == pytest.approx(1 + 10 * 0.1)
    decodes = sum(1 + 0.01 + 0.001 * context for context in (11, 12, 13))
    assert record.latency == pytest.approx(2.0 + decodes)


def test_what_is_left_when_time_is_up_is_aborted() -> None:
    costs = StepCosts(seconds=[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], source="made up")
    turns = [Turn(prompt=[1] * 4, output_len=length) for length in (2, 3, 50)]
    sessions = [Session(turns=[turn]) for turn in turns]
    run = simulate([*sessions, Session(turns=turns[:1], at=99.0)], System("paged", 64, 64), costs, until=10.0)
    assert [record.session for record in run.records] == [0, 1]
    assert run.unfinished == 2
    assert 10.0 <= run.seconds < 12.0
    assert run.decode_rate(since=5.0) == pytest.approx(1.0, rel=0.3), "one row, a step a second"


def test_sharing_is_seen_in_references_and_blocks() -> None:
    shape = Shape(Fixed(64), Fixed(8))
    recipe = Recipe(shape, 4, n=4)
    saved = simulate(draw_sessions(recipe), System("paged", 4096, 512, block_size=16), COSTS).blocks_saved()
    # Four samples of 64 + up to 8 tokens: 4 × 5 references, of which 4 blocks are shared by all four.
    assert 50 < saved < 100 * (1 - 8 / 20) + 5
    alone = simulate(draw_sessions(Recipe(shape, 4)), System("paged", 4096, 512, block_size=16), COSTS)
    assert alone.blocks_saved() == 0


def test_the_geometry_is_the_papers() -> None:
    """Section 3 and table 1: 800 KB a token for OPT-13B, 26 GB of weights, 15.7K slots in 12 GB."""
    assert OPT_13B.kv_bytes_per_token == 800 * 1024
    assert OPT_13B.weight_bytes / 1e9 == pytest.approx(26, rel=0.02)
    assert kv_slots(OPT_13B) // 100 == 157
    papers = {"OPT-13B": (26, 15_700), "OPT-66B": (132, 9_700), "OPT-175B": (346, 60_100)}
    assert [server.ranks.size for server in SERVERS] == [1, 4, 8]
    for server in SERVERS:
        gigabytes, slots = papers[server.model.name]
        assert server.model.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.02)
        assert server.slots == pytest.approx(slots, rel=0.02)


def test_ranks_divide_a_step_and_add_their_sums() -> None:
    """Per layer two sums, of a hidden state a token; each rank sends 2 (n - 1) / n of it."""
    alone = roofline(OPT_66B, A100_40GB, 16)
    free = roofline(OPT_66B, A100_40GB, 16, ranks=Ranks(4, bandwidth=1e30))
    assert free.seconds[:-1] == pytest.approx([cost / 4 for cost in alone.seconds[:-1]])
    four = roofline(OPT_66B, A100_40GB, 16, ranks=Ranks(4, bandwidth=1e11, sum_seconds=1e-5))
    step, *tokens = (one - other for one, other in zip(four.seconds, free.seconds, strict=True))
    assert step == pytest.approx(128 * 1e-5)
    assert tokens[:2] == pytest.approx([128 * 1.5 * 9216 * 2 / 1e11] * 2)
    assert tokens[2:] == pytest.approx([0] * 4)
    assert roofline(OPT_66B, A100_40GB, 16, ranks=Ranks()) == alone


@given(st.integers(0, 2**32), st.floats(0, 0.2))
def test_a_fit_finds_the_costs_that_made_the_records(seed: int, noise: float) -> None:
    rng = np.random.default_rng(seed)
    true = np.array([5e-3, 1e-5, 2e-5, 3e-8, 0.0, 0.0, 0.0])
    features = rng.uniform(0, [1, 2000, 256, 1e5, 1, 0, 0], (400, 7))
    features[:, 0] = 1
    measured = features @ true * rng.uniform(1 - noise, 1 + noise, 400)
    costs = fit([StepRecord(f.tolist(), s) for f, s in zip(features, measured, strict=True)], "made up")
    assert min(costs.seconds) >= 0
    assert costs.error is not None and costs.error <= noise / 2 + 0.05
    assert costs.total_error is not None and costs.total_error <= 0.05
    assert np.abs(features @ costs.seconds / (features @ true) - 1).mean() < 0.25 * noise + 1e-6


def test_records_come_back_from_their_file(tmp_path: Path) -> None:
    records = [StepRecord([1.0, 2.0], 0.5), StepRecord([1.0, 3.0], 0.25)]
    write_records(tmp_path / "steps.jsonl", records)
    assert read_records(tmp_path / "steps.jsonl") == records
    (tmp_path / "steps.jsonl").write_text("[]")
    with pytest.raises(ValueError, match=r"steps\.jsonl"):
        read_records(tmp_path / "steps.jsonl")
    with pytest.raises(ValueError, match="at least 4"):
        fit(records, "")


class Device(Runner, StepHandle):
    """Takes the next of the given times at each launch and each wait."""

    def __init__(self) -> None:
        self.now = 0.0

    def launch(self, plan: StepPlan) -> StepHandle:
        return self

    def wait(self) -> StepResult:
        return StepResult(empty_int32(), empty_int32(), None, ())


def make_plan(prefills: list[tuple[int, int]], decodes: list[int]) -> StepPlan:
    """(query, context) of each prefill, and the context of each decode."""
    return StepPlan(
        rows=np.arange(len(decodes) + len(prefills), dtype=np.int32),
        num_decodes=len(decodes),
        query_lens=np.array([1] * len(decodes) + [query for query, _ in prefills], np.int32),
        context_lens=np.array(decodes + [context for _, context in prefills], np.int32),
        prefill_tokens=np.zeros(sum(query for query, _ in prefills), np.int32),
        copies=np.zeros((2, 2), np.int32),
        swap_out=np.zeros((3, 2), np.int32),
        swap_in=np.zeros((1, 2), np.int32),
    )


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), max_size=4),
    st.lists(st.integers(1, 50), max_size=4),
)
def test_features_are_counted_pair_by_pair(prefills: list[tuple[int, int]], decodes: list[int]) -> None:
    prefills = [(query, before + query) for query, before in prefills]
    features = step_features(make_plan(prefills, decodes))
    pairs = sum(position + 1 for query, end in prefills for position in range(end - query, end))
    queries = sum(query for query, _ in prefills)
    assert features.tolist() == [1, queries, len(decodes), sum(decodes), pairs, 2, 4]


def test_recorded_steps_do_not_overlap() -> None:
    device = Device()
    runner = RecordingRunner(device, clock=lambda: device.now)
    plan = make_plan([], [5])
    first = runner.launch(plan)
    device.now = 1.0
    second = runner.launch(plan)  # while the first is under way
    device.now = 3.0
    first.wait()
    device.now = 7.0
    second.wait()
    device.now = 10.0
    third = runner.launch(plan)  # after a pause
    device.now = 11.0
    third.wait()
    assert [record.seconds for record in runner.records] == [3.0, 4.0, 1.0]
