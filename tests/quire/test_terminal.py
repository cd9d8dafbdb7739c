"""What a person sees who types at a terminal."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect

from tests.quire.stub_api import stub_api
from tests.waiting import SECONDS

ROOT = Path(__file__).parents[2]
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()=>][A-Z0-9]?")


def hear_interrupts() -> None:
    """Undo what a shell does to commands in the background, and all that they start: ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def typing(*words: str) -> Iterator[pexpect.spawn]:
    """Yield a terminal in which `quire` runs with these words."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "QUIRE_API_KEY": "secret"}
    terminal = pexpect.spawn(
        sys.executable,
        ["-m", "quire", *words],
        env=environment,
        cwd=str(ROOT),
        timeout=SECONDS,
        encoding="utf-8",
        dimensions=(40, 100),
        preexec_fn=hear_interrupts,
    )
    try:
        yield terminal
    finally:
        terminal.close(force=True)


def plain(text: str | None) -> str:
    """Return the text without what moves the cursor and colours."""
    return _ESCAPES.sub("", text or "").replace("\r", "")


def test_a_conversation() -> None:
    with stub_api() as url, typing("chat", url) as terminal:
        terminal.expect_exact("first. /help tells of commands, Ctrl-C stops an answer, Ctrl-D ends.")
        terminal.expect_exact(">>> ")
        terminal.sendline("hello")
        terminal.expect("I first")
        terminal.expect_exact(">>> ")
        terminal.sendline("markdown")
        terminal.expect_exact(">>> ")
        shown = plain(terminal.before)
        assert "They are paged." in shown and "**" not in shown  # drawn, not as it was written
        assert "────" in shown  # between a table's heading and its rows
        terminal.sendline("/set temperature 0.2")
        terminal.expect_exact("temperature is 0.2.")
        terminal.expect_exact(">>> ")
        terminal.sendline("wait")
        terminal.expect("first")
        terminal.sendintr()
        terminal.expect_exact("(stopped)")
        terminal.expect_exact(">>> ")
        terminal.sendintr()
        terminal.expect_exact("Ctrl-D or /exit ends.")
        terminal.expect_exact(">>> ")
        terminal.sendeof()
        terminal.expect(pexpect.EOF)
        terminal.wait()
        assert terminal.exitstatus == 0


def test_a_mistake_is_told_in_a_line() -> None:
    with typing("serve", "--prot", "1") as terminal:
        terminal.expect(pexpect.EOF)
        assert plain(terminal.before) == "quire serve: there is no flag --prot: did you mean --port?\n"
        terminal.wait()
        assert terminal.exitstatus == 2
