"""The numbers of requests that run, that wait, and that the engine holds anything of, as its stats tell."""

from __future__ import annotations

import gc
import threading

from quire.engine.core import EngineCore
from quire.engine.messages import Request, SamplingParams
from quire.engine.sequences.grammar import Constraint, Grammars
from quire.engine.sequences.grammar_queue import GrammarQueue
from tests.engine.simulation import make_core
from tests.engine.toy_grammar import COMPILED, GRAMMARS, VOCABULARY


def add(core: EngineCore, numbers: range) -> None:
    for number in numbers:
        core.add(Request(number, [5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True)))


def finish(core: EngineCore) -> None:
    while core.has_work:
        core.step()
    gc.collect()


def test_requests_are_counted_until_nothing_holds_them() -> None:
    core = make_core(100, 4, 8, 64)
    assert core.stats.requests_in_memory == 0
    add(core, range(3))
    core.step()
    assert core.stats.requests_in_memory == 3
    kept = list(core.scheduler.state.alive)
    finish(core)
    add(core, range(3, 4))
    core.step()
    assert core.stats.requests_in_memory >= 4  # they have ended, and are held all the same
    del kept
    gc.collect()
    finish(core)
    add(core, range(4, 5))
    core.step()
    assert core.stats.requests_in_memory <= 2  # the newest, and one that a row may still name


def test_what_runs_and_waits_is_counted_in_requests() -> None:
    core = make_core(100, 4, 8, 64)
    for number, n in enumerate((4, 8, 8)):
        core.add(Request(number, [5, 6, 7], SamplingParams(n=n, max_tokens=4, ignore_eos=True, seed=1)))
    core.step()
    assert (core.stats.running, core.stats.waiting, core.stats.sequences_running) == (1, 2, 4)
    finish(core)
    assert (core.stats.running, core.stats.waiting, core.stats.sequences_running) == (0, 0, 0)


def test_a_request_whose_grammar_is_being_compiled_waits() -> None:
    ready = threading.Event()

    class Held(Grammars):
        def compile(self, grammar: str) -> Constraint:
            ready.wait(60)
            return COMPILED[grammar]

    core = make_core(100, 4, 8, 64)
    core.grammars = GrammarQueue(Held(lambda: VOCABULARY))
    for number, grammar in enumerate(GRAMMARS):
        core.add(Request(number, [5], SamplingParams(max_tokens=4, grammar=grammar)))
    core.step()
    assert (core.stats.waiting, core.stats.requests_in_memory) == (len(GRAMMARS), len(GRAMMARS))
    core.abort(0)
    core.step()
    assert (core.stats.waiting, core.stats.requests_in_memory) == (len(GRAMMARS) - 1, len(GRAMMARS) - 1)
    ready.set()
    finish(core)
    assert core.stats.waiting == 0
