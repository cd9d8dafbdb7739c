"""Tries grammars out in a process that may be killed: `python -m service.grammar_compiler`.

Over its standard input comes one frame with the vocabulary, and then one for each grammar; for each of them
a frame goes out, with what is wrong with it or null.
"""

from __future__ import annotations

import resource
import sys
from typing import BinaryIO

import msgspec
import numpy as np

from engine.grammar import Constraint, Grammars, find_masks, load_vocabulary
from service.grammar_trials import LENGTH, Vocabulary, encode_frame

MEMORY_BYTES = 8 << 30  # of address space, most of which is never touched
STEPS = 16  # that a grammar is followed for, by each of two ways


def _read_frame(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return stream.read(LENGTH.unpack(head)[0])


def trial(grammars: Grammars, grammar: str, ends: tuple[int, ...] = ()) -> str | None:
    """What is wrong with `grammar`, as far as compiling it and some steps of it show. ends: eos tokens."""
    try:
        begin = grammars.compile(grammar)
    except ValueError as refused:
        return str(refused)
    for nth in (0, -1):
        error = _follow(begin.fork(), nth, ends)
        if error is not None:
            return f"it cannot be followed: {error}"
    return None


def _follow(place: Constraint, nth: int, ends: tuple[int, ...]) -> str | None:
    """Why it cannot go on, where it always takes the nth of the tokens that may come next."""
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


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    first = _read_frame(sys.stdin.buffer)
    if first is None:
        return
    vocabulary = msgspec.msgpack.decode(first, type=Vocabulary)
    grammars = Grammars(lambda: load_vocabulary(*msgspec.structs.astuple(vocabulary)))
    while (frame := _read_frame(sys.stdin.buffer)) is not None:
        grammar = msgspec.msgpack.decode(frame, type=str)
        sys.stdout.buffer.write(encode_frame(trial(grammars, grammar, vocabulary.eos_token_ids)))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
