"""Coroutines that are run where they are made, for as long as they need not wait."""

from __future__ import annotations

import types
from collections.abc import Awaitable, Coroutine, Generator
from functools import partial
from typing import Any


def start_eagerly(coroutine: Coroutine[Any, Any, None]) -> Awaitable[None] | None:
    """Run `coroutine` up to its first wait. Return its rest, which is to be awaited, or None if it has ended.

    What an eager task of Python 3.12 does, but that no task is made of what need not wait.
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    return _rest(coroutine, awaited)


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    while True:
        try:
            sent = yield awaited
        except BaseException as error:  # a cancellation is for the coroutine
            resume = partial(coroutine.throw, error)
        else:
            resume = partial(coroutine.send, sent)
        try:
            awaited = resume()
        except StopIteration:
            return
