"""What is found of a group's tokens when its turn comes, and how many blocks it needs beside that."""

from __future__ import annotations

from quire.engine.memory.prefix_cache import Found
from quire.engine.memory.window_blocks import WindowBlocks
from quire.engine.schedule.state import SchedulerState
from quire.engine.sequences.sequence import Sequence, SequenceGroup


def find(state: SchedulerState, sequence: Sequence) -> Found:
    """Return findable blocks, up to where prompt logprobs are still wanted: they need not be computed.

    Were all tokens found, the last one is computed in a copy of its block. Copies are made before a step
    writes, so a block that is still computing cannot be copied. With windows, the first of several sequences
    goes on from no later than where the others do: behind the prompt, which they share.
    """
    group, blocks = sequence.group, state.blocks
    found = blocks.match(sequence)
    if is_whole(state, sequence, found) and blocks.is_computing(found):
        found = found.first(len(found) - 1)
    others = group.in_cache[1:] if group.forked else []
    if blocks.windows is not None and others and sequence is group.in_cache[0]:
        found = blocks.first_of(sequence, found, group.num_prompt // blocks.block_size)
    if group.prompt_logprobs is not None and group.prompt_logprobs_asked < group.num_prompt:
        return blocks.first_of(sequence, found, (group.prompt_logprobs_asked - 1) // blocks.block_size)
    return blocks.contents.with_tail(sequence, found)


def is_whole(state: SchedulerState, sequence: Sequence, found: Found) -> bool:
    return len(found) * state.blocks.block_size == sequence.num_tokens


def attach(state: SchedulerState, sequence: Sequence, found: Found) -> None:
    """Begin the table of `sequence` with what was found."""
    state.blocks.attach(sequence, found)
    state.rows.context[sequence.row] = found.num_tokens(state.blocks.block_size)


def begin_later(state: SchedulerState, sequence: Sequence) -> None:
    """Begin a later sequence of a group: it shares the prompt of the first one, and may find more.

    Of a prompt that was found in some cache groups and not in others, the first one computes all blocks anew:
    those that were found are no use then, beside its own the group would need more than it was let in for.
    """
    blocks, first = state.blocks, sequence.group.in_cache[0]
    most = (sequence.num_tokens - 1) // blocks.block_size
    found = blocks.contents.first_on_device(sequence, find(state, sequence), most)
    shared = min(sequence.group.num_prompt // blocks.block_size, most)
    shares = shared > 0 and first is not sequence and blocks.reaches(first, shared)
    if shares and (shared > len(found) or not _are_of(first, found, shared)):
        blocks.fork(first, sequence, shared)
        state.rows.context[sequence.row] = shared * blocks.block_size
    else:
        attach(state, sequence, found)


def _are_of(first: Sequence, found: Found, end: int) -> bool:
    """Return whether what was found is, before logical block `end`, what `first` has there."""
    full = [WindowBlocks(0, found.device)] if first.table else []
    return all(
        table.block(logical) == part.blocks[logical - part.first]
        for table, part in zip(first.tables, [*full, *found.windows], strict=True)
        for logical in range(max(table.first, part.first), min(table.end, part.end, end))
    )


def blocks_to_resume(state: SchedulerState, group: SequenceGroup) -> int:
    """Return how many blocks a waiting group names until all its sequences have taken a decode step."""
    blocks = state.blocks
    shared = group.num_prompt // blocks.block_size
    most = group.num_prompt + group.request.params.max_tokens - 1
    lengths = [min(sequence.num_tokens + 1, most) for sequence in group.live]
    full = shared + sum(blocks.blocks_for(length) - shared for length in lengths)
    return state.capacity.blocks(full, lengths)


def blocks_to_find(state: SchedulerState, group: SequenceGroup, found: Found) -> int:
    """Return how many of `blocks_to_resume` must come from those available when `found` are shared.

    One more when the tokens are found whole: the last one is computed in a copy of its block.
    """
    on_device = found.on_device if found.windows else found.device
    kept = len(on_device) - state.blocks.pool.num_evictable(on_device)
    return blocks_to_resume(state, group) - kept + is_whole(state, group.in_cache[0], found)


def blocks_to_come(state: SchedulerState, group: SequenceGroup) -> int:
    """Return the blocks that a running group was admitted with and has not taken yet."""
    if not group.prefill_queue:
        return 0
    held = {block for sequence in group.live for block in sequence.blocks}
    return max(0, blocks_to_resume(state, group) - len(held))
