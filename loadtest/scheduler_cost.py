"""Measure what a step costs the host: `python -m quire.loadtest.scheduler_cost [--sequences N] [--steps N]`.

Processor time of `schedule` (with block management), of `commit` and of the whole `EngineCore.step`, without
a model, while all sequences decode: in microseconds, and as a multiple of a fixed piece of Python that is
timed between the steps: the ratio compares between machines, and between hours of one that others use too.
At each context there are as many KV blocks, and those that it does not take hold what earlier requests
computed, as in a server: else a longer context would be timed with a larger cache.
The last line is of steps in which one request ends and the next one is let in.
The first measurement is not shown: its memory is fresh, which costs page faults.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from quire.engine.arrays import empty_int32
from quire.engine.capacity import Capacity
from quire.engine.core import EngineCore
from quire.engine.hashing import BlockHasher
from quire.engine.messages import Request, SamplingParams
from quire.engine.schedule.plan import Runner, StepHandle, StepPlan, StepResult
from quire.engine.schedule.scheduler import WATERMARK, Scheduler
from quire.loadtest.command import command_parser

CONTEXTS = (256, 2048, 16384)
LONGEST = max(CONTEXTS)
CHURN_CONTEXT = 256
BLOCK_SIZE = 16
VOCABULARY = 128_000
EOS = VOCABULARY - 1
EARLIER = 100_000  # first id of the requests that filled the cache
YARDSTICK_ITEMS = 1000
YARDSTICK_EVERY = 4  # steps


@dataclass
class Timings:
    """Seconds of each step, and of the yardstick in between."""

    schedule: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    yardstick: list[float] = field(default_factory=list)

    @property
    def both(self) -> list[float]:
        return [sum(pair) for pair in zip(self.schedule, self.commit, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.both) / statistics.median(self.yardstick)


class NoModel(Runner, StepHandle):
    """A runner whose steps are done at once. It is its own handle."""

    def __init__(self) -> None:
        self._samples: list[int] = []

    def launch(self, plan: StepPlan) -> NoModel:
        self._samples.append(len(plan.sample_rows))
        return self

    def wait(self) -> StepResult:
        tokens = np.arange(self._samples.pop(0), dtype=np.int32) * 499  # all over the vocabulary
        return StepResult(tokens, empty_int32(), None, ())


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--sequences", type=int, default=256, help="running at once")
    parser.add_argument("--steps", type=int, default=320, help="timed at each context, after as many untimed")
    arguments = parser.parse_args()
    print(f"{arguments.sequences} sequences decode; µs, medians but for the last two columns")
    print(
        f"{'context':>8}{'schedule':>10}{'commit':>10}{'both':>8}{'step':>8}{'ratio':>8}{'least':>8}{'p99':>8}"
    )
    measure(arguments.sequences, CONTEXTS[0], arguments.steps, churn=False)
    for context in CONTEXTS:
        show(str(context), measure(arguments.sequences, context, arguments.steps, churn=False))
    show("churn", measure(arguments.sequences, CHURN_CONTEXT, arguments.steps, churn=True))


def show(name: str, timings: Timings) -> None:
    both = sorted(timings.both)
    medians = [statistics.median(each) for each in (timings.schedule, timings.commit, both, timings.step)]
    schedule, commit, total, step, least, p99 = (
        round(1e6 * seconds) for seconds in (*medians, both[0], both[-len(both) // 100])
    )
    print(f"{name:>8}{schedule:>10}{commit:>10}{total:>8}{step:>8}{timings.ratio:>8.2f}{least:>8}{p99:>8}")


def yardstick_seconds() -> float:
    """Time of a loop over a thousand ints: dictionary, list and attribute work, as a scheduler does."""
    begin = time.thread_time()
    seen: dict[int, list[int]] = {}
    for i in range(YARDSTICK_ITEMS):
        seen.setdefault(i * 7 % 61, []).append(i)
    assert sum(len(items) for items in seen.values()) == YARDSTICK_ITEMS
    return time.thread_time() - begin


def measure(
    sequences: int,
    context: int,
    steps: int,
    *,
    churn: bool,
    prepare: Callable[[EngineCore], None] = lambda core: None,
) -> Timings:
    """Time `steps` steps from `context` tokens on, one ahead as in serving, after as many untimed ones."""
    core = EngineCore(*_scheduler(sequences, 2 * steps), clock=time.thread_time)
    prepare(core)
    _fill_cache(core, sequences, LONGEST - context)
    most = 2 * steps + 2
    for i in range(sequences):
        # Lengths differ, so that each step as many sequences fill a block and take the next one.
        _add(core, i, context - 1 - i % BLOCK_SIZE, 1 + i * most // sequences if churn else most)
    if churn:
        for i in range(sequences, 4 * sequences):
            _add(core, i, context, most)
    while not core.stats.decode_tokens:
        core.step()
    timings = Timings()
    gc.collect()
    gc.disable()
    for i in range(2 * steps - 4):
        begin = time.thread_time()
        core.step()
        seconds = time.thread_time() - begin
        assert churn or (core.stats.decode_tokens == sequences and not core.stats.block_evictions)
        if i >= steps:
            timings.step.append(seconds)
            timings.schedule.append(core.stats.schedule_seconds)
            timings.commit.append(core.stats.commit_seconds)
            if i % YARDSTICK_EVERY == 0:
                yardstick_seconds()  # what the step left in the processor's caches is to make no difference
                timings.yardstick.append(yardstick_seconds())
    gc.enable()
    return timings


def _scheduler(sequences: int, new: int) -> tuple[Scheduler, NoModel]:
    """Return one with blocks for all sequences at the longest context and `new` tokens, and some to spare."""
    length = LONGEST + new + BLOCK_SIZE
    blocks = int(sequences * (-(-length // BLOCK_SIZE) + 1) * (1 + 2 * WATERMARK))
    capacity = Capacity(blocks, BLOCK_SIZE, sequences, max_model_len=2 * length, vocab_size=VOCABULARY)
    hasher = BlockHasher(BLOCK_SIZE, seed=0)
    return Scheduler(capacity, sequences * LONGEST, (EOS,), hasher=hasher), NoModel()


def _fill_cache(core: EngineCore, sequences: int, length: int) -> None:
    """Fill it with what a request of `length` tokens for each of the sequences leaves behind."""
    for i in range(sequences if length else 0):
        _add(core, EARLIER + i, length, 1)
    while core.has_work:
        core.step()


def _add(core: EngineCore, i: int, length: int, max_tokens: int) -> None:
    """Add a request. No two prompts begin alike."""
    prompt = [i % 1000, i // 1000] + [j % 1000 for j in range(length - 2)]
    core.add(Request(i, prompt, SamplingParams(max_tokens=max_tokens)))


if __name__ == "__main__":
    main()
