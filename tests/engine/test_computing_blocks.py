"""A shared prefix is computed once, even by requests that arrive together and whatever befalls the first."""

from __future__ import annotations

import numpy as np
import pytest

from quire.engine.arrays import as_int32
from quire.engine.core import EngineCore
from quire.engine.hashing import Digest, Prefix
from quire.engine.messages import Output, Request, SamplingParams
from quire.engine.schedule.draft import StepDraft
from quire.engine.schedule.finding import attach, find
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.schedule.lifecycle import start
from quire.engine.schedule.plan import NOT_FINITE, StepPlan, StepResult
from quire.engine.sequences.sequence import SequenceGroup
from tests.engine.oracle import OracleRunner, expected_tokens
from tests.engine.simulation import make_core

BLOCK_SIZE = 4
PREFIX = [5, 9, 2, 7, 7, 1, 3, 3]  # two blocks
TAIL = 3
NEW = 6


def requests(count: int) -> list[Request]:
    """With the same prefix and tails of their own."""
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    return [Request(i, PREFIX + [10 + i] * TAIL, params) for i in range(count)]


def make(asked: list[Request], *, num_blocks: int = 64, caching: bool = True) -> EngineCore:
    core = make_core(num_blocks, BLOCK_SIZE, 8, 200, caching=caching, num_host_blocks=8)
    for request in asked:
        core.add(request)
    return core


def computed(core: EngineCore) -> int:
    assert isinstance(core.runner, OracleRunner)
    return core.runner.tokens_computed


def finish(core: EngineCore) -> dict[int, list[Output]]:
    """Step until nothing is left; the outputs of each request."""
    got: dict[int, list[Output]] = {}
    for _ in range(1000):
        if not core.has_work:
            return got
        for output in core.step():
            got.setdefault(output.request_id, []).append(output)
        check_scheduler(core.scheduler.state)
    raise AssertionError("requests go on without an end")


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def findable(core: EngineCore, prompt: list[int], salt: str = "") -> int:
    """Return how many blocks of `prompt` a new request would find."""
    group = SequenceGroup(Request(99, prompt, SamplingParams(), cache_salt=salt), as_int32(prompt), 99, ())
    return len(core.scheduler.blocks.match(group.sequences[0]))


@pytest.mark.parametrize("together", [True, False])
def test_who_arrives_with_others_shares_what_the_first_one_computes(together: bool) -> None:
    """In the same plan, or in the next one, before the first is committed."""
    asked = requests(6)
    core = make(asked if together else asked[:1])
    plan = core.scheduler.schedule()
    assert plan is not None
    handles = [core.runner.launch(plan)]
    if not together:
        for request in asked[1:]:
            core.add(request)
        later = core.scheduler.schedule()
        assert later is not None
        handles.append(core.runner.launch(later))
    got: dict[int, list[Output]] = {}
    for handle in handles:
        for output in core.scheduler.commit(handle.wait()):
            got.setdefault(output.request_id, []).append(output)
    for request_id, outputs in finish(core).items():
        got.setdefault(request_id, []).extend(outputs)
    for request in asked:
        assert tokens_of(got[request.id]) == expected_tokens(request, 0)
        first = got[request.id][0]
        assert (first.cached_tokens, first.cached_host_tokens) == (len(PREFIX) if request.id else 0, 0)
    assert computed(core) == len(PREFIX) + len(asked) * (TAIL + NEW - 1)


def test_prompts_that_are_the_same_to_the_last_token_compute_their_last_block_each() -> None:
    """Its last token is computed again in a copy of the block, which is made before the step writes it."""
    asked = [Request(i, PREFIX, SamplingParams(max_tokens=NEW, ignore_eos=True)) for i in range(3)]
    core = make(asked)
    got = finish(core)
    assert computed(core) == 3 * (BLOCK_SIZE + NEW - 1) + BLOCK_SIZE
    assert all(tokens_of(got[request.id]) == expected_tokens(request, 0) for request in asked)


def test_who_must_not_share_or_needs_every_logit_computes_it_all() -> None:
    salted = Request(7, [*PREFIX, 1], SamplingParams(max_tokens=NEW, ignore_eos=True), cache_salt="tenant")
    scored = Request(8, [*PREFIX, 2], SamplingParams(max_tokens=NEW, ignore_eos=True, prompt_logprobs=0))
    plain = requests(1)
    core = make([*plain, salted, scored])
    got = finish(core)
    assert [got[request.id][0].cached_tokens for request in (*plain, salted, scored)] == [0, 0, 0]
    entries = got[8][0].prompt_logprobs
    assert entries is not None and len(entries) == len(PREFIX) + 1
    without = make(requests(3), caching=False)
    finish(without)
    assert computed(without) == 3 * (len(PREFIX) + TAIL + NEW - 1)


