"""Requests that wait for new grammars: each is compiled once, and only while somebody wants it."""

from __future__ import annotations

from collections import Counter
from threading import Event
from unittest.mock import Mock

import pytest
from llguidance import LLMatcher

from quire.engine.messages import Request, SamplingParams
from quire.engine.sequences.grammar import Constraint, Grammars
from quire.engine.sequences.grammar_queue import MAX_SLOW, GrammarQueue
from tests.engine.toy_grammar import COMPILER, VOCABULARY, deep_rules

LONG = 60.0  # seconds: what is waited for comes
FIRST, SECOND, THIRD = (LLMatcher.grammar_from_regex(regex) for regex in ("[ab]{3}", "x[0-9]", "c*"))
WRONG = LLMatcher.grammar_from_regex("(")


class Panic(BaseException):
    """As llguidance's, which is no Exception."""


class Gated(Grammars):
    """Counts what it compiles, each once its gate is open."""

    def __init__(self, *closed: str) -> None:
        super().__init__(lambda: VOCABULARY)
        self.compiled = Counter[str]()
        self.begun = {grammar: Event() for grammar in closed}
        self.gates = {grammar: Event() for grammar in closed}

    def compile(self, grammar: str) -> Constraint:
        self.compiled[grammar] += 1
        if grammar in self.gates:
            self.begun[grammar].set()
            assert self.gates[grammar].wait(LONG)
        return COMPILER.compile(grammar)


def request(request_id: int, grammar: str) -> Request:
    return Request(request_id, [1], SamplingParams(grammar=grammar, seed=1))


def taken(queue: GrammarQueue, count: int) -> list[tuple[int, bool]]:
    """Take so many requests, and say of each whether it has got its grammar."""
    got: list[tuple[int, bool]] = []
    while len(got) < count:
        got += [(each.id, isinstance(compiled, Constraint)) for each, compiled in queue.take(LONG)]
    return got


def test_a_grammar_is_compiled_once_for_all_who_wait_for_it() -> None:
    """A refusal is everyone's, too."""
    grammars = Gated(FIRST)
    queue = GrammarQueue(grammars)
    for i in range(30):
        queue.add(request(i, WRONG if i % 3 == 2 else FIRST))
    grammars.gates[FIRST].set()
    assert sorted(taken(queue, 30)) == [(i, i % 3 != 2) for i in range(30)]
    assert grammars.compiled == {FIRST: 1, WRONG: 1}
    assert queue.find(FIRST) is not None and queue.find(WRONG) is None and not len(queue)


@pytest.mark.parametrize("error", [RuntimeError("x"), MemoryError(), Panic("x")])
def test_whatever_a_compilation_ends_with_is_a_refusal_of_its_requests_alone(
    error: BaseException,
) -> None:
    grammars = Gated(FIRST)
    grammars.gates[FIRST] = Mock(**{"wait.side_effect": error})
    queue = GrammarQueue(grammars)
    for i, grammar in enumerate([FIRST, SECOND, FIRST]):
        queue.add(request(i, grammar))
    got: dict[int, Constraint | ValueError] = {}
    while len(got) < 3:
        got |= {each.id: compiled for each, compiled in queue.take(LONG)}
    assert isinstance(got[1], Constraint)
    assert all(isinstance(got[i], ValueError) and type(error).__name__ in str(got[i]) for i in (0, 2))


def test_a_grammar_is_compiled_that_is_deeper_than_one_that_is_tried_out_may_be() -> None:
    """Where a stack ends the process does: here it would be this one."""
    queue = GrammarQueue(Gated())
    queue.add(request(0, LLMatcher.grammar_from_lark(deep_rules(4000))))
    assert taken(queue, 1) == [(0, True)]


def test_who_waits_for_a_slower_grammar_is_passed_and_all_others_keep_their_order() -> None:
    grammars = Gated(FIRST, SECOND)
    queue = GrammarQueue(grammars)
    for i, grammar in enumerate([FIRST, SECOND, FIRST, THIRD, FIRST, SECOND]):
        queue.add(request(i, grammar))
    grammars.gates[FIRST].set()
    assert taken(queue, 3) == [(0, True), (2, True), (4, True)]
    assert queue.take(0.0) == [] and len(queue) == 3
    grammars.gates[SECOND].set()
    assert sorted(taken(queue, 3)) == [(1, True), (3, True), (5, True)]


def test_a_grammar_that_takes_too_long_holds_up_no_others() -> None:
    """It may never end. Once it does, who waits for it gets it."""
    grammars = Gated(FIRST)
    queue = GrammarQueue(grammars, patience=0.0)
    for i, grammar in enumerate([FIRST, SECOND, FIRST, THIRD]):
        queue.add(request(i, grammar))
    assert grammars.begun[FIRST].wait(LONG)
    assert sorted(taken(queue, 2)) == [(1, True), (3, True)]  # the second may take too long as well
    queue.add(request(4, FIRST))
    queue.abort(2)
    assert len(queue) == 2
    grammars.gates[FIRST].set()
    assert taken(queue, 2) == [(0, True), (4, True)]
    assert grammars.compiled == {FIRST: 1, SECOND: 1, THIRD: 1}


def test_only_a_few_grammars_take_too_long_at_once() -> None:
    """So many threads may never end; what follows waits for one of them."""
    slow = [LLMatcher.grammar_from_regex(f"[a-z]{{{i}}}") for i in range(1, MAX_SLOW + 2)]
    grammars = Gated(*slow)
    queue = GrammarQueue(grammars, patience=0.0)
    for i, grammar in enumerate([*slow, FIRST]):
        queue.add(request(i, grammar))
        if grammar in slow:
            assert grammars.begun[grammar].wait(LONG)
            assert queue.take(0.0) == []
    assert queue.take(0.0) == [] and not grammars.compiled[FIRST]
    for grammar in slow:
        grammars.gates[grammar].set()
    assert sorted(taken(queue, len(slow) + 1)) == [(i, True) for i in range(len(slow) + 1)]


def test_a_grammar_that_nobody_wants_any_more_is_not_compiled() -> None:
    """If that has begun it goes on, and who comes by then gets it."""
    grammars = Gated(FIRST)
    queue = GrammarQueue(grammars)
    queue.add(request(0, FIRST))
    assert grammars.begun[FIRST].wait(LONG)
    for i in range(1, 9):
        queue.add(request(i, THIRD if i < 3 else LLMatcher.grammar_from_regex(f"[a-z]{{{i}}}")))
    for i in range(9):
        if i != 2:
            queue.abort(i)
    assert len(queue) == 1
    queue.add(request(9, FIRST))
    grammars.gates[FIRST].set()
    assert sorted(taken(queue, 2)) == [(2, True), (9, True)]
    assert grammars.compiled == {FIRST: 1, THIRD: 1}


def test_what_was_compiled_for_nobody_is_kept() -> None:
    grammars = Gated(FIRST)
    queue = GrammarQueue(grammars)
    queue.add(request(0, FIRST))
    assert grammars.begun[FIRST].wait(LONG)
    queue.abort(0)
    queue.add(request(1, SECOND))
    grammars.gates[FIRST].set()
    assert taken(queue, 1) == [(1, True)]
    assert queue.find(FIRST) is not None
