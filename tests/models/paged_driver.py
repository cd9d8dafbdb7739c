"""A small driver of a model over the paged cache: chunked prefill, mixed steps, padded decode batches."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from quire.engine.device.kv_cache import KVCache
from quire.engine.models.config import ModelConfig
from quire.engine.models.loader import Model
from quire.engine.models.vocabulary import all_logits
from quire.kernels.attention.batch import DecodeBatch, ForwardBatch, Newest, PrefillBatch, Span
from quire.kernels.attention.gather import DecodeGather
from quire.kernels.formats.kv_format import UNSCALED, KVFormat

BLOCK_SIZE = 16
Query = tuple[int, list[int]]  # a row and its tokens of this step


class PagedDriver:
    """Rows with permuted block tables over a cache that starts as NaN. Row `rows` pads."""

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        rows: int,
        max_len: int,
        seed: int = 0,
        held: KVFormat | None = None,
    ) -> None:
        self.model = model
        self.rows = rows
        self.chosen_tokens = config.chosen_tokens
        blocks_per_row = -(-max_len // BLOCK_SIZE)
        groups, self.group_of_layer = len(config.cache_groups), config.group_of_layer
        num_blocks = groups * rows * blocks_per_row + 1
        held = held or UNSCALED[model.embedding.dtype]
        copy_blocks = model.backend.copy_blocks
        self.cache = KVCache(config, num_blocks, BLOCK_SIZE, held, model.embedding.device, copy_blocks)
        self.cache.blocks.fill_(0xFF)  # NaN in every type, or with a scale of NaN
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        self.tables = torch.zeros(groups, rows + 1, blocks_per_row, dtype=torch.int32)
        self.tables[:, :rows] = order[:-1].view(groups, rows, blocks_per_row).int()
        self.block_tables = self.tables[0]
        self.lengths = [0] * rows

    def step(
        self, decodes: dict[int, int], prefills: dict[int, list[int]], padding: int = 0
    ) -> dict[int, Tensor]:
        """Run {row: token} decodes and {row: tokens} chunks -> {row: logits [its tokens, V]}."""
        queries = self._queries(decodes, prefills, padding)
        logits = self._logits(self._batch(queries, len(decodes) + padding))
        each = logits.split([len(ids) for _, ids in queries])
        return {row: own for (row, _), own in zip(queries, each, strict=True) if row < self.rows}

    def step_of_newest(
        self, decodes: dict[int, int], prefills: dict[int, list[int]], padding: int = 0
    ) -> dict[int, Tensor]:
        """The same, for each row's newest token alone -> {row: logits [V]}."""
        queries = self._queries(decodes, prefills, padding)
        batch = self._batch(queries, len(decodes) + padding)
        context_lens = self._context_lens(queries)
        each = [
            Newest(
                tokens=_int32([len(ids) for _, ids in queries]).cumsum(0, dtype=torch.int32) - 1,
                queries=DecodeBatch(
                    tables,
                    rows=_int32([row for row, _ in queries]),
                    context_lens=context_lens,
                    order=context_lens.argsort(descending=True).int(),
                    workspace=DecodeGather(),
                ),
            )
            for tables in self.tables
        ]
        others = zip(batch.other_groups, each[1:], strict=True)
        others_with = tuple(replace(other, newest=newest) for other, newest in others)
        logits = self._logits(replace(batch, newest=each[0], other_groups=others_with))
        return {row: own for (row, _), own in zip(queries, logits, strict=True) if row < self.rows}

    def _queries(self, decodes: dict[int, int], prefills: dict[int, list[int]], padding: int) -> list[Query]:
        single = [(row, [token]) for row, token in decodes.items()] + [(self.rows, [0])] * padding
        return [*single, *prefills.items()]

    def _context_lens(self, queries: list[Query]) -> Tensor:
        return _int32([0 if row == self.rows else self.lengths[row] for row, _ in queries])

    def _logits(self, batch: ForwardBatch) -> Tensor:
        with torch.inference_mode():
            given = () if self.cache.states is None else (self.cache.states,)
            logits = self.model.part_logits(self.model.forward(batch, self.cache.layers, *given))
            return all_logits(logits, self.model.config.vocab_size, self.model.ranks)

    def _batch(self, queries: list[Query], num_decodes: int) -> ForwardBatch:
        """The first `num_decodes` have one token each, the rest are chunks. Lengths grow."""
        batch, *others = [self._group_batch(queries, num_decodes, tables) for tables in self.tables]
        spans = tuple(
            Span(row, len(ids), 0 if row == self.rows else self.lengths[row] + len(ids))
            for row, ids in queries
        )
        if not self.chosen_tokens or max(span.context_len for span in spans) <= self.chosen_tokens:
            spans = ()
        token_rows = _int32([row for row, ids in queries for _ in ids]) if spans else None
        for row, ids in queries:
            if row < self.rows:
                self.lengths[row] += len(ids)
        return replace(
            batch,
            other_groups=tuple(others),
            group_of_layer=self.group_of_layer,
            token_rows=token_rows,
            spans=spans,
        )

    def _group_batch(self, queries: list[Query], num_decodes: int, tables: Tensor) -> ForwardBatch:
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts: list[int] = []
        for row, ids in queries:
            starts.append(len(tokens))
            tokens += ids
            if row == self.rows:
                positions, slots = [*positions, 0], [*slots, -1]
                continue
            for position in range(self.lengths[row], self.lengths[row] + len(ids)):
                block = int(tables[row, position // BLOCK_SIZE])
                positions.append(position)
                slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        rows = _int32([row for row, _ in queries])
        context_lens = _int32(
            [0 if row == self.rows else self.lengths[row] + len(ids) for row, ids in queries]
        )
        prefill = None
        if len(queries) > num_decodes:
            prefill = PrefillBatch(
                tables,
                rows=rows[num_decodes:],
                query_starts=_int32([*starts[num_decodes:], len(tokens)]),
                context_lens=context_lens[num_decodes:],
                max_query_len=max(len(ids) for _, ids in queries),
                spans=tuple(
                    Span(row, len(ids), self.lengths[row] + len(ids)) for row, ids in queries[num_decodes:]
                )
                if self.cache.states is not None
                else (),
            )
        return ForwardBatch(
            tokens=_int32(tokens),
            positions=_int32(positions),
            slots=torch.tensor(slots),
            decode=DecodeBatch(
                tables,
                rows[:num_decodes],
                context_lens[:num_decodes],
                _int32(list(range(num_decodes))),
                DecodeGather(),
            ),
            prefill=prefill,
        )

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
