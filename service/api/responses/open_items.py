"""The output item that is being generated, and its events in OpenAI's order: `open`, `more` text, `close`."""

from __future__ import annotations

import secrets

from quire.service.answer.replies import TokenLogprobs
from quire.service.api.responses.replies import (
    ItemStatus,
    OutputCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
)
from quire.service.api.responses.writer import Event, EventWriter
from quire.service.text.tools.calls import object_of


class OpenMessage:
    def __init__(self, writer: EventWriter, index: int) -> None:
        """`index` is its place in the output."""
        self.item = OutputMessage(id=f"msg_{secrets.token_hex(24)}", content=[])
        self._writer = writer
        self._index = index
        self._place = {"item_id": self.item.id, "output_index": index, "content_index": 0}
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._delta = writer.deltas("response.output_text.delta", **self._place, logprobs=[])

    def open(self) -> list[Event]:
        added = self._writer.event("response.output_item.added", output_index=self._index, item=self.item)
        part = OutputText(text="")
        self.item.content.append(part)
        return [added, self._writer.event("response.content_part.added", **self._place, part=part)]

    def more(self, text: str, logprobs: list[TokenLogprobs]) -> Event:
        self._texts.append(text)
        if not logprobs:
            return self._delta(text)
        self._logprobs += logprobs
        kind = "response.output_text.delta"
        return self._writer.event(kind, **self._place, delta=text, logprobs=logprobs)

    def close(self, status: ItemStatus) -> list[Event]:
        self.item.status = status
        (part,) = self.item.content
        part.text, part.logprobs = "".join(self._texts), self._logprobs
        event = self._writer.event
        return [
            event("response.output_text.done", **self._place, text=part.text, logprobs=part.logprobs),
            event("response.content_part.done", **self._place, part=part),
            event("response.output_item.done", output_index=self._index, item=self.item),
        ]


class OpenReasoning:
    def __init__(self, writer: EventWriter, index: int) -> None:
        """`index` is its place in the output."""
        self.item = OutputReasoning(id=f"rs_{secrets.token_hex(24)}", content=[])
        self._writer = writer
        self._index = index
        self._place = {"item_id": self.item.id, "output_index": index, "content_index": 0}
        self._texts: list[str] = []
        self._delta = writer.deltas("response.reasoning_text.delta", **self._place)

    def open(self) -> list[Event]:
        added = self._writer.event("response.output_item.added", output_index=self._index, item=self.item)
        part = ReasoningText(text="")
        self.item.content.append(part)
        return [added, self._writer.event("response.content_part.added", **self._place, part=part)]

    def more(self, text: str) -> Event:
        self._texts.append(text)
        return self._delta(text)

    def close(self, status: ItemStatus) -> list[Event]:
        self.item.status = status
        (part,) = self.item.content
        part.text = "".join(self._texts)
        event = self._writer.event
        return [
            event("response.reasoning_text.done", **self._place, text=part.text),
            event("response.content_part.done", **self._place, part=part),
            event("response.output_item.done", output_index=self._index, item=self.item),
        ]


class OpenCall:
    def __init__(self, writer: EventWriter, index: int, call_id: str, name: str) -> None:
        """`index` is its place in the output."""
        self.item = OutputCall(id=f"fc_{secrets.token_hex(24)}", call_id=call_id, name=name)
        self._writer = writer
        self._index = index
        self._place = {"item_id": self.item.id, "output_index": index}
        self._texts: list[str] = []
        self._delta = writer.deltas("response.function_call_arguments.delta", **self._place)

    def open(self) -> list[Event]:
        return [self._writer.event("response.output_item.added", output_index=self._index, item=self.item)]

    def more(self, text: str) -> Event:
        """Tell more of the arguments."""
        self._texts.append(text)
        return self._delta(text)

    def close(self) -> list[Event]:
        """Whatever ends it: arguments may be whole when an answer is cut, or be no JSON when it is not."""
        self.item.arguments = "".join(self._texts)
        self.item.status = "incomplete" if object_of(self.item.arguments) is None else "completed"
        done = "response.function_call_arguments.done"
        return [
            self._writer.event(done, **self._place, arguments=self.item.arguments),
            self._writer.event("response.output_item.done", output_index=self._index, item=self.item),
        ]
