"""What the engine tells of its pool, made by hand or by a core that is stepped here."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec
import numpy as np

from quire.engine.inspection.inspector import Inspector
from quire.engine.inspection.messages import CACHED, ExactPool, PoolAnswer, PoolQuestion, TableLine
from quire.engine.inspection.replay import KEPT
from quire.engine.messages import Request, SamplingParams
from tests.engine.simulation import make_core

Noted = tuple[int, int, int, int, list[int]]  # kind, request, index, logical block, blocks


def exactly(answer: PoolAnswer, moves: Iterable[Noted] = ()) -> PoolAnswer:
    """Return `answer` with all that can be undone, and the moves that led to it."""
    counts = np.frombuffer(answer.references, np.uint8).astype(np.int32)
    exact = ExactPool(
        counts=counts.tobytes(),
        holds=bytes(counts.nbytes),
        flags=bytes(KEPT * (state == CACHED) for state in answer.states),
        lines=[TableLine(table.request, table.index, 0, 0, table.blocks) for table in answer.tables],
    )
    numbers = array("q")
    for kind, request, index, logical, blocks in moves:
        numbers.extend([kind, len(blocks), request, index, logical, *blocks])
    return msgspec.structs.replace(answer, exact=exact, moves=numbers.tobytes())


def after_requests(count: int, num_blocks: int = 16) -> PoolAnswer:
    """Return what an engine tells that has served so many requests, and that nobody has asked before."""
    core = make_core(num_blocks, 4, 8, 64)
    for number in range(count):
        core.add(Request(number, [number] * 10, SamplingParams(max_tokens=6, ignore_eos=True, seed=1)))
        while core.has_work:
            core.step()
    answer = Inspector(core).answer(PoolQuestion(0, True))
    assert isinstance(answer, PoolAnswer)
    return answer
