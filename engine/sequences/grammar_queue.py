"""Requests that wait for their grammars, which a thread compiles while steps go on."""

from __future__ import annotations

from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor, wait

from quire.engine.messages import Request
from quire.engine.sequences.grammar import Constraint, Grammars

MAX_KEPT = 64  # grammars of late, for requests to come


class GrammarQueue:
    """Compiles in the order of arrival."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._kept: OrderedDict[str, Constraint] = OrderedDict()
        self._waiting: deque[tuple[Request, Future[Constraint]]] = deque()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="quire-grammar")

    def __len__(self) -> int:
        return len(self._waiting)

    def find(self, grammar: str) -> Constraint | None:
        """Return the beginning of a grammar that was compiled of late."""
        constraint = self._kept.get(grammar)
        if constraint is not None:
            self._kept.move_to_end(grammar)
        return constraint

    def add(self, request: Request) -> None:
        future = self._worker.submit(self._grammars.compile, request.params.grammar)
        self._waiting.append((request, future))

    def abort(self, request_id: int) -> None:
        self._waiting = deque(entry for entry in self._waiting if entry[0].id != request_id)

    def take(self, seconds: float) -> list[tuple[Request, Constraint | ValueError]]:
        """Take those whose grammar is ready, or was refused, in order; wait so long for the first."""
        if self._waiting and seconds:
            wait([self._waiting[0][1]], seconds)
        taken: list[tuple[Request, Constraint | ValueError]] = []
        while self._waiting and self._waiting[0][1].done():
            request, future = self._waiting.popleft()
            try:
                constraint = future.result()
            except ValueError as refusal:
                # Its traceback holds this very list, and with it the request.
                taken.append((request, refusal.with_traceback(None)))
                continue
            self.keep(request.params.grammar, constraint)
            taken.append((request, constraint))
        return taken

    def keep(self, grammar: str, constraint: Constraint) -> None:
        """Remember the beginning of `grammar`."""
        self._kept[grammar] = constraint
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
