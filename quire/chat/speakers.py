"""Who answers in a conversation: an engine in this process, or a server that speaks OpenAI's API."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from quire.llm import LLM

Message = dict[str, str]
Settings = Mapping[str, Any]  # temperature, top_p, …: fields of SamplingParams and of requests alike

_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 600.0  # for which a server may be silent


class AnswerFailed(Exception):
    """There is no answer, or no more of it, for this reason. The conversation can go on."""


class Speaker(Protocol):
    name: str

    def answer(self, messages: list[Message], settings: Settings) -> Generator[str, None, None]:
        """Yield the answer's text as it comes. Raises AnswerFailed. To be closed when no more is wanted."""


class EngineSpeaker:
    """An LLM of this process."""

    def __init__(self, llm: LLM, name: str) -> None:
        self._llm = llm
        self.name = name

    def answer(self, messages: list[Message], settings: Settings) -> Generator[str, None, None]:
        from quire.engine.messages import SamplingParams

        try:
            prompt = self._llm.chat_prompt(messages)
            room = self._llm.info.max_request_tokens - len(prompt)
            if room < 1:
                raise AnswerFailed(
                    f"the conversation has {len(prompt)} tokens, and the model takes "
                    f"{self._llm.info.max_request_tokens}: /reset begins a new one"
                )
            defaults = self._llm.info.sampling_defaults
            most = min(defaults.max_tokens or room, room)
            params = SamplingParams(**{**defaults.said, "max_tokens": most, **settings})
            stream = self._llm.stream(prompt, params)
        except (ValueError, TypeError) as error:
            raise AnswerFailed(str(error)) from None
        try:
            yield from stream
        finally:
            stream.close()


class ServerSpeaker:
    """A server at a URL, which may end with /v1."""

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        """Ask which model it has, unless that is given. Raises ValueError if nothing answers there."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self.name = model or self._first_model()

    def _first_model(self) -> str:
        try:
            with self._open("/v1/models", None, _CONNECT_SECONDS) as reply:
                models = json.load(reply)["data"]
                return str(models[0]["id"])
        except AnswerFailed as error:
            raise ValueError(f"{self._url}: {error}") from None
        except (ValueError, LookupError, TypeError):
            raise ValueError(f"{self._url} answers, but lists no models: is it an OpenAI API?") from None

    def answer(self, messages: list[Message], settings: Settings) -> Generator[str, None, None]:
        body = {"model": self.name, "messages": messages, "stream": True, **settings}
        try:
            with self._open("/v1/chat/completions", body, _ANSWER_SECONDS) as reply:
                for line in reply:
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        yield _text_of(json.loads(line.removeprefix(b"data: ")))
        except (OSError, HTTPException) as error:
            raise AnswerFailed(f"the server went away: {error}") from None

    def _open(self, path: str, body: object, seconds: float) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            reply: HTTPResponse = urllib.request.urlopen(request, timeout=seconds)
        except urllib.error.HTTPError as error:
            raise AnswerFailed(_message_of(error)) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            told = f"no server answers at {self._url} ({reason}); `quire serve` starts one"
            raise AnswerFailed(told) from None
        return reply


def _text_of(event: Any) -> str:
    """Return the text of one event of a stream. Raises AnswerFailed for an error."""
    if "error" in event:
        raise AnswerFailed(event["error"].get("message", "the server failed"))
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))


def _message_of(error: urllib.error.HTTPError) -> str:
    """Return what the server says of it."""
    try:
        return f"{json.load(error)['error']['message']} ({error.code})"
    except (ValueError, LookupError, TypeError):
        return f"the server answers {error.code} {error.reason}"
