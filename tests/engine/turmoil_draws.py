"""What a turmoil is drawn from: its core, its trouble and its requests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace as replaced

import msgspec
from msgspec.structs import replace

from quire.engine.capacity import Capacity
from quire.engine.core import EngineCore
from quire.engine.hashing import BlockHasher, Digest
from quire.engine.messages import POOLED, Output, PoolingParams, Request
from quire.engine.pinned_prefixes import pin_prefixes
from quire.engine.schedule.bisection import MAX_FRUITLESS
from quire.engine.schedule.plan import StepPlan
from quire.engine.sequences.grammar_queue import GrammarQueue
from tests.engine.late_grammars import LateGrammars, LateWorker
from tests.engine.oracle import VOCAB
from tests.engine.poison import KINDS, Poisoned, poisoned
from tests.engine.simulation import COMMON, LONGEST_DELAY, make_core, random_request
from tests.engine.turmoil_runner import TurmoilRunner, unfinite

WINDOWS: list[tuple[tuple[int, ...], bool]] = [
    *(((), True),) * 3,
    *((windows, True) for windows in ((5,), (3, 3), (8, 1000), (1,), (2, 9))),
    *((windows, False) for windows in ((2,), (5,), (4, 12))),
]
MOST_HICCUPS = MAX_FRUITLESS - 1

Got = dict[tuple[int, int], list[Output]]


class WeakHasher(BlockHasher):
    """A digest stands for many blocks."""

    def __init__(self, block_size: int, num_digests: int) -> None:
        super().__init__(block_size, seed=0)
        self.num_digests = num_digests

    def next(self, before: Digest, content: bytes) -> Digest:
        return bytes([super().next(before, content)[0] % self.num_digests])


class Chances(msgspec.Struct):
    """How likely things are in a turmoil."""

    stop: float  # in a step, that a sample is whole
    leave: float  # in a step, that a client does
    full: float  # that a request is as long as there is room for
    fault: float  # of a request, of either kind


def draw_chances(rng: random.Random) -> Chances:
    return Chances(
        stop=rng.choice([0.0, 0.15]),
        leave=rng.choice([0.0, 0.04]),
        full=rng.choice([0.0, 0.1, 0.6]),
        fault=rng.choice([0.0, 0.0, 0.06]),
    )


def draw_core(rng: random.Random) -> tuple[EngineCore, TurmoilRunner]:
    block_size = rng.choice([1, 2, 3, 4, 8, 16])
    rows = rng.randint(1, 8)
    windows, keeps_all = rng.choice(WINDOWS)
    num_blocks = max(3, rng.randint(*rng.choice([(16, 90), (16, 90), (8, 32)])) // block_size)
    num_blocks *= keeps_all + len(windows)
    budget = rng.choice([rows, rng.randint(rows, 24), 64])
    if rng.random() < 0.25:  # room for just one of some requests
        anything = Capacity(1 << 20, block_size, rows, 1000, VOCAB, windows, keeps_all, budget)
        num_blocks = anything._blocks_needed(rng.randint(1, 24), rng.randint(8, 24), rng.randint(1, rows))
    host = rng.choice([0, num_blocks // 3, num_blocks])
    caching = rng.random() < 0.75
    core = make_core(
        num_blocks,
        block_size,
        rows,
        budget,
        caching=caching,
        num_host_blocks=host,
        mode=rng.choice(["swap", "auto", "recompute"]),
        pushed=random.Random(rng.random()) if rng.random() < 0.4 else None,
        windows=windows,
        keeps_all=keeps_all,
        max_model_len=rng.choice([1000, 1000, 40, 12]),
    )
    clock = itertools.count()
    core.clock = core.scheduler.state.clock = core.scheduler.blocks.history.clock = lambda: float(next(clock))
    runner = TurmoilRunner(num_blocks, block_size, rows, host, rng, windows, keeps_all=keeps_all)
    core.runner = runner
    if rng.random() < 0.4:
        runner.delay = lambda: rng.randint(0, LONGEST_DELAY)
    state, contents = core.scheduler.state, core.scheduler.blocks.contents
    runner.pools = rng.random() < 0.08
    state.capacity = replaced(state.capacity, pools=runner.pools)
    if contents._prefixes is not None and rng.random() < 0.2:
        contents._prefixes._hasher = WeakHasher(block_size, rng.choice([2, 12, 60]))
    elif caching and rng.random() < 0.3:
        try:
            pin_prefixes(core, [COMMON[: rng.choice([4, 5, 8, 11])]])
        except ValueError as refusal:
            assert "KV blocks" in str(refusal) or "--max-model-len" in str(refusal)
            assert not core.has_work
    if rng.random() < 0.4:
        core.grammars = GrammarQueue(LateGrammars(rng))
        core.grammars._worker = LateWorker(rng)  # type: ignore[assignment]
        core.mask_wait = 0.0
    return core, runner


def draw_trouble(rng: random.Random, core: EngineCore, runner: TurmoilRunner) -> None:
    """Have steps be interrupted, raise what no request is to blame for, or take too much memory."""
    if rng.random() < 0.5:
        return
    runner.waits_interrupted = rng.choice([0.0, 0.0, 0.1, 0.5])
    runner.launches_interrupted = rng.choice([0.0, 0.0, 0.1])
    hiccups = rng.choice([0, 0, MOST_HICCUPS])
    most = core.scheduler.rows.size  # of what a step computes: any request fits alone
    too_much: Callable[[StepPlan], bool] = rng.choice(
        [lambda plan: False] * 3
        + [lambda plan: plan.num_tokens > most, lambda plan: len(plan.starts) > 1 and plan.num_tokens > most]
    )

    def trouble(plan: StepPlan) -> Exception | None:
        nonlocal hiccups
        likely = 0.5 if len(plan.swap_out) else 0.02
        if hiccups > 0 and not core.bisection.in_progress and rng.random() < likely:
            hiccups -= 1
            return Poisoned("now and then")
        return MemoryError("too many tokens") if too_much(plan) else None

    runner.trouble = trouble


def draw_request(
    rng: random.Random, core: EngineCore, number: int, earlier: list[Request], got: Got, chances: Chances
) -> Request:
    """Return any request, or one that goes on from what an earlier one has got, or is the same."""
    capacity = core.scheduler.state.capacity
    drawn = random_request(rng, number, rng.choice([4, 12, 24]), core.scheduler.rows.size)
    params, prompt, salt = drawn.params, drawn.prompt, drawn.cache_salt
    if earlier and rng.random() < 0.35:
        other = rng.choice(earlier)
        generated = [token for output in got.get((other.id, 0), []) for token in output.tokens]
        prompt = other.prompt + generated + rng.choice([[], prompt[:3]])
        salt = rng.choice([salt, other.cache_salt, other.cache_salt])
    if capacity.pools:
        return Request(number, prompt, POOLED, core.clock(), salt, pooling=PoolingParams())
    if not params.beam_width and rng.random() < 0.2:
        params = replace(params, presence_penalty=1.0)
    if rng.random() < chances.full:
        room = capacity.room(len(prompt), params.num_sequences)
        if 1 <= room <= 40:
            params = replace(params, max_tokens=room, min_tokens=0)
    request = Request(number, prompt, params, core.clock(), salt)
    if rng.random() < chances.fault:
        return unfinite(request, rng.randrange(len(prompt) + params.max_tokens))
    if rng.random() < chances.fault:
        return poisoned(request, rng.choice(KINDS), rng.randrange(len(prompt) + params.max_tokens))
    return request
