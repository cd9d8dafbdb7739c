"""The events of a response, in OpenAI's order: they build its output as they tell of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET

from quire.service.answer.choice import Choice
from quire.service.answer.replies import TokenLogprobs
from quire.service.api.responses.open_items import OpenCall, OpenMessage, OpenReasoning
from quire.service.api.responses.replies import ItemStatus, OutputReasoning, ResponseReply, Status
from quire.service.api.responses.response import ModelResponse
from quire.service.api.responses.writer import Event, EventWriter
from quire.service.errors import ApiError
from quire.service.http.framing import Framing
from quire.service.text.pieces import Thought
from quire.service.text.tools.calls import Part

_OpenItem = OpenMessage | OpenReasoning | OpenCall


class ResponseEvents:
    """Numbers from 0. `start` comes first, then `update` as often as one likes, then one of the ends."""

    def __init__(
        self, response: ModelResponse, stream_id: str | None = None, ignored: Sequence[str] = ()
    ) -> None:
        """Each event names its response, and the `stream_id` if there is one.

        ignored: fields of the request without effect, which the first event names where no header can.
        """
        self._response = response
        self._ignored = list(dict.fromkeys(ignored))
        names = {"response_id": response.id}
        if stream_id is not None:
            names["stream_id"] = stream_id
        self._writer = EventWriter(names)
        self._item: _OpenItem | None = None
        self._logprobs: list[TokenLogprobs] = []  # of tokens whose text is still to be told of

    def start(self) -> list[Event]:
        ignored = {"ignored": self._ignored} if self._ignored else {}
        created = self._response.snapshot("in_progress")
        return [
            self._writer.event("response.created", response=created, **ignored),
            self._about("response.in_progress", "in_progress"),
        ]

    def update(self) -> list[Event]:
        """Return the events of what has come since."""
        self._logprobs += self._response.take_logprobs()
        return [event for part in self._response.choice.take_parts() for event in self._tell(part)]

    def finish(self) -> list[Event]:
        """Return the last events, once the choice has finished."""
        status = self._response.final_status
        events = self.update()
        output = self._response.output
        if not output or (isinstance(output[-1], OutputReasoning) and status == "completed"):  # said nothing
            events += self._open(OpenMessage(self._writer, len(output)))
        events += self._end("incomplete" if status == "incomplete" else "completed")
        return [*events, self._about(f"response.{status}", status)]

    def failed(self, error: ApiError) -> list[Event]:
        return [*self.update(), *self._end("incomplete"), self._about("response.failed", "failed", error)]

    def cancelled(self) -> list[Event]:
        return [*self.update(), *self._end("incomplete"), self._about("response.cancelled", "cancelled")]

    def _about(self, kind: str, status: Status, error: ApiError | None = None) -> Event:
        return self._writer.event(kind, response=self._response.snapshot(status, error))

    def _tell(self, part: Part) -> list[Event]:
        """Return the events by which one item ends, another begins, or goes on."""
        index = len(self._response.output)
        events: list[Event] = []
        if isinstance(part, str):
            text = part
            if not isinstance(self._item, OpenMessage):
                text = text.lstrip() if index else text  # white space around calls is no text
                events = self._open(OpenMessage(self._writer, index))
        elif isinstance(part, Thought):
            text = part.text
            if not isinstance(self._item, OpenReasoning):
                events = self._open(OpenReasoning(self._writer, index))
        else:
            text = part.function.arguments
            if part.id is not UNSET and part.function.name is not UNSET:
                events = self._open(OpenCall(self._writer, index, part.id, part.function.name))
        item = self._item
        if isinstance(item, OpenMessage):
            events += [item.more(text, self._logprobs)] if text else []
        elif item is not None:
            events += [item.more(text)] if text else []
        if text and not isinstance(item, OpenReasoning):  # calls come without; thinking's are not among them
            self._logprobs = []
        return events

    def _open(self, item: _OpenItem) -> list[Event]:
        closed = self._close("completed")
        self._item = item
        self._response.output.append(item.item)
        return [*closed, *item.open()]

    def _end(self, status: ItemStatus) -> list[Event]:
        """Close the last item. A message gets what came without text of its own, too: what ended it, say."""
        item, rest = self._item, self._logprobs
        more = [item.more("", rest)] if rest and isinstance(item, OpenMessage) else []
        return [*more, *self._close(status)]

    def _close(self, status: ItemStatus) -> list[Event]:
        item, self._item = self._item, None
        if item is None:
            return []
        return item.close() if isinstance(item, OpenCall) else item.close(status)


def error_event(error: ApiError, **names: str | None) -> Event:
    """On a WebSocket: what was asked for is refused. `names` say what that was, as far as it is known."""
    detail = msgspec.structs.asdict(error.detail)
    if error.headers:
        detail["headers"] = error.headers
    given = {name: value for name, value in names.items() if value is not None}
    return Event(
        "error", msgspec.json.encode({"type": "error", "status": error.status, "error": detail, **given})
    )


class ResponseEncoder:
    """The EventEncoder of a response's stream."""

    def __init__(
        self, response: ModelResponse, framing: Framing, keep: Callable[[ResponseReply], None]
    ) -> None:
        """`keep` is given the response once it has ended as it should."""
        self._response = response
        self._framing = framing
        self._keep = keep
        self._events = ResponseEvents(response)
        self._due = self._events.start()  # it goes out with the first chunk

    def chunk(self, choice: Choice) -> list[bytes]:
        return self._messages(self._events.update())

    def end(self) -> list[bytes]:
        messages = self._messages(self._events.finish())
        self._keep(self._response.snapshot(self._response.final_status))
        return messages

    def failure(self, error: ApiError) -> list[bytes]:
        return self._messages(self._events.failed(error))

    def _messages(self, events: list[Event]) -> list[bytes]:
        due, self._due = self._due, []
        return [self._framing.message(event.data, event.type) for event in (*due, *events)]
