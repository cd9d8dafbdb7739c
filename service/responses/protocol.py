"""What clients of the Responses API may send."""

from __future__ import annotations

import secrets
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from engine.request import SamplingParams
from service.protocol import MAX_TOKENS, ModelName, Text
from service.structured_output import FlatFormat, Form, TextFormat, json_form

_PREVIOUS = "Goes on from a response of the same WebSocket, and waits for its end. Over HTTP it is refused"
_STREAM_ID = "Given back with each event. Responses of one stream_id are generated one after another"
_STORE = "Only false: responses are not kept"
_ID = "As it was returned; it changes nothing"

Identifier = Annotated[str, Meta(max_length=256)]


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`output_text` is what the model said before; it may carry the empty lists that it came with."""

    type: Literal["input_text", "output_text"]
    text: Text
    annotations: Annotated[list[str], Meta(max_length=0)] | None = None
    logprobs: Annotated[list[str], Meta(max_length=0)] | None = None


Content = Text | Annotated[list[TextPart], Meta(min_length=1, max_length=1024)]


class InputItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message, of the client or of an earlier response."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: Annotated[str, Meta(max_length=256, description=_ID)] | None = None
    status: Annotated[Literal["in_progress", "completed", "incomplete"], Meta(description=_ID)] | None = None

    @property
    def text(self) -> str:
        content = self.content
        return content if isinstance(content, str) else "\n".join(part.text for part in content)

    def __post_init__(self) -> None:
        if isinstance(self.content, str):
            return
        kind = "output_text" if self.role == "assistant" else "input_text"
        wrong = next((part.type for part in self.content if part.type != kind), None)
        if wrong is not None:
            raise ValueError(f"content of the role {self.role!r} must be {kind}, got {wrong}")


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: FlatFormat | None = None


class ResponseRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: ModelName | None = None
    input: Text | Annotated[list[InputItem], Meta(min_length=1, max_length=4096)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stream: bool | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16, description="Your own labels, given back with the response"),
        ]
        | None
    ) = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    ignore_eos: bool | None = None
    store: Annotated[bool, Meta(description=_STORE)] | None = None
    text: TextOptions | None = None
    previous_response_id: Annotated[str, Meta(max_length=256, description=_PREVIOUS)] | None = None

    def __post_init__(self) -> None:
        if self.store:
            raise ValueError("store must be false: responses are not kept here")
        if self.ignore_eos and not isinstance(self.text_format, TextFormat):
            raise ValueError("ignore_eos may not be given together with text.format")

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def token_limit_name(self) -> str:
        return "max_output_tokens"

    @property
    def text_format(self) -> FlatFormat:
        return (self.text.format if self.text is not None else None) or TextFormat()

    def form(self) -> Form | None:
        """What the text must be. Raises ValueError that names the field."""
        return json_form("text.format", self.text_format)

    def sampling_params(self, max_tokens: int, grammar: str = "") -> SamplingParams:
        """For the engine, with a seed drawn if none was given."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            ignore_eos=bool(self.ignore_eos),
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            grammar=grammar,
        )


class ResponseCreate(
    ResponseRequest, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="response.create"
):
    """Over a WebSocket, where every response is streamed."""

    stream_id: Annotated[str, Meta(min_length=1, max_length=256, description=_STREAM_ID)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream is False:
            raise ValueError("stream may not be false on a WebSocket: responses come as events")


class ResponseCancel(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="response.cancel"
):
    response_id: Identifier


ClientEvent = ResponseCreate | ResponseCancel
