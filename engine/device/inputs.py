"""The int32 arrays that a step takes: those of a plan, and those of a dummy step, which pad a plan's.

Each kind has the same fields on the host (`Int32`) and on the device (`Tensor`). A graph is recorded with
idle inputs and run with a plan's, padded with idle ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from quire.engine.arrays import Int32, empty_int32
from quire.engine.schedule.cascade import SMALLEST_CASCADE
from quire.engine.schedule.plan import StepPlan

TOKENS_A_CHUNK = 16  # a graph of so many tokens has room for one prefill chunk more

Array = TypeVar("Array", Int32, Tensor)


class DecodeInputs(NamedTuple, Generic[Array]):
    """A step of B decodes, with N cascades of up to W rows or with none."""

    rows: Array  # [B] device rows
    positions: Array  # [B], -1 pads
    context_lens: Array  # [B] this step's tokens counted; 0 pads
    order: Array  # [B] 0 ... B - 1 by falling context length
    members: Array  # [N × W] the cascades' decodes, -1 after them; or empty
    cascade_of: Array  # [B] each decode's cascade, or -1; or empty


class MixedInputs(NamedTuple, Generic[Array]):
    """A step of T tokens: those of B decodes first, and then those of P prefill chunks."""

    token_ids: Array  # [T], -1 for the one that the token's row sampled last
    token_rows: Array  # [T] device rows
    positions: Array  # [T], -1 pads
    decode_rows: Array  # [B] device rows
    decode_context_lens: Array  # [B] this step's tokens counted; 0 pads
    decode_order: Array  # [B] 0 ... B - 1 by falling context length
    chunk_rows: Array  # [P] device rows
    chunk_context_lens: Array  # [P] this step's tokens counted; 0 pads
    query_starts: Array  # [P + 1] from B to T


class NewestInputs(NamedTuple, Generic[Array]):
    """The newest tokens of a mixed step's R rows, one query each."""

    tokens: Array  # [R] indices in 0 ... T - 1, rising
    rows: Array  # [R] device rows
    context_lens: Array  # [R] this step's tokens counted; 0 pads
    order: Array  # [R] 0 ... R - 1 by falling context length


class SampleInputs(NamedTuple, Generic[Array]):
    """The S tokens that a mixed step samples."""

    rows: Array  # [S] device rows
    hidden: Array  # [S] which of the forward's hidden states each is drawn from
    positions: Array  # [S] in their sequences


class MoveInputs(NamedTuple, Generic[Array]):
    """Changes of the block tables, copies of blocks and tokens to decode on from, before the forward."""

    entries: Array  # [K] indices in the flat block tables
    blocks: Array  # [K] the blocks to stand there
    copies: Array  # [C, 2] source and destination; flat on the device
    override_rows: Array  # [G] rows whose last token is another than they sampled
    override_tokens: Array  # [G] it


PER_TOKEN = 3  # the fields of MixedInputs that are as long as the step
PER_ROW = sum(len(kind._fields) for kind in (MixedInputs, NewestInputs, SampleInputs)) - PER_TOKEN


def decode_inputs(plan: StepPlan, cascades: tuple[Int32, Int32]) -> DecodeInputs[Int32]:
    """Return the inputs of a plan without prefills. `cascades`: as `Cascades.find` gives them."""
    return DecodeInputs(
        plan.rows, plan.context_lens - 1, plan.context_lens, _by_context(plan.context_lens), *cascades
    )


def idle_decode(size: int, padding_row: int, cascade_width: int | None = None) -> DecodeInputs[Int32]:
    """Return `size` decodes that pad, with room for cascades of `cascade_width` rows or for none."""
    members, cascade_of = empty_int32(), empty_int32()
    if cascade_width is not None:
        members = np.full(size // SMALLEST_CASCADE * cascade_width, -1, np.int32)
        cascade_of = np.full(size, -1, np.int32)
    return DecodeInputs(
        rows=np.full(size, padding_row, np.int32),
        positions=np.full(size, -1, np.int32),
        context_lens=np.zeros(size, np.int32),
        order=np.arange(size, dtype=np.int32),
        members=members,
        cascade_of=cascade_of,
    )


def mixed_inputs(plan: StepPlan) -> MixedInputs[Int32]:
    """Return the inputs of a plan with prefills."""
    decodes = plan.num_decodes
    starts = np.cumsum(plan.query_lens, dtype=np.int32) - plan.query_lens
    firsts = plan.context_lens - plan.query_lens
    decode_context_lens = plan.context_lens[:decodes]
    return MixedInputs(
        token_ids=np.concatenate([np.full(decodes, -1, np.int32), plan.prefill_tokens]),
        token_rows=np.repeat(plan.rows, plan.query_lens),
        positions=np.repeat(firsts - starts, plan.query_lens) + np.arange(plan.num_tokens, dtype=np.int32),
        decode_rows=plan.rows[:decodes],
        decode_context_lens=decode_context_lens,
        decode_order=_by_context(decode_context_lens),
        chunk_rows=plan.rows[decodes:],
        chunk_context_lens=plan.context_lens[decodes:],
        query_starts=np.append(starts[decodes:], np.int32(plan.num_tokens)),
    )


def newest_inputs(plan: StepPlan) -> NewestInputs[Int32]:
    """Return each row's newest token."""
    return NewestInputs(
        tokens=np.cumsum(plan.query_lens, dtype=np.int32) - 1,
        rows=plan.rows,
        context_lens=plan.context_lens,
        order=_by_context(plan.context_lens),
    )


def idle_mixed(size: int, padding_row: int) -> tuple[MixedInputs[Int32], NewestInputs[Int32]]:
    """Return `size` tokens that pad; those left over in a padded step have no context."""
    rows = min(size, padding_row)
    chunks = min(max(size // TOKENS_A_CHUNK, 4), padding_row)
    mixed = MixedInputs(
        token_ids=np.zeros(size, np.int32),
        token_rows=np.full(size, padding_row, np.int32),
        positions=np.full(size, -1, np.int32),
        decode_rows=np.full(rows, padding_row, np.int32),
        decode_context_lens=np.zeros(rows, np.int32),
        decode_order=np.arange(rows, dtype=np.int32),
        chunk_rows=np.full(chunks, padding_row, np.int32),
        chunk_context_lens=np.zeros(chunks, np.int32),
        query_starts=np.full(chunks + 1, size, np.int32),
    )
    newest = NewestInputs(
        tokens=np.zeros(rows, np.int32),
        rows=np.full(rows, padding_row, np.int32),
        context_lens=np.zeros(rows, np.int32),
        order=np.arange(rows, dtype=np.int32),
    )
    return mixed, newest


def split_mixed(arrays: Sequence[Tensor]) -> tuple[MixedInputs[Tensor], NewestInputs[Tensor] | None]:
    """Name the arrays of a mixed step, which come with those of its newest tokens or without."""
    width = len(MixedInputs._fields)
    newest = arrays[width:]
    return MixedInputs(*arrays[:width]), NewestInputs(*newest) if newest else None


def _by_context(context_lens: Int32) -> Int32:
    """Return an order of rows, those with the longest context first."""
    return np.argsort(-context_lens, kind="stable").astype(np.int32)
