"""Preemption: blocks for older groups from newer ones (PagedAttention, section 4.5)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import Enum, auto

import msgspec

from quire.engine.config import PreemptionMode
from quire.engine.memory.pool import OutOfBlocks
from quire.engine.schedule.draft import StepDraft
from quire.engine.schedule.lifecycle import preempt
from quire.engine.schedule.state import SchedulerState
from quire.engine.sequences.sequence import Sequence

logger = logging.getLogger("quire.scheduler")


class PreemptionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Costs are measured at start, so that the choice does not depend on the moment (section 4.5, 7.3)."""

    mode: PreemptionMode = "auto"
    seconds_per_block: float = 0.0  # over the link, one way
    seconds_per_token: float = 0.0  # of prefill, whatever comes before it
    seconds_per_pair: float = 0.0  # of a token and one before it, which it attends to

    def swaps(self, blocks: int, contexts: Iterable[int]) -> bool:
        """Return whether `blocks` out and in are cheaper than to prefill so many tokens of each sequence."""
        if self.mode == "auto":
            recompute = sum(self.prefill_seconds(tokens) for tokens in contexts)
            return 2 * blocks * self.seconds_per_block <= recompute
        return self.mode == "swap"

    def prefill_seconds(self, tokens: int) -> float:
        """Return what it takes to compute the first `tokens` of a sequence."""
        return tokens * self.seconds_per_token + tokens * tokens / 2 * self.seconds_per_pair


class Grant(Enum):
    """The end of a demand for blocks."""

    GRANTED = auto()
    PARTIAL = auto()  # some new tokens are backed, and the others wait for blocks in transfer
    STALLED = auto()  # it waits for blocks in transfer
    PREEMPTED = auto()  # the sequence was itself the newest, and has lost its row


class Preemption:
    """Finds blocks for a sequence to write to. The newest group is preempted first, the oldest never."""

    def __init__(self, state: SchedulerState, policy: PreemptionPolicy) -> None:
        self.recomputes = 0  # groups that were preempted and lost their blocks, since start
        self.swaps = 0  # groups that were preempted and went to host memory, since start
        self._state = state
        self._blocks = state.blocks
        self.policy = policy

    def ensure_capacity(self, draft: StepDraft, sequence: Sequence, num_tokens: int) -> Grant:
        """Back `num_tokens` of `sequence` with blocks."""
        while True:
            try:
                self._blocks.grow(sequence, num_tokens)
                return Grant.GRANTED
            except OutOfBlocks:
                if self._give_back_behind(draft):
                    continue
                missing = self._blocks.blocks_for(num_tokens) - sequence.num_blocks
                grant = self._make_room(draft, sequence, missing * self._blocks.pages)
                if grant is Grant.STALLED and self._has_room(sequence):
                    return Grant.PARTIAL
                if grant is not Grant.GRANTED:
                    return grant

    def ensure_writable(self, draft: StepDraft, sequence: Sequence, position: int) -> Grant:
        """Make the block of `position` writable, by a copy if it is shared; never PARTIAL."""
        while not self._blocks.is_writable(sequence, position):
            try:
                self._blocks.copy_on_write(sequence, position)
            except OutOfBlocks:
                if self._give_back_behind(draft):
                    continue
                grant = self._make_room(draft, sequence, 1)
                if grant is not Grant.GRANTED:
                    return grant
        self._state.shared_tails.pop(sequence.row, None)
        return Grant.GRANTED

    def _give_back_behind(self, draft: StepDraft) -> bool:
        """Give back what is behind the windows of all that run; return whether that was anything.

        It would be given back, and kept as cached, once the steps in flight are committed: too late.
        """
        if self._blocks.windows is None:
            return False
        begun = {prefill.row: prefill.start for prefill in reversed(draft.prefills)}
        rows, given_back = self._state.rows, 0
        for group in self._state.running:
            for sequence in group.live:
                position = begun.get(sequence.row, rows.context.item(sequence.row))
                given_back += self._blocks.give_back_behind(sequence, position)
        return given_back > 0

    def _has_room(self, sequence: Sequence) -> bool:
        rows = self._state.rows
        return bool(rows.capacity[sequence.row] > rows.context[sequence.row])

    def _make_room(self, draft: StepDraft, sequence: Sequence, missing: int) -> Grant:
        """Preempt newer groups until it is worth trying again in this very step: GRANTED."""
        pool, running = self._blocks.pool, self._state.running
        while pool.num_in_transfer - draft.reserved < missing:
            newest = running[-1]
            # The oldest is never preempted: alone, it has room once what is in transfer has arrived.
            alone = newest is running[0] and pool.num_in_transfer > 0
            if newest.transferring or alone:
                break
            self.preempt_newest(draft, sequence)
            if newest is sequence.group:
                return Grant.PREEMPTED
            if not newest.swapped or pool.num_available:
                return Grant.GRANTED
        draft.reserved += missing
        draft.stalled.add(sequence.row)
        return Grant.STALLED

    def preempt_newest(self, draft: StepDraft, beneficiary: Sequence) -> None:
        """Preempt the newest running group, which keeps its tokens and comes back before any other."""
        group = self._state.running[-1]
        rows = {sequence.row for sequence in group.live}
        blocks = len({block for sequence in group.live for block in sequence.blocks})
        contexts = self._state.rows.context[list(rows)].tolist()
        # What this very step was to write to its blocks has not been written yet, and will not be.
        # Little is lost then: the group was let in just now, or is computing several sequences again.
        drafted = any(prefill.row in rows for prefill in draft.prefills) or not self._blocks.is_written(group)
        draft.preempted |= rows
        swap = not drafted and self.policy.swaps(blocks, contexts) and self._blocks.swap_out(group)
        record = preempt(self._state, group, swapped=swap)
        if swap:
            self.swaps += 1
            draft.await_blocks(group)
        else:
            self.recomputes += 1
            group.prefill_queue = []
        record.beneficiary, record.blocks, record.tokens = beneficiary.group.request.id, blocks, sum(contexts)
        preemption = {
            "request": group.request.id,
            "beneficiary": beneficiary.group.request.id,
            "mode": "swap" if swap else "recompute",
            "blocks": blocks,
            "tokens": sum(contexts),
        }
        logger.debug(
            "preempted request=%(request)d for=%(beneficiary)d mode=%(mode)s blocks=%(blocks)d "
            "tokens=%(tokens)d",
            preemption,
            extra=preemption,
        )
