"""Assert what must hold of the scheduler between two calls, and of the blocks of all that it knows."""

from __future__ import annotations

from collections import Counter

import numpy as np

from quire.engine.memory.invariants import EVERY, check_memory
from quire.engine.schedule.plan import NOT_FINITE
from quire.engine.schedule.state import SchedulerState
from quire.engine.sequences.sequence import NO_ROW, Sequence


def check_scheduler(state: SchedulerState, share: slice = EVERY) -> None:
    """Check every invariant, of `share` of the blocks and sequences. O(blocks + tokens)."""
    groups = [*state.running, *state.waiting]
    live = [sequence for group in groups for sequence in group.live]
    transfers = [*state.transfers, *(step.transfers for step in state.in_flight)]
    check_memory(state.blocks, live, [each.moves for each in transfers], share)
    waited_for = [id(group) for each in transfers for group in each.groups]
    assert len(set(waited_for)) == len(waited_for), "a group is on its way twice"
    transferring = {id(group) for group in groups if group.transferring}
    assert transferring <= set(waited_for), "a group waits for blocks that are not on their way"
    assert sorted(state.groups) == sorted(group.request.id for group in groups)
    orders = [group.order for group in groups]
    assert not state.in_turn or orders == sorted(orders), "a group runs or waits out of its turn"
    assert state.num_swapped == sum(group.swapped for group in groups)
    assert state.num_in_lockstep == sum(group.in_lockstep for group in groups)
    stops = Counter(token for group in groups for token in group.stop_tokens)
    stops[NOT_FINITE % len(state.ending_at)] += 1
    assert stops == {token: state.ending_at[token] for token in np.flatnonzero(state.ending_at).tolist()}
    _check_rows(state, share)
    _check_steps(state, share)
    for group in state.waiting:
        assert all(not sequence.num_blocks and sequence.row == NO_ROW for sequence in group.live)
        assert group.swapped or not any(sequence.host_blocks for sequence in group.live)


def _check_rows(state: SchedulerState, share: slice) -> None:
    rows, block_size = state.rows, state.blocks.block_size
    in_rows = [sequence for sequence in rows.sequences if sequence is not None]
    assert {id(s) for s in in_rows} == {id(s) for group in state.running for s in group.live}
    assert len(in_rows) == rows.num_used
    for sequence in in_rows[share]:
        row = sequence.row
        assert rows.sequences[row] is sequence
        assert rows.capacity[row] == sequence.num_blocks * block_size
        context = int(rows.context[row])
        assert context <= min(rows.capacity[row], rows.limit[row])
        _check_tokens(state, sequence)
        _check_decoding(state, sequence)
        writes = rows.decoding[row] and context < rows.limit[row]
        if writes and context % block_size and row not in state.shared_tails:
            assert state.blocks.is_writable(sequence, context), "it would write to a block of others"
        # Beams step together: one that got its block may have to wait for the others'.
        allowed = state.blocks.blocks_for(max(context, 1)) + (sequence.group.beams is not None)
        assert sequence.num_blocks <= allowed, "a block too many"
    for row in range(rows.size):
        assert rows.sequences[row] or not rows.tokens.length(row), "tokens of nobody"
    for row, sequence in state.shared_tails.items():
        assert rows.sequences[row] is sequence, "another's block is copied before it is written"


def _check_tokens(state: SchedulerState, sequence: Sequence) -> None:
    """Check that the row of `sequence` holds its tokens: all but those in flight."""
    group, tokens = sequence.group, sequence.tokens
    assert np.array_equal(tokens[: group.num_prompt], group.prompt), "another request's tokens"
    if group.beams is None and group.forked and sequence not in group.prefill_queue:
        in_flight = sum(sequence in step.samples.sequences for step in state.in_flight)
        context = int(state.rows.context[sequence.row])
        assert len(tokens) == context + 1 - in_flight, "a token too few or too many"


def _check_decoding(state: SchedulerState, sequence: Sequence) -> None:
    """Check that `sequence`, which is in a row, decodes only once all that it reads is on the device."""
    group, row = sequence.group, sequence.row
    if state.rows.decoding[row]:
        assert not group.transferring, "it decodes before its blocks are there"
        assert sequence not in group.prefill_queue, "it decodes before its prompt is computed"
        assert group.beams is None or not group.beams.pending, "it decodes before its beam is chosen"
    if state.blocks.windows is not None and sequence.num_blocks:
        context = state.rows.context.item(row)
        assert state.blocks.windows.reaches(sequence, context), "a block is given back that it still reads"


def _check_steps(state: SchedulerState, share: slice) -> None:
    """Check that steps sample for those who are there, and that what they give is written to no other row."""
    rows, decodes, samples = state.rows, state.rows._decodes, state.rows._samples
    assert decodes is None or np.array_equal(np.sort(decodes), np.flatnonzero(rows.decoding)), "others decode"
    if samples is not None:
        assert np.array_equal(samples.needs_host, rows._needs_host[samples.row_index]), "not what it needs"
        there = rows._sequence[samples.row_index].tolist()
        assert all(one is other for one, other in zip(samples.sequences, there, strict=True)), "of others"
    for step in state.in_flight:
        columns = step.samples.sequences, step.samples.rows.tolist(), step.needs_host.tolist()
        for sequence, row, needs_host in list(zip(*columns, strict=True))[share]:
            assert needs_host or sequence.row == row, "a token is going to be written to another's row"
