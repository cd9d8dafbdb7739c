"""The paper's memory: words as tokens, blocks of four of them, and which physical block is given out next."""

from __future__ import annotations

from quire.engine.sequences.sequence import Sequence
from tests.engine.oracle import VOCAB
from tests.engine.tables import Tables

BLOCK_SIZE = 4
_VOCABULARY: list[str] = []


def tokens(text: str) -> list[int]:
    """Return one token a word, the same for the same word."""
    for word in text.split():
        if word not in _VOCABULARY:
            _VOCABULARY.append(word)
    assert len(_VOCABULARY) <= VOCAB
    return [_VOCABULARY.index(word) for word in text.split()]


class Memory:
    """A block manager, and requests that are written to it word by word."""

    def __init__(self, num_blocks: int, next_blocks: list[int], block_size: int = BLOCK_SIZE) -> None:
        """The pool hands out `next_blocks` in this order, and then the others."""
        self.tables = Tables(num_blocks, block_size)
        self.pool = self.tables.blocks.pool
        taken = self.pool.allocate_many(num_blocks)
        others = [block for block in taken if block not in next_blocks]
        self.pool.release(*reversed(others), *reversed(next_blocks))

    def request(self, prompt: str, n: int = 1) -> list[Sequence]:
        """Compute a prompt, which the first sequence of the request holds; return all its sequences."""
        sequences = self.tables.group(tokens(prompt), n)
        self.write(sequences[0], "")
        return sequences

    def write(self, sequence: Sequence, text: str) -> None:
        """Generate `text` after what `sequence` has, a step a word."""
        self.tables.write(sequence, [])
        for token in tokens(text):
            self.tables.write(sequence, [token])
            self.tables.step()

    def block_table(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Return (physical block number, # filled) of each logical block, as Fig. 6 draws it."""
        block_size = self.tables.blocks.block_size
        context = int(self.tables.rows.context[sequence.row])
        return [
            (block, min(block_size, context - logical * block_size))
            for logical, block in enumerate(sequence.table)
        ]

    def physical_blocks(self) -> dict[int, str]:
        """Return what stands in each physical block that is in use."""
        block_size, content = self.tables.blocks.block_size, {}
        for sequence in self.tables.sequences:
            for logical, (block, filled) in enumerate(self.block_table(sequence) if sequence.table else []):
                first = logical * block_size
                words = [_VOCABULARY[token] for token in sequence.tokens[first : first + filled]]
                assert content.setdefault(block, words) == words, f"block {block} holds two texts"
        return {block: " ".join(words) for block, words in content.items()}

    def counts(self, sequence: Sequence) -> list[int]:
        """Return the reference count of each block of `sequence`."""
        return self.tables.counts(sequence)
