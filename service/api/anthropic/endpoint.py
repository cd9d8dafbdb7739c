"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

import secrets

from msgspec import json
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import FieldError
from quire.service.api.answers import Answer
from quire.service.api.anthropic.events import MessageAnswer, MessageEncoder
from quire.service.api.anthropic.history import beginning
from quire.service.api.anthropic.protocol import CountTokensRequest, MessagesRequest, PromptFields
from quire.service.api.anthropic.replies import TokenCount
from quire.service.api.anthropic.translation import chat_request, ignored_fields, prompt_request
from quire.service.api.chat import generate, prompt_text, prompt_tokens
from quire.service.api.requests.chat import ChatRequest
from quire.service.api.streams import answer
from quire.service.errors import refused
from quire.service.http.codec import JsonResponse, decode
from quire.service.http.framing import Framing
from quire.service.http.gate import note_ignored
from quire.service.state import ServerState
from quire.service.text.reasoning.use import may_think

_messages = json.Decoder(MessagesRequest)
_to_count = json.Decoder(CountTokensRequest)


async def messages(state: ServerState, request: Request) -> Response:
    state.generating()
    body = await decode(request, _messages)
    message = await _begin(state, request, body)

    def encoder(framing: Framing) -> MessageEncoder:
        return MessageEncoder(message, framing)

    own = Answer(message.generation, message.whole, encoder)
    return answer(state, request, own, streamed=bool(body.stream))


async def count_tokens(state: ServerState, request: Request) -> Response:
    """Count those of the whole prompt, cached or not, however many they are."""
    _, tokenizer, _ = state.serving()
    body = await decode(request, _to_count)
    prompt = _translated(state, request, body)
    model = state.check_model(body.model)
    text = await prompt_text(state.renderer, tokenizer, model, prompt) + beginning(body)
    tokens = await state.encode(text, "messages", add_special_tokens=False)
    return JsonResponse(TokenCount(len(tokens)))


async def _begin(state: ServerState, request: Request, body: MessagesRequest) -> MessageAnswer:
    """Hand the request to the engine. Raises ApiError."""
    _, _, info = state.serving()
    model = state.check_model(body.model)
    prompt = _translated(state, request, body)
    begun = beginning(body)
    tokens = await prompt_tokens(state, prompt, begun)
    room = max(info.capacity.room(len(tokens), 1), 1)  # too long a prompt is refused where all are
    chat = chat_request(body, prompt, room, thinks=_thinks(state))
    generation = await generate(state, request, chat, tokens, continues=bool(begun))
    identity = f"msg_{secrets.token_hex(12)}"
    return MessageAnswer(
        identity,
        model,
        generation,
        fills_context=body.max_tokens > room,
        shows_thinking=getattr(body.thinking, "display", None) != "omitted",
    )


def _thinks(state: ServerState) -> bool:
    _, tokenizer, _ = state.serving()
    return may_think(state.config.reasoning_parser, tokenizer)


def _translated(state: ServerState, request: Request, body: PromptFields) -> ChatRequest:
    """Note what has no effect, too. Raises ApiError 400."""
    _, tokenizer, _ = state.serving()
    template = tokenizer.chat_template
    note_ignored(request.scope, ignored_fields(body, template, thinks=_thinks(state)))
    try:
        return prompt_request(body, template)
    except FieldError as error:
        raise refused(error) from None
