"""POST /api/embed and POST /api/embeddings."""

from __future__ import annotations

import time

from msgspec import json, structs
from starlette.requests import Request
from starlette.responses import Response

from quire.service.api.ollama.models import served_name
from quire.service.api.ollama.protocol import EmbeddingsRequest, EmbedRequest
from quire.service.api.ollama.replies import EmbeddingsReply, EmbedReply
from quire.service.api.pooling.embeddings import embedding_of, embedding_params, numbers, written
from quire.service.api.pooling.prompts import (
    behind_prompt,
    fitted,
    labels_of,
    respond,
    tokens_of,
    unpooled_of,
)
from quire.service.api.pooling.protocol import PoolingFields
from quire.service.http.codec import JsonResponse, decode
from quire.service.http.gate import note_ignored
from quire.service.state import ServerState
from quire.service.text.pooled_prompt import PooledPrompt

_embeds = json.Decoder(EmbedRequest)
_embeddings = json.Decoder(EmbeddingsRequest)
_CUT = "without truncate: false only the first ones are taken"


async def ollama_embed(state: ServerState, request: Request) -> Response:
    """Give a vector of each text; of no text it has the model loaded, which it is."""
    pooling = embedding_of(state)
    body = await decode(request, _embeds)
    times = state.times_of(request, served_name(state, body.model))
    note_ignored(request.scope, _ignored(body))
    params = embedding_params(state, pooling, body.dimensions, True)  # as Ollama has it
    texts = [body.input] if isinstance(body.input, str) else body.input or []
    if not any(texts):
        return JsonResponse(
            EmbedReply(model=body.model, embeddings=[], total_duration=0, prompt_eval_count=0)
        )
    prompts = await _prompts(state, texts, "input", truncate=body.truncate is not False)
    count, began = sum(len(prompt.tokens) for prompt in prompts), time.monotonic()

    def reply(vectors: list[bytes]) -> EmbedReply:
        return EmbedReply(
            model=body.model,
            embeddings=[written(vector) for vector in vectors],
            total_duration=round((time.monotonic() - began) * 1e9),
            prompt_eval_count=count,
        )

    return respond(state, request, prompts, params, times, None, reply)


async def ollama_embeddings(state: ServerState, request: Request) -> Response:
    """Answer as the older API does, of one text."""
    pooling = embedding_of(state)
    body = await decode(request, _embeddings)
    times = state.times_of(request, served_name(state, body.model))
    note_ignored(request.scope, _ignored(body))
    if not body.prompt:
        return JsonResponse(EmbeddingsReply([]))
    prompts = await _prompts(state, [body.prompt], "prompt", truncate=True)
    params = embedding_params(state, pooling, None, None)

    def reply(vectors: list[bytes]) -> EmbeddingsReply:
        return EmbeddingsReply(numbers(vectors[0]))

    return respond(state, request, prompts, params, times, None, reply)


async def _prompts(state: ServerState, texts: list[str], param: str, *, truncate: bool) -> list[PooledPrompt]:
    """Return the tokens of each; of a text that is too long its beginning, and the end that all have."""
    _, tokenizer, info = state.serving()
    limit = info.max_request_tokens
    if not truncate:
        return await tokens_of(state, texts, param, PoolingFields(), advice=_CUT)
    state.admit(len(texts), param)
    tokens = await state.encode_all(behind_prompt(texts, info), param, add_special_tokens=True)
    for i, each in enumerate(tokens):
        if len(each) > limit:
            end = each[-1:] if each[-1] in tokenizer.special else []
            tokens[i] = each[: limit - len(end)] + end
    unpooled = unpooled_of(tokenizer, info, add_special_tokens=True)
    return [
        fitted(PooledPrompt(each, unpooled), info, label, None)
        for each, label in zip(tokens, labels_of(param, len(tokens)), strict=True)
    ]


def _ignored(body: EmbedRequest | EmbeddingsRequest) -> list[str]:
    """Name what had no effect: nothing is sampled, so no option has one."""
    names = [] if body.keep_alive is None else ["keep_alive"]
    if body.options is not None:
        given = structs.asdict(body.options)
        names += [f"options.{name}" for name, value in given.items() if value is not None]
    return names
