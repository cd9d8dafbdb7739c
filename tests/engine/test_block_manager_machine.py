"""The block manager against a plain map of what every slot should hold, under any order of operations."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, permutations
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, currently_in_test_context, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from quire.engine.arrays import as_int32
from quire.engine.hashing import BlockHasher, Digest
from quire.engine.memory.invariants import check_memory
from quire.engine.memory.manager import BlockManager
from quire.engine.memory.moves import Moves
from quire.engine.memory.pool import BlockPool, OutOfBlocks
from quire.engine.memory.prefix_cache import Found, PrefixCache
from quire.engine.messages import Request, SamplingParams
from quire.engine.sequences.rows import Rows
from quire.engine.sequences.sequence import NO_ROW, Sequence, SequenceGroup
from quire.engine.sequences.window_table import WindowTable
from tests.engine.memory_model import Content, Histories, LateMemory
from tests.engine.nightly import NIGHTLY

ROWS = 6
# Several processes can run a part each, with seeds of its own; `nightly` looks elsewhere every time.
PARTS, MOST_SEEDS = 5 if NIGHTLY else 2, 12
# What all parts take at least, and how often they reach each thing: five times what mutants are found by.
STEPS, OFTEN = (200_000, 100) if NIGHTLY else (24_000, 12)
SETTINGS = settings(
    max_examples=(12_500 if NIGHTLY else 50) // PARTS,
    stateful_step_count=15,
    derandomize=not NIGHTLY,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
_WEIGHTS = {
    "start": 6,
    "compute": 14,
    "fork": 6,
    "adopt": 1,
    "follow": 3,
    "launch": 8,
    "commit": 8,
    "arrive": 8,
    "swap_out": 3,
    "swap_in": 6,
    "resume": 3,
    "spill": 5,
    "end": 5,
}
_REACHED = (
    "device hits",
    "computing hits",
    "failed",
    "host hits",
    "copies",
    "adopted",
    "copied at once",
    "swapped out",
    "recomputed",
    "swapped in",
    "spilled",
    "left in transfer",
    "no room",
)
_OPERATIONS = (list(_WEIGHTS), list(_WEIGHTS.values()))
MAX_TOKENS = 40  # of a sequence


@dataclass
class Step:
    """What a step does besides its moves."""

    writes: list[tuple[int, int, int]] = field(default_factory=list)
    touched: set[int] = field(default_factory=set)  # rows whose blocks are written or copied
    filled: list[tuple[Sequence, int, int]] = field(default_factory=list)  # sequence, epoch, full blocks
    brought: list[tuple[Sequence, int, int]] = field(default_factory=list)  # likewise, once it has arrived
    arrivals: list[SequenceGroup] = field(default_factory=list)


class CollidingHasher(BlockHasher):
    """Digests of two bits: nothing can be told by them."""

    def next(self, before: Digest, content: bytes) -> Digest:
        return bytes([super().next(before, content)[0] & 3])


class BlockManagerMachine(RuleBasedStateMachine):
    """Sequences made by hand, moved as the scheduler may move them, and in orders that it never would."""

    done: ClassVar[Counter[str]] = Counter()  # over all runs: how often each thing came about
    windows: ClassVar[tuple[int, ...]] = ()
    keeps_all: ClassVar[bool] = True

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(4, 14),
        num_host_blocks=st.sampled_from([0, 3, 14, 20, 40, 40]),  # hits there are rare with fewer
        caching=st.sampled_from([*[True] * 7, False]),
        colliding=st.booleans(),
    )
    def begin(
        self, block_size: int, num_blocks: int, num_host_blocks: int, caching: bool, colliding: bool
    ) -> None:
        kind = CollidingHasher if colliding else BlockHasher
        hasher = kind(block_size, seed=1) if caching else None
        self.caching = caching
        self.size = block_size
        self.rows = Rows(ROWS, MAX_TOKENS, block_size)
        pages = self.keeps_all + len(self.windows)
        num_blocks, num_host_blocks = pages * num_blocks, pages * num_host_blocks
        tiers = num_blocks, block_size, self.rows, hasher, num_host_blocks
        self.blocks = BlockManager(*tiers, self.windows, keeps_all=self.keeps_all)
        self.memory = LateMemory(num_blocks, num_host_blocks, block_size)
        self.histories = Histories()
        self.groups: list[SequenceGroup] = []
        self.step = Step()
        self.in_flight: deque[tuple[Moves, Step]] = deque()
        self.moving: deque[tuple[Moves, Step]] = deque()  # committed, but for their transfers
        self.epochs: Counter[Sequence] = Counter()  # of tables: what was filled in another is not theirs
        self.launched: dict[Sequence, int] = {}  # tokens that are in memory
        self.requests = 0

    # -- what may be picked ----------------------------------------------------------------------------

    def running(self) -> list[Sequence]:
        return [s for g in self.groups for s in g.live if s.row != NO_ROW and not g.transferring]

    def untouched(self) -> list[Sequence]:
        return [sequence for sequence in self.running() if sequence.row not in self.step.touched]

    def away(self, *, swapped: bool) -> list[SequenceGroup]:
        return [
            g for g in self.groups if g.swapped == swapped and not g.transferring and g.live[0].row == NO_ROW
        ]

    # -- rules -----------------------------------------------------------------------------------------

    @rule(
        kind=st.integers(0, 2),
        length=st.integers(1, 12),
        tail=st.integers(0, 3),
        salt=st.sampled_from(["", "", "tenant"]),
    )
    def start(self, kind: int, length: int, tail: int, salt: str) -> None:
        if not self.rows.num_free:
            return
        prompt = [[0] * 12, [0, 1] * 6, [0, 0, 0, 1] * 3][kind][:length] + [tail % 2] * (tail // 2)
        request = Request(self.requests, prompt, SamplingParams(max_tokens=100), cache_salt=salt)
        self.requests += 1
        group = SequenceGroup(request, as_int32(request.prompt), request.id, ())
        self.groups.append(group)
        self._attach(group.live[0])

    def _attach(self, sequence: Sequence) -> None:
        """A row for `sequence`, and the blocks that need not be computed."""
        found = self.blocks.match(sequence)
        self._check_found(sequence, found)
        pool = self.blocks.pool
        if len(found) * self.size == len(sequence.tokens) and self.blocks.is_computing(found):
            found = found.first(len(found) - 1)  # a copy of its last block would be made before it is written
        while sum(pool.count(b) == 0 for b in found.on_device) + found.num_to_bring > pool.num_available:
            found = self.blocks.first_of(sequence, found, len(found) - 1)
        self.rows.assign(sequence)
        self.blocks.attach(sequence, found)
        self.epochs[sequence] += 1
        tokens = min(len(found) * self.size, len(sequence.tokens) - 1)  # the last one is computed anyhow
        self.rows.context[sequence.row] = tokens
        self.launched[sequence] = self._written(sequence, tokens)
        if found.num_to_bring:
            self._await(sequence.group)
            self.step.brought.append((sequence, self.epochs[sequence], len(found)))
        self.done["device hits"] += len(found.on_device)
        self.done["computing hits"] += sum(not pool.is_kept(block) for block in found.on_device)
        self.done["host hits"] += found.num_from_host

    def _written(self, sequence: Sequence, tokens: int) -> int:
        """How many of its first `tokens` do not wait for the next step to write them."""
        coming = [False] * sequence.num_blocks
        for logical, block in _numbered(sequence.tables):
            coming[logical] |= block in self.blocks.moves.written
        return min(tokens, self.size * [*coming, True].index(True))

    def _await(self, group: SequenceGroup) -> None:
        group.transferring = True
        self.step.arrivals.append(group)

    @precondition(lambda self: self.untouched())
    @rule(pick=st.integers(0, 63), count=st.integers(1, 6), bits=st.integers(0, 63))
    def compute(self, pick: int, count: int, bits: int) -> None:
        """Prefill what is not computed yet, or else generate."""
        sequences = self.untouched()
        sequence = sequences[pick % len(sequences)]
        row = sequence.row
        start = int(self.rows.context[row])
        if start == len(sequence.tokens):
            for i in range(min(count, MAX_TOKENS - start)):
                sequence.append(bits >> i & 1)
        end = min(start + count, len(sequence.tokens))
        while start < self.rows.capacity[row] and not self.blocks.is_writable(sequence, start):
            free = self.blocks.pool.num_available
            try:
                self.blocks.copy_on_write(sequence, start)
            except OutOfBlocks:
                assert free == 0
                self.done["no room"] += 1
                return
            self.done["copies"] += 1
        try:
            self.blocks.grow(sequence, end)
        except OutOfBlocks:
            assert self.blocks.pool.num_available < self.blocks.pages
            self.done["no room"] += 1
        end = min(end, int(self.rows.capacity[row]))
        begun, ended = start // self.size, -(-end // self.size)
        for block in [table.block(at) for table in sequence.tables for at in range(begun, ended)]:
            assert self.blocks.pool.count(block) == 1, "a block of two tables is written"
            assert not self.blocks.pool.is_kept(block), "a findable block is written"
        histories = self._histories(sequence)
        self.step.writes += [(row, position, histories[position]) for position in range(start, end)]
        self.step.touched.add(row)
        self.step.filled.append((sequence, self.epochs[sequence], end // self.size))
        self.rows.context[row] = end
        self.blocks.mark_computing(sequence, start, end)

    @precondition(lambda self: self.rows.num_free and self.running())
    @rule(pick=st.integers(0, 63), part=st.sampled_from([None, None, 0, 1, 2]))
    def fork(self, pick: int, part: int | None) -> None:
        sequences = self.running()
        parent = sequences[pick % len(sequences)]
        group = parent.group
        child = Sequence(group, len(group.sequences))
        group.sequences.append(child)
        self.rows.assign(child)
        self._share(parent, child, part)

    @precondition(lambda self: len(self.untouched()) > 1)
    @rule(pick=st.integers(0, 63), other=st.integers(0, 63))
    def adopt(self, pick: int, other: int) -> None:
        """A beam goes on where another one of its group is."""
        sequences = self.untouched()
        parent = sequences[pick % len(sequences)]
        siblings = [s for s in sequences if s.group is parent.group and s is not parent]
        if siblings:
            child = siblings[other % len(siblings)]
            self._share(parent, child, None)
            self.done["adopted"] += 1

    @precondition(lambda self: len(self.untouched()) > 1)
    @rule(pick=st.integers(0, 63))
    def follow(self, pick: int) -> None:
        """The same, but that the last block's tokens may be copied to the one that the beam has."""
        context, copies = self.rows.context, self.blocks.moves.copies
        sequences = [s for s in self.untouched() if s.row not in copies]
        pairs = [(p, c) for p, c in permutations(sequences, 2) if p.group is c.group]
        likely = [(p, c) for p, c in pairs if context[p.row] % self.size and self._writes(c, context[p.row])]
        if pairs:
            parent, child = (likely or pairs)[pick % len(likely or pairs)]
            self.blocks.follow_all([(parent, child)])
            self._took_over(parent, child, int(context[parent.row]))
            self.done["copied at once"] += child.row in self.blocks.moves.copies

    def _writes(self, sequence: Sequence, position: int) -> bool:
        """Whether `sequence` has a block of its own for `position`."""
        return position < self.rows.capacity[sequence.row] and self.blocks.is_writable(sequence, position)

    def _share(self, parent: Sequence, child: Sequence, part: int | None) -> None:
        context = int(self.rows.context[parent.row])
        reached = part is not None and self.blocks.reaches(parent, part)
        if part is not None and part * self.size <= context and reached:
            context = part * self.size
        else:
            part = None
        self.blocks.fork(parent, child, part)
        self._took_over(parent, child, context)

    def _took_over(self, parent: Sequence, child: Sequence, context: int) -> None:
        self.epochs[child] += 1
        child.take_tokens(parent)
        self.rows.context[child.row] = context
        self.launched[child] = min(context, self.launched[parent])
        if parent.row in self.step.touched:
            self.step.touched.add(child.row)  # it reads what this step is going to write
        elif parent.row in self.blocks.moves.copies:
            self.step.touched |= {parent.row, child.row}  # nobody takes over what is still to be copied

    @rule()
    def launch(self) -> None:
        if len(self.in_flight) == 3:
            return
        step, self.step = self.step, Step()
        moves = self.blocks.take_moves()
        self.memory.launch(moves, self._writes_of_all_groups(step))
        self.in_flight.append((moves, step))
        for sequence in self.rows.sequences:
            if sequence is not None:
                self.launched[sequence] = int(self.rows.context[sequence.row])
                for number, table in enumerate(sequence.tables):
                    row = number * self.rows.stride + sequence.row
                    for logical, block in enumerate(table.blocks, table.first):
                        assert self.memory.tables[row, logical] == block, "the device was not told"

    def _writes_of_all_groups(self, step: Step) -> list[tuple[int, int, int]]:
        stride = self.rows.stride
        return [
            (number * stride + row, position, history)
            for number in range(self.blocks.pages)
            for row, position, history in step.writes
        ]

    @precondition(lambda self: self.in_flight)
    @rule()
    def commit(self) -> None:
        moves, step = self.in_flight.popleft()
        self.moving.append((moves, step))
        self.blocks.copied(moves)
        self._publish(step.filled)

    def _publish(self, filled: list[tuple[Sequence, int, int]]) -> None:
        self.blocks.publish([(s, num_blocks) for s, epoch, num_blocks in filled if self.epochs[s] == epoch])

    @precondition(lambda self: self.moving)
    @rule()
    def arrive(self) -> None:
        moves, step = self.moving.popleft()
        self.memory.arrive()
        self.blocks.host.arrived(moves)
        self._publish(step.brought)
        for group in step.arrivals:
            group.transferring = False
            if group.swapped:
                self.blocks.host.publish(group)

    @precondition(lambda self: self.running())
    @rule(pick=st.integers(0, 63))
    def swap_out(self, pick: int) -> None:
        """Preempt a group: to host memory, or if that has no room its blocks are lost."""
        sequences = self.running()
        group = sequences[pick % len(sequences)].group
        rows = {sequence.row for sequence in group.live}
        if rows & self.step.touched or not self.blocks.is_written(group):
            return
        started = len(self.blocks.moves.swap_out)
        group.swapped = self.blocks.swap_out(group)
        assert group.swapped or len(self.blocks.moves.swap_out) == started
        if group.swapped:
            self._await(group)
        self.done["swapped out" if group.swapped else "recomputed"] += 1
        for sequence in group.live:
            self._leave(sequence)

    @precondition(lambda self: self.away(swapped=True))
    @rule(pick=st.integers(0, 63))
    def swap_in(self, pick: int) -> None:
        groups = self.away(swapped=True)
        group = groups[pick % len(groups)]
        needed = {block for sequence in group.live for block in sequence.host_blocks}
        if len(group.live) > self.rows.num_free or len(needed) > self.blocks.pool.num_available:
            return
        for sequence in group.live:
            self.rows.assign(sequence)
        self.blocks.swap_in(group)
        group.swapped = False
        self._await(group)
        for sequence in group.live:
            self.epochs[sequence] += 1
            context = int(self.rows.context[sequence.row])
            self.launched[sequence] = self._written(sequence, context)
            self.step.brought.append((sequence, self.epochs[sequence], context // self.size))
        self.done["swapped in"] += 1

    @precondition(lambda self: self.away(swapped=False))
    @rule(pick=st.integers(0, 63))
    def resume(self, pick: int) -> None:
        """A group that lost its blocks begins again."""
        groups = self.away(swapped=False)
        group = groups[pick % len(groups)]
        if len(group.live) <= self.rows.num_free:
            for sequence in group.live:
                self._attach(sequence)

    @rule(count=st.integers(1, 6))
    def spill(self, count: int) -> None:
        self.blocks.host.spill(count, self.blocks.moves)
        self.done["spilled"] += len(self.blocks.moves.spills)

    @precondition(lambda self: self.groups)
    @rule(pick=st.integers(0, 63), whole=st.booleans(), failed=st.sampled_from([False, False, True]))
    def end(self, pick: int, whole: bool, failed: bool) -> None:
        """A sequence stops, fails or its client leaves, whatever is under way for it."""
        sequences = [sequence for group in self.groups for sequence in group.live]
        sequence = sequences[pick % len(sequences)]
        group = sequence.group
        if sequence.row in self.step.touched and not whole:
            return  # forks of it read what it is going to write
        ending = group.live if whole else [sequence]
        written = chain(*(each.blocks for each in ending if each.row in self.step.touched))
        shared = self.blocks.moves.written.intersection(written)
        others = [s for s in self.rows.sequences if s is not None and s not in ending]
        if any(shared.intersection(other.blocks) for other in others):
            return  # who shares what it computes reads that too
        self.done["left in transfer"] += group.transferring
        for each in ending:
            if failed:
                self._fail(each)
            if each.row != NO_ROW:
                self._leave(each)
            self.blocks.host.drop(each)
            each.finish_reason = "error" if failed else "abort"
        if not group.live:
            self.groups.remove(group)

    def _fail(self, sequence: Sequence) -> None:
        """Nothing is to be found any more of what it computed and was the first to make findable."""
        self.blocks.forget(sequence)
        self.done["failed"] += 1
        if self.caching:
            found = self.blocks.match(sequence)
            assert len(found) <= sequence.num_found, "what a failed sequence computed is findable"

    @rule(seed=st.integers(0, 1 << 32), count=st.integers(1, 400))
    def burst(self, seed: int, count: int) -> None:
        """`count` of the operations above, for many more of them in the same time."""
        rng = random.Random(seed)
        for name in rng.choices(*_OPERATIONS, k=count):
            if name == "start":
                salt = rng.choice(["", "", "tenant"])
                self.start(rng.randrange(3), rng.randint(1, 12), rng.randrange(4), salt)
            elif name == "compute" and self.untouched():
                self.compute(rng.randrange(64), rng.randint(1, 6), rng.randrange(64))
            elif name == "fork" and self.rows.num_free and self.running():
                self.fork(rng.randrange(64), rng.choice([None, None, 0, 1, 2]))
            elif name == "adopt" and len(self.untouched()) > 1:
                self.adopt(rng.randrange(64), rng.randrange(64))
            elif name == "follow" and len(self.untouched()) > 1:
                self.follow(rng.randrange(64))
            elif name == "launch":
                self.launch()
            elif name == "commit" and self.in_flight:
                self.commit()
            elif name == "arrive" and self.moving:
                self.arrive()
            elif name == "swap_out" and self.running():
                self.swap_out(rng.randrange(64))
            elif name == "swap_in" and self.away(swapped=True):
                self.swap_in(rng.randrange(64))
            elif name == "resume" and self.away(swapped=False):
                self.resume(rng.randrange(64))
            elif name == "spill":
                self.spill(rng.randint(1, 6))
            elif name == "end" and self.groups:
                self.end(rng.randrange(64), rng.random() < 0.5, rng.random() < 0.3)
            else:
                continue
            if currently_in_test_context():
                note(f"  {name}")
            self.holds()

    def _leave(self, sequence: Sequence) -> None:
        row = sequence.row
        self.blocks.free(sequence)
        self.rows.release(sequence)
        self.step.touched.discard(row)
        self.step.writes = [write for write in self.step.writes if write[0] != row]

    # -- what must hold --------------------------------------------------------------------------------

    def _histories(self, sequence: Sequence) -> list[int]:
        return self.histories.of(sequence.group.request.cache_salt, sequence.tokens.tolist())

    @invariant()
    def holds(self) -> None:
        """Called after every operation."""
        self.done["steps"] += 1
        self._check_accounts()
        self._check_tables()
        for cache in self.blocks.caches:
            self._check_tier(cache, self.blocks.pool, self.memory.device)
            self._check_computing(cache)
        for cache in self.blocks.host.caches:
            self._check_tier(cache, self.blocks.host.pool, self.memory.host)

    def _check_accounts(self) -> None:
        sequences = [sequence for group in self.groups for sequence in group.live]
        check_memory(self.blocks, sequences, [moves for moves, _ in (*self.moving, *self.in_flight)])
        pool = self.blocks.pool
        assert pool.num_free + pool.num_active + pool.num_cached + pool.num_in_transfer == pool.num_blocks

    def _check_tables(self) -> None:
        pending = [self.blocks.moves, *(moves for moves, _ in (*self.moving, *self.in_flight))]
        coming = {t.device: t.host for moves in pending for t in moves.swap_in}
        leaving = {t.host: t.device for moves in pending for t in moves.swap_out}
        copied = {destination: source for source, destination in self.blocks.moves.copies.values()}
        for group in self.groups:
            for sequence in group.live:
                expected = self._histories(sequence)
                for logical, block in _numbered(sequence.tables):
                    if block in coming:
                        content = self.memory.host[coming[block]]
                    else:
                        content = self.memory.device[copied.get(block, block)]
                    self._check_block(content, expected[: self.launched[sequence]], logical)
                for logical, block in _numbered(sequence.host_tables):
                    content = self.memory.host[block]
                    if block in leaving:
                        content = self.memory.device[leaving[block]]
                    self._check_block(content, expected[: sequence.saved_context], logical)

    def _check_block(self, content: Content, expected: list[int], logical: int) -> None:
        piece = expected[logical * self.size : (logical + 1) * self.size]
        assert content[: len(piece)] == piece, f"logical block {logical} holds something else"

    def _check_tier(self, cache: PrefixCache, pool: BlockPool, memory: list[Content]) -> None:
        """What is findable is written, whole and once."""
        kept = [block for block in range(pool.num_blocks) if pool.is_kept(block) and block in cache]
        for block in kept:
            tokens = np.array(self.histories.tokens(memory[block]), "<i4")
            assert cache.prefix(block).content == tokens.tobytes()
        assert len({memory[block][-1] for block in kept}) == len(kept), "two findable blocks hold the same"

    def _check_computing(self, cache: PrefixCache) -> None:
        """A computing block is going to be written by the next step, whole and once, or is."""
        memory = self._planned() if cache.computing else []
        for block in cache.computing:
            tokens = np.array(self.histories.tokens(memory[block]), "<i4")
            assert cache.prefix(block).content == tokens.tobytes()
        ends = {memory[block][-1] for block in cache.computing}
        assert len(ends) == len(cache.computing), "two computing blocks hold the same"

    def _planned(self) -> list[Content]:
        """Device memory as the next step is going to leave it, but for transfers."""
        memory = list(self.memory.device)
        for source, destination in self.blocks.moves.copies.values():
            memory[destination] = memory[source]
        for row, position, history in self.step.writes:
            sequence, logical = self.rows.sequences[row], position // self.size
            for block in (table.block(logical) for table in sequence.tables):
                memory[block] = list(memory[block])
                memory[block][position % self.size] = history
        return memory

    def _check_found(self, sequence: Sequence, found: Found) -> None:
        """All that is findable is found, on the device first, and it is right."""
        expected = self._histories(sequence)
        memory, pool = self._planned(), self.blocks.pool
        for logical, block in enumerate(found.device):
            self._check_block(memory[block], expected, logical)
        for logical, block in enumerate(found.host, len(found.device)):
            self._check_block(self.memory.host[block], expected, logical)
        for part in found.windows:
            for logical, block in enumerate(part.blocks, part.first):
                content = self.memory.host[block] if logical in part.on_host else memory[block]
                self._check_block(content, expected, logical)
        if not self.caching:
            assert not len(found)
            return
        ends = expected[self.size - 1 :: self.size]
        windows_on_device = [
            _ends(cache, pool, memory) | {memory[block][-1] for block in cache.computing}
            for cache in self.blocks.caches
        ]
        windows_on_host = [
            _ends(cache, self.blocks.host.pool, self.memory.host) for cache in self.blocks.host.caches
        ]
        count, most_on_device = len(ends), 0
        if self.keeps_all:
            on_device, on_host = windows_on_device.pop(0), windows_on_host.pop(0)
            count = 0
            while count < len(ends) and ends[count] in on_device:
                count += 1
            most_on_device = count
            while count < len(ends) and ends[count] in on_host:
                count += 1
        if self.windows:
            count = min(count, (len(expected) - 1) // self.size)
            reads = [
                [max(0, at * self.size + 1 - window) // self.size for at in range(count + 1)]
                for window in self.windows
            ]
            whole = [
                at
                for at in range(count + 1)
                if all(
                    ends[logical] in device | host
                    for device, host, first in zip(windows_on_device, windows_on_host, reads, strict=True)
                    for logical in range(first[at], at)
                )
            ]
            count = max(whole)
            for part, first, device in zip(found.windows, reads, windows_on_device, strict=True):
                assert part.first == first[count] and part.first + len(part.blocks) == count
                absent = {logical for logical in range(part.first, count) if ends[logical] not in device}
                assert part.on_host == absent, "a window's blocks on the device were not found"
        assert len(found.device) == min(count, most_on_device), "blocks on the device were not found"
        assert len(found) == count, "findable blocks in host memory were not found"

    def teardown(self) -> None:
        """Once everyone has left, every step is committed and all has arrived, every block can be had."""
        self._finish_steps()  # what is computing is launched before anyone leaves
        while self.groups:
            self.end(0, True, False)
        self._finish_steps()
        self._check_accounts()
        assert self.blocks.pool.num_available == self.blocks.pool.num_blocks
        assert self.blocks.host.pool.num_available == self.blocks.host.pool.num_blocks

    def _finish_steps(self) -> None:
        for _ in range(2):
            while self.in_flight:
                self.commit()
            self.launch()
        while self.in_flight:
            self.commit()
        while self.moving:
            self.arrive()


def _ends(cache: PrefixCache, pool: BlockPool, memory: list[Content]) -> set[int | None]:
    """The histories up to the end of each findable block."""
    blocks = range(pool.num_blocks)
    return {memory[block][-1] for block in blocks if pool.is_kept(block) and block in cache}


def _numbered(tables: list[WindowTable]) -> Iterator[tuple[int, int]]:
    """Yield the blocks of all tables with their logical numbers."""
    for each in tables:
        yield from enumerate(each.blocks, each.first)


class WindowMachine(BlockManagerMachine):
    """The same with window groups."""

    done: ClassVar[Counter[str]] = Counter()
    windows = (3, 7)


class LoneWindowMachine(BlockManagerMachine):
    """The same where all layers have one window."""

    done: ClassVar[Counter[str]] = Counter()
    windows, keeps_all = (5,), False


@pytest.mark.parametrize("part", range(PARTS))
def test_every_slot_holds_what_the_map_says(part: int) -> None:
    done = BlockManagerMachine.done
    done.clear()
    for number in range(MOST_SEEDS):
        machine = BlockManagerMachine if NIGHTLY else seed(part + number * PARTS)(BlockManagerMachine)
        run_state_machine_as_test(machine, settings=SETTINGS)
        reached = min(done[name] for name in _REACHED)
        if done["steps"] > STEPS / PARTS and reached > OFTEN / PARTS:
            break
    assert done["steps"] > STEPS / PARTS, f"the runs are shorter than they were: {done}"
    assert reached > OFTEN / PARTS, f"the runs no longer reach what they are for: {done}"


@pytest.mark.parametrize(("machine", "walks"), [(WindowMachine, 100), (LoneWindowMachine, 150)])
def test_every_slot_of_window_groups_holds_what_the_map_says(
    machine: type[BlockManagerMachine], walks: int
) -> None:
    done = machine.done
    done.clear()
    for number in range(walks):
        rng = random.Random(number)
        walk = machine()
        blocks, host_blocks = rng.randint(4, 14), rng.choice([0, 3, 14, 40, 40, 40])
        walk.begin(rng.choice([1, 2, 4]), blocks, host_blocks, rng.random() < 0.9, rng.random() < 0.3)
        walk.burst(number, 300)
        walk.teardown()
    unreached = [name for name in _REACHED if done[name] < 10]
    assert not unreached, done
