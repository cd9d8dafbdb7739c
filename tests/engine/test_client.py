"""AsyncEngine against processes that do not do as an engine does."""

from __future__ import annotations

import asyncio

from quire.engine.client import AsyncEngine
from quire.engine.config import EngineConfig


def test_an_engine_whose_frames_cannot_be_read_is_dead() -> None:
    async def scenario() -> None:
        engine = AsyncEngine(EngineConfig(model="none"), program=("tests.engine.garbled",))
        await engine.start()
        assert [progress.phase async for progress in engine.watch_progress()] == ["weights"]
        assert engine.state == "dead" and "cannot be understood" in (engine.error or "")
        await engine.stop()

    asyncio.run(scenario())
