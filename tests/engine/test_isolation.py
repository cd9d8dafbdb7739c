"""A request that makes steps raise ends alone: the others' tokens are what they are without it."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from quire.engine.arrays import as_int32
from quire.engine.config import EngineInfo
from quire.engine.core import EngineCore
from quire.engine.logs import JsonFormatter
from quire.engine.messages import Output, Request, SamplingParams
from quire.engine.pinned_prefixes import pin_prefixes
from quire.engine.schedule.bisection import MAX_FRUITLESS
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.schedule.plan import StepPlan
from quire.engine.sequences.sequence import SequenceGroup
from quire.loadtest.offline import bench
from quire.loadtest.offline.roofline import Ceilings
from quire.loadtest.workloads import Work
from quire.offline_engine import OfflineEngine
from quire.service.demo import MODEL_FOLDER
from quire.service.text.tokenizer import Tokenizer
from tests.engine.oracle import VOCAB, OracleHandle, OracleRunner, expected_beams, expected_tokens
from tests.engine.poison import KINDS, POISON, Poisoned, PoisonedRunner, Trouble, poisoned
from tests.engine.simulation import COMMON, EOS, LONGEST_DELAY, check_outputs, make_core, random_request

SEEDS = 60
CHUNKS = 4
MOST_STEPS = 3_000
ABORTS = 150  # the first steps, in which clients leave

Got = dict[tuple[int, int], list[Output]]


def poisoned_core(rng: random.Random, num_blocks: int, block_size: int, rows: int, **how: Any) -> EngineCore:
    core = make_core(num_blocks, block_size, rows, how.pop("budget"), **how)
    core.runner = PoisonedRunner(num_blocks, block_size, rows, how.get("num_host_blocks", 0), rng)
    return core


def common(a: list[int], b: list[int]) -> int:
    """Return the number of tokens that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def found(core: EngineCore, request: Request, tokens: list[int]) -> int:
    """Return how many of `tokens`, of `request`, are in the prefix cache."""
    known = Request(request.id, tokens, request.params, cache_salt=request.cache_salt)
    (sequence, *_) = SequenceGroup(known, as_int32(known.prompt), 0, EOS).sequences
    return len(core.scheduler.blocks.match(sequence)) * core.scheduler.blocks.block_size


def check_culprit(core: EngineCore, culprit: Request, requests: list[Request], got: Got) -> None:
    """Check that `culprit`, which has just ended, gave right tokens; only what is others' too is found."""
    for index in range(culprit.params.n):
        tokens = [token for output in got[culprit.id, index] for token in output.tokens]
        if not culprit.params.beam_width:
            assert tokens == expected_tokens(culprit, index, EOS)[: len(tokens)]
        mine = culprit.prompt + tokens
        theirs = [COMMON[:8]]
        for other in requests:
            if other is not culprit and other.cache_salt == culprit.cache_salt:
                width = 1 if other.params.beam_width else other.params.n
                generated = [
                    [t for output in got.get((other.id, i), []) for t in output.tokens] for i in range(width)
                ]
                if other.params.beam_width:
                    generated = expected_beams(other, EOS)
                theirs += [other.prompt + each for each in generated]
        if not any(other.params.beam_width for other in requests):
            assert found(core, culprit, mine) <= max(common(mine, each) for each in theirs)


def check_survivor(request: Request) -> None:
    """It was never computed where it is poisoned: the last token of all is not."""
    position, kind = divmod((request.params.seed or 0) - POISON, len(KINDS))
    if (request.params.seed or 0) >= POISON and KINDS[kind] == "token" and not request.params.beam_width:
        for index in range(request.params.n):
            length = len(request.prompt) + len(expected_tokens(request, index, EOS))
            assert position >= length - 1, "a step that raised went unnoticed"


