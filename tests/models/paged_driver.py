"""A small driver of a model over the paged cache: chunked prefill, mixed steps, padded decode batches."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.models.batch import ForwardBatch, PrefillBatch
from engine.models.config import ModelConfig
from engine.models.loader import Model

BLOCK_SIZE = 16


class PagedDriver:
    """Rows with permuted block tables over a cache that starts as NaN. Row `rows` pads."""

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        rows: int,
        max_len: int,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.rows = rows
        blocks_per_row = -(-max_len // BLOCK_SIZE)
        num_blocks = rows * blocks_per_row + 1
        dtype = kv_dtype or model.embedding.dtype
        copy_blocks = model.backend.copy_blocks
        self.cache = KVCache(config, num_blocks, BLOCK_SIZE, dtype, model.embedding.device, copy_blocks)
        self.cache.blocks.fill_(0xFF)  # NaN in every type
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        self.block_tables = torch.zeros(rows + 1, blocks_per_row, dtype=torch.int32)
        self.block_tables[:rows] = order[: rows * blocks_per_row].view(rows, blocks_per_row).int()
        self.lengths = [0] * rows

    def step(
        self, decodes: dict[int, int], prefills: dict[int, list[int]], padding: int = 0
    ) -> dict[int, Tensor]:
        """Run {row: token} decodes and {row: tokens} chunks -> {row: logits [its tokens, V]}."""
        queries = [(row, [token]) for row, token in decodes.items()]
        queries += [(self.rows, [])] * padding + list(prefills.items())
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts: dict[int, int] = {}
        for row, ids in queries:
            if row == self.rows:
                tokens, positions, slots = [*tokens, 0], [*positions, 0], [*slots, -1]
                continue
            starts[row] = len(tokens)
            for token in ids:
                position = self.lengths[row]
                block = int(self.block_tables[row, position // BLOCK_SIZE])
                tokens.append(token)
                positions.append(position)
                slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
                self.lengths[row] += 1
        prefill = None
        if prefills:
            lengths = [len(ids) for ids in prefills.values()]
            prefill = PrefillBatch(
                rows=_int32(list(prefills)),
                query_starts=_int32(
                    [len(decodes) + padding + sum(lengths[:end]) for end in range(len(lengths) + 1)]
                ),
                context_lens=_int32([self.lengths[row] for row in prefills]),
                max_query_len=max(lengths),
            )
        batch = ForwardBatch(
            tokens=_int32(tokens),
            positions=_int32(positions),
            slots=torch.tensor(slots),
            block_tables=self.block_tables,
            decode_rows=_int32([*decodes, *[self.rows] * padding]),
            decode_context_lens=_int32([self.lengths[row] for row in decodes] + [0] * padding),
            decode_order=_int32(list(range(len(decodes) + padding))),
            prefill=prefill,
        )
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward(batch, self.cache.layers))
        return {row: logits[starts[row] : starts[row] + len(ids)] for row, ids in queries if row in starts}

    def generate(
        self, prompts: list[list[int]], steps: int, seed: int = 0
    ) -> tuple[list[list[int]], list[Tensor]]:
        """Greedy tokens of each prompt, and its logits [prompt + steps - 1, V].

        Prompts come in uneven chunks while those that are through already decode.
        """
        chance = random.Random(seed)
        rest = {row: list(prompt) for row, prompt in enumerate(prompts)}
        outputs: list[list[int]] = [[] for _ in prompts]
        logits: list[list[Tensor]] = [[] for _ in prompts]
        while rest or any(len(output) < steps for output in outputs):
            decodes = {row: out[-1] for row, out in enumerate(outputs) if out and len(out) < steps}
            chunks = {}
            for row in sorted(rest, key=lambda row: chance.random())[:2]:
                size = chance.randint(1, 13)
                chunks[row], rest[row] = rest[row][:size], rest[row][size:]
            results = self.step(decodes, chunks, padding=chance.randint(0, 2) if decodes else 0)
            for row, result in results.items():
                logits[row].append(result)
                if not rest.get(row):
                    rest.pop(row, None)
                    outputs[row].append(int(result[-1].argmax()))
        return outputs, [torch.cat(parts) for parts in logits]


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
