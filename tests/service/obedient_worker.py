"""A worker that does what a question says: `python -m tests.service.obedient_worker`."""

from __future__ import annotations

import os
import signal
import time
from itertools import count

import msgspec

from quire.service.text.worker import Answer, work


def _prepare(opening: bytes) -> Answer:
    told = msgspec.json.decode(opening)
    if told == "refuse":
        raise ValueError("this is no opening")
    if told == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return _answer


_questions = count(1)


def _answer(question: bytes) -> object:
    number = next(_questions)
    match msgspec.json.decode(question):
        case "spin":
            while True:
                pass
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case ["crash", signal_number]:
            os.kill(os.getpid(), signal_number)
        case "grow":
            return len(bytes(1 << 40))
        case ["sleep", seconds]:
            time.sleep(seconds)
        case ["large", size]:
            return "x" * size
        case "number":
            return number
    return os.getpid()


if __name__ == "__main__":
    work(_prepare, 1 << 30)
