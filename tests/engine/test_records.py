"""The record that the engine makes of each request: where its time went, and what held it up."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from quire.engine.config import PreemptionMode
from quire.engine.core import EngineCore
from quire.engine.hashing import Prefix
from quire.engine.memory.cache_history import CacheHistory
from quire.engine.messages import Request, SamplingParams
from quire.engine.records import Company, Miss, RequestRecord
from quire.engine.schedule.lifecycle import preempt
from quire.engine.sequences.sequence import SequenceGroup
from quire.engine.sequences.timeline import MAX_SPANS, Timeline
from tests.engine.simulation import make_core
from tests.engine.toy_grammar import GRAMMARS

BLOCK = 4
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


class Clock:
    """A second passes each time that anybody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def timed(core: EngineCore) -> Clock:
    clock = Clock()
    core.clock = core.scheduler.state.clock = core.scheduler.blocks.history.clock = clock
    return clock


def request(number: int, prompt: list[int], max_tokens: int = 2, **settings: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **settings)  # type: ignore[arg-type]
    return Request(number, prompt, params)


def run(core: EngineCore, *requests: Request) -> dict[int, RequestRecord]:
    """Return the records of all, which came together. Spans always add up, and follow one another."""
    for each in requests:
        core.add(each)
    records: dict[int, RequestRecord] = {}
    while core.has_work:
        core.step()
        records |= {record.request_id: record for record in core.records}
    for record in records.values():
        total = sum(span.seconds for span in record.spans)
        assert total == pytest.approx(record.ended - record.arrival)
        if all(span.pieces == 1 for span in record.spans):
            ends = [span.start + span.seconds for span in record.spans]
            assert [span.start for span in record.spans] == pytest.approx([record.arrival, *ends[:-1]])
    return records


def filler(number: int) -> list[int]:
    """Return a prompt that begins like no other, of six blocks."""
    return [40 + number, *range(1 + number, 24 + number)]


def names(record: RequestRecord) -> list[str]:
    return [span.name for span in record.spans]


def test_a_request_waits_is_prefilled_in_chunks_and_decodes() -> None:
    core = make_core(16, BLOCK, 2, 3)
    timed(core)
    record = run(core, request(0, PROMPT, 3))[0]
    assert names(record) == ["queue", "prefill", "prefill", "prefill", "decode"]
    assert [span.count for span in record.spans] == [0, 3, 3, 2, 0]
    assert record.reason == "length"
    assert record.company.steps == record.company.sequences == 2


def test_whoever_leaves_has_a_record_too() -> None:
    core = make_core(16, BLOCK, 2, 64)
    timed(core)
    core.add(request(0, PROMPT, 50))
    core.step()
    core.abort(0)
    core.step()
    (record,) = core.records
    assert (record.request_id, record.reason) == (0, "abort")
    core.step()
    assert core.records == []


def test_one_that_waits_for_blocks_is_told_who_holds_them() -> None:
    core = make_core(4, BLOCK, 4, 64, caching=False)
    timed(core)
    records = run(core, request(0, PROMPT, 6), request(1, PROMPT, 2), request(2, PROMPT, 2))
    assert "waiting_for_blocks" not in names(records[0])
    for number, ahead in ((1, 0), (2, 1)):
        assert names(records[number])[:2] == ["queue", "waiting_for_blocks"]
        assert records[number].queued_behind == ahead + 1
    (waited,) = [each for each in records[1].waited if each.wait.reason == "blocks"]
    assert waited.wait.holders == [0] and waited.wait.running == 1
    assert waited.wait.total == 4 and 2 <= waited.wait.held <= 3 and waited.wait.needed > 0


def test_one_that_waits_for_a_place_among_the_sequences() -> None:
    core = make_core(64, BLOCK, 1, 64, caching=False)
    timed(core)
    record = run(core, request(0, PROMPT, 9), request(1, PROMPT))[1]
    waits = {each.wait.reason: each.wait for each in record.waited}
    assert (waits["sequences"].held, waits["sequences"].total) == (1, 1)


