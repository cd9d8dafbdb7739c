"""Answers questions about the engine's blocks. Nothing is computed unless it is asked."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from itertools import chain

import numpy as np
import xxhash
from numpy.typing import NDArray

from quire.engine.core import EngineCore
from quire.engine.hashing import Prefix
from quire.engine.inspection import messages
from quire.engine.inspection.exact import exact_pool
from quire.engine.inspection.own_blocks import OwnBlocks
from quire.engine.inspection.prefix_counts import PrefixCounts
from quire.engine.inspection.prefix_tree import prefix_tree
from quire.engine.memory.pool import BlockPool
from quire.engine.memory.prefix_cache import PrefixCache
from quire.engine.sequences.sequence import NO_ROW, Sequence, SequenceGroup

COUNT_SECONDS = 10.0  # after the last question about the pool
TENANT = 64  # characters of a salt that are its tenant's, where the server asks for keys
KNOWN = slice(0, 16)  # of a digest, as hexadecimal digits


class Inspector:
    """Knows how the blocks stand. Hits are counted from the first question about the pool on."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._state = core.scheduler.state
        self._counts: PrefixCounts | None = None
        self._asked = float("-inf")
        self._secret = secrets.token_bytes(16)
        self._own = OwnBlocks(self._state)

    def answer(self, question: messages.Question) -> messages.Answer:
        if isinstance(question, messages.PoolQuestion):
            return self._pool(question)
        if isinstance(question, messages.BlockQuestion):
            return self._block(question)
        if isinstance(question, messages.OwnQuestion):
            return self._own.count(question.requests)
        if self._counts is not None:
            self._counts.look()
        return prefix_tree(self._state.blocks, self._counts)

    def observe(self) -> None:
        """Stop counting when nobody asks any more."""
        if self._counts is not None and time.monotonic() - self._asked > COUNT_SECONDS:
            self._counts.close()
            self._counts = None

    def _pool(self, question: messages.PoolQuestion) -> messages.PoolAnswer:
        begin = self._asked = time.monotonic()
        blocks, host = self._state.blocks, self._state.blocks.host
        if self._counts is None:
            self._counts = PrefixCounts(blocks)
        self._counts.look()
        position, moves = blocks.ring.since(question.since)
        sequences = chain.from_iterable(group.live for group in self._groups())
        exact = exact_pool(blocks, sequences) if question.exact else None
        states = [_states(blocks.pool, blocks.caches), _states(host.pool, host.caches)]
        counts = [np.minimum(tier._counts, 255).astype(np.uint8) for tier in (blocks.pool, host.pool)]
        return messages.PoolAnswer(
            at=time.time(),
            clock=self._core.clock(),
            seconds=time.monotonic() - begin,
            num_blocks=blocks.pool.num_blocks,
            num_host_blocks=host.pool.num_blocks,
            block_size=blocks.block_size,
            states=b"".join(each.tobytes() for each in states),
            references=b"".join(each.tobytes() for each in counts),
            tables=list(self._tables()),
            num_waiting=len(self._state.waiting) - self._state.num_swapped,
            moves=moves,
            begin=position,
            exact=exact,
        )

    def _tables(self) -> Iterator[messages.Table]:
        """Yield the sequences that have blocks in either tier."""
        for group in self._groups():
            running = group.live and group.live[0].row != NO_ROW
            state: messages.RequestState = "running" if running else "swapped" if group.swapped else "waiting"
            for sequence in group.live:
                if sequence.num_blocks or sequence.host_blocks:
                    yield _table(sequence, state)

    def _groups(self) -> Iterator[SequenceGroup]:
        yield from self._state.running
        yield from self._state.waiting

    def _block(self, question: messages.BlockQuestion) -> messages.BlockAnswer:
        blocks, block = self._state.blocks, question.block
        on_device = question.tier == "device"
        pool, caches = (blocks.pool, blocks.caches) if on_device else (blocks.host.pool, blocks.host.caches)
        if not 0 <= block < pool.num_blocks:
            return messages.BlockAnswer(messages.FREE, 0, [])
        holders, held = [], None
        for sequence in chain.from_iterable(group.live for group in self._groups()):
            for table in sequence.tables if on_device else sequence.host_tables:
                if block in table.blocks:
                    logical = table.first + table.blocks.index(block)
                    holders.append(messages.Holder(sequence.group.request.id, sequence.index, logical))
                    held = held or sequence
        state = int(_states(pool, caches)[block])
        answer = messages.BlockAnswer(state, pool.count(block), holders)
        if held is not None:
            first = holders[0].logical * blocks.block_size
            content = held.tokens[first : first + blocks.block_size]
            answer.position = first
            self._tell(answer, content.tolist(), held.group.request.cache_salt, question.tenant)
        for prefix in (cache.prefix(block) for cache in caches if block in cache):
            answer.digest = prefix.digest.hex()[KNOWN]
            if held is None:
                full = sum(isinstance(content, bytes) for content in _before(prefix))
                answer.position = full * blocks.block_size
                tokens = np.frombuffer(bytes(prefix.content), np.int32).tolist()  # type: ignore[arg-type]
                self._tell(answer, tokens, _salt(prefix), question.tenant)
        return answer

    def _tell(self, answer: messages.BlockAnswer, tokens: list[int], salt: str | None, tenant: str) -> None:
        """Give the tokens to whoever owns them, a digest to all; what has no salt is the operator's own."""
        if salt is None or salt.startswith(tenant):
            answer.tokens = tokens
        if not answer.digest:
            content = np.array(tokens, np.int32).tobytes()
            answer.digest = xxhash.xxh3_128_hexdigest(self._secret + content)[KNOWN]


def _table(sequence: Sequence, state: messages.RequestState) -> messages.Table:
    return messages.Table(
        sequence.group.request.id,
        sequence.index,
        state,
        sequence.num_tokens,
        np.array(sequence.blocks, np.int32).tobytes(),
        np.array(sequence.host_blocks, np.int32).tobytes(),
        sequence.group.request.cache_salt[:TENANT],
    )


def _states(pool: BlockPool, caches: list[PrefixCache]) -> NDArray[np.uint8]:
    """Return the state of each block. Its lists are read as `memory.invariants` reads them."""
    active = np.array(pool._counts, np.int32) > 0
    states = np.full(pool.num_blocks, messages.IN_TRANSFER, np.uint8)
    states[np.array(pool._free, np.intp)] = messages.FREE
    states[np.frombuffer(pool._evictable, np.bool_)] = messages.CACHED
    states[active] = messages.ACTIVE
    computing = set().union(*(cache.computing for cache in caches))
    for number, those in ((messages.COMPUTING, computing), (messages.PINNED, pool._resting)):
        if those:
            states[np.fromiter(those, np.intp)] = number
    return states


def _before(prefix: Prefix) -> Iterator[bytes | str]:
    """Yield the content of the full blocks before that of `prefix`, and the salt where it comes in."""
    before = prefix.before
    while before is not None:
        yield before.content
        before = before.before


def _salt(prefix: Prefix) -> str | None:
    """Return the salt of the tenant whose prefix this is; None if it is public."""
    return next((content for content in _before(prefix) if isinstance(content, str)), None)
