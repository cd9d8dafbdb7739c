"""GET /v1/models, POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from msgspec import json
from starlette.requests import Request
from starlette.responses import Response

from quire.service.answer.replies import DetokenizeReply, Model, ModelList, TokenizeReply
from quire.service.api.request_params import check_token_ids
from quire.service.api.requests.tokens import DetokenizeRequest, TokenizeRequest
from quire.service.api.unread import unread_fields
from quire.service.http.codec import JsonResponse, decode
from quire.service.http.gate import note_ignored
from quire.service.state import ServerState
from quire.service.text.rendering import render, template_arguments

_to_tokenize = json.Decoder(TokenizeRequest)
_to_detokenize = json.Decoder(DetokenizeRequest)


def _model(state: ServerState, name: str) -> Model:
    _, _, info = state.serving()
    return Model(
        id=name,
        created=state.created,
        root=info.model if info.merged is None else info.merged[0],
        max_model_len=info.max_request_tokens,
        display_name=name,
        created_at=datetime.fromtimestamp(state.created, UTC),
        max_input_tokens=info.max_request_tokens,
    )


async def list_models(state: ServerState, request: Request) -> Response:
    names = state.config.served_model_names
    models = [_model(state, name) for name in names]
    return JsonResponse(ModelList(data=models, first_id=names[0], last_id=names[-1]))


async def get_model(state: ServerState, request: Request) -> Response:
    return JsonResponse(_model(state, state.check_model(request.path_params["name"])))


async def tokenize(state: ServerState, request: Request) -> Response:
    _, tokenizer, info = state.serving()
    body = await decode(request, _to_tokenize)
    model = state.check_model(body.model)
    if body.messages is None:
        text, add_special_tokens = body.prompt or "", True
    else:
        arguments, unused = template_arguments(tokenizer, body.chat_template_kwargs, None)
        note_ignored(request.scope, [*unread_fields(body.messages, tokenizer.chat_template), *unused])
        text, add_special_tokens = (
            await render(
                state.renderer,
                tokenizer,
                model,
                [message.as_template_message() for message in body.messages],
                add_generation_prompt=body.add_generation_prompt is not False
                and not body.continue_final_message,
                continues=body.continue_final_message,
                tools=[tool.function.as_template_tool() for tool in body.tools or ()],
                arguments=arguments,
            ),
            False,
        )
    if body.add_special_tokens is not None:
        add_special_tokens = body.add_special_tokens
    param = "prompt" if body.messages is None else "messages"
    tokens = await state.encode(text, param, add_special_tokens=add_special_tokens)
    reply = TokenizeReply(count=len(tokens), max_model_len=info.max_request_tokens, tokens=tokens)
    if body.return_token_strs:
        reply.token_strs = await asyncio.to_thread(lambda: list(map(tokenizer.token_name, tokens)))
    return JsonResponse(reply)


async def detokenize(state: ServerState, request: Request) -> Response:
    _, _, info = state.serving()
    body = await decode(request, _to_detokenize)
    state.check_model(body.model)
    check_token_ids(body.tokens, info.vocab_size, "tokens")
    (text,) = await state.decode_all([body.tokens], skip_special_tokens=False)
    return JsonResponse(DetokenizeReply(text))