def test_one_that_waits_for_a_step_with_room_for_its_tokens() -> None:
    core = make_core(64, BLOCK, 4, 4, caching=False)
    timed(core)
    records = run(core, request(0, PROMPT), request(1, PROMPT))
    assert "budget" in {each.wait.reason for each in records[1].waited}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_preempted_are_told_for_whom(mode: PreemptionMode) -> None:
    core = make_core(6, BLOCK, 2, 64, caching=False, num_host_blocks=6, mode=mode)
    timed(core)
    record = run(core, request(7, PROMPT[:4], 12), request(8, PROMPT[:4], 12))[8]
    (preemption,) = record.preemptions
    assert (preemption.mode, preemption.beneficiary) == (mode, 7)
    assert preemption.blocks == 3 and preemption.tokens >= 9
    assert preemption.away and preemption.back
    away, back = ("swapped_out", "swap_in") if mode == "swap" else ("preempted", "recompute")
    assert sum(span.seconds for span in record.spans if span.name == away) == preemption.away
    assert sum(span.seconds for span in record.spans if span.name == back) > 0


def misses(core: EngineCore, *requests: Request) -> Iterable[tuple[int, str | None, int | None, int | None]]:
    """Return, of each request alone, the tokens found, and why not more, where, and what differs."""
    for each in requests:
        record = run(core, each)[each.id]
        miss = record.miss
        yield (
            record.cached_tokens,
            *((None, None, None) if miss is None else (miss.kind, miss.token, miss.differs_at)),
        )


def test_a_miss_names_the_first_token_that_differs() -> None:
    core = make_core(64, BLOCK, 2, 64)
    long = list(range(20, 40))
    other = [*long[:10], 49, *long[11:]]
    assert list(misses(core, request(0, long), request(1, other), request(2, long))) == [
        (0, "never_seen", 0, None),
        (8, "differs", 8, 10),
        (19, None, None, None),  # all but the last token, which is computed for its logits
    ]


def test_what_was_evicted_is_told_with_its_time() -> None:
    core = make_core(8, BLOCK, 2, 64)
    timed(core)
    first = list(range(20, 36))
    run(core, request(0, first))
    for number in (1, 2):
        run(core, request(number, filler(number)))
    miss = run(core, request(3, first))[3].miss
    assert miss is not None and miss.kind == "evicted" and miss.seconds and miss.seconds > 1


def test_what_was_evicted_at_the_clock_s_zero_was_evicted() -> None:
    history = CacheHistory(64)
    history.clock = lambda: 0.0
    prefix = Prefix(Prefix(None, "", 1), b"abcd", 2)
    history.changed(prefix, cached=False)
    assert history.explain([prefix], 0, BLOCK, "") == Miss("evicted", 0, seconds=0.0)


def salted(number: int, salt: str, owner: str) -> Request:
    return Request(number, PROMPT, SamplingParams(max_tokens=1, temperature=0.0), 0.0, salt, owner)


def test_what_an_aborted_request_was_still_computing_was_never_cached() -> None:
    core = make_core(200, BLOCK, 8, 8)
    timed(core)
    core.add(request(0, filler(0)))
    core.step()
    core.abort(0)
    run(core)
    miss = run(core, request(1, filler(0)))[1].miss
    assert miss is not None and miss.kind == "never_seen"


def test_another_salt_of_the_same_owner_is_told_and_another_owners_cache_is_not() -> None:
    core = make_core(64, BLOCK, 2, 64)
    found = misses(core, salted(0, "key1", "key1"), salted(1, "key1own", "key1"), salted(2, "key2", "key2"))
    assert [kind for _, kind, *_ in found] == ["never_seen", "salted_otherwise", "never_seen"]


def test_tokens_that_fill_no_block_and_those_whose_logprobs_are_wanted() -> None:
    core = make_core(64, BLOCK, 2, 64)
    longer = [*PROMPT, 13, 14, 15]
    asked = list(misses(core, request(0, PROMPT), request(1, longer), request(2, longer, prompt_logprobs=0)))
    assert [each[:3] for each in asked[1:]] == [(8, "partial_block", 8), (0, "prompt_logprobs", 0)]
    uncached = make_core(64, BLOCK, 2, 64, caching=False)
    assert list(misses(uncached, request(0, PROMPT))) == [(0, "off", 0, None)]


