"""Fig. 5: the query of "forth" attends to keys and values in three blocks that do not follow each other."""

from __future__ import annotations

import torch

from quire.loadtest.attention_variants import Case, contiguous
from quire.loadtest.evaluation.real.variants import OurKernel

WORDS = ["Four", "score", "and", "seven", "years", "ago", "our", "fathers", "brought", "forth"]
TABLE = [7, 1, 3]
BLOCK_SIZE, BLOCKS, HEADS, HEAD_DIM = 4, 9, 2, 8


def forth() -> Case:
    """The query of the last word; keys and values of all words, in order and in the blocks of TABLE."""
    rng = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, HEADS, len(WORDS), HEAD_DIM, generator=rng) for _ in range(2))
    query = torch.randn(1, HEADS, 1, HEAD_DIM, generator=rng)
    cut = []
    for contiguous_memory in (keys, values):
        blocks = torch.full((BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM), torch.nan)  # of other requests: never read
        for position in range(len(WORDS)):
            place = TABLE[position // BLOCK_SIZE], slice(None), position % BLOCK_SIZE
            blocks[place] = contiguous_memory[0, :, position]
        cut.append(blocks)
    return Case(query, keys, values, *cut, torch.tensor([TABLE]), len(WORDS))


def test_fig5_attention_over_blocks_is_attention_over_contiguous_memory() -> None:
    case = forth()
    attended = OurKernel.of(case)()
    torch.testing.assert_close(attended, contiguous(case), atol=1e-6, rtol=1e-5)


def test_fig5_block_by_block_as_equation_4_writes_it() -> None:
    """A_ij = exp(q·K_j / √d) / Σ exp(q·K_t / √d), o_i = Σ V_j·A_ij, a block j at a time."""
    case = forth()
    output = torch.zeros(HEADS, HEAD_DIM)
    total = torch.zeros(HEADS, 1)
    for logical, block in enumerate(TABLE):
        filled = min(BLOCK_SIZE, len(WORDS) - logical * BLOCK_SIZE)
        keys, values = case.key_blocks[block, :, :filled], case.value_blocks[block, :, :filled]
        weights = (case.q[0] @ keys.mT * HEAD_DIM**-0.5).exp()  # [heads, 1, filled]
        output += (weights @ values)[:, 0]
        total += weights.sum(-1)
    attended = OurKernel.of(case)()
    torch.testing.assert_close(attended[0, :, 0], output / total, atol=1e-6, rtol=1e-5)
