"""Which replica was sent which prefix: what there is to go by where no registry says what they hold."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from quire.engine.hashing import Digest
from quire.engine.registry.prompt_hasher import PromptHasher
from quire.service.router.placement import Location
from quire.service.router.prompt import Prompt

MAX_DIGESTS = 1 << 16  # of a replica: what is remembered is bounded, too


class PrefixAffinity:
    """The blocks of the prompts that each replica was sent, as many as it has room for.

    It is a tree of prefixes: a block's digest stands for all blocks before it, too. Those sent longest ago
    go first, as in the replica's own cache, and the end of a prompt before its beginning.
    """

    def __init__(self, block_size: int) -> None:
        self._hasher = PromptHasher(block_size, secrets.randbits(63))
        self._blocks: Mapping[str, int] = {}
        self._sent: dict[str, OrderedDict[Digest, None]] = {}  # by URL; the one sent longest ago first

    def follow(self, blocks: Mapping[str, int]) -> None:
        """Take in which replicas there are, by URL, and how many blocks each has."""
        self._blocks = dict(blocks)
        self._sent = {url: self._sent.get(url, OrderedDict()) for url in blocks}

    def locate(self, prompt: Prompt) -> Location:
        """Return where a prompt's blocks should be."""
        digests = self._hasher.digests(prompt.salt, prompt.tokens)
        held = {url: _match(sent, digests) for url, sent in self._sent.items()}
        return Location(len(prompt.tokens), {"": digests}, {"": self._hasher.block_size}, held)

    def add(self, url: str, digests: Sequence[Digest]) -> None:
        """Note that a prompt is sent there."""
        sent = self._sent.get(url)
        if sent is None:
            return
        for digest in reversed(digests):
            sent[digest] = None
            sent.move_to_end(digest)
        while len(sent) > min(self._blocks[url], MAX_DIGESTS):
            sent.popitem(last=False)


def _match(sent: OrderedDict[Digest, None], digests: Sequence[Digest]) -> int:
    for count, digest in enumerate(digests):
        if digest not in sent:
            return count
    return len(digests)
