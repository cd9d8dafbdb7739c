"""Worker processes: what ends one, what is then tried again, and that none is left over."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from quire.service.text.frames import encode_frame
from quire.service.text.worker_pool import OutOfTime, WorkerCrashed, WorkerLost, Workers

pytestmark = pytest.mark.anyio


@pytest.fixture
async def make_workers() -> AsyncIterator[Callable[..., Workers]]:
    made: list[Workers] = []

    def make(opening: str = "", count: int = 1, seconds: float = 20.0) -> Workers:
        made.append(Workers("tests.service.obedient_worker", count, lambda: opening, seconds))
        return made[-1]

    yield make
    for workers in made:
        await workers.close()


async def ask(workers: Workers, question: object) -> object:
    return msgspec.json.decode(await workers.ask(encode_frame(question)))


def is_alive(pid: object) -> bool:
    assert isinstance(pid, int)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_process_answers_again_and_again(make_workers: Callable[..., Workers]) -> None:
    workers = make_workers()
    await workers.start()
    first = await ask(workers, "pid")
    assert len(str(await ask(workers, ["large", 5 << 20]))) == 5 << 20
    assert await ask(workers, "pid") == first
    await workers.close()
    assert not is_alive(first)


async def test_as_many_as_may_answer_at_once(make_workers: Callable[..., Workers]) -> None:
    workers = make_workers(count=2)
    pids = await asyncio.gather(*(ask(workers, ["sleep", 0.05]) for _ in range(6)))
    assert len(set(pids)) == 2


async def test_an_answer_has_so_much_processor_time(make_workers: Callable[..., Workers]) -> None:
    workers = make_workers(seconds=0.1)
    first = await ask(workers, "pid")
    with pytest.raises(OutOfTime):
        await ask(workers, "spin")
    assert not is_alive(first)
    second = await ask(workers, ["sleep", 0.5])  # which takes no processor time
    assert second != first and await ask(workers, "pid") == second


async def test_one_that_was_killed_beforehand_is_replaced(make_workers: Callable[..., Workers]) -> None:
    workers = make_workers()
    first = await ask(workers, "pid")
    assert isinstance(first, int)
    os.kill(first, 9)
    assert await ask(workers, "pid") != first


@pytest.mark.parametrize("question", ["die", "grow"])
async def test_an_accident_is_tried_again_and_then_told(
    make_workers: Callable[..., Workers], question: str
) -> None:
    workers = make_workers()
    with pytest.raises(WorkerLost):
        await ask(workers, question)
    assert await ask(workers, "pid")


@pytest.mark.parametrize("fault", [signal.SIGSEGV, signal.SIGABRT])
async def test_a_question_that_crashes_its_process_is_told_at_once(
    make_workers: Callable[..., Workers], fault: signal.Signals
) -> None:
    workers = make_workers()
    with pytest.raises(WorkerCrashed):
        await ask(workers, ["crash", fault])
    assert await ask(workers, "pid")


async def test_a_start_that_fails(make_workers: Callable[..., Workers]) -> None:
    with pytest.raises(WorkerLost):
        await ask(make_workers("die"), "pid")
    with pytest.raises(ValueError, match="this is no opening"):
        await ask(make_workers("refuse"), "pid")
    with pytest.raises(ValueError, match="this is no opening"):
        await make_workers("refuse").start()


async def test_an_asker_that_leaves_costs_no_process(make_workers: Callable[..., Workers]) -> None:
    workers = make_workers()
    first = await ask(workers, "pid")
    leaving = asyncio.ensure_future(ask(workers, ["sleep", 0.2]))
    await asyncio.sleep(0.05)
    leaving.cancel()
    assert await ask(workers, "pid") == first


async def test_what_nobody_waits_for_any_more_is_not_asked(make_workers: Callable[..., Workers]) -> None:
    """Else those who ask and leave would have others wait, and all their questions be kept."""
    workers = make_workers()
    assert await ask(workers, "number") == 1
    busy = asyncio.ensure_future(ask(workers, ["sleep", 0.05]))
    leaving = [asyncio.ensure_future(ask(workers, "pid")) for _ in range(5)]
    await asyncio.sleep(0)
    for each in leaving:
        each.cancel()
    await asyncio.gather(busy, *leaving, return_exceptions=True)
    assert await ask(workers, "number") == 3


async def test_closing_ends_what_waits_for_its_turn(make_workers: Callable[..., Workers]) -> None:
    workers = make_workers()
    asked = [asyncio.ensure_future(ask(workers, ["sleep", 60])) for _ in range(3)]
    await asyncio.sleep(0)
    await workers.close()
    assert all(isinstance(each, WorkerLost) for each in await asyncio.gather(*asked, return_exceptions=True))


async def test_closing_ends_what_is_being_is_being_asked(make_workers: Callable[..., Workers]) -> None:
    workers = make_workers()
    first = await ask(workers, "pid")
    asked = asyncio.ensure_future(ask(workers, ["sleep", 60]))
    await asyncio.sleep(0.05)
    await workers.close()
    with pytest.raises(WorkerLost):
        await asked
    assert not is_alive(first)
