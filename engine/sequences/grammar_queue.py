"""Requests that wait for their grammars, which a thread compiles while steps go on."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait

from quire.engine.messages import Request
from quire.engine.sequences.grammar import STACK_BYTES, Constraint, Grammars
from quire.engine.threads import DaemonWorker

logger = logging.getLogger("quire.engine")

MAX_KEPT = 64  # grammars of late, for requests to come
PATIENCE = 5.0  # seconds for a grammar, until those behind it are compiled beside it
MAX_SLOW = 4  # that are compiled beside others; the rest waits for them


class GrammarQueue:
    """Compiles in the order of arrival, each grammar once for all who wait for it.

    One that takes too long, and may never end, goes on in a thread of its own.
    """

    def __init__(self, grammars: Grammars, patience: float = PATIENCE) -> None:
        """`patience`: seconds after which a grammar takes too long."""
        self._grammars = grammars
        self._patience = patience
        self._kept: OrderedDict[str, Constraint] = OrderedDict()
        self._waiting: list[Request] = []  # in the order of arrival
        self._compiling: dict[str, Future[Constraint]] = {}  # of each grammar, in the order in which they end
        self._slow: dict[str, Future[Constraint]] = {}  # of those that take too long
        self._first = ("", 0.0)  # the one that is compiled first, and since when it was seen to be
        self._worker = _worker()

    def __len__(self) -> int:
        return len(self._waiting)

    def find(self, grammar: str) -> Constraint | None:
        """Return the beginning of a grammar that was compiled of late."""
        constraint = self._kept.get(grammar)
        if constraint is not None:
            self._kept.move_to_end(grammar)
        return constraint

    def add(self, request: Request) -> None:
        grammar = request.params.grammar
        if grammar not in self._compiling and grammar not in self._slow:
            self._compiling[grammar] = self._worker.submit(self._grammars.compile, grammar)
        self._waiting.append(request)

    def abort(self, request_id: int) -> None:
        """Forget a request, and its grammar if nobody else waits for it and its turn has not come."""
        left = [request for request in self._waiting if request.id == request_id]
        self._waiting = [request for request in self._waiting if request.id != request_id]
        for grammar in {request.params.grammar for request in left}:
            is_wanted = any(request.params.grammar == grammar for request in self._waiting)
            if not is_wanted and grammar in self._compiling and self._compiling[grammar].cancel():
                del self._compiling[grammar]

    def take(self, seconds: float) -> list[tuple[Request, Constraint | ValueError]]:
        """Take those whose grammar is ready, or was refused, in order; wait so long for the first grammar.

        Who waits for another grammar is passed by those behind.
        """
        self._pass_slow()
        if self._waiting and seconds:
            first = [*self._compiling.values()][:1]
            wait([*first, *self._slow.values()], min(seconds, self._patience), FIRST_COMPLETED)
        ready: dict[str, Constraint | ValueError] = {}
        for grammar, future in self._take_done():
            error = future.exception()
            if error is not None:
                ready[grammar] = _refusal(error)
                continue
            constraint = ready[grammar] = future.result()
            self.keep(grammar, constraint)
        if not ready:
            return []
        waiting, self._waiting = self._waiting, []
        taken: list[tuple[Request, Constraint | ValueError]] = []
        for request in waiting:
            compiled = ready.get(request.params.grammar)
            if compiled is None:
                self._waiting.append(request)
            else:
                taken.append((request, compiled))
        return taken

    def _take_done(self) -> Iterator[tuple[str, Future[Constraint]]]:
        """Forget the compilations that have ended, and yield them."""
        for grammar in [grammar for grammar, future in self._slow.items() if future.done()]:
            yield grammar, self._slow.pop(grammar)
        while self._compiling:
            grammar, future = next(iter(self._compiling.items()))
            if not future.done():
                return
            del self._compiling[grammar]
            yield grammar, future

    def _pass_slow(self) -> None:
        """Have another thread compile what is behind a grammar that takes too long."""
        first = next(iter(self._compiling), "")
        if first != self._first[0]:
            self._first = (first, time.monotonic())
        taken = time.monotonic() - self._first[1]
        if (
            not first
            or taken < self._patience
            or self._compiling[first].done()
            or len(self._slow) == MAX_SLOW
        ):
            return
        self._slow[first] = self._compiling.pop(first)
        self._worker = _worker()
        for grammar, future in self._compiling.items():
            if future.cancel():
                self._compiling[grammar] = self._worker.submit(self._grammars.compile, grammar)

    def keep(self, grammar: str, constraint: Constraint) -> None:
        """Remember the beginning of `grammar`."""
        self._kept[grammar] = constraint
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)


def _worker() -> DaemonWorker:
    return DaemonWorker("quire-grammar", STACK_BYTES)


def _refusal(error: BaseException) -> ValueError:
    """Return what a compilation ended with as the refusal of its requests: nothing else has failed."""
    if isinstance(error, ValueError):
        return error
    logger.error("a grammar could not be compiled", exc_info=error)
    return ValueError(f"the grammar cannot be compiled: {type(error).__name__}: {error}")
