"""What an OpenAI-compatible server's answer says, event by event or frame by frame, as it comes."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.loadtest.client.records import Record


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    done: bool = False  # of a WebSocket's last frame


_decode = msgspec.json.Decoder(_Event).decode


class Answer:
    """One answer, however it comes."""

    def __init__(self, record: Record, start: float) -> None:
        self.text: list[str] = []  # of the first choice
        self.error: Any = None
        self.done = False
        self._record = record
        self._start = start
        self._rest = b""
        self._begun: dict[int, float] = {}  # by choice: when its latest chunk came

    def feed(self, body: bytes, now: float) -> None:
        """Take lines of an event stream; a piece may end anywhere."""
        lines = (self._rest + body).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            data = line[5:].strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                self.done = True
            elif data:
                self._take(_decode(data), now - self._start)

    def feed_frame(self, frame: str, now: float) -> None:
        """Take a frame of a WebSocket, of which one with `done` or `error` is the last."""
        event = _decode(frame)
        self.done = event.done
        self._take(event, now - self._start)

    @property
    def ended(self) -> bool:
        return self.done or self.error is not None

    def _take(self, event: _Event, now: float) -> None:
        record = self._record
        if event.error is not None:
            self.error = event.error
        if event.usage is not None:
            record.prompt_tokens = event.usage.prompt_tokens
            record.output_tokens = event.usage.completion_tokens
            if event.usage.prompt_tokens_details is not None:
                record.cached_tokens = event.usage.prompt_tokens_details.cached_tokens or 0
        for choice in event.choices:
            if choice.index == 0:
                self.text.append(_text(choice))
            if not _brings_token(choice):
                continue
            if choice.index not in self._begun:
                record.first = record.first or now
            elif choice.token_ids or _text(choice) or choice.finish_reason is None:
                record.gaps.append(now - self._begun[choice.index])
            self._begun[choice.index] = record.last = now

    @property
    def sequences(self) -> int:
        return max(len(self._begun), 1)


def _brings_token(choice: _Choice) -> bool:
    """Say whether a choice brings a token: by its token ids if it has some.

    Else a token may have no text, and the last one may come with the end; chat may begin with a role alone.
    """
    if choice.token_ids is not None:
        return bool(choice.token_ids)
    if _text(choice) or choice.finish_reason is not None:
        return True
    if choice.delta is None:
        return choice.text is not None
    return choice.delta.role is None and choice.delta.content is not None


def _text(choice: _Choice) -> str:
    if choice.delta is None:
        return choice.text or ""
    return choice.delta.content or choice.delta.reasoning_content or ""
