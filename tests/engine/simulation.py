"""The whole engine but the model, driven by a seed: random requests, pool sizes, arrivals, aborts and ends.

Besides what the oracle model sees, it asserts what the scheduler guarantees about who runs, who is preempted
and how long anyone waits.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Collection
from itertools import chain

from msgspec.structs import replace

from quire.engine.arrays import Int32
from quire.engine.capacity import Capacity
from quire.engine.config import PreemptionMode
from quire.engine.core import EngineCore
from quire.engine.hashing import BlockHasher, Prefix
from quire.engine.memory.manager import BlockManager
from quire.engine.memory.prefix_cache import Found, PrefixCache
from quire.engine.messages import EndSample, Output, Request, SamplingParams
from quire.engine.pinned_prefixes import pin_prefixes
from quire.engine.schedule.draft import StepDraft
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.schedule.plan import StepPlan
from quire.engine.schedule.preemption import Preemption, PreemptionPolicy
from quire.engine.schedule.scheduler import Scheduler
from quire.engine.sequences.sequence import Sequence, SequenceGroup
from tests.engine.oracle import VOCAB, OracleRunner, expected_beams, expected_tokens
from tests.engine.toy_grammar import COMPILED, COMPILER, GRAMMARS

EOS = (3,)
LONGEST_DELAY = 5  # steps that a transfer may take longer than its own
COMMON = [7 * i % VOCAB for i in range(24)]  # what many prompts begin with


def plain_match(prefixes: list[Prefix], device: PrefixCache, host: PrefixCache) -> Found:
    """Return what `Match.renew` must find, whatever it has found before."""
    found = Found(array("i"), array("i"))
    for prefix in prefixes:
        block = None if found.host else device.find(prefix)
        if block is not None:
            found.device.append(block)
            continue
        block = host.find(prefix)
        if block is None:
            break
        found.host.append(block)
    return found


class CheckedBlocks(BlockManager):
    """Finds what a plain search does, and counts what is found where blocks can be found in another way."""

    computing_hits = 0
    tail_hits = 0

    def attach(self, sequence: Sequence, found: Found) -> None:
        self.computing_hits += sum(not self.pool.is_kept(block) for block in found.on_device)
        self.tail_hits += found.tail is not None
        super().attach(sequence, found)

    def match(self, sequence: Sequence) -> Found:
        found = super().match(sequence)
        if self.windows is None:
            assert found == plain_match(sequence.prefixes, self.cache, self.host.cache)
        else:
            remembered, self.contents._window_matches = self.contents._window_matches, {}
            assert found == super().match(sequence)
            self.contents._window_matches = remembered
        return found


class CheckedScheduler(Scheduler):
    """A scheduler whose guarantees are asserted in each step."""

    def _may_enter(self, only: Collection[SequenceGroup] | None) -> list[SequenceGroup]:
        return [group for group in self.state.waiting if only is None or group in only]

    def schedule(self, now: float = 0.0, only: Collection[SequenceGroup] | None = None) -> StepPlan | None:
        fresh = [group for group in self._may_enter(only) if group.queue_seconds is None]
        plan = super().schedule(now, only)
        begun = [group for group in fresh if group.queue_seconds is not None]
        assert begun == fresh[: len(begun)], "a request was admitted before an earlier one"
        if begun:
            swapped = [group for group in self._may_enter(only) if group.swapped]
            assert not swapped, "admitted while a group is swapped out"
        if plan is not None:
            assert plan.num_tokens <= self.max_num_batched_tokens, "more tokens than the step may compute"
            started = {start.row for start in plan.starts}
            for group in self.state.running:
                rows = {sequence.row for sequence in group.live}
                assert rows <= started or not rows & started, "a group was admitted in part"
        return plan


class PushedScheduler(CheckedScheduler):
    """Now and then the newest group is preempted although there is room, to either place."""

    rng: random.Random

    def _schedule_decodes(self, draft: StepDraft) -> Int32:
        decodes = super()._schedule_decodes(draft)
        running = self.state.running
        if len(running) > 1 and not running[-1].transferring and self.rng.random() < 0.4:
            self.preemption.policy = PreemptionPolicy(mode=self.rng.choice(["swap", "recompute"]))
            self.preemption.preempt_newest(draft, running[0].live[0])
        return decodes


class CheckedPreemption(Preemption):
    """Preempts the newest group, whole, and never for a newer one."""

    def preempt_newest(self, draft: StepDraft, beneficiary: Sequence) -> None:
        running = list(self._state.running)
        super().preempt_newest(draft, beneficiary)
        (victim,) = [group for group in running if group not in self._state.running]
        assert victim is not min(running, key=lambda group: group.order), "the oldest group was preempted"
        assert victim is max(running, key=lambda group: group.order), "a newer group was left running"
        assert beneficiary.group.order <= victim.order, "a group was preempted for a newer one"
        assert not any(sequence.blocks or sequence.row >= 0 for sequence in victim.live), "preempted in part"


def make_core(
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    budget: int,
    *,
    caching: bool = True,
    num_host_blocks: int = 0,
    mode: PreemptionMode = "recompute",
    pushed: random.Random | None = None,
    delays: random.Random | None = None,
    windows: tuple[int, ...] = (),
    keeps_all: bool = True,
    max_model_len: int = 1000,
) -> EngineCore:
    """`delays`: of the transfers, which else are done with their steps."""
    capacity = Capacity(
        num_blocks,
        block_size,
        max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        windows=windows,
        keeps_all=keeps_all,
        step_tokens=budget,
    )
    hasher = BlockHasher(block_size, seed=0) if caching else None
    kind = CheckedScheduler if pushed is None else PushedScheduler
    scheduler = kind(capacity, budget, EOS, hasher=hasher, num_host_blocks=num_host_blocks)
    scheduler.blocks.__class__ = CheckedBlocks
    if isinstance(scheduler, PushedScheduler) and pushed is not None:
        scheduler.rng = pushed
    # By these costs `auto` swaps groups that fill, or share, more than five in six of their slots.
    policy = PreemptionPolicy(mode=mode, seconds_per_block=1.0, seconds_per_token=2.4 / block_size)
    scheduler.preemption = CheckedPreemption(scheduler.state, policy)
    runner = OracleRunner(num_blocks, block_size, max_num_seqs, num_host_blocks, windows, keeps_all=keeps_all)
    if delays is not None:
        runner.delay = lambda: delays.randint(0, LONGEST_DELAY)
    core = EngineCore(scheduler, runner, clock=lambda: 0.0, grammars=COMPILER)
    core.mask_wait = 60.0  # what runs does not depend on the time that a mask takes
    for grammar, compiled in COMPILED.items():  # by now: a thread would make the order of arrival uncertain
        assert core.grammars is not None
        core.grammars.keep(grammar, compiled)
    return core


def most_steps(core: EngineCore, request: Request, longest_delay: int) -> int:
    """Steps within which `request` ends once no older one is left, whatever the newer ones do.

    Nobody preempts it any more, so it prefills at most once, first in turn, with what the decodes of the
    other rows leave of the budget. A token takes a step, and another one to be committed before a beam can
    go on. For each block that it takes it may wait for one in transfer, which is there after two commits and
    what the transfer takes longer than its step.
    """
    params, scheduler = request.params, core.scheduler
    length = len(request.prompt) + params.max_tokens
    share = scheduler.max_num_batched_tokens - scheduler.rows.size + 1
    prefill = -(-params.num_sequences * length // share)
    blocks = scheduler.blocks.pages * (scheduler.blocks.blocks_for(length) + 1)
    waits = (2 + longest_delay) * params.num_sequences * blocks
    resume = 4 + 2 * longest_delay
    return prefill + 2 * params.max_tokens + waits + resume


def random_request(rng: random.Random, request_id: int, longest: int, widest: int) -> Request:
    n = rng.choice([1, 1, 1, rng.randint(1, widest)])
    if rng.random() < 0.2:
        width = rng.randint(1, widest)
        beams = SamplingParams(
            n=rng.randint(1, width),
            temperature=0.0,
            beam_width=width,
            length_penalty=rng.choice([0.0, 1.0, -1.0]),
            early_stopping=rng.choice([True, False, "never"]),
            max_tokens=rng.randint(1, longest),
            stop_token_ids=tuple(rng.sample(range(VOCAB), rng.randint(0, 8))),
            seed=rng.randrange(1 << 40),
            prompt_logprobs=rng.choice([None, 0]),
        )
        return Request(request_id, [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))], beams)
    params = SamplingParams(
        n=n,
        temperature=rng.choice([0.0, 1.0]),
        max_tokens=rng.randint(1, longest),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=tuple(rng.sample(range(VOCAB), rng.randint(0, 2))),
        seed=rng.randrange(1 << 40),
        logprobs=rng.choice([None, 0, 2]),
        prompt_logprobs=rng.choice([None, None, 0, 3]),
    )
    if rng.random() < 0.2:
        min_tokens = rng.randint(0, params.max_tokens)
        params = replace(params, grammar=rng.choice(GRAMMARS), ignore_eos=False, min_tokens=min_tokens)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))]
    if rng.random() < 0.5:  # few prompts, so that they come again, whole or as prefixes
        prompt = COMMON[: rng.choice([4, 8, 12, 16, longest])] + prompt[: rng.randint(0, 3)]
    return Request(request_id, prompt, params, cache_salt=rng.choice(["", "", "tenant"]))


def distinct_filled(core: EngineCore) -> int:
    """Token slots in use, counted block by block."""
    scheduler = core.scheduler
    filled = {}
    for sequence in scheduler.rows.sequences:
        if sequence is not None:
            context = int(scheduler.rows.context[sequence.row])
            tables = sequence.tables
            for i, block in chain(*(enumerate(table.blocks, table.first) for table in tables)):
                here = min(scheduler.blocks.block_size, max(0, context - i * scheduler.blocks.block_size))
                filled[block] = max(filled.get(block, 0), here)
    return sum(filled.values())


def check_outputs(
    request: Request,
    got: dict[tuple[int, int], list[Output]],
    stopped: set[tuple[int, int]],
    done: Counter[str],
) -> None:
    """Every sequence of `request` has its tokens, one end, and the log-probabilities that it asked for.

    Those of samples that were `stopped` meanwhile are as far as they came.
    """
    params = request.params
    sequences = [got[request.id, index] for index in range(params.n)]
    for outputs in sequences:
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    if params.beam_width:
        assert all(len(outputs) == 1 for outputs in sequences)
        assert [outputs[0].tokens for outputs in sequences] == expected_beams(request, EOS)
        assert all(outputs[0].cumulative_logprob is not None for outputs in sequences)
        done["searches"] += 1
        return
    for index, outputs in enumerate(sequences):
        done["cached"] += outputs[0].cached_tokens
        done["from host"] += outputs[0].cached_host_tokens
        tokens = [token for output in outputs for token in output.tokens]
        expected = expected_tokens(request, index, EOS)
        done["constrained"] += bool(params.grammar)
        last = outputs[-1]
        if (request.id, index) in stopped:
            assert last.finish_reason is None and tokens == expected[: len(tokens)], f"request {request.id}"
            done["stopped"] += 1
        else:
            assert last.finish_reason == ("stop" if last.stop_token is not None else "length")
            assert tokens == expected, f"request {request.id}"
        if params.logprobs is not None:
            flat = [entry for output in outputs for entry in output.logprobs or []]
            assert [entry.token for entry in flat] == tokens
            assert all(len(entry.top_tokens) == params.logprobs for entry in flat)
        if index == 0 and params.prompt_logprobs is not None:
            everyone = outputs[0].prompt_logprobs
            assert everyone is not None
            assert [entry and entry.token for entry in everyone] == [None, *request.prompt[1:]]


def _has_ended(outputs: list[Output] | None) -> bool:
    return bool(outputs) and outputs[-1].finish_reason is not None


def simulate(
    seed: int, *, pushed: bool = False, windows: tuple[int, ...] = (), keeps_all: bool = True
) -> Counter[str]:
    """Twelve random requests from their arrival to their end. Returns how often each thing came about.

    windows, keeps_all: of cache groups, as `Capacity` has them.
    `pushed`: groups are preempted at random moments too, so there is no bound on how long anyone waits.
    """
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8])
    max_num_seqs = rng.randint(1, 8)
    num_blocks = max(3, rng.randint(16, 90) // block_size)
    budget = rng.randint(max_num_seqs, 24)
    caching = rng.random() < 0.7
    slow_transfers = seed % 7 == 5
    longest_delay = LONGEST_DELAY if slow_transfers else 0
    host = rng.choice([0, num_blocks // 3, num_blocks])
    if windows:
        pages = keeps_all + len(windows)
        num_blocks, host = num_blocks * pages, host * pages
    mode: PreemptionMode = rng.choice(["swap", "auto", "recompute"])
    core = make_core(
        num_blocks,
        block_size,
        max_num_seqs,
        budget,
        caching=caching,
        num_host_blocks=host,
        mode=mode,
        pushed=random.Random(seed) if pushed else None,
        delays=random.Random(seed) if slow_transfers else None,
        windows=windows,
        keeps_all=keeps_all,
    )
    scheduler = core.scheduler
    if caching and seed % 5 == 3 and num_blocks * block_size >= 16:
        pin_prefixes(core, [COMMON[: 8 if seed % 2 else 5]])  # whole blocks, or one that is not full
    coming = [random_request(rng, i, rng.choice([4, 12, 24]), max_num_seqs) for i in range(12)]
    coming.reverse()
    alive: dict[int, Request] = {}
    deadlines: dict[int, int] = {}
    aborted: set[int] = set()
    got: dict[tuple[int, int], list[Output]] = {}
    stopped: set[tuple[int, int]] = set()
    stops, stopping = seed % 4 == 1, random.Random(-1 - seed)  # whether, and when, samples are stopped
    done: Counter[str] = Counter()
    steps = 0
    accepted: list[Request] = []
    while coming or core.has_work:
        while coming and (rng.random() < 0.4 or not core.has_work):
            request = coming.pop()
            if not core.handle(request):
                accepted.append(request)
                alive[request.id] = request
                deadlines[request.id] = steps + sum(
                    most_steps(core, each, longest_delay) for each in alive.values()
                )
        if accepted and rng.random() < 0.03:
            victim = rng.choice(accepted).id
            aborted.add(victim)
            alive.pop(victim, None)
            core.abort(victim)
        going = [
            (request.id, index)
            for request in alive.values()
            for index in range(request.params.n)
            if not request.params.beam_width and not _has_ended(got.get((request.id, index)))
        ]
        begun = [each for each in going if each in got and each not in stopped]
        if begun and stops and stopping.random() < 0.2:
            stop = stopping.choice(begun)
            stopped.add(stop)
            assert not core.handle(EndSample(*stop))
        ended: Counter[int] = Counter()
        for output in core.step():
            assert output.request_id not in aborted
            assert (output.request_id, output.index) not in stopped
            got.setdefault((output.request_id, output.index), []).append(output)
            ended[output.request_id] += output.finish_reason is not None
        steps += 1
        for request_id, request in list(alive.items()):
            assert pushed or steps <= deadlines[request_id], f"request {request_id} waits too long"
            every = [(request_id, index) for index in range(request.params.n)]
            if all(each in stopped or _has_ended(got.get(each)) for each in every):
                del alive[request_id]
        check_scheduler(scheduler.state)
        assert scheduler.state.tokens_filled == distinct_filled(core)
    assert scheduler.blocks.pool.num_available == num_blocks - scheduler.blocks.pool.num_pinned
    assert scheduler.blocks.host.pool.num_available == host
    for request in accepted:
        if request.id not in aborted:
            check_outputs(request, got, stopped, done)
    done["recomputes"] = scheduler.preemption.recomputes
    done["swaps"] = scheduler.preemption.swaps
    done["copies"] = scheduler.blocks.copies_on_write
    done["pinned"] = scheduler.blocks.pool.num_pinned
    assert isinstance(scheduler.blocks, CheckedBlocks)
    done["computing"] = scheduler.blocks.computing_hits
    done["tails"] = scheduler.blocks.tail_hits
    done["evictions"] = scheduler.blocks.pool.evictions
    return done
