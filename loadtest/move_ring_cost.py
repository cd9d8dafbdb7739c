"""Measure what it costs to keep the moves of blocks, against a tree without that.

`python -m quire.loadtest.move_ring_cost BEFORE [--rounds N] [--sequences N] [--steps N] [--json FILE]`

BEFORE is a checkout of an earlier commit, such as `git worktree add ../before COMMIT` makes. scheduler_cost
and the demo model's engine run in both trees in turn. Then the ring is timed alone: a move with it and
without, and all that a step of scheduler_cost tells it, told once more.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.engine.arrays import as_int32
from quire.engine.memory.manager import BlockManager
from quire.engine.memory.move_ring import MoveRing
from quire.engine.messages import Request, SamplingParams
from quire.engine.sequences.rows import Rows
from quire.engine.sequences.sequence import SequenceGroup
from quire.loadtest import scheduler_cost as steps
from quire.loadtest.command import write_json
from quire.loadtest.why_cost import in_turn, parse_comparison, python_in, scheduler_cost, timed

BUDGET_US = 15.0  # of a step: 0.3 % of 5 ms
CONTEXT = 2048
# Steps the demo model by hand, in whatever tree it runs in.
DEMO = """
import json, statistics, time
from quire.engine.config import EngineConfig
from quire.engine.messages import Request, SamplingParams
from quire.engine.startup import start_engine

core, _ = start_engine(EngineConfig(model="service/demo/model", device="cpu", dtype="float32"))
host, whole = [], []
for turn in range(4):
    for i in range(32):
        params = SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.0)
        core.add(Request(100 * turn + i, [turn + 5, i + 5, *range(10, 40)], params))
    while core.has_work:
        begin = time.process_time()
        core.step()
        if turn and core.stats.decode_tokens == 32:
            whole.append(time.process_time() - begin)
            host.append(core.stats.schedule_seconds + core.stats.commit_seconds)
print(json.dumps({"step_us": 1e6 * statistics.median(whole), "host_us": 1e6 * statistics.median(host)}))
"""


class NoRing(MoveRing):
    """Hears of nothing."""

    def begin_step(self, now: float, num_waiting: int) -> None:
        pass

    def note(self, *move: object) -> None:
        pass

    def note_one(self, *move: object) -> None:
        pass

    def mark(self, *move: object) -> None:
        pass

    def mark_pair(self, *move: object) -> None:
        pass


class HeardRing(MoveRing):
    """Remembers what it was told, a list of calls for each step."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.steps: list[list[tuple[str, tuple[Any, ...]]]] = []

    def begin_step(self, now: float, num_waiting: int) -> None:
        self.steps.append([("begin_step", (now, num_waiting))])

    def note(self, *move: Any) -> None:
        self.steps[-1].append(("note", (*move[:-1], list(move[-1]))))

    def note_one(self, *move: Any) -> None:
        self.steps[-1].append(("note_one", move))

    def mark(self, *move: Any) -> None:
        self.steps[-1].append(("mark", move))


def main() -> None:
    arguments = parse_comparison(__doc__)

    def run_in(tree: Path) -> dict[str, float]:
        found = scheduler_cost(tree, arguments)
        run = {f"scheduler {context}, µs": row["both"] for context, row in found.items()}
        run |= {f"scheduler {context}, ratio": row["ratio"] for context, row in found.items()}
        run |= {f"demo model, {key}": us for key, us in demo(tree).items()}
        print(tree, run, file=sys.stderr, flush=True)
        return run

    both = in_turn(arguments, run_in)
    figures: dict[str, object] = {"command": " ".join(sys.argv[1:]), "budget_us": BUDGET_US}
    print(f"{'':>26}{'before':>9}{'after':>9}   medians of {arguments.rounds} runs each")
    for key in both[0][0]:
        before, after = (round(statistics.median(run[key] for run in runs), 2) for runs in both)
        print(f"{key:>26}{before:>9}{after:>9}")
        figures[key] = {"before": before, "after": after}
    for key, seconds in {**move_cost(), **step_cost(arguments.sequences, arguments.steps)}.items():
        print(f"{key:>26}{1e6 * seconds:>9.2f} µs")
        figures[f"{key}, µs"] = round(1e6 * seconds, 3)
    write_json(arguments.json, "cpu", figures)


def demo(tree: Path) -> dict[str, float]:
    """Step the demo model in `tree`; return the processor time of a step, and of its host work."""
    found: dict[str, float] = json.loads(python_in(tree, "-c", DEMO).splitlines()[-1])
    return found


def move_cost() -> dict[str, float]:
    """Return the seconds of taking a block and giving it back, with the ring and without it."""
    return {
        "a block taken and given back": _one_block(MoveRing),
        "the same without the ring": _one_block(NoRing),
    }


def _one_block(kind: type[MoveRing]) -> float:
    rows = Rows(1, 64, 16)
    blocks = BlockManager(64, 16, rows, None)
    blocks.ring = blocks.pool._ring = kind(64)
    request = Request(0, [1] * 16, SamplingParams())
    (sequence,) = SequenceGroup(request, as_int32(request.prompt), 0, ()).sequences
    rows.assign(sequence)

    def move() -> None:
        blocks.grow(sequence, 16)
        blocks.free(sequence)

    return min(timed(move) for _ in range(5))


def step_cost(sequences: int, num_steps: int) -> dict[str, float]:
    """Return the seconds that the ring takes of a step: the median, and of one in which a request ends."""
    return {
        f"the ring, a {name} step": statistics.median(_told_again(sequences, num_steps, churn=churn))
        for name, churn in (("decode", False), ("churn", True))
    }


def _told_again(sequences: int, num_steps: int, *, churn: bool) -> list[float]:
    heard: list[HeardRing] = []

    def hear(core: steps.EngineCore) -> None:
        blocks = core.scheduler.blocks
        ring = HeardRing(blocks.pool.num_blocks)
        ring.steps.append([])
        blocks.ring = blocks.pool._ring = blocks.cache._ring = ring
        heard.append(ring)

    context = steps.CHURN_CONTEXT if churn else CONTEXT
    steps.measure(sequences, context, num_steps, churn=churn, prepare=hear)
    ring = MoveRing(1 << 16)
    seconds = []
    for told in heard[0].steps[-num_steps:]:
        calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
            (getattr(ring, name), values) for name, values in told
        ]
        begin = time.thread_time()
        for call, values in calls:
            call(*values)
        seconds.append(time.thread_time() - begin)
    return seconds


if __name__ == "__main__":
    main()
