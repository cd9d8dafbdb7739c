"""`quire top`: what it makes of a server's stream and metrics, on a terminal and elsewhere."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys

import numpy as np
from rich.console import Console

from quire.engine.inspection.messages import ACTIVE, PoolAnswer, PoolQuestion, Table
from quire.service.commands.top_view import TopView, read_metrics
from quire.service.inspector.updates import BlockHistory
from tests.service.live import Live


def int32(*numbers: int) -> bytes:
    return np.array(numbers, np.int32).tobytes()


def pool(*tables: Table) -> PoolAnswer:
    used = {int(block) for table in tables for block in np.frombuffer(table.blocks, np.int32)}
    states = bytes(ACTIVE * (block in used) for block in range(100))
    return PoolAnswer(0.0, 0.0, 100, 0, 16, states, states, list(tables), 0)


BEAMS = pool(
    Table(7, 0, "running", 40, int32(0, 1, 2), b"", "a"), Table(7, 1, "running", 41, int32(0, 1, 3), b"", "a")
)


def drawn(view: TopView) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(view.draw())
    return console.export_text()


def test_requests_blocks_and_what_sharing_saves_are_shown() -> None:
    view = TopView("http://here")
    history = BlockHistory(BEAMS, lambda salt: f"key-{salt}")
    view.take(history.full())
    text = drawn(view)
    assert "4 active  0 cached  96 free  of 100" in text
    assert text.splitlines()[-1].split() == ["7", "running", "key-a", "2", "81", "4", "2", "0"]
    grown = Table(7, 0, "running", 64, int32(0, 1, 2, 9), b"", "a")
    view.take(history.advance(pool(grown)))
    assert drawn(view).splitlines()[-1].split() == ["7", "running", "key-a", "1", "64", "4", "0", "0"]


def test_rates_are_what_was_added_since_the_last_metrics() -> None:
    view = TopView("http://here")
    view.take(BlockHistory(BEAMS).full())
    cache = 'quire_prefix_cache_tokens_total{source="device"} 30\n'
    cache += 'quire_prefix_cache_tokens_total{source="miss"} 10\n'
    view.take_metrics(cache + 'vllm:generation_tokens_total{model_name="m"} 100\n')
    view.take_metrics(cache + 'vllm:generation_tokens_total{model_name="m"} 300\n')
    assert view.rates["output tokens/s"] > 0 == view.rates["prompt tokens/s"]
    assert "prefix hits 75.0% of 40 prompt tokens" in drawn(view)
    assert read_metrics('# HELP a b\na{b="c d"} 1.5\ne 2\n') == {("a", 'b="c d"'): 1.5, ("e", ""): 2.0}


def command(live: Live, *flags: str) -> list[str]:
    return [sys.executable, "-m", "quire", "top", "--url", live.url, *flags]


def test_it_is_printed_once_where_there_is_no_terminal(live: Live) -> None:
    live.call(lambda: live.engine.answers.update({PoolQuestion: BEAMS}))
    shown = subprocess.run(
        command(live, "--api-key", "key"), capture_output=True, text=True, timeout=60, check=True
    )
    assert "4 active" in shown.stdout and "running" in shown.stdout


def test_q_quits(live: Live) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command(live, "--api-key", "key"), stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        seen = b""
        while b"active" not in seen:
            assert select.select([ours], [], [], 60)[0], seen
            seen += os.read(ours, 1 << 16)
        os.write(ours, b"q")
        while process.poll() is None:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    os.read(ours, 1 << 16)
                except OSError:  # the terminal has no other end any more
                    break
        assert process.wait(60) == 0
    os.close(ours)


def test_what_is_refused_is_said(live: Live) -> None:
    words = command(live, "--api-key", "wrong")
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "answers 401" in done.stderr
