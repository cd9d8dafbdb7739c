"""A thread that does one thing after another, for which a process that ends does not wait."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Task = Callable[[], None]


class DaemonWorker:
    """One thread, with a stack of its own size: tasks may recurse deeper, or less deep, than elsewhere.

    A task that never ends keeps those behind it waiting, and nothing else. Once the worker is garbage its
    thread ends, after what it was given.
    """

    def __init__(self, name: str, stack_bytes: int) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True)
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
        weakref.finalize(self, self._tasks.put, None)

    def submit(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Have the thread call it, after what came before, unless the future is cancelled by then."""
        future: Future[R] = Future()
        self._tasks.put(partial(_complete, future, partial(function, *args, **kwargs)))
        return future


def _work(tasks: SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # which holds what it was called with


def _complete(future: Future[R], function: Callable[[], R]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:  # a panic of an extension is no Exception
        future.set_exception(error)
        del future  # which holds the error, whose traceback holds this frame: a cycle
    else:
        future.set_result(result)
