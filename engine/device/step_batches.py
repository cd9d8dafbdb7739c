"""Steps as the layers take them: a step's inputs on the device, with the block tables of its rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.engine.arrays import Int32, empty_int32
from quire.engine.device.inputs import DecodeInputs, MixedInputs, MoveInputs, NewestInputs
from quire.engine.device.limits import Limits
from quire.engine.models.config import ModelConfig
from quire.engine.schedule.cascade import Cascades
from quire.engine.schedule.plan import StepPlan
from quire.engine.sequences.rows import table_stride
from quire.kernels.attention.batch import DecodeBatch, ForwardBatch, Newest, PrefillBatch, Span
from quire.kernels.attention.cascade import SharedPrefixes, rows_of_cascade, shared_lens
from quire.kernels.attention.gather import DecodeGather
from quire.kernels.attention.splits import DecodeWorkspace
from quire.kernels.backend import Backend

NO_CASCADES: tuple[Int32, Int32] = (empty_int32(), empty_int32())


class StepBatches:
    """The rows' block tables and last tokens, and the steps that are made with them.

    tables: of each cache group, parts of `block_tables`. cascades: rows that share prefixes, None where each
    reads its own.
    """

    def __init__(
        self, config: ModelConfig, limits: Limits, block_size: int, backend: Backend, device: torch.device
    ) -> None:
        rows, groups = limits.max_num_seqs + 1, len(config.cache_groups)
        stride, max_blocks = table_stride(limits.max_num_seqs), -(-limits.max_model_len // block_size)
        self.block_tables = torch.zeros(groups * stride, max_blocks, dtype=torch.int32, device=device)
        self.tables = self.block_tables.split(stride)
        self.last_tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.workspaces: list[DecodeWorkspace | DecodeGather] = [DecodeGather() for _ in self.tables]
        self.cascades: Cascades | None = None
        self._group_of_layer, self._block_size = config.group_of_layer, block_size
        self._token_places = backend.token_places
        if device.type == "cuda":
            # Each row reads latents for itself, and what is in its window.
            shares = any(not spec.latent and not spec.window for spec in config.cache_specs)
            workspace = DecodeWorkspace.allocate(
                rows, config.num_heads, config.attended_dim, device, shares=shares
            )
            self.workspaces = [workspace] * groups
            if shares:
                self.cascades = Cascades(rows, block_size, rows_of_cascade(config.largest_group))

    @property
    def blocks_of_row(self) -> int:
        """Return how many entries all tables of a row have."""
        return len(self.tables) * self.block_tables.shape[1]

    def note(self, plan: StepPlan) -> None:
        """Take notice of changes of tables, which rows share prefixes by."""
        if self.cascades is None:
            return
        rows, columns, blocks = plan.table_rows, plan.table_columns, plan.table_blocks
        if len(self.tables) > 1:
            first = rows < len(self.tables[0])
            rows, columns, blocks = rows[first], columns[first], blocks[first]
        self.cascades.note(rows, columns, blocks)

    def cascades_of(self, plan: StepPlan) -> tuple[Int32, Int32]:
        """Return which decodes of a plan share prefixes, as `Cascades.find` gives them."""
        return NO_CASCADES if self.cascades is None else self.cascades.find(plan.rows, plan.context_lens)

    def moves(self, plan: StepPlan) -> MoveInputs[Int32]:
        entries = plan.table_rows * self.block_tables.shape[1] + plan.table_columns
        return MoveInputs(entries, plan.table_blocks, plan.copies, plan.override_rows, plan.override_tokens)

    def change_rows(self, moves: MoveInputs[Tensor]) -> None:
        """Change block tables and last tokens as a plan says."""
        if len(moves.entries):
            self.block_tables.view(-1)[moves.entries] = moves.blocks
        if len(moves.override_rows):
            self.last_tokens[moves.override_rows] = moves.override_tokens

    def decode(self, inputs: DecodeInputs[Tensor], spans: tuple[Span, ...] | None) -> ForwardBatch:
        """Return a step of decodes.

        spans: of all rows, if some may have more tokens than indexers choose of them; none of any in a step
        that is recorded for any; None: no row has more.
        """
        rows, context_lens = inputs.rows, inputs.context_lens
        tokens, positions, slots = self._places(None, rows, inputs.positions)
        shared = None
        if self.cascades is not None and len(inputs.members):
            members = inputs.members.view(-1, self.cascades.width)
            lens = shared_lens(members, rows, context_lens, self.tables[0], self._block_size)
            shared = SharedPrefixes(members, inputs.cascade_of, lens)
        return ForwardBatch(
            tokens=tokens,
            positions=positions,
            slots=slots[0],
            decode=self._decode_batch(0, rows, context_lens, inputs.order, shared),
            other_groups=tuple(
                ForwardBatch(
                    tokens=tokens,
                    positions=positions,
                    slots=slots[group],
                    decode=self._decode_batch(group, rows, context_lens, inputs.order),
                )
                for group in range(1, len(self.tables))
            ),
            group_of_layer=self._group_of_layer,
            token_rows=None if spans is None else rows,
            spans=spans or (),
        )

    def mixed(
        self,
        inputs: MixedInputs[Tensor],
        newest: NewestInputs[Tensor] | None,
        max_query_len: int | None,
        spans: tuple[Span, ...] | None,
        chunks: tuple[Span, ...],
    ) -> ForwardBatch:
        """Return a step of prefill chunks, with or without decodes beside them.

        newest: the last layer is asked for those tokens alone. max_query_len: of the longest chunk, if it is
        known; chunks: all of them, if they are. spans: as `decode` has them.
        """
        places = self._places(inputs.token_ids, inputs.token_rows, inputs.positions)
        batch, *others = [
            self._mixed_of_group(group, places, inputs, newest, max_query_len, chunks)
            for group in range(len(self.tables))
        ]
        batch = replace(batch, other_groups=tuple(others), group_of_layer=self._group_of_layer)
        if spans is not None:
            batch = replace(batch, token_rows=inputs.token_rows, spans=spans)
        return batch

    def _mixed_of_group(
        self,
        group: int,
        places: tuple[Tensor, Tensor, Tensor],
        inputs: MixedInputs[Tensor],
        newest: NewestInputs[Tensor] | None,
        max_query_len: int | None,
        chunks: tuple[Span, ...],
    ) -> ForwardBatch:
        """Return a mixed step, whose tokens are at `places`, as the layers of a cache group take it."""
        ahead = None
        if newest is not None:
            decode = self._decode_batch(group, newest.rows, newest.context_lens, newest.order)
            ahead = Newest(newest.tokens, decode)
        tokens, positions, slots = places
        return ForwardBatch(
            tokens=tokens,
            positions=positions,
            slots=slots[group],
            decode=self._decode_batch(
                group, inputs.decode_rows, inputs.decode_context_lens, inputs.decode_order
            ),
            prefill=PrefillBatch(
                block_tables=self.tables[group],
                rows=inputs.chunk_rows,
                query_starts=inputs.query_starts,
                context_lens=inputs.chunk_context_lens,
                max_query_len=max_query_len or len(inputs.token_ids),
                spans=chunks,
            ),
            newest=ahead,
        )

    def _decode_batch(
        self,
        group: int,
        rows: Tensor,
        context_lens: Tensor,
        order: Tensor,
        shared: SharedPrefixes | None = None,
    ) -> DecodeBatch:
        return DecodeBatch(self.tables[group], rows, context_lens, order, self.workspaces[group], shared)

    def _places(self, ids: Tensor | None, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, their positions, and their slots in each cache group [G, T]."""
        return self._token_places(ids, rows, positions, self.last_tokens, self.tables, self._block_size)


def spans_of(plan: StepPlan, begin: int = 0) -> tuple[Span, ...]:
    """Return the tokens and contexts of a plan's rows from the `begin`th on."""
    each = (plan.rows, plan.query_lens, plan.context_lens)
    return tuple(map(Span, *(array[begin:].tolist() for array in each)))