def test_cached_blocks_in_host_memory_take_time_to_load() -> None:
    core = make_core(8, BLOCK, 2, 64, num_host_blocks=64)
    timed(core)
    first = list(range(20, 36))
    run(core, request(0, first))
    for number in (1, 2, 3):
        run(core, request(number, filler(number)))
    record = run(core, request(4, first))[4]
    assert record.cached_host_tokens and names(record)[:3] == ["queue", "loading", "prefill"]


def test_decoding_beside_the_prefills_of_others() -> None:
    core = make_core(64, BLOCK, 4, 16, caching=False)
    core.add(request(0, PROMPT, 20))
    while not core.stats.decode_tokens:
        core.step()
    company = run(core, request(1, [*PROMPT, *PROMPT]))[0].company
    assert (company.mixed, company.prefilled) == (2, 16)
    assert company.sequences > company.steps


def test_a_grammar_takes_its_share() -> None:
    core = make_core(64, BLOCK, 2, 64)
    timed(core)
    params = SamplingParams(max_tokens=12, temperature=0.0, grammar=GRAMMARS[0])
    record = run(core, Request(0, PROMPT, params))[0]
    assert names(record) == ["grammar", "queue", "prefill", "decode", "masks"]
    masks = record.spans[-1]
    assert masks.pieces > 1 and masks.seconds > 0


def test_a_timeline_is_bounded() -> None:
    timeline = Timeline(0.0)
    for at in range(4 * MAX_SPANS):
        timeline.chunk(float(at), 16)
    timeline.enter("ended", 4.0 * MAX_SPANS)
    assert len(timeline.spans) == MAX_SPANS
    assert sum(span.seconds for span in timeline.spans) == 4.0 * MAX_SPANS
    assert sum(span.count for span in timeline.spans) == 16 * 4 * MAX_SPANS


def leave(core: EngineCore, group: SequenceGroup) -> None:
    """Have `group` wait, preempted, while the step in flight is committed."""
    state = core.scheduler.state
    preempt(state, group, swapped=False)
    state.waiting.clear()
    core.step()
    state.waiting.append(group)


def test_who_is_preempted_waits_for_no_mask() -> None:
    core = make_core(64, BLOCK, 2, 64)
    timed(core)
    core.add(Request(0, PROMPT, SamplingParams(max_tokens=12, temperature=0.0, grammar=GRAMMARS[0])))
    core.step()
    (group,) = core.scheduler.state.running
    leave(core, group)
    assert group.timeline.name == "preempted"
    record = run(core)[0]
    assert names(record)[3:5] == ["preempted", "recompute"]


def test_who_is_preempted_while_its_blocks_come_back_does_not_decode_once_they_are_there() -> None:
    core = make_core(6, BLOCK, 2, 64, caching=False, num_host_blocks=6, mode="swap")
    timed(core)
    core.runner.delay = lambda: 3  # type: ignore[attr-defined]
    for number in (7, 8):
        core.add(request(number, PROMPT[:4], 12))
    group = core.scheduler.state.groups[8]
    while group.timeline.name != "swap_in":
        core.step()
    leave(core, group)
    assert group.transferring
    while group.transferring:
        assert group.timeline.name == "preempted"
        core.step()
    assert group.timeline.name != "decode"
    run(core)


def test_what_was_lost_on_its_way_to_host_memory_is_computed_again() -> None:
    timeline = Timeline(0.0)
    timeline.admit(1.0, [])
    timeline.chunk(1.0, 8)
    timeline.decode(2.0, Company())
    timeline.preempt(3.0, "swap", Company())
    timeline.lose(5.0)
    timeline.come_back(6.0)
    timeline.chunk(6.0, 9)
    timeline.decode(7.0, Company())
    record = timeline.end(0, 8.0, "length", Company(), (8, 0, 0))
    spans = [(span.name, span.seconds) for span in record.spans[-4:]]
    assert spans == [("swapped_out", 2.0), ("preempted", 1.0), ("recompute", 1.0), ("decode", 1.0)]
