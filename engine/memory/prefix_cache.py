"""The index of full blocks by content: of the tokens whose keys and values they hold."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from quire.engine.hashing import Digest, Prefix
from quire.engine.memory.move_kinds import COMPUTED, COMPUTING, DEVICE
from quire.engine.memory.move_ring import MoveRing
from quire.engine.memory.pinned_tails import Tail
from quire.engine.memory.window_blocks import WindowBlocks


class PrefixCache:
    """Digest to block, one to one. A hit compares the tokens too, so a collision costs a miss.

    A block is found while it is computing and once it is published. Others than the plans of this process
    only hear of published ones.
    """

    def __init__(self, num_blocks: int, ring: MoveRing | None = None, tier: int = DEVICE) -> None:
        """ring: which hears what is computing."""
        self.listeners: list[Callable[[Prefix, bool], None]] = []  # told: published from now on, or no more
        self.exact_listeners: list[Callable[[Prefix, bool], None]] = []  # not of what was never published
        self.computing: set[int] = set()  # blocks that are findable and not published
        self.times_added = 0  # how often a block became findable, since start
        self._blocks: dict[Digest, int] = {}  # the last ones became findable last
        self._prefixes: list[Prefix | None] = [None] * num_blocks  # of findable blocks
        self._times_forgotten = array("q", bytes(8 * num_blocks))
        self._ring = ring or MoveRing(num_blocks)
        self._tier = tier

    def __len__(self) -> int:
        """Return the number of published blocks."""
        return len(self._blocks) - len(self.computing)

    def __contains__(self, block: int) -> bool:
        """Return whether `block` is findable."""
        return self._prefixes[block] is not None

    def find(self, prefix: Prefix) -> int | None:
        """Return the block that holds the last tokens of `prefix`, computed after all its others."""
        block = self._blocks.get(prefix.digest)
        return block if block is not None and prefix.equals(self._prefixes[block]) else None

    def collides(self, prefix: Prefix) -> bool:
        """Return whether a block with other tokens has the digest of `prefix`, which so cannot be found."""
        block = self._blocks.get(prefix.digest)
        return block is not None and not prefix.equals(self._prefixes[block])

    def mark_computing(self, prefixes: Sequence[Prefix], blocks: Sequence[int]) -> None:
        """Let each of `blocks` be found by its prefix, unless one that holds the same is."""
        for prefix, block in zip(prefixes, blocks, strict=True):
            if prefix.digest not in self._blocks:
                self._blocks[prefix.digest] = block
                self._prefixes[block] = prefix
                self.times_added += 1
                self.computing.add(block)
                self._ring.mark(COMPUTING + self._tier, block)

    def publish(self, prefix: Prefix, block: int) -> int | None:
        """Publish `block`, unless another that holds the same is; return which. None: a collision."""
        found = self._blocks.setdefault(prefix.digest, block)
        if found != block:
            if not prefix.equals(self._prefixes[found]):
                return None
            if found not in self.computing:
                return found
            self.forget(found)
            self._blocks[prefix.digest] = block
        elif self._prefixes[block] is not None:
            if block not in self.computing:
                return block
            self._computed(block)
        self.times_added += self._prefixes[block] is None
        self._prefixes[block] = prefix
        for listener in (*self.listeners, *self.exact_listeners):
            listener(prefix, True)
        return block

    def prefix(self, block: int) -> Prefix:
        """Return the prefix that a findable block ends."""
        prefix = self._prefixes[block]
        assert prefix is not None, f"block {block} is not findable"
        return prefix

    def forget(self, block: int) -> None:
        """Have `block` found no more; perhaps it is going to hold something else."""
        prefix, self._prefixes[block] = self.prefix(block), None
        self._times_forgotten[block] += 1
        del self._blocks[prefix.digest]
        if block in self.computing:
            self._computed(block)
        else:
            for listener in self.exact_listeners:
                listener(prefix, False)
        for listener in self.listeners:  # of one that was computing too: `prefixes` may have told of it
            listener(prefix, False)

    def _computed(self, block: int) -> None:
        self.computing.remove(block)
        self._ring.mark(COMPUTED + self._tier, block)

    def newest(self, count: int) -> Iterator[Digest]:
        """Yield what the last `count` blocks hold that became findable; for those forgotten, older ones."""
        return islice(reversed(self._blocks), count)

    def times_forgotten(self, blocks: array[int]) -> NDArray[np.int64]:
        """Return how often each of `blocks` [N] was forgotten: until once more, it holds what was found."""
        return np.asarray(self._times_forgotten)[np.asarray(blocks)]

    def prefixes(self) -> list[Prefix]:
        """Return those published; another thread may see some that are computing from this very moment."""
        held = enumerate(self._prefixes.copy())
        return [prefix for block, prefix in held if prefix is not None and block not in self.computing]


@dataclass(frozen=True, slots=True)
class Found:
    """Blocks that hold a sequence's first tokens: on the device, and after those in host memory.

    They are full, but for `tail`, which comes after them. windows: what each cache group with a window has;
    where no layer keeps all tokens, that is all there is.
    """

    device: Sequence[int]
    host: Sequence[int]
    tail: Tail | None = None
    windows: Sequence[WindowBlocks] = ()

    @property
    def on_device(self) -> array[int]:
        """Return the device's blocks of all cache groups."""
        blocks = array("i")
        for part in (self.device, *(each.device for each in self.windows)):
            blocks.extend(part)
        return blocks

    @property
    def num_to_bring(self) -> int:
        """Return how many blocks of all cache groups come from host memory."""
        return len(self.host) + sum(len(each.on_host) for each in self.windows)

    @property
    def num_from_host(self) -> int:
        """Return how many of the prompt's blocks come from host memory, be it in one cache group."""
        in_windows = set[int]().union(*(each.on_host for each in self.windows))
        return len(in_windows.union(range(len(self.device), len(self.device) + len(self.host))))

    def __len__(self) -> int:
        return len(self.device) + len(self.host) or (self.windows[0].end if self.windows else 0)

    def num_tokens(self, block_size: int) -> int:
        """Return how many tokens need not be computed."""
        return len(self) * block_size + (0 if self.tail is None else self.tail.num_tokens)

    def first(self, count: int) -> Found:
        return Found(self.device[:count], self.host[: max(0, count - len(self.device))])


