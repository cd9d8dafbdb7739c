"""A rank's process that is asleep while it has something to do hangs; one that has nothing to do rests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.engine.parallel.pulse import ASLEEP_LOOKS, Pulse
from tests.waiting import until

ASLEEP = "import time; print(flush=True); time.sleep(1000)"
COMPUTES = "print(flush=True)\nwhile True: pass"
COMPILES = "import subprocess; subprocess.run(['sh', '-c', 'echo; read line'])"


@contextmanager
def process(code: str) -> Iterator[int]:
    """Run a program that says when it is there; yield its id."""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        try:
            yield running.pid
        finally:
            running.kill()


def looks(pid: int, owes: Callable[[int], bool]) -> list[str | None]:
    pulse = Pulse(pid)
    return [pulse.look(owes=owes(look)) for look in range(ASLEEP_LOOKS + 3)]


def test_one_that_sleeps_and_owes_something_hangs_after_some_looks() -> None:
    with process(ASLEEP) as pid:
        until(lambda: " S " in Path(f"/proc/{pid}/stat").read_text(), "it sleeps")
        rested = looks(pid, lambda look: False)
        now_and_then = looks(pid, lambda look: look % 3 > 0)
        owing = looks(pid, lambda look: True)
    assert not any(rested) and not any(now_and_then)
    assert owing[0] is None and owing[-1] == "its process sleeps, and the others wait for it"


@pytest.mark.parametrize("code", [COMPUTES, COMPILES], ids=["computes", "has a program run"])
def test_one_that_does_something_goes_on(code: str) -> None:
    with process(code) as pid:
        seen = looks(pid, lambda look: True)
    assert not any(seen)


def test_one_that_has_ended_is_told_of_elsewhere() -> None:
    with process(ASLEEP) as pid:
        pulse = Pulse(pid)
    assert pulse.look(owes=True) is None
