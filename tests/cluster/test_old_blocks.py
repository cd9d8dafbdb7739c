"""A full cache in miniature: what is put away in 16 bytes a block is published like all else."""

from __future__ import annotations

import random

from quire.engine.config import RegistryConfig
from quire.engine.hashing import Digest
from quire.engine.registry.deployment import Deployment
from quire.engine.registry.redis import Answer, Load, Registry
from quire.loadtest.registry_scale.old_blocks import DIGEST_BYTES, PROMPT_BLOCKS, OldBlocks
from quire.loadtest.registry_scale.replica_process import ReplicaProcess

CAPACITY = 4 * PROMPT_BLOCKS + 30  # what is filled last is less than a prompt
RNG = random.Random(1)
OLD = [RNG.randbytes(DIGEST_BYTES) for _ in range(CAPACITY)]
ASKED = [[RNG.randbytes(DIGEST_BYTES) for _ in range(90)] for _ in range(8)]


class Notebook(Registry):
    """Writes down what is published, and can fail."""

    def __init__(self) -> None:
        deployment = Deployment(
            model="m", revision="r", tokenizer="t", block_size=16, dtype="bfloat16", seed="s"
        )
        config = RegistryConfig(redis_url="redis://localhost", advertise_url="http://10.0.0.1:8000")
        super().__init__(config, deployment, [], "parity", "1")
        self.held: set[Digest] = set()
        self.changes: list[tuple[list[Digest], list[Digest]]] = []
        self.forgets = False

    def publish(
        self,
        seq: int,
        added: list[Digest],
        removed: list[Digest],
        load: Load,
        *,
        anew: bool = False,
        whole: bool = True,
    ) -> Answer:
        if self.forgets and not anew:
            return Answer("RESYNC", 0)
        self.forgets = False
        if anew:
            self.held.clear()
        self.held.update(added)
        assert self.held.issuperset(removed)
        self.held.difference_update(removed)
        self.changes.append((added, removed))
        return Answer("OK", len(self.held))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 10
        return self.now


def ask(process: ReplicaProcess, digests: list[Digest]) -> None:
    process.begin(digests)
    process.computed(digests)
    process.end(digests)
    process.tick()


def test_it_publishes_what_a_cache_does_that_was_asked_for_all_this() -> None:
    put_away, asked = Notebook(), Notebook()
    full = ReplicaProcess(put_away, CAPACITY, Clock(), OldBlocks(b"".join(OLD)))
    full.tick()
    other = ReplicaProcess(asked, CAPACITY, Clock(), OldBlocks(b""))
    for begin in range(0, CAPACITY, PROMPT_BLOCKS):
        ask(other, OLD[begin : begin + PROMPT_BLOCKS])
    assert len(full) == len(other) == CAPACITY
    assert put_away.held == asked.held == set(OLD)

    put_away.changes.clear()
    asked.changes.clear()
    for digests in ASKED:
        ask(full, digests)
        ask(other, digests)
    assert put_away.changes == asked.changes
    assert put_away.held == asked.held
    assert len(put_away.held) == CAPACITY


def test_what_is_put_away_is_published_anew_with_the_rest() -> None:
    notebook = Notebook()
    process = ReplicaProcess(notebook, CAPACITY, Clock(), OldBlocks(b"".join(OLD)))
    process.tick()
    ask(process, ASKED[0])
    before = set(notebook.held)
    notebook.forgets = True
    process.tick()  # is told
    process.tick()
    assert not notebook.forgets
    assert notebook.held == before
    assert len(before) == len(process) == CAPACITY
