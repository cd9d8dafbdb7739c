"""Sends sessions to a server on one event loop, open loop (by a schedule) or closed loop (by concurrency)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator

from quire.loadtest.client.records import Record
from quire.loadtest.client.sessions import Session
from quire.loadtest.client.target import Target, ask
from quire.loadtest.client.transports import Transport

Numbered = tuple[int, Session]
"""A session and its number in the whole run."""


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
    try:
        if concurrency is None:
            records = await _open_loop(transport, target, sessions, start, on_done)
        else:
            await asyncio.sleep(start - time.monotonic())
            records = await _closed_loop(transport, target, iter(sessions), concurrency, start, on_done)
    finally:
        await transport.close()
    return sorted(records, key=lambda record: (record.session, record.turn))


async def _open_loop(
    transport: Transport,
    target: Target,
    sessions: Iterable[Numbered],
    start: float,
    on_done: Callable[[Record], None],
) -> list[Record]:
    records: list[Record] = []
    async with asyncio.TaskGroup() as tasks:
        for number, session in sorted(sessions, key=lambda item: item[1].at):
            await asyncio.sleep(start + session.at - time.monotonic())
            tasks.create_task(_run(transport, target, number, session, session.at, start, records, on_done))
    return records


async def _closed_loop(
    transport: Transport,
    target: Target,
    sessions: Iterator[Numbered],
    concurrency: int,
    start: float,
    on_done: Callable[[Record], None],
) -> list[Record]:
    records: list[Record] = []

    async def place() -> None:
        for number, session in sessions:
            due = time.monotonic() - start
            await _run(transport, target, number, session, due, start, records, on_done)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(place())
    return records


async def _run(
    transport: Transport,
    target: Target,
    number: int,
    session: Session,
    due: float,
    start: float,
    records: list[Record],
    on_done: Callable[[Record], None],
) -> None:
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
