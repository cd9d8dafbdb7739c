"""The moves that are kept lead from any pool to what it has become, and back."""

from __future__ import annotations

import random
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from hypothesis.stateful import invariant

from quire.engine.inspection.exact import exact_pool
from quire.engine.inspection.messages import ExactPool, PoolAnswer
from quire.engine.inspection.replay import Replay, read_moves
from tests.engine.test_block_manager_machine import _REACHED, BlockManagerMachine


def as_it_is(machine: BlockManagerMachine) -> Replay:
    blocks = machine.blocks
    exact = exact_pool(blocks, [sequence for group in machine.groups for sequence in group.live])
    return replay_of(exact, blocks.pool.num_blocks, blocks.host.pool.num_blocks)


def replay_of(exact: ExactPool, num_blocks: int, num_host_blocks: int) -> Replay:
    size = bytes(num_blocks + num_host_blocks)
    return Replay(PoolAnswer(0.0, 0.0, num_blocks, num_host_blocks, 16, size, size, [], 0), exact)


def contents(replay: Replay) -> object:
    return replay.counts, replay.holds, replay.flags, replay.tables


class ReplayedMachine(BlockManagerMachine):
    """All operations of the block manager, followed by what it has noted."""

    done: ClassVar[Counter[str]] = Counter()

    def begin(self, *setting: object) -> None:
        super().begin(*setting)  # type: ignore[arg-type]
        self.first, self.replay, self.position, self.moves = as_it_is(self), as_it_is(self), 0, []

    def launch(self) -> None:
        super().launch()
        self.blocks.ring.begin_step(0.0, 0)

    @invariant()
    def holds(self) -> None:
        begin, numbers = self.blocks.ring.since(self.position)
        assert begin == self.position
        self.position += len(numbers) // 8
        moves = list(read_moves(numbers))
        for move in moves:
            self.replay.redo(move)
        self.moves += moves
        assert contents(self.replay) == contents(as_it_is(self))

    def teardown(self) -> None:
        for move in reversed(self.moves):
            self.replay.undo(move)
        assert contents(self.replay) == contents(self.first)


class ReplayedWindows(ReplayedMachine):
    done: ClassVar[Counter[str]] = Counter()
    windows: ClassVar[tuple[int, ...]] = (3, 7)  # none of whose blocks is spilled, nor found in host memory


class ReplayedLoneWindow(ReplayedMachine):
    done: ClassVar[Counter[str]] = Counter()
    windows: ClassVar[tuple[int, ...]] = (5,)
    keeps_all = False


@pytest.mark.parametrize("machine", [ReplayedMachine, ReplayedWindows, ReplayedLoneWindow])
def test_moves_lead_to_the_pool_as_it_is_and_back_to_the_first(machine: type[ReplayedMachine]) -> None:
    machine.done.clear()
    for number in range(30):
        rng = random.Random(number)
        walk = machine()
        blocks, host_blocks = rng.randint(4, 14), rng.choice([0, 3, 14, 40])
        walk.begin(rng.choice([1, 2, 4]), blocks, host_blocks, rng.random() < 0.9, rng.random() < 0.3)
        walk.burst(number, 300)
        walk.teardown()
    unreached = {name for name in _REACHED if machine.done[name] < 3}
    assert unreached <= ({"spilled", "host hits"} if machine.windows else set()), machine.done


def test_a_state_is_that_of_the_pool() -> None:
    """Told by what a block is named, held and kept for."""
    exact = ExactPool(
        counts=np.array([0, 2, 0, 1, 0, 0], np.int32).tobytes(),
        holds=np.array([0, 0, 0, 0, 1, 0], np.int32).tobytes(),
        flags=bytes([0, 0, 1, 2, 1, 5]),
        lines=[],
    )
    replay = replay_of(exact, 6, 0)
    assert [replay.state(place) for place in range(6)] == [0, 1, 2, 3, 4, 5]
