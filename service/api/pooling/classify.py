"""POST /classify: which of a head's labels fits a text."""

from __future__ import annotations

from msgspec import json
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.messages import PoolingParams
from quire.service.api.pooling.embeddings import numbers
from quire.service.api.pooling.prompts import not_supported, pooling_of, respond, tokens_of
from quire.service.api.pooling.protocol import ClassifyRequest
from quire.service.api.pooling.replies import ClassifyData, ClassifyReply, PoolingUsage, new_id, now
from quire.service.http.codec import decode
from quire.service.state import ServerState

_decoder = json.Decoder(ClassifyRequest)


async def classify(state: ServerState, request: Request) -> Response:
    pooling = pooling_of(state)
    if not pooling.names:
        raise not_supported(state, "tells no labels apart: its config.json names none")
    body = await decode(request, _decoder)
    model = state.check_model(body.model)
    times = state.times_of(request, model)
    prompts = await tokens_of(state, body.inputs, "input", body)
    activation = "none" if body.use_activation is False else pooling.class_activation
    usage = PoolingUsage.of(prompts)

    def reply(vectors: list[bytes]) -> ClassifyReply:
        data = []
        for index, vector in enumerate(vectors):
            probs = numbers(vector)
            label = pooling.names[max(range(len(probs)), key=probs.__getitem__)]
            data.append(ClassifyData(index=index, label=label, probs=probs, num_classes=len(probs)))
        return ClassifyReply(id=new_id("classify"), created=now(), model=model, data=data, usage=usage)

    params = PoolingParams(activation=activation)
    return respond(state, request, prompts, params, times, body.cache_salt, reply)
