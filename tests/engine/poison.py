"""Requests that make steps raise, and a device that does not survive it in good order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

from msgspec.structs import replace

from quire.engine.messages import Request
from quire.engine.schedule.plan import StepPlan, StepResult
from tests.engine.oracle import OracleHandle, OracleRunner

POISON = 1 << 41  # seeds from here on are of poisoned requests

Kind = Literal["token", "decode", "forked", "moved"]
Trouble = Callable[[StepPlan], Exception | None]
"""Raised by a step for which no single request is to blame."""

KINDS: tuple[Kind, ...] = ("token", "decode", "forked", "moved")
MOMENTS = ("launch", "late", "wait")


class Poisoned(RuntimeError):
    pass


def poisoned(request: Request, kind: Kind, position: int) -> Request:
    """A step raises that computes a token of it at `position` or later.

    decode: only as a decode; forked: of a second sample or beam; moved: only beside a transfer.
    """
    seed = POISON + position * len(KINDS) + KINDS.index(kind)
    return replace(request, params=replace(request.params, seed=seed))


class LateHandle(OracleHandle):
    def __init__(self, runner: OracleRunner, error: Exception) -> None:
        self.error = error

    def wait(self) -> StepResult:
        raise self.error


class PoisonedRunner(OracleRunner):
    """An oracle whose steps raise: before anything has come of them, in the end, or when waited for.

    What such a step was to write is gone then. Steps after it raise until the runner has settled.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        num_host_blocks: int,
        rng: random.Random,
        windows: tuple[int, ...] = (),
        *,
        keeps_all: bool = True,
    ) -> None:
        super().__init__(num_blocks, block_size, max_num_seqs, num_host_blocks, windows, keeps_all=keeps_all)
        self.rng = rng
        self.trouble: Trouble = lambda plan: None
        self.failed = False
        self.raised: list[str] = []  # what was going on
        self.most_moved = 1  # a request that raises only beside others cannot be found out, and is let be

    def launch(self, plan: StepPlan) -> OracleHandle:
        if self.failed:
            raise Poisoned("a step before it raised")
        for start in plan.starts:
            self.state[start.row] = (start.params, start.index)
        error = self._poison(plan) or self.trouble(plan)
        if error is None:
            return super().launch(plan)
        self.failed = True
        moment = self.rng.choice(MOMENTS)
        if moment == "launch":
            raise error
        super().launch(plan)
        for row, length, context in zip(plan.rows, plan.query_lens, plan.context_lens, strict=True):
            for position in range(context - length, context):
                for block, offset in self._slots(row, position):
                    self.cache[block][offset] = self.cache[block][-1] = None
        for block in plan.copies[:, 1]:
            self.cache[block] = self._empty()
        if moment == "late":
            raise error
        return LateHandle(self, error)

    def settle(self) -> None:
        assert self.failed, "nothing has raised"
        self.failed = False

    def _poison(self, plan: StepPlan) -> Exception | None:
        moves = len(plan.swap_in) + len(plan.swap_out) > 0
        for r, row in enumerate(plan.rows.tolist()):
            params, index = self.state[row]
            position, kind = divmod((params.seed or 0) - POISON, len(KINDS))
            decodes = r < plan.num_decodes
            if (params.seed or 0) < POISON or plan.context_lens[r] <= position:
                continue
            if [True, decodes, index > 0, moves and self.most_moved > 0][kind]:
                self.most_moved -= KINDS[kind] == "moved"
                self.raised.append("transfer" if moves else "decode" if decodes else "prefill")
                return Poisoned(f"row {row}")
        return None