def simulate(seed: int) -> Counter[str]:
    """Random requests, some of them poisoned, from their arrival to their end; how often each thing came."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8])
    rows = rng.randint(1, 8)
    num_blocks = max(4, rng.randint(16, 60) // block_size)
    host = rng.choice([0, num_blocks // 3, num_blocks])
    core = poisoned_core(
        rng,
        num_blocks,
        block_size,
        rows,
        budget=rng.randint(rows, 24),
        caching=rng.random() < 0.7,
        num_host_blocks=host,
        mode=rng.choice(["swap", "auto", "recompute"]),
        pushed=random.Random(seed) if seed % 4 == 1 else None,
    )
    scheduler, runner = core.scheduler, core.runner
    assert isinstance(runner, PoisonedRunner)
    if seed % 2:
        runner.delay = lambda: rng.randint(0, LONGEST_DELAY)
    pins = scheduler.blocks.has_prefix_cache and seed % 5 == 3 and num_blocks * block_size >= 16
    if pins:
        pin_prefixes(core, [COMMON[:8]])
    hiccups = [rng.random() for _ in range(rng.choice([0, MAX_FRUITLESS - 1]))]

    def hiccup(plan: StepPlan) -> Exception | None:
        likely = 0.5 if len(plan.swap_out) else 0.02
        if hiccups and not core.bisection.in_progress and rng.random() < likely:
            hiccups.pop()
            return Poisoned("now and then")
        return None

    runner.trouble = hiccup
    coming = [random_request(rng, i, rng.choice([4, 12, 24]), rows) for i in range(12)]
    for i in rng.sample(range(12), rng.choice([1, 2, 3])):
        length = len(coming[i].prompt) + coming[i].params.max_tokens
        coming[i] = poisoned(coming[i], rng.choice(KINDS), rng.randrange(length))
    coming.reverse()
    accepted: list[Request] = []
    aborted: set[int] = set()
    failed: set[int] = set()
    got: Got = {}
    done: Counter[str] = Counter()
    steps = 0
    while coming or core.has_work:
        while coming and (rng.random() < 0.4 or not core.has_work):
            request = coming.pop()
            if not core.handle(request):
                accepted.append(request)
        if accepted and steps < ABORTS and rng.random() < 0.02:
            victim = rng.choice(accepted).id
            aborted.add(victim)
            core.abort(victim)
        ends = set()
        for output in core.step():
            assert output.request_id >= 0 and output.request_id not in aborted
            got.setdefault((output.request_id, output.index), []).append(output)
            if output.finish_reason == "error":
                assert output.error == "computing it raised Poisoned"
                ends.add(output.request_id)
        for request in accepted:
            if request.id in ends:
                check_culprit(core, request, accepted, got)
        failed |= ends
        check_scheduler(scheduler.state)
        steps += 1
        assert steps < MOST_STEPS, "it goes on for ever"
    core.step()  # sees that nobody is left to be tried, if the last ones were aborted
    run(core)
    assert scheduler.state.in_turn and not core.bisection.in_progress
    assert scheduler.blocks.pool.num_available == num_blocks - scheduler.blocks.pool.num_pinned
    if scheduler.blocks.host is not None:
        assert scheduler.blocks.host.pool.num_available == host
    for request in accepted:
        if request.id in failed:
            assert (request.params.seed or 0) >= POISON, "an innocent request was failed"
            for index in range(request.params.n):
                ends_of_one = [o.finish_reason for o in got[request.id, index] if o.finish_reason]
                assert len(ends_of_one) == 1 and got[request.id, index][-1].finish_reason
            done["blamed"] += 1
            params = request.params
            done["beams" if params.beam_width > 1 else "samples" if params.n > 1 else "one"] += 1
        elif request.id not in aborted:
            check_outputs(request, got, set(), done)
            done["poisoned, but lived"] += (request.params.seed or 0) >= POISON
            check_survivor(request)
            done["beside"] += bool(failed)
    done.update(runner.raised)
    done["hiccups"] += len(hiccups) > 0
    return done


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_only_the_culprit_ends(chunk: int) -> None:
    done: Counter[str] = Counter()
    for seed in range(chunk * SEEDS, (chunk + 1) * SEEDS):
        try:
            done += simulate(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    for thing in ("one", "beside", "prefill", "decode", "transfer", "searches", "constrained"):
        assert done[thing] > 10, thing
    assert done["beams"] and done["samples"]


def test_samples_that_were_not_drawn_share_their_prompt_again() -> None:
    """The step that would have drawn the first ones raised: no prompt of each one's own would fit."""
    core = poisoned_core(random.Random(0), 4, 4, 4, budget=16)
    assert isinstance(core.runner, PoisonedRunner)
    times = iter([Poisoned("once")])
    core.runner.trouble = lambda plan: next(times, None)
    request = Request(0, list(range(5, 17)), SamplingParams(n=3, max_tokens=1, ignore_eos=True))
    core.add(request)
    got = run(core)
    assert all(tokens_of(got[0, index]) == expected_tokens(request, index) for index in range(3))


