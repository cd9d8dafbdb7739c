"""The event loop's own metrics: a stall is seen, and so is a task too many."""

from __future__ import annotations

import asyncio
import time

import pytest

from quire.service.metrics.loop_watch import LoopWatch

pytestmark = pytest.mark.anyio


def later_than(watch: LoopWatch, seconds: float) -> float:
    """How many wakings were later than this bound."""
    buckets = dict(watch.lag.buckets())
    return buckets["+Inf"] - buckets[str(seconds)]


async def test_a_stall_is_seen() -> None:
    watch = LoopWatch()
    watch.start()
    await asyncio.sleep(0.2)
    assert dict(watch.lag.buckets())["+Inf"] > 1
    before = later_than(watch, 0.25)
    time.sleep(0.4)  # noqa: ASYNC251 - nothing else runs meanwhile
    await asyncio.sleep(0.1)
    assert later_than(watch, 0.25) == before + 1


async def test_tasks_are_counted_and_the_watch_is_none() -> None:
    watch = LoopWatch()
    assert watch.num_tasks == 0
    before = len(asyncio.all_tasks())
    watch.start()
    assert watch.num_tasks == before
    sleeper = asyncio.create_task(asyncio.sleep(60))
    assert watch.num_tasks == before + 1
    sleeper.cancel()
    await asyncio.gather(sleeper, return_exceptions=True)
    assert watch.num_tasks == before
