"""KV events: the changes of the prefix cache as llm-d, Dynamo and others read them from vLLM.

They are msgpack arrays. A block is named by its digest, and says which tokens it holds after which block.
Where layers are of several cache groups, each has a block of the same digest, and events name the group; so
they do where there is one with a window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec
import numpy as np
import xxhash

from quire.engine.hashing import Digest, Prefix
from quire.engine.memory.manager import BlockManager
from quire.engine.memory.prefix_cache import PrefixCache

Medium = Literal["GPU", "CPU"]  # vLLM's names of the tiers: the device's, and host memory
Kind = Literal["full_attention", "sliding_window"]  # likewise, of what a cache group's layers see
EVENT_BLOCKS = 1024  # most in one event


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """An event; its class's name is its first element."""


class BlockStored(KVCacheEvent):
    """Blocks that follow one another can be found from now on."""

    block_hashes: list[Digest]
    parent_block_hash: Digest | None  # None: they begin a prompt
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    # What each block's digest depends on beside tokens: in a tenant's first block a digest of its salt.
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None  # None: there is one group, which keeps all tokens
    kv_cache_spec_kind: Kind | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks of a tier can be found no more."""

    block_hashes: list[Digest]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    """No block can be found any more, of any tier."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of some moment, in their order."""

    ts: float  # seconds since 1970
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class Source:
    """A cache, and what events say of its blocks."""

    cache: PrefixCache
    medium: Medium
    group: int | None = None
    kind: Kind | None = None
    window: int | None = None  # tokens that a prompt's next one reads of this group, itself among them


def sources_of(blocks: BlockManager, max_model_len: int) -> list[Source]:
    """Return the caches of both tiers, of each cache group if there are several or it has a window."""
    if blocks.windows is None:
        return [Source(blocks.cache, "GPU"), Source(blocks.host.cache, "CPU")]
    sources: list[Source] = []
    windows = [*[max_model_len] * (blocks.full is not None), *blocks.windows.windows]
    for group, (window, device, host) in enumerate(
        zip(windows, blocks.caches, blocks.host.caches, strict=True)
    ):
        sees_all = window >= max_model_len
        kind: Kind = "full_attention" if sees_all else "sliding_window"
        sees = None if sees_all else window
        sources += [Source(device, "GPU", group, kind, sees), Source(host, "CPU", group, kind, sees)]
    return sources


class KVEventLog:
    """Follows the caches of all tiers and groups. The engine's thread only ever appends to a bounded queue.

    The other methods are for one other thread. What it told before counts: a block is stored once, and only
    then removed.
    """

    def __init__(self, sources: Sequence[Source], block_size: int, max_changes: int) -> None:
        self._sources = sources
        self._block_size = block_size
        self._changes: deque[tuple[int, Prefix, bool]] = deque()
        self._max_changes = max_changes
        self._overflown = True  # nothing is told yet: begin with everything
        self._told: list[dict[Digest, Prefix]] = [{} for _ in sources]
        for number, source in enumerate(sources):
            source.cache.listeners.append(partial(self._note, number))

    def _note(self, number: int, prefix: Prefix, findable: bool) -> None:
        if len(self._changes) < self._max_changes:
            self._changes.append((number, prefix, findable))
        else:
            self._overflown = True

    def take(self) -> list[Event]:
        """Return the events of all that has changed; after too many changes, of everything anew."""
        if self._overflown:
            self._overflown = False
            self._changes.clear()
            # What changes from here on may be told by both, and is told once.
            self._told = [
                {prefix.digest: prefix for prefix in source.cache.prefixes()} for source in self._sources
            ]
            return self.everything()
        changes = [self._changes.popleft() for _ in range(len(self._changes))]
        return list(_joined(self._news(changes), self._block_size))

    def everything(self) -> list[Event]:
        """Return the events from which a subscriber that knows nothing has all that was told."""
        sources = zip(self._sources, self._told, strict=True)
        stored = ((source, prefix, True) for source, told in sources for prefix in _chains(told))
        return [AllBlocksCleared(), *_joined(stored, self._block_size)]

    def _news(self, changes: Iterable[tuple[int, Prefix, bool]]) -> Iterator[tuple[Source, Prefix, bool]]:
        for number, prefix, findable in changes:
            told = self._told[number]
            if findable != (prefix.digest in told):
                if findable:
                    told[prefix.digest] = prefix
                else:
                    del told[prefix.digest]
                yield self._sources[number], prefix, findable


def _chains(told: dict[Digest, Prefix]) -> Iterator[Prefix]:
    """Yield them so that one that follows another comes right after it, where that is possible."""
    children: dict[Digest, list[Prefix]] = {}
    stack = []
    for prefix in told.values():
        parent = prefix.parent
        if parent is not None and parent in told:
            children.setdefault(parent, []).append(prefix)
        else:
            stack.append(prefix)
    while stack:
        prefix = stack.pop()
        yield prefix
        stack += children.get(prefix.digest, ())


def _joined(changes: Iterable[tuple[Source, Prefix, bool]], block_size: int) -> Iterator[Event]:
    """Yield the changes as events, those in a row that can be one joined."""
    event: Event | None = None
    for source, prefix, findable in changes:
        if event is None or not _extend(event, source, prefix, findable):
            if event is not None:
                yield event
            if findable:
                event = BlockStored(
                    [prefix.digest], prefix.parent, _tokens(prefix), block_size, None, source.medium, None,
                    _extra_keys(prefix), source.group, source.kind, source.window,
                )  # fmt: skip
            else:
                event = BlockRemoved([prefix.digest], source.medium, source.group)
    if event is not None:
        yield event


def _extend(event: Event, source: Source, prefix: Prefix, findable: bool) -> bool:
    """Add the change to the event if that can say it; return whether it can."""
    if isinstance(event, AllBlocksCleared) or len(event.block_hashes) >= EVENT_BLOCKS:
        return False
    told = event.medium, event.group_idx, isinstance(event, BlockStored)
    if told != (source.medium, source.group, findable):
        return False
    if isinstance(event, BlockStored):
        if prefix.parent != event.block_hashes[-1] or _extra_keys(prefix) is not None:
            return False
        event.token_ids += _tokens(prefix)
        if event.extra_keys is not None:
            event.extra_keys.append(None)
    event.block_hashes.append(prefix.digest)
    return True


def _tokens(prefix: Prefix) -> list[int]:
    assert isinstance(prefix.content, bytes), "a salt is no block"
    tokens: list[int] = np.frombuffer(prefix.content, np.int32).tolist()
    return tokens


def _extra_keys(prefix: Prefix) -> list[tuple[str, ...] | None] | None:
    """Return a digest of the salt that comes in with this block, as a list for one block."""
    before = prefix.before
    if before is None or not isinstance(before.content, str) or not before.content:
        return None
    return [(xxhash.xxh3_128_hexdigest(before.content.encode()),)]