def plain(request_id: int, max_tokens: int = 40, n: int = 1) -> Request:
    params = SamplingParams(n=n, temperature=1.0, max_tokens=max_tokens, ignore_eos=True, seed=request_id)
    return Request(request_id, [request_id % VOCAB] * 6, params)


def roomy(requests: list[Request], trouble: Trouble | None = None) -> EngineCore:
    core = poisoned_core(random.Random(0), 200, 4, 16, budget=64)
    if trouble is not None:
        assert isinstance(core.runner, PoisonedRunner)
        core.runner.trouble = trouble
    for request in requests:
        core.add(request)
    return core


def run(core: EngineCore) -> Got:
    got: Got = {}
    for _ in range(MOST_STEPS):
        if not core.has_work:
            break
        for output in core.step():
            got.setdefault((output.request_id, output.index), []).append(output)
        check_scheduler(core.scheduler.state)
    assert not core.has_work
    return got


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def test_it_is_logged_with_who_and_what(caplog: pytest.LogCaptureFixture) -> None:
    requests = [poisoned(plain(i), "token", 20) if i == 5 else plain(i, n=2) for i in range(7)]
    got = run(roomy(requests))
    assert [key for key, outputs in got.items() if outputs[-1].finish_reason == "error"] == [(5, 0)]
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    written = json.loads(JsonFormatter().format(line))
    assert (written["request"], written["error"]) == (5, "Poisoned")


def test_who_is_cleared_has_not_to_wait_until_it_ends() -> None:
    """Trials take a few steps for each halving, however long the requests are."""
    requests = [poisoned(plain(i), "token", 12) if i == 5 else plain(i, max_tokens=150) for i in range(8)]
    core = roomy(requests)
    steps = 0
    while core.has_work and not any(output.finish_reason == "error" for output in core.step()):
        steps += 1
    assert steps < 60 and len(core.scheduler.state.waiting) == 7


def test_steps_take_less_memory_until_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody ends by it, and when it has gone well for a while all is as before."""
    monkeypatch.setattr("quire.engine.schedule.bisection.CALM_STEPS", 30)
    sizes: list[int] = []  # rows of each step
    raised: list[int] = []  # of those that did not fit

    def trouble(plan: StepPlan) -> Exception | None:
        sizes.append(len(plan.rows))
        if len(sizes) < 100 and (plan.num_tokens > 20 or len(plan.rows) > 5):
            raised.append(len(plan.rows))
            return MemoryError()
        return None

    requests = [plain(i) for i in range(16)]
    core = roomy(requests, trouble)
    got = run(core)
    assert all(tokens_of(got[each.id, 0]) == expected_tokens(each, 0) for each in requests)
    assert core.scheduler.max_num_batched_tokens == 64
    assert max(sizes[-50:]) > 5 and len(raised) < 10


def test_who_needs_more_memory_than_there_is_ends_alone() -> None:
    def trouble(plan: StepPlan) -> Exception | None:
        assert isinstance(core.runner, PoisonedRunner)
        seeds = [core.runner.state[row][0].seed for row in plan.rows.tolist()]
        return MemoryError() if 3 in seeds else None

    requests = [plain(i) for i in range(9)]
    core = roomy(requests, trouble)
    got = run(core)
    assert got.pop((3, 0))[-1].error == "the device has too little memory to compute it"
    assert all(tokens_of(outputs) == expected_tokens(requests[i], 0) for (i, _), outputs in got.items())
    assert core.scheduler.max_num_batched_tokens == 64


@pytest.mark.parametrize("fewest_rows", [1, 2])
def test_what_raises_for_nobody_ends_all(fewest_rows: int) -> None:
    """Steps that raise whatever they compute, or whenever they compute two rows, are no request's fault."""
    launched: list[int] = []

    def trouble(plan: StepPlan) -> Exception | None:
        launched.append(len(plan.rows))
        return Poisoned("always") if len(plan.rows) >= fewest_rows else None

    core = roomy([plain(i, max_tokens=500) for i in range(6)], trouble)
    with pytest.raises(Poisoned):
        while True:
            assert not any(output.finish_reason for output in core.step())
    assert len(launched) < (4 if fewest_rows == 1 else 40 * MAX_FRUITLESS)


