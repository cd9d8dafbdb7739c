"""Compiles grammars on trial, in a process that may be killed: `python -m service.grammar_compiler`.

Over its standard input comes one frame with the vocabulary, and then one for each grammar; for each of them
a frame goes out, with what is wrong with it or null.
"""

from __future__ import annotations

import resource
import sys
from typing import BinaryIO

import msgspec

from engine.grammar import Grammars, load_vocabulary
from service.grammar_trials import LENGTH, Vocabulary, encode_frame

MEMORY_BYTES = 8 << 30  # of address space, most of which is never touched


def _read_frame(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return stream.read(LENGTH.unpack(head)[0])


def trial(grammars: Grammars, grammar: str) -> str | None:
    """What is wrong with `grammar`."""
    try:
        grammars.compile(grammar)
    except ValueError as error:
        return str(error)
    return None


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    first = _read_frame(sys.stdin.buffer)
    if first is None:
        return
    vocabulary = msgspec.msgpack.decode(first, type=Vocabulary)
    grammars = Grammars(lambda: load_vocabulary(*msgspec.structs.astuple(vocabulary)))
    while (frame := _read_frame(sys.stdin.buffer)) is not None:
        sys.stdout.buffer.write(encode_frame(trial(grammars, msgspec.msgpack.decode(frame, type=str))))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
