"""A worker does what it is given in order, tells of each how it ended, and holds nothing afterwards."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import CancelledError

import pytest

from quire.engine.threads import DaemonWorker

LONG = 60.0  # seconds: what is waited for comes
STACK = 1 << 20


class Panic(BaseException):
    """No Exception."""


class Held:
    """Something that a task is called with."""


def fail(held: Held) -> None:
    raise Panic(held)


def test_tasks_are_done_in_order_by_one_thread_and_what_is_cancelled_is_not() -> None:
    worker, gate, done = DaemonWorker("worker", STACK), threading.Event(), list[int]()
    first = worker.submit(gate.wait, LONG)
    cancelled, second = worker.submit(done.append, 1), worker.submit(lambda: threading.current_thread().name)
    assert cancelled.cancel()
    gate.set()
    assert first.result(LONG) and second.result(LONG) == "worker" and done == []
    with pytest.raises(CancelledError):
        cancelled.result(LONG)


def test_a_task_that_raises_ends_itself_alone_and_leaves_no_cycle() -> None:
    worker, held = DaemonWorker("worker", STACK), Held()
    gone = weakref.ref(held)
    failed = worker.submit(fail, held)
    assert isinstance(failed.exception(LONG), Panic)
    assert worker.submit(int).result(LONG) == 0
    gc.disable()
    try:
        del failed, held
        assert gone() is None
    finally:
        gc.enable()


def test_the_thread_of_a_worker_that_is_garbage_ends() -> None:
    worker = DaemonWorker("worker", STACK)
    thread = worker.submit(threading.current_thread).result(LONG)
    assert thread.daemon and thread.is_alive()
    del worker
    thread.join(LONG)
    assert not thread.is_alive()
