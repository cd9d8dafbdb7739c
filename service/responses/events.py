"""The events of a response, in OpenAI's order: they build its output as they tell of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from service.choice import Choice
from service.errors import ApiError
from service.responses.replies import ItemStatus, OutputMessage, OutputText, Status
from service.responses.response import ModelResponse

_TEXT_DELTA = "response.output_text.delta"

_encode = msgspec.json.Encoder().encode


class Event(NamedTuple):
    type: str
    data: bytes  # JSON

    def sse(self) -> bytes:
        return b"event: " + self.type.encode() + b"\ndata: " + self.data + b"\n\n"


class ResponseEvents:
    """Numbers from 0. `start` comes first, then `update` as often as one likes, then one of the ends."""

    def __init__(self, response: ModelResponse, stream_id: str | None = None) -> None:
        """Each event names its response, and the `stream_id` if there is one."""
        self._response = response
        self._names = {"response_id": response.id}
        if stream_id is not None:
            self._names["stream_id"] = stream_id
        self._number = 0
        self._message: OutputMessage | None = None  # the item that is open
        self._texts: list[str] = []  # of that item
        self._delta = b""  # what an event of more text begins with

    def start(self) -> list[Event]:
        return [
            self._about("response.created", "in_progress"),
            self._about("response.in_progress", "in_progress"),
        ]

    def update(self) -> list[Event]:
        """What has come since."""
        text = self._response.choice.take_text()
        return [*self._open(), self._text_delta(text)] if text else []

    def finish(self) -> list[Event]:
        """When the choice has finished."""
        status = self._response.final_status
        events = [*self.update(), *self._open()]  # without any text it is an empty message
        events += self._close("incomplete" if status == "incomplete" else "completed")
        return [*events, self._about(f"response.{status}", status)]

    def failed(self, error: ApiError) -> list[Event]:
        return [*self.update(), *self._close("incomplete"), self._about("response.failed", "failed", error)]

    def cancelled(self) -> list[Event]:
        return [*self.update(), *self._close("incomplete"), self._about("response.cancelled", "cancelled")]

    def _about(self, kind: str, status: Status, error: ApiError | None = None) -> Event:
        return self._event(kind, response=self._response.snapshot(status, error))

    def _open(self) -> list[Event]:
        if self._message is not None:
            return []
        index = len(self._response.output)
        message = self._message = self._response.start_message()
        place = {"item_id": message.id, "output_index": index, "content_index": 0}
        head = {
            "type": "response.output_text.delta",
            **self._names,
            **place,
            "logprobs": [],
        }
        self._delta = _encode(head)[:-1] + b',"delta":'
        added = self._event("response.output_item.added", output_index=index, item=message)
        part = OutputText(text="")
        message.content.append(part)
        return [added, self._event("response.content_part.added", **place, part=part)]

    def _text_delta(self, text: str) -> Event:
        """Put together by hand: there is one for every token."""
        self._texts.append(text)
        data = self._delta + _encode(text) + b',"sequence_number":%d}' % self._number
        self._number += 1
        return Event(_TEXT_DELTA, data)

    def _close(self, status: ItemStatus) -> list[Event]:
        if self._message is None:
            return []
        message, self._message = self._message, None
        message.status = status
        (part,) = message.content
        part.text = "".join(self._texts)
        self._texts = []
        index = len(self._response.output) - 1
        place = {"item_id": message.id, "output_index": index, "content_index": 0}
        return [
            self._event("response.output_text.done", **place, text=part.text, logprobs=[]),
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", output_index=index, item=message),
        ]

    def _event(self, kind: str, **fields: Any) -> Event:
        about = {"type": kind, "sequence_number": self._number, **self._names, **fields}
        self._number += 1
        return Event(kind, _encode(about))


def error_event(error: ApiError, **names: str | None) -> Event:
    """On a WebSocket: what was asked for is refused. `names` say what that was, as far as it is known."""
    detail = msgspec.structs.asdict(error.detail)
    if error.headers:
        detail["headers"] = error.headers
    given = {name: value for name, value in names.items() if value is not None}
    return Event("error", _encode({"type": "error", "status": error.status, "error": detail, **given}))


class SseEvents:
    """The EventEncoder of a response's stream."""

    def __init__(self, response: ModelResponse) -> None:
        self._events = ResponseEvents(response)
        self._due = self._events.start()  # it goes out with the first chunk

    def chunk(self, choice: Choice) -> bytes:
        return self._sse(self._events.update())

    def end(self) -> bytes:
        return self._sse(self._events.finish())

    def failure(self, error: ApiError) -> bytes:
        return self._sse(self._events.failed(error))

    def _sse(self, events: list[Event]) -> bytes:
        due, self._due = self._due, []
        return b"".join([event.sse() for event in (*due, *events)])
