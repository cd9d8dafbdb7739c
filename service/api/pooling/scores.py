"""POST /v1/rerank and /v1/score: how well texts fit, by a head for that or by the angle of embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import mul

import msgspec
from msgspec import json
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import FieldError
from quire.engine.messages import PoolingParams
from quire.engine.models.pooling import Pooling
from quire.service.api.pooling.embeddings import embedding_params, numbers
from quire.service.api.pooling.prompts import Label, fitted, not_supported, pooling_of, respond, tokens_of
from quire.service.api.pooling.protocol import PoolingFields, RerankRequest, ScoreRequest
from quire.service.api.pooling.replies import (
    PoolingUsage,
    RankedDocument,
    RerankReply,
    RerankResult,
    ScoreData,
    ScoreReply,
    new_id,
    now,
)
from quire.service.errors import ApiError, bad_value, refused
from quire.service.http.codec import decode
from quire.service.state import ServerState
from quire.service.text.pooled_prompt import PooledPrompt
from quire.service.text.rendering import rendered
from quire.service.text.sizes import utf8_size

_rerank = json.Decoder(RerankRequest)
_score = json.Decoder(ScoreRequest)

Pairs = list[tuple[str, str]]  # of texts, or of their names
Reply = Callable[[list[float], PoolingUsage], msgspec.Struct]
"""Makes a reply of the pairs' scores."""


@dataclass(frozen=True)
class _Scoring:
    """Pairs whose scores are wanted, and of which fields they are. param: the field that has many."""

    pairs: Pairs
    names: Pairs
    param: str
    pooling: Pooling
    reply: Reply
    use_activation: bool | None


def _scoring(state: ServerState) -> Pooling:
    pooling = pooling_of(state)
    if pooling.labels > 1:
        apart = f"tells {pooling.labels} labels apart: ask /classify; a score needs a head with one"
        raise not_supported(state, apart)
    return pooling


async def rerank(state: ServerState, request: Request) -> Response:
    pooling = _scoring(state)
    body = await decode(request, _rerank)
    model = state.check_model(body.model)
    texts = body.texts

    def reply(scores: list[float], usage: PoolingUsage) -> RerankReply:
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
        results = [RerankResult(index=i, relevance_score=scores[i]) for i in best]
        if body.return_documents is not False:
            for result in results:
                result.document = RankedDocument(texts[result.index])
        return RerankReply(id=new_id("rerank"), model=model, usage=usage, results=results)

    pairs = [(body.query, text) for text in texts]
    scoring = _Scoring(pairs, body.names, "documents", pooling, reply, body.use_activation)
    return await _answer(state, request, body, model, scoring)


async def score(state: ServerState, request: Request) -> Response:
    pooling = _scoring(state)
    body = await decode(request, _score)
    model = state.check_model(body.model)
    try:
        pairs = body.pairs
    except FieldError as error:
        raise refused(error) from None

    def reply(scores: list[float], usage: PoolingUsage) -> ScoreReply:
        data = [ScoreData(index=i, score=value) for i, value in enumerate(scores)]
        return ScoreReply(id=new_id("score"), created=now(), model=model, data=data, usage=usage)

    scoring = _Scoring(pairs, body.names, "text_2", pooling, reply, body.use_activation)
    return await _answer(state, request, body, model, scoring)


async def _answer(
    state: ServerState,
    request: Request,
    body: PoolingFields,
    model: str,
    scoring: _Scoring,
) -> Response:
    pairs, pooling = scoring.pairs, scoring.pooling
    times = state.times_of(request, model)
    if pooling.labels:
        prompts = await _pair_tokens(state, scoring, body)
        activation = "none" if scoring.use_activation is False else pooling.activation
        params = PoolingParams(activation=activation)
    elif scoring.use_activation is not None:
        raise bad_value("use_activation", "use_activation: this model embeds, and has no head to activate")
    else:
        labels: dict[str, Label] = {}
        for pair, names in zip(pairs, scoring.names, strict=True):
            for text, name in zip(pair, names, strict=True):
                labels.setdefault(text, Label(name))
        texts = list(labels)
        prompts = await tokens_of(state, texts, scoring.param, body, [*labels.values()])
        params = embedding_params(state, pooling, None, True)
    usage = PoolingUsage.of(prompts)

    def scored(vectors: list[bytes]) -> msgspec.Struct:
        found = [numbers(vector) for vector in vectors]
        if pooling.labels:
            return scoring.reply([vector[0] for vector in found], usage)
        by_text = dict(zip(texts, found, strict=True))
        cosines = [sum(map(mul, by_text[first], by_text[second])) for first, second in pairs]
        return scoring.reply(cosines, usage)

    return respond(state, request, prompts, params, times, body.cache_salt, scored)


async def _pair_tokens(state: ServerState, scoring: _Scoring, body: PoolingFields) -> list[PooledPrompt]:
    """Return the tokens of each pair, as a template for that or the tokenizer puts them together.

    Raises ApiError.
    """
    _, tokenizer, info = state.serving()
    pairs, param = scoring.pairs, scoring.param
    state.admit(len(pairs), param)
    _check_size(pairs, param, state.config.max_untokenised_bytes)
    labels = [_pair_label(*each) for each in zip(pairs, scoring.names, strict=True)]
    if (template := tokenizer.pair_template) is not None:
        texts = [
            await rendered(state.renderer, template, tokenizer.pair_messages(*pair), param) for pair in pairs
        ]
        return await tokens_of(state, texts, param, body, labels)
    special = body.add_special_tokens is not False
    tokens = await state.encode_pairs(pairs, param, add_special_tokens=special)
    cut = body.truncate_prompt_tokens
    return [fitted(PooledPrompt(each), info, label, cut) for each, label in zip(tokens, labels, strict=True)]


def _check_size(pairs: Pairs, param: str, limit: int) -> None:
    """Raises ApiError 413 for more than may ever wait: a long text that all have is in each of the pairs."""
    sizes = {text: utf8_size(text) for text in {text for pair in pairs for text in pair}}
    size = sum(sizes[text] for pair in pairs for text in pair)
    if size > limit:
        message = f"{param}: the pairs have {size} bytes together, more than {limit}: send fewer at once"
        raise ApiError(413, message, param=param, code="prompt_too_large")


def _pair_label(pair: tuple[str, str], names: tuple[str, str]) -> Label:
    """Name the text that is too long: of a pair the longer one."""
    second_is_longer = len(pair[1]) >= len(pair[0])
    return Label(*(names[::-1] if second_is_longer else names))
