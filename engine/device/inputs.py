"""The arrays that a step's forward pass takes: of a plan, and of a step that does nothing.

A graph is recorded with idle inputs and run with a plan's, padded with idle ones.
"""

from __future__ import annotations

import numpy as np

from quire.engine.arrays import Int32, empty_int32
from quire.engine.schedule.cascade import SMALLEST_BUNDLE
from quire.engine.schedule.plan import StepPlan

TOKENS_A_CHUNK = 16  # a graph of so many tokens has room for one prefill chunk more


def decode_inputs(plan: StepPlan, bundles: tuple[Int32, Int32]) -> list[Int32]:
    """Device rows [B], positions [B] (-1 pads), what attention takes (see `_attending`), and the bundles.

    Those are members [N × R] and of each row its bundle [B], or both empty.
    """
    return [plan.rows, plan.context_lens - 1, *_attending(plan.rows, plan.context_lens), *bundles]


def idle_decode(size: int, padding_row: int, bundle_width: int | None = None) -> list[Int32]:
    """With room for bundles of so many rows, or for none."""
    no_bundles = [empty_int32(), empty_int32()]
    if bundle_width is not None:
        no_bundles = [
            np.full(size // SMALLEST_BUNDLE * bundle_width, -1, np.int32),
            np.full(size, -1, np.int32),
        ]
    return [
        np.full(size, padding_row, np.int32),
        np.full(size, -1, np.int32),
        *_attending_idly(size, padding_row),
        *no_bundles,
    ]


def mixed_inputs(plan: StepPlan) -> list[Int32]:
    """T tokens, B decodes' first and then those of P prefill chunks.

    Token ids [T], -1 for the last one that the token's row sampled; their rows [T]; positions [T], -1 pads;
    the decodes' three of `_attending`; chunks' rows [P]; context lengths [P], 0 pads; query starts [P + 1].
    """
    decodes = plan.num_decodes
    starts = np.cumsum(plan.query_lens, dtype=np.int32) - plan.query_lens
    firsts = plan.context_lens - plan.query_lens
    return [
        np.concatenate([np.full(decodes, -1, np.int32), plan.prefill_tokens]),
        np.repeat(plan.rows, plan.query_lens),
        np.repeat(firsts - starts, plan.query_lens) + np.arange(plan.num_tokens, dtype=np.int32),
        *_attending(plan.rows[:decodes], plan.context_lens[:decodes]),
        plan.rows[decodes:],
        plan.context_lens[decodes:],
        np.append(starts[decodes:], np.int32(plan.num_tokens)),
    ]


def newest_inputs(plan: StepPlan) -> list[Int32]:
    """Of each row its newest token, an index in 0 ... T - 1 [R], rising, and the three of `_attending`."""
    return [
        np.cumsum(plan.query_lens, dtype=np.int32) - 1,
        *_attending(plan.rows, plan.context_lens),
    ]


def idle_mixed(size: int, padding_row: int) -> list[Int32]:
    """Of `size` tokens, with `newest_inputs`; those left over in a padded step have no context."""
    rows = min(size, padding_row)
    chunks = min(max(size // TOKENS_A_CHUNK, 4), padding_row)
    return [
        np.zeros(size, np.int32),
        np.full(size, padding_row, np.int32),
        np.full(size, -1, np.int32),
        *_attending_idly(rows, padding_row),
        np.full(chunks, padding_row, np.int32),
        np.zeros(chunks, np.int32),
        np.full(chunks + 1, size, np.int32),
        np.zeros(rows, np.int32),
        *_attending_idly(rows, padding_row),
    ]


def _attending(rows: Int32, context_lens: Int32) -> list[Int32]:
    """One query a row: rows [B], context lengths [B] (this step's tokens counted; 0 pads), an order [B]."""
    return [rows, context_lens, np.argsort(-context_lens, kind="stable").astype(np.int32)]


def _attending_idly(size: int, padding_row: int) -> list[Int32]:
    return [
        np.full(size, padding_row, np.int32),
        np.zeros(size, np.int32),
        np.arange(size, dtype=np.int32),
    ]
