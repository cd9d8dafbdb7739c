"""Blocks for who needs them: newer groups yield theirs to older ones (PagedAttention, section 4.5)."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from quire.engine.config import PreemptionMode
from quire.engine.memory.pool import OutOfBlocks
from quire.engine.schedule.draft import StepDraft
from quire.engine.schedule.state import RunQueue
from quire.engine.sequences.sequence import Sequence

logger = logging.getLogger("quire.scheduler")


class PreemptionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Costs are measured at start, so that the choice does not depend on the moment (section 4.5, 7.3)."""

    mode: PreemptionMode = "auto"
    seconds_per_block: float = 0.0  # over the link, one way
    seconds_per_token: float = 0.0  # of prefill, whatever comes before it
    seconds_per_pair: float = 0.0  # of a token and one before it, which it attends to

    def swaps(self, blocks: int, contexts: Iterable[int]) -> bool:
        """Whether `blocks` out and in again are cheaper than to prefill so many tokens of each sequence."""
        if self.mode == "auto":
            recompute = sum(self.prefill_seconds(tokens) for tokens in contexts)
            return 2 * blocks * self.seconds_per_block <= recompute
        return self.mode == "swap"

    def prefill_seconds(self, tokens: int) -> float:
        """To compute the first `tokens` of a sequence."""
        return tokens * self.seconds_per_token + tokens * tokens / 2 * self.seconds_per_pair


class Yielding:
    """Finds blocks for a sequence to write to. The newest group yields first and the oldest never does."""

    def __init__(self, queue: RunQueue, policy: PreemptionPolicy) -> None:
        self.recomputes = 0  # groups that yielded and lost their blocks, since start
        self.swaps = 0  # groups that yielded and went to host memory, since start
        self._queue = queue
        self._blocks = queue.blocks
        self._policy = policy

    def back(self, draft: StepDraft, sequence: Sequence, num_tokens: int) -> bool:
        """Back `num_tokens` of `sequence` with blocks; False when it cannot go on in this step."""
        while True:
            try:
                self._blocks.grow(sequence, num_tokens)
                return True
            except OutOfBlocks:
                missing = self._blocks.blocks_for(num_tokens) - len(sequence.table)
                if not self._make_room(draft, sequence, missing):
                    return False

    def own(self, draft: StepDraft, sequence: Sequence, position: int) -> bool:
        """Make the block of `position` writable; False when `sequence` cannot go on in this step."""
        while not self._blocks.is_writable(sequence, position):
            try:
                self._blocks.copy_on_write(sequence, position)
            except OutOfBlocks:
                if not self._make_room(draft, sequence, 1):
                    return False
        self._queue.shared_tails.pop(sequence.row, None)
        return True

    def _make_room(self, draft: StepDraft, sequence: Sequence, missing: int) -> bool:
        """Have newer groups yield; True when it is worth trying again in this very step."""
        pool, running = self._blocks.pool, self._queue.running
        if pool.num_in_transfer - draft.promised < missing:
            newest = running[-1]
            # The oldest never yields: alone, it has room once what is in transfer has arrived.
            alone = newest is running[0] and pool.num_in_transfer > 0
            if not newest.transferring and not alone:
                self.preempt_newest(draft, sequence)
                if newest is sequence.group:
                    return False
                if not newest.swapped or pool.num_available:
                    return True
                return self._make_room(draft, sequence, missing)
        draft.promised += missing
        draft.stalled.add(sequence.row)
        return False

    def preempt_newest(self, draft: StepDraft, beneficiary: Sequence) -> None:
        """The newest running group yields its blocks, keeps its tokens and comes back before any other."""
        group = self._queue.running[-1]
        rows = {sequence.row for sequence in group.live}
        blocks = len({block for sequence in group.live for block in sequence.table})
        contexts = self._queue.rows.context[list(rows)].tolist()
        # What this very step was to write to its blocks has not been written yet, and will not be.
        # Little is lost then: the group was let in just now, or is computing several sequences again.
        drafted = any(prefill.row in rows for prefill in draft.prefills) or not self._blocks.is_written(group)
        draft.preempted |= rows
        swap = not drafted and self._policy.swaps(blocks, contexts) and self._blocks.swap_out(group)
        self._queue.leave(group, swapped=swap)
        if swap:
            self.swaps += 1
            draft.await_blocks(group)
        else:
            self.recomputes += 1
            group.prefill_queue = []
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
