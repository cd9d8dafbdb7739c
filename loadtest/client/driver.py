"""Sends sessions to a server on one event loop, open loop (by a schedule) or closed loop (by concurrency)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from quire.loadtest.client.records import Record
from quire.loadtest.client.sessions import Session
from quire.loadtest.client.target import Target, ask

Numbered = tuple[int, Session]
"""A session and its number in the whole run."""

RunOne = Callable[[int, Session, float], Coroutine[Any, Any, None]]
"""Runs a session, by its number, that is due at a time."""


async def drive(
    target: Target,
    api_key: str,
    sessions: Iterable[Numbered],
    concurrency: int | None,
    start: float,
    on_done: Callable[[Record], None],
) -> list[Record]:
    """Run all sessions and return a record of each request. No failure of a request is raised.

    `start`: time.monotonic() from which schedules and records count. With a concurrency, so many sessions
    are under way at any time, and each begins when a place is free, whatever its `at`.
    """
    transport = target.open_transport(api_key)
    records: list[Record] = []

    async def run_one(number: int, session: Session, due: float) -> None:
        """Run one session, turn after turn; end early where a turn fails, as nobody could answer it."""
        history: list[str] = []
        for i, turn in enumerate(session.turns):
            if i:
                due = time.monotonic() - start + turn.think
                await asyncio.sleep(turn.think)
            record = Record(session=number, turn=i, due=due, sent=due)
            text = await ask(transport, target, turn, history, record, start, time.monotonic)
            records.append(record)
            on_done(record)
            if record.failure:
                return
            history += [str(turn.prompt), text]

    try:
        if concurrency is None:
            await _open_loop(sessions, start, run_one)
        else:
            await asyncio.sleep(start - time.monotonic())
            await _closed_loop(iter(sessions), concurrency, start, run_one)
    finally:
        await transport.close()
    return sorted(records, key=lambda record: (record.session, record.turn))


async def _open_loop(sessions: Iterable[Numbered], start: float, run_one: RunOne) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number, session in sorted(sessions, key=lambda item: item[1].at):
            await asyncio.sleep(start + session.at - time.monotonic())
            tasks.create_task(run_one(number, session, session.at))


async def _closed_loop(sessions: Iterator[Numbered], concurrency: int, start: float, run_one: RunOne) -> None:
    async def place() -> None:
        for number, session in sessions:
            await run_one(number, session, time.monotonic() - start)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(place())
