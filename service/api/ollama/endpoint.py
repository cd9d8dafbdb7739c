"""POST /api/chat and POST /api/generate."""

from __future__ import annotations

from msgspec import json
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import FieldError
from quire.service.api.answers import Answer
from quire.service.api.chat import generate, prompt_tokens
from quire.service.api.ollama.events import Make, OllamaAnswer, Taken, chat_reply, generate_reply
from quire.service.api.ollama.models import served_name
from quire.service.api.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest
from quire.service.api.ollama.replies import now
from quire.service.api.ollama.translation import Generating, chat_of, ignored_fields, is_raw, with_limit
from quire.service.api.request_params import check_sampling
from quire.service.api.requests.chat import ChatRequest
from quire.service.api.streams import answer
from quire.service.errors import bad_value, refused
from quire.service.http.codec import JsonResponse, decode
from quire.service.http.framing import TEXT, Framing
from quire.service.http.gate import note_ignored
from quire.service.state import ServerState

_chats = json.Decoder(OllamaChatRequest)
_prompts = json.Decoder(OllamaGenerateRequest)


async def ollama_chat(state: ServerState, request: Request) -> Response:
    state.generating()
    body = await decode(request, _chats)
    return await _answer(state, request, body, chat_reply, asks=bool(body.messages))


async def ollama_generate(state: ServerState, request: Request) -> Response:
    state.generating()
    body = await decode(request, _prompts)
    return await _answer(state, request, body, generate_reply, asks=bool(body.prompt))


async def _answer(
    state: ServerState, request: Request, body: Generating, make: Make, *, asks: bool
) -> Response:
    """Answer. A request that asks for nothing has the model loaded, which it is."""
    _, tokenizer, info = state.serving()
    model = served_name(state, body.model)
    template = tokenizer.chat_template
    note_ignored(request.scope, ignored_fields(body, template))
    try:
        chat = chat_of(body, model, template)
    except FieldError as error:
        raise refused(error) from None
    if not asks:
        loaded = {"model": body.model, "created_at": now(), "done": True, "done_reason": "load"}
        return JsonResponse(make(Taken(), loaded))
    raw = is_raw(body, template)
    tokens = await (_raw_tokens(state, body, chat) if raw else prompt_tokens(state, chat))
    room = max(info.capacity.room(len(tokens), 1), 1)  # too long a prompt is refused where all are
    generation = await generate(state, request, with_limit(chat, body, room), tokens, continues=raw)

    def started(framing: Framing) -> OllamaAnswer:
        return OllamaAnswer(generation, body.model, make, framing, logprobs=bool(body.logprobs))

    own = Answer(generation, lambda: started(TEXT).whole(), started)
    return answer(state, request, own, streamed=body.stream is not False)


async def _raw_tokens(state: ServerState, body: Generating, chat: ChatRequest) -> list[int]:
    """Return the tokens of a prompt that goes to the model as it is. Raises ApiError."""
    _, _, info = state.serving()
    assert isinstance(body, OllamaGenerateRequest)
    if body.system:
        raise bad_value("system", "system needs a chat template: raw is set, or the model has none")
    check_sampling(chat, info)
    state.admit(1)
    limit = info.max_request_tokens
    return await state.encode(body.prompt or "", "prompt", add_special_tokens=True, limit=limit)