class Match:
    """The blocks that hold a sequence's first tokens, on the device and after those in host memory.

    A group that waits for room is asked for them in each step, and may have thousands. So those that were
    found stay found until their cache forgets them, and only what follows is looked up again.
    """

    def __init__(self, prefixes: list[Prefix], device: PrefixCache, host: PrefixCache) -> None:
        self.prefixes = prefixes  # of the sequence, which may become more
        self._device = _Places(device)
        self._host = _Places(host)

    def renew(self) -> Found:
        """Return the blocks that are found by now."""
        device, host, end = self._device, self._host, len(self.prefixes)
        device.cut()
        device.follow(self.prefixes, end)
        host.cut()
        host.begin_at(device.end, self.prefixes)
        host.follow(self.prefixes, end)
        return Found(device.blocks[:], host.blocks[:])


class _Places:
    """Blocks of one tier that hold a run of the prefixes, from the `begin`-th on."""

    def __init__(self, cache: PrefixCache, begin: int = 0) -> None:
        self.begin = begin
        self.blocks = array("i")
        self._cache = cache
        self._forgotten = array("q")  # how often each had been forgotten by then

    @property
    def end(self) -> int:
        return self.begin + len(self.blocks)

    def cut(self) -> None:
        """Drop the first that is not found any more, and those after it."""
        if self.blocks:
            changed = self._cache.times_forgotten(self.blocks) != np.asarray(self._forgotten)
            first = int(changed.argmax())
            if changed[first]:
                del self.blocks[first:], self._forgotten[first:]

    def follow(self, prefixes: list[Prefix], end: int) -> None:
        """Go on before the `end`-th of `prefixes`, up to the first that is not found."""
        find, known = self._cache.find, len(self.blocks)
        for at in range(self.end, end):
            block = find(prefixes[at])
            if block is None:
                break
            self.blocks.append(block)
        if len(self.blocks) > known:
            self._forgotten.extend(self._cache.times_forgotten(self.blocks[known:]).tolist())

    def begin_at(self, begin: int, prefixes: list[Prefix]) -> None:
        """Begin with another prefix. What is known is kept, unless one before it is not found."""
        before = _Places(self._cache, begin)
        before.follow(prefixes, self.begin)
        if before.end >= self.begin:
            kept = slice(max(0, begin - self.begin), None)
            before.blocks += self.blocks[kept]
            before._forgotten += self._forgotten[kept]
        self.begin, self.blocks, self._forgotten = begin, before.blocks, before._forgotten
