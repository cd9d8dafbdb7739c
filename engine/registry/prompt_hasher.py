"""A prompt's digests, as the replicas of a deployment make them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.engine.hashing import BlockHasher, Digest, Prefix, Prefixes

_PARITY_BLOCKS = 3


class PromptHasher:
    """`pinned`: token ids of the prefixes that all tenants share."""

    def __init__(self, block_size: int, seed: int, pinned: Iterable[list[int]] = ()) -> None:
        self.block_size = block_size
        self._hasher = BlockHasher(block_size, seed)
        self._prefixes = Prefixes(self._hasher)
        for tokens in pinned:
            self._prefixes.make_public(tokens)

    def digests(self, salt: str, tokens: Sequence[int]) -> list[Digest]:
        """Return the digests of the full blocks of a prompt."""
        prefixes: list[Prefix] = []
        self._prefixes.extend(prefixes, self._hasher.block_contents(tokens), salt)
        return [prefix.digest for prefix in prefixes]

    def parity(self) -> str:
        """Return the digest of a fixed prompt: whoever computes another one hashes blocks in another way."""
        tokens = [(at * 2654435761) % 131071 for at in range(_PARITY_BLOCKS * self.block_size)]
        return self.digests("parity", tokens)[-1].hex()
