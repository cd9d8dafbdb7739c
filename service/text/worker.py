"""A worker process: what may take too long, or too much memory, is done where it can be killed.

Over its standard input comes one frame with what it must know, and a frame goes out when it is ready: null,
or what is wrong with what it was told. Then one comes for each question, and one goes out with its answer.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Callable

from quire.service.text.frames import encode_frame, read_frame

START_SECONDS = 30.0  # of its own processor time, before its first question

Answer = Callable[[bytes], object]


def work(prepare: Callable[[bytes], Answer], memory_bytes: int) -> None:
    """Answer questions until the input ends. `prepare` may raise ValueError.

    The first argument of the command line is how many seconds of processor time an answer may take; after
    them SIGPROF ends the process, whatever it is at. A host that is busy takes nothing away from them.
    """
    seconds = float(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a question that crashes it leaves no file
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    opening = read_frame(source)
    if opening is None:
        return
    signal.setitimer(signal.ITIMER_PROF, START_SECONDS)
    error = None
    try:
        answer = prepare(opening)
    except ValueError as refusal:
        error = str(refusal)
    sink.write(encode_frame(error))
    sink.flush()
    if error is not None:
        return
    while (question := read_frame(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        reply = encode_frame(answer(question))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(reply)
        sink.flush()
