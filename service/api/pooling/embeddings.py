"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from array import array
from typing import cast

import msgspec
from msgspec import json
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import FieldError
from quire.engine.messages import PoolingParams
from quire.engine.models.pooling import Pooling
from quire.service.api.pooling.prompts import not_supported, pooling_of, respond, tokens_of
from quire.service.api.pooling.protocol import EmbeddingRequest
from quire.service.api.pooling.replies import EmbeddingData, EmbeddingReply, PoolingUsage, new_id, now
from quire.service.errors import refused
from quire.service.http.codec import decode
from quire.service.state import ServerState

_decoder = json.Decoder(EmbeddingRequest)


def embedding_of(state: ServerState) -> Pooling:
    """Return how the model embeds. Raises ApiError 400 if it does not."""
    pooling = pooling_of(state)
    if pooling.labels:
        path = "/classify" if pooling.labels > 1 else "/v1/rerank or /v1/score"
        raise not_supported(state, f"has a head that scores texts, and gives no embeddings: ask {path}")
    return pooling


def embedding_params(
    state: ServerState, pooling: Pooling, dimensions: int | None, normalize: bool | None
) -> PoolingParams:
    """Return what becomes of vectors. Raises ApiError 400."""
    _, _, info = state.serving()
    try:
        wanted = pooling.checked_dimensions(dimensions, info.vector_size)
    except FieldError as error:
        raise refused(error) from None
    return PoolingParams(wanted, normalize=pooling.normalize if normalize is None else normalize)


async def embeddings(state: ServerState, request: Request) -> Response:
    pooling = embedding_of(state)
    body = await decode(request, _decoder)
    model = state.check_model(body.model)
    times = state.times_of(request, model)
    params = embedding_params(state, pooling, body.dimensions, body.normalize)
    prompts = await tokens_of(state, body.inputs, "input", body)
    encoded = _base64 if body.encoding_format == "base64" else written
    usage = PoolingUsage.of(prompts)

    def reply(vectors: list[bytes]) -> EmbeddingReply:
        data = [EmbeddingData(index=i, embedding=encoded(vector)) for i, vector in enumerate(vectors)]
        return EmbeddingReply(id=new_id("embd"), created=now(), model=model, data=data, usage=usage)

    return respond(state, request, prompts, params, times, body.cache_salt, reply)


def numbers(vector: bytes) -> list[float]:
    """Return the numbers of a float32 vector."""
    return array("f", vector).tolist()


def written(vector: bytes) -> list[float]:
    """Return the same as a reply has it: made at once, all vectors would let no other thread run."""
    return cast(list[float], msgspec.Raw(json.encode(numbers(vector))))


def _base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()
