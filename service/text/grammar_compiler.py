"""Tries grammars out in a process that may be killed: `python -m quire.service.text.grammar_compiler`.

What comes of each is what is wrong with it, or null.
"""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np

from quire.engine.sequences.grammar import STACK_BYTES, Constraint, Grammars, find_masks, load_vocabulary
from quire.engine.threads import DaemonWorker
from quire.service.text.grammar_errors import in_own_words
from quire.service.text.worker import Answer, work

MEMORY_BYTES = 8 << 30  # of address space, most of which is never touched
STEPS = 16  # that a grammar is followed for, by each of two ways
TRIAL_STACK_BYTES = STACK_BYTES // 4  # so that what passes here does not end the engine


class Vocabulary(msgspec.Struct, frozen=True, array_like=True):
    """The vocabulary, told to a process first."""

    tokenizer: str  # the text of a tokenizer.json
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def trial(grammars: Grammars, grammar: str, ends: tuple[int, ...] = ()) -> str | None:
    """Return what is wrong with `grammar`, as far as compiling and some steps show. ends: eos tokens."""
    try:
        begin = grammars.compile(grammar)
    except ValueError as refused:
        return in_own_words(str(refused))
    for nth in (0, -1):
        error = _follow(begin.fork(), nth, ends)
        if error is not None:
            return f"it cannot be followed: {in_own_words(error)}"
    return None


def _follow(place: Constraint, nth: int, ends: tuple[int, ...]) -> str | None:
    """Return why it cannot go on, where it always takes the nth of the tokens that may come next."""
    for _ in range(STEPS):
        allowed = np.flatnonzero(np.unpackbits(place.mask.view(np.uint8), bitorder="little"))
        allowed = allowed[~np.isin(allowed, ends)]
        if not len(allowed):
            return None
        place.accept(int(allowed[nth]))
        if place.error is None:
            find_masks([place])
        if place.error is not None:
            return place.error
    return None


def _prepare(opening: bytes) -> Answer:
    vocabulary = msgspec.json.decode(opening, type=Vocabulary)
    grammars = Grammars(lambda: load_vocabulary(*msgspec.structs.astuple(vocabulary)))
    with contextlib.suppress(ValueError):  # which each grammar is then told
        _ = grammars.vocabulary
    thread = DaemonWorker("quire-trial", TRIAL_STACK_BYTES)

    def answer(question: bytes) -> str | None:
        grammar = msgspec.json.decode(question, type=str)
        tried = thread.submit(trial, grammars, grammar, vocabulary.eos_token_ids)
        error = tried.exception()  # a panic of llguidance is no Exception
        return tried.result() if error is None else f"it cannot be compiled: {type(error).__name__}: {error}"

    return answer


if __name__ == "__main__":
    work(_prepare, MEMORY_BYTES)