@pytest.mark.parametrize("followers", [0, 2])
def test_who_leaves_takes_back_only_what_nobody_shares(followers: int) -> None:
    """The step that writes the blocks is on its way, and others have built on it."""
    asked = requests(1 + followers)
    core = make(asked)
    plan = core.scheduler.schedule()
    assert plan is not None
    handle = core.runner.launch(plan)
    core.abort(0)
    check_scheduler(core.scheduler.state)
    assert findable(core, PREFIX) == (2 if followers else 0)
    assert len(core.scheduler.blocks.cache) == 0
    outputs = list(core.scheduler.commit(handle.wait()))
    assert len(core.scheduler.blocks.cache.computing) == 0
    assert findable(core, asked[-1].prompt) == len(core.scheduler.blocks.cache) == (2 if followers else 0)
    got = finish(core)
    for request in asked[1:]:
        first = [token for output in outputs if output.request_id == request.id for token in output.tokens]
        assert first + tokens_of(got[request.id]) == expected_tokens(request, 0)


def test_others_hear_of_a_block_when_it_is_written_and_of_its_parents_first() -> None:
    core = make(requests(3))
    heard: list[Digest] = []
    parents: list[Digest | None] = []

    def hear(prefix: Prefix, findable: bool) -> None:
        assert findable
        heard.append(prefix.digest)
        parents.append(None if prefix.before is None else prefix.before.digest)

    core.scheduler.blocks.cache.listeners.append(hear)
    plan = core.scheduler.schedule()
    assert plan is not None
    assert not heard and not core.scheduler.blocks.cache.prefixes()
    core.abort(0)  # the others publish what it leaves
    core.scheduler.commit(core.runner.launch(plan).wait())
    assert len(heard) == 2 and parents[1] == heard[0]


def sick(plan: StepPlan, result: StepResult, rows: list[int]) -> StepResult:
    """The logits of `rows` are not finite."""
    tokens = np.where(np.isin(plan.sample_rows, rows), NOT_FINITE, result.tokens).astype(np.int32)
    return StepResult(tokens, result.logprob_samples, result.logprobs, result.prompt_logprobs)


@pytest.mark.parametrize("n", [1, 2])
def test_only_who_fails_fails_and_nothing_of_it_is_cached(n: int) -> None:
    """Its prompt takes three steps; the last one has room for others, who share what they can of it."""
    culprit = Request(0, [*PREFIX, *[8] * 11], SamplingParams(n=n, max_tokens=NEW, ignore_eos=True))
    others = [
        Request(i, [*PREFIX, *[8] * i], SamplingParams(max_tokens=NEW, ignore_eos=True)) for i in (1, 9)
    ]
    core = make([culprit, *others])
    core.scheduler.max_num_batched_tokens = 8
    got: dict[int, list[Output]] = {}
    while 0 not in got:
        assert findable(core, culprit.prompt) == len(core.scheduler.blocks.cache)
        plan = core.scheduler.schedule()
        assert plan is not None
        rows = [sequence.row for sequence in core.scheduler.state.running[0].live]
        for output in core.scheduler.commit(sick(plan, core.runner.launch(plan).wait(), rows)):
            got.setdefault(output.request_id, []).append(output)
        check_scheduler(core.scheduler.state)
    assert [output.finish_reason for output in got.pop(0)] == ["error"] * n
    assert findable(core, culprit.prompt) == 0
    assert core.scheduler.state.running, "somebody shares blocks of it"
    for request_id, outputs in finish(core).items():
        got.setdefault(request_id, []).extend(outputs)
    assert [tokens_of(got[request.id]) for request in others] == [expected_tokens(r, 0) for r in others]
    assert findable(core, culprit.prompt) == 0


def test_who_takes_over_what_another_was_computing_answers_for_it() -> None:
    core = make(requests(2))
    plan = core.scheduler.schedule()
    assert plan is not None
    core.abort(0)
    (heir,) = core.scheduler.state.running[0].live
    core.scheduler.commit(sick(plan, core.runner.launch(plan).wait(), [heir.row]))
    assert findable(core, PREFIX) == 0
    assert not finish(core)


def test_a_group_that_shares_what_this_step_writes_is_not_swapped_out() -> None:
    """The copy out reads before the step has written."""
    asked = requests(2)
    core = make(asked)
    scheduler = core.scheduler
    scheduler.preemption.policy = type(scheduler.preemption.policy)(mode="swap")
    draft = StepDraft(budget=len(PREFIX) + TAIL)
    first, second = scheduler.state.waiting
    start(scheduler.state, first, draft)
    first.prefill_queue = list(first.sequences)
    scheduler._schedule_prefill(draft, first)
    start(scheduler.state, second, draft)
    (sequence,) = second.sequences
    attach(scheduler.state, sequence, find(scheduler.state, sequence))
    assert len(sequence.table) == 2
    scheduler.preemption.preempt_newest(draft, first.sequences[0])
    assert not second.swapped and scheduler.preemption.recomputes == 1
