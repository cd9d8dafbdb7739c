"""Client processes: sessions dealt out to several, so that the measuring side is not what is measured."""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Event
from typing import Any

from quire.loadtest.client.driver import Numbered, drive
from quire.loadtest.client.records import Record
from quire.loadtest.client.sessions import Session
from quire.loadtest.client.target import Target

HEAD_START = 0.05  # seconds between the call to begin and time 0, for every process to hear of it

OnProgress = Callable[[int, int], None]
"""Takes how many requests have ended, and how many of them failed."""


def run_sessions(
    target: Target,
    sessions: Sequence[Session],
    *,
    concurrency: int | None = None,
    processes: int = 4,
    api_key: str = "",
    on_progress: OnProgress = lambda done, failed: None,
) -> list[Record]:
    """Send all; return records by session and turn. Without a concurrency: an open loop, by each `at`.

    Raise ValueError for a session that cannot be sent to the target.
    """
    for session in sessions:
        target.check(session)
    processes = min(processes, len(sessions), concurrency or len(sessions))
    context = multiprocessing.get_context("spawn")
    go, results = context.Event(), context.Queue()
    start = context.Value("d", 0.0)
    counts = context.Array("q", 2 * processes)  # done and failed, of each process
    workers = []
    for i in range(processes):
        share = None if concurrency is None else (concurrency + processes - 1 - i) // processes
        mine = list(enumerate(sessions))[i::processes]
        arguments = (i, target, api_key, mine, share, start, go, counts, results)
        workers.append(context.Process(target=_work, args=arguments, daemon=True))
    try:
        for worker in workers:
            worker.start()
        for _ in workers:
            _next(results, workers, lambda: None)  # it is there
        start.value = time.monotonic() + HEAD_START
        go.set()
        records: list[Record] = []
        for _ in workers:
            records += _next(results, workers, lambda: on_progress(sum(counts[0::2]), sum(counts[1::2])))
        on_progress(sum(counts[0::2]), sum(counts[1::2]))
        for worker in workers:
            worker.join()
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
    return sorted(records, key=lambda record: (record.session, record.turn))


def _next(results: Any, workers: Sequence[Any], meanwhile: Callable[[], None]) -> Any:
    """Return what the next process says. Raise RuntimeError if one has ended before its time."""
    while True:
        try:
            answer = results.get(timeout=0.2)
        except queue.Empty:
            meanwhile()
            if any(worker.exitcode not in (None, 0) for worker in workers):
                raise RuntimeError("a client process has ended early; see its error above") from None
            continue
        return answer


def _work(
    number: int,
    target: Target,
    api_key: str,
    sessions: list[Numbered],
    concurrency: int | None,
    start: Any,
    go: Event,
    counts: SynchronizedArray[int],
    results: Any,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this process

    def count(record: Record) -> None:
        counts[2 * number] += 1
        counts[2 * number + 1] += bool(record.failure)

    results.put(None)
    go.wait()
    results.put(asyncio.run(drive(target, api_key, sessions, concurrency, start.value, count)))
