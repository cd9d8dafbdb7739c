"""Time what rank 0 does to tell a step to other ranks: `python -m quire.loadtest.rank_messages [--size 8]`.

A step of 256 decodes and one of 2,048 prompt tokens; readers are processes that decode each frame. They look
for it all along, as ranks with GPUs do while a step is computed, or sleep, as they do when there was none for
a while. Rank 0 is busy before, as with its device, or with the plan. Steps before those that count warm all
of them up. No GPU.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from quire.engine.parallel.channel import Reader, Writer
from quire.engine.parallel.frames import decode, encode_step
from quire.engine.schedule.plan import StepPlan
from quire.loadtest.command import add_line, command_parser

STEPS = 500  # that count, of each kind
WARM_UP_STEPS = 200
PAUSE_SECONDS = 0.002  # between steps
SPIN_SECONDS = 5e-4  # for which readers that look do so when nothing is computed


def plans() -> dict[str, StepPlan]:
    """Return steps by name."""
    rows = np.arange(256, dtype=np.int32)
    ones = np.ones(256, np.int32)
    decodes = StepPlan(
        rows=rows,
        num_decodes=256,
        query_lens=ones,
        context_lens=rows + 700,
        prefill_tokens=np.empty(0, np.int32),
        table_rows=rows[:16],
        table_columns=rows[:16],
        table_blocks=rows[:16],
        sample_rows=rows,
        sample_tokens=rows,
        sample_positions=rows + 700,
    )
    prompt = np.array([2048], np.int32)
    one = np.zeros(1, np.int32)
    prefill = StepPlan(
        rows=one,
        num_decodes=0,
        query_lens=prompt,
        context_lens=prompt,
        prefill_tokens=np.arange(2048, dtype=np.int32),
        table_rows=np.zeros(128, np.int32),
        table_columns=np.arange(128, dtype=np.int32),
        table_blocks=np.arange(128, dtype=np.int32),
        sample_rows=one,
        sample_tokens=prompt - 1,
        sample_positions=prompt,
    )
    return {"256 decodes": decodes, "2,048 prompt tokens": prefill}


def read(fd: int, index: int, readers: int, frames: int, *, look: bool) -> None:
    """Take so many frames, as a rank does."""
    reader = Reader(fd, index, readers, SPIN_SECONDS if look else 0.0)
    for _ in range(frames):
        decode(reader.receive(lambda: look))


def be_busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def measure(readers: int, *, look: bool) -> Iterator[dict[str, object]]:
    """Yield how long each step took to be sent, and to be with the last reader."""
    steps, writer = plans(), Writer(readers)
    frames = (WARM_UP_STEPS + STEPS) * len(steps)
    forked = multiprocessing.get_context("fork")
    processes = [
        forked.Process(target=read, args=(writer.fd, i, readers, frames), kwargs={"look": look})
        for i in range(readers)
    ]
    for process in processes:
        process.start()
    for name, plan in steps.items():
        sent, taken = [], []
        for _ in range(WARM_UP_STEPS + STEPS):
            be_busy(PAUSE_SECONDS)
            begin = time.perf_counter()
            writer.send(encode_step(plan, 0), lambda: None)
            sent.append(time.perf_counter() - begin)
            while not all(writer.has_taken(i) for i in range(readers)):
                pass
            taken.append(time.perf_counter() - begin)
        yield {
            "ranks": readers + 1,
            "step": name,
            "others": "look" if look else "sleep",
            "sent_us": round(statistics.median(sent[WARM_UP_STEPS:]) * 1e6, 1),
            "taken_us": round(statistics.median(taken[WARM_UP_STEPS:]) * 1e6, 1),
        }
    for process in processes:
        process.join()
    writer.close()


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--size", type=int, default=8, help="ranks, of which this is one")
    parser.add_argument("--json", type=Path, help="add a line for each to this file")
    arguments = parser.parse_args()
    for look in (True, False):
        for figures in measure(arguments.size - 1, look=look):
            add_line(figures, arguments.json)


if __name__ == "__main__":
    main()
