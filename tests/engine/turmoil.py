"""The simulation where everything may come at once: faults, interrupts, late masks, digests that collide …

`simulation` bounds how long anyone waits, which nobody can tell here. Beside what it asserts: whatever can be
found holds what it is found by, listeners have heard of just that, and the records of requests add up.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from quire.engine.messages import EndSample, Request
from quire.engine.records import RequestRecord
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.schedule.state import SchedulerState
from tests.engine.findable import FindableBlocks
from tests.engine.oracle import expected_tokens
from tests.engine.simulation import EOS, check_outputs, distinct_filled
from tests.engine.turmoil_draws import Got, draw_chances, draw_core, draw_request, draw_trouble
from tests.engine.turmoil_runner import expected_vector, is_poisoned, last_finite

REQUESTS = 14
CALM = 200  # steps after which nobody leaves any more, nor is anything interrupted
MOST_STEPS = 4_000
AFTER = 12  # steps at the end, by which nobody is tried any more and all transfers are done

Sample = tuple[int, int]


class Turmoil:
    """Random requests from their arrival to their end, by a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.core, self.runner = draw_core(self.rng)
        self.findable = FindableBlocks(self.core)
        draw_trouble(self.rng, self.core, self.runner)
        self.chances = draw_chances(self.rng)
        self.accepted: dict[int, Request] = {}
        self.aborted: set[int] = set()
        self.failed: set[int] = set()
        self.stopped: set[Sample] = set()
        self.ended: set[Sample] = set()
        self.recorded: Counter[int] = Counter()
        self.got: Got = {}
        self.done: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Return how often each thing came about."""
        coming, steps = iter(range(REQUESTS)), 0
        left = REQUESTS
        while left or self.core.has_work:
            while left and (self.rng.random() < 0.4 or not self.core.has_work):
                self._arrive(next(coming))
                left -= 1
            if steps > CALM:
                self.runner.waits_interrupted = self.runner.launches_interrupted = 0.0
            elif self.accepted and self.rng.random() < self.chances.leave:
                self._leave(self.rng.choice(list(self.accepted)))
            if self.rng.random() < self.chances.stop:
                self._stop_one()
            self._step()
            steps += 1
            assert steps < MOST_STEPS, "it goes on for ever"
        self.runner.waits_interrupted = self.runner.launches_interrupted = 0.0
        for _ in range(AFTER):
            self._step()
        self._check_end()
        return self.done

    def _arrive(self, number: int) -> None:
        earlier = list(self.accepted.values())
        request = draw_request(self.rng, self.core, number, earlier, self.got, self.chances)
        if not self.core.handle(request):
            self.accepted[number] = request

    def _leave(self, number: int) -> None:
        self.aborted.add(number)
        self.core.abort(number)

    def _stop_one(self) -> None:
        going = [key for key in self.got if key not in self.ended | self.stopped]
        going = [key for key in going if key[0] not in self.aborted]
        if going:
            key = self.rng.choice(going)
            self.stopped.add(key)
            assert not self.core.handle(EndSample(*key))

    def _step(self) -> None:
        try:
            outputs = list(self.core.step())
        except KeyboardInterrupt:
            self.done["interrupts"] += 1
            assert not self.core.torn
        else:
            for record in self.core.records:
                check_record(record)
                self.recorded[record.request_id] += record.request_id >= 0
            for output in outputs:
                key = output.request_id, output.index
                assert output.request_id >= 0 and output.request_id not in self.aborted
                assert key not in self.stopped and key not in self.ended
                self.got.setdefault(key, []).append(output)
                if output.finish_reason is not None:
                    self.ended.add(key)
                if output.error == "computing it raised Poisoned":
                    self.failed.add(output.request_id)
        state = self.core.scheduler.state
        check_scheduler(state)
        check_timelines(state)
        self.findable.check()
        assert state.tokens_filled == distinct_filled(self.core)

    def _check_end(self) -> None:
        core, scheduler, blocks = self.core, self.core.scheduler, self.core.scheduler.blocks
        assert not core.has_work and not core.bisection.in_progress and scheduler.state.in_turn
        assert blocks.pool.num_available == blocks.pool.num_blocks - blocks.pool.num_pinned
        assert blocks.host.pool.num_available == blocks.host.pool.num_blocks
        assert max(self.recorded.values(), default=1) <= 1, "a request has two records"
        for number, request in self.accepted.items():
            if number in self.failed:
                assert is_poisoned(request), "an innocent request was failed"
                self.done["blamed"] += 1
            elif number not in self.aborted:
                assert number in self.recorded
                self._check_request(request)
        self.done["swaps"] += scheduler.preemption.swaps
        self.done["recomputes"] += scheduler.preemption.recomputes
        self.done["pinned"] += blocks.pool.num_pinned

    def _check_request(self, request: Request) -> None:
        last = last_finite(request)
        if request.pooling is not None:
            (output,) = self.got[request.id, 0]
            assert output.finish_reason == "stop" and output.vector is not None
            assert np.frombuffer(output.vector, np.float32).tolist() == expected_vector(request.prompt)
            self.done["pooled"] += 1
        elif last is None:
            check_outputs(request, self.got, self.stopped, self.done)
        elif not request.params.beam_width:
            self._check_unfinite(request, last)
        elif any(self.got[request.id, index][-1].error for index in range(request.params.n)):
            assert all(len(self.got[request.id, index]) == 1 for index in range(request.params.n))
            assert all(self.got[request.id, index][0].error for index in range(request.params.n))
        else:
            check_outputs(request, self.got, self.stopped, self.done)

    def _check_unfinite(self, request: Request, last: int) -> None:
        """Each sample has the tokens up to position `last`, and an error instead of any more."""
        finite = max(0, last + 1 - len(request.prompt))
        for index in range(request.params.n):
            outputs = self.got[request.id, index]
            tokens = [token for output in outputs for token in output.tokens]
            expected = expected_tokens(request, index, EOS)
            assert tokens == expected[: len(tokens)] and len(tokens) <= finite
            if (request.id, index) not in self.stopped:
                assert len(tokens) == min(finite, len(expected))
                assert (outputs[-1].finish_reason == "error") == (len(expected) > finite)
                self.done["unfinite"] += len(expected) > finite


def check_timelines(state: SchedulerState) -> None:
    """A group is in a state that fits where it is."""
    for group in state.running:
        assert group.timeline.name not in ("grammar", "queue", "preempted", "swapped_out")
    for group in state.waiting:
        away = "swapped_out" if group.swapped else "preempted" if group.timeline.preemptions else "queue"
        assert group.timeline.name == away


def check_record(record: RequestRecord) -> None:
    """Its spans are all of its time, one after the other."""
    assert sum(span.seconds for span in record.spans) == record.ended - record.arrival
    if all(span.pieces == 1 for span in record.spans):
        ends = [span.start + span.seconds for span in record.spans]
        assert [span.start for span in record.spans] == [record.arrival, *ends][: len(ends)]
    assert 0 <= record.cached_host_tokens <= record.cached_tokens < max(record.prompt_tokens, 1)
    assert 0 <= record.company.mixed <= record.company.steps
    assert all(each.away is None or each.away >= 0 for each in record.preemptions)
