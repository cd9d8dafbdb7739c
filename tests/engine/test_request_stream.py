"""A request's stream against what the engine's steps gave it."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from quire.engine.client import AsyncEngine
from quire.engine.config import EngineConfig, StepStats
from quire.engine.frames import StepFrame
from quire.engine.messages import Output, Request, SamplingParams, StepOutputs
from quire.engine.request_stream import RequestStream

SEQUENCES = 3
NO_STATS = StepStats(**dict.fromkeys(StepStats.__struct_fields__, 0))
Step = list[tuple[int, bool]]  # sequences that have a token each, and whether there is more to it

steps = st.lists(
    st.lists(st.tuples(st.integers(0, SEQUENCES - 1), st.booleans()), unique_by=lambda each: each[0]),
    max_size=12,
)


@given(steps, st.sets(st.integers(0, 11)))
def test_tokens_come_in_order_and_as_few_outputs(steps: list[Step], taken_after: set[int]) -> None:
    """Whatever a listener is given at once: no two outputs in a row that could be one."""
    told: list[list[Output]] = []

    async def run() -> None:
        engine = AsyncEngine(EngineConfig(model="none"))
        engine._loop = asyncio.get_running_loop()
        request = Request(0, [1], SamplingParams(n=SEQUENCES))
        stream = engine._streams[0] = RequestStream(
            request, engine._tell_soon, engine._abort, engine._end_sample
        )
        stream.listen(told.append)
        for number, step in enumerate(steps):
            plain = [index for index, more in step if not more]
            others = [Output(0, index, [number], cached_tokens=1) for index, more in step if more]
            outputs = StepOutputs([0] * len(plain), plain, [number] * len(plain), others)
            engine._receive(StepFrame(outputs, NO_STATS))
            if number in taken_after:
                await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(run())
    outputs = [output for batch in told for output in batch]
    for index in range(SEQUENCES):
        tokens = [token for output in outputs if output.index == index for token in output.tokens]
        assert tokens == [number for number, step in enumerate(steps) if index in dict(step)]
    whole = [output for output in outputs if output.cached_tokens]
    assert all(len(output.tokens) == 1 for output in whole)
    assert len(whole) == sum(more for step in steps for _, more in step)
    for batch in told:
        assert batch
        for one, next_one in pairwise(batch):
            assert one.index != next_one.index or one.cached_tokens or next_one.cached_tokens
