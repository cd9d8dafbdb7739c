"""What can be found by its content holds that content, and listeners have heard of it."""

from __future__ import annotations

import numpy as np

from quire.engine.core import EngineCore
from quire.engine.hashing import Digest, Prefix
from quire.engine.memory.prefix_cache import PrefixCache
from tests.engine.oracle import OracleRunner, Slot, State, slot_history


class FindableBlocks:
    """Looks at every published block of a core whose runner is an oracle."""

    def __init__(self, core: EngineCore) -> None:
        assert isinstance(core.runner, OracleRunner)
        blocks, self.runner = core.scheduler.blocks, core.runner
        self.tiers = [(cache, self.runner.cache, at) for at, cache in enumerate(blocks.caches)]
        self.tiers += [(cache, self.runner.host, at) for at, cache in enumerate(blocks.host.caches)]
        self.told: list[set[Digest]] = []
        self.expected: dict[Prefix, tuple[list[Slot], int]] = {}
        for cache, _, _ in self.tiers:
            told = {prefix.digest for prefix in cache.prefixes()}
            self.told += [told, set(told)]

            def hear(prefix: Prefix, cached: bool, told: set[Digest] = told) -> None:
                (told.add if cached else told.discard)(prefix.digest)

            def hear_exactly(prefix: Prefix, cached: bool, told: set[Digest] = self.told[-1]) -> None:
                assert cached != (prefix.digest in told), "one is told what is known"
                (told.add if cached else told.remove)(prefix.digest)

            cache.listeners.append(hear)
            cache.exact_listeners.append(hear_exactly)

    def check(self) -> None:
        told = iter(self.told)
        for cache, memory, group in self.tiers:
            published = {prefix.digest for prefix in cache.prefixes()}
            assert next(told) == next(told) == published, "others know of other blocks"
            self._check_contents(cache, memory, keeps_states=group in self.runner.stateful)

    def _check_contents(
        self, cache: PrefixCache, memory: list[list[Slot | State | None]], *, keeps_states: bool
    ) -> None:
        for block, (*content, state) in enumerate(memory):
            if block in cache and block not in cache.computing:
                slots, history = self._slots(cache.prefix(block))
                assert content == slots, f"block {block} is found by what it does not hold"
                assert not keeps_states or state == (slots[-1][0], history), f"block {block}: another state"

    def _slots(self, prefix: Prefix) -> tuple[list[Slot], int]:
        """Return what a block that ends with `prefix` holds, and the hash of all."""
        known = self.expected.get(prefix)
        if known is not None:
            return known
        before: tuple[list[Slot], int] = ([], 0) if prefix.previous is None else self._slots(prefix.previous)
        position, history = (before[0][-1][0] + 1 if before[0] else 0), before[1]
        slots: list[Slot] = []
        assert isinstance(prefix.content, bytes)
        for token in np.frombuffer(prefix.content, np.int32).tolist():
            slots.append((position, token, history))
            history = slot_history(history, position, token)
            position += 1
        self.expected[prefix] = slots, history
        return slots, history