@pytest.mark.parametrize("found_out", [False, True])
def test_poison_whose_clients_leave_at_once_does_not_end_the_engine(found_out: bool) -> None:
    """They leave before it is known whose fault it is, or before anything has raised; again and again."""
    others = [plain(i, max_tokens=200) for i in range(3)]
    core = roomy(others)
    assert isinstance(core.runner, PoisonedRunner)
    got: Got = {}

    def step() -> None:
        for output in core.step():
            got.setdefault((output.request_id, output.index), []).append(output)
        check_scheduler(core.scheduler.state)

    for i in range(100, 100 + 3 * MAX_FRUITLESS):
        core.add(poisoned(plain(i), "token", 0))
        while not (core.bisection.in_progress if found_out else core.runner.failed):
            step()
        core.abort(i)
        step()
        while core.bisection.in_progress:
            step()
    while core.has_work:
        step()
    assert {i: tokens_of(outputs) for (i, _), outputs in got.items()} == {
        each.id: expected_tokens(each, 0) for each in others
    }


def prompts_raise(plan: StepPlan) -> Exception | None:
    return Poisoned("a prompt") if len(plan.prefill_tokens) > 1 else None


def test_it_ends_alone_however_short_requests_must_be() -> None:
    core = roomy([])
    core.scheduler.state.capacity = replace(core.scheduler.state.capacity, max_model_len=2)
    short = [Request(i, [i], SamplingParams(max_tokens=1, seed=i)) for i in range(6)]
    short[3] = poisoned(short[3], "token", 0)
    for request in short:
        core.add(request)
    got = run(core)
    assert [i for (i, _), outputs in got.items() if outputs[-1].finish_reason == "error"] == [3]


def test_a_prefix_that_raises_cannot_be_pinned() -> None:
    with pytest.raises(ValueError, match=r"prefix 1 of --pin-prefix .* raised Poisoned"):
        pin_prefixes(roomy([], prompts_raise), [COMMON[:8]])


def test_nothing_is_measured_of_a_workload_that_fails() -> None:
    info = EngineInfo(**dict.fromkeys(EngineInfo.__struct_fields__, 0))
    with pytest.raises(bench.WorkloadFailed, match=r"workload failed: .* raised Poisoned"):
        engine = OfflineEngine(roomy([], prompts_raise), Tokenizer.from_folder(MODEL_FOLDER))
        bench.bench(engine, info, "one", [Work([1, 2, 3], 4)], 1, Ceilings(1, 1))


def test_a_runner_that_does_not_settle_ends_all() -> None:
    core = make_core(20, 4, 4, 16)

    class Broken(OracleRunner):
        def launch(self, plan: StepPlan) -> OracleHandle:
            raise Poisoned("once and for all")

    core.runner = Broken(20, 4, 4)
    core.add(plain(0))
    core.add(plain(1))
    with pytest.raises(RuntimeError, match="no steps after one that raised"):
        while True:
            assert not list(core.step())
