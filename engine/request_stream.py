"""RequestStream: what the engine says of one request, for whoever listens or waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.engine.messages import FinishReason, Output, Request


class RequestStream:
    """The outputs of one request as they come."""

    def __init__(
        self,
        request: Request,
        tell_soon: Callable[[RequestStream], None],
        abort: Callable[[RequestStream], None],
        end_sample: Callable[[RequestStream, int], None],
    ) -> None:
        """tell_soon: has `tell` called in this turn of the loop. abort, end_sample: in the engine."""
        self.request_id = request.id
        self._tell_soon = tell_soon
        self._abort = abort
        self._end_sample = end_sample
        self._unfinished = set(range(request.params.n))
        self._outputs: list[Output] = []
        self._latest: Output | None = None  # the last of them, if its sequence's next token may join it
        self._listener: Callable[[list[Output]], None] | None = None
        self._waiter: asyncio.Future[None] | None = None

    def listen(self, listener: Callable[[list[Output]], None]) -> None:
        """Instead of `get`: `listener`, which must not raise, is given what has come in a turn of the loop.

        It is called from the loop and not from a task of its own, so that outputs wake nobody else.
        """
        self._listener = listener
        if self._outputs:
            self._tell_soon(self)

    async def get(self) -> list[Output]:
        """Wait for at least one output and take all that have come; not to be called after the last."""
        if not self._outputs:
            assert self._unfinished, "every sequence of this request has finished"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        outputs, self._outputs, self._latest = self._outputs, [], None
        return outputs

    def abort(self) -> None:
        """Stop the request; nothing more will come. Does nothing when it has finished."""
        self._abort(self)

    def end_sample(self, index: int) -> None:
        """Want no more of one sample, while others go on; what is on its way still comes."""
        if index in self._unfinished:
            self._unfinished.discard(index)
            self._end_sample(self, index)

    # -- the engine's end ---------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return not self._unfinished

    def forget(self) -> None:
        """Take the request for finished, and let go of the listener.

        That has the stream: garbage that only a collector would find.
        """
        self._listener = None
        self._unfinished.clear()

    def push(self, output: Output) -> None:
        if not self._outputs and self._listener is not None:
            self._tell_soon(self)
        self._outputs.append(output)
        self._latest = None
        if output.finish_reason is not None:
            self._unfinished.discard(output.index)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def push_token(self, index: int, token: int) -> None:
        """Take a token that a sequence goes on with; it joins what has come for that and is not taken yet."""
        if self._latest is not None and self._latest.index == index:
            self._latest.tokens.append(token)
        else:
            output = Output(self.request_id, index, [token])
            self.push(output)
            self._latest = output

    def tell(self) -> None:
        outputs, self._outputs, self._latest = self._outputs, [], None
        if self._listener is not None and outputs:
            self._listener(outputs)

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        for index in sorted(self._unfinished):
            self.push(Output(self.request_id, index, [], finish_reason=reason, error=error))
