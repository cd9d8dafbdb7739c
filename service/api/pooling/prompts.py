"""From texts and token ids to prompts that the engine pools, and to the response that waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.config import EngineInfo
from quire.engine.messages import PoolingParams
from quire.engine.models.pooled_texts import PooledTexts
from quire.engine.models.pooling import Pooling
from quire.service.answer.pooled import PooledPrompts
from quire.service.answer.stream import GenerationResponse, encoded_reply
from quire.service.api.pooling.protocol import PoolingFields
from quire.service.api.request_params import cache_salt, check_token_ids
from quire.service.errors import ApiError, bad_value
from quire.service.explain.times import RequestTimes
from quire.service.http.connection import Connection
from quire.service.state import ServerState
from quire.service.text.pooled_prompt import PooledPrompt, unpooled_tokens

if TYPE_CHECKING:
    from quire.service.text.tokenizer import Tokenizer

INLINE_BYTES = 64 << 10  # of vectors that are made into a reply in the time of a trip to another thread
CUT = "with truncate_prompt_tokens: -1 only the last ones are taken"


class Label(NamedTuple):
    """The field that a prompt is of, and the one that it is a prompt together with."""

    param: str
    beside: str | None = None


def pooling_of(state: ServerState) -> Pooling:
    """Return how the model pools. Raises ApiError 400 if it generates text."""
    _, _, info = state.serving()
    if info.pooling is None:
        raise not_supported(
            state,
            "generates text, and gives neither embeddings nor scores: those are of a server that was started "
            "with --runner pooling",
        )
    return info.pooling


def not_supported(state: ServerState, what_it_does: str) -> ApiError:
    """Return the refusal of what the served model cannot do."""
    message = f"{state.config.served_model_names[0]} {what_it_does}"
    return bad_value("model", message, "model_not_supported")


async def tokens_of(
    state: ServerState,
    inputs: list[str] | list[list[int]],
    param: str,
    fields: PoolingFields,
    labels: list[Label] | None = None,
    advice: str = CUT,
) -> list[PooledPrompt]:
    """Return the tokens of each input: of the items of `param`, unless they have other `labels`.

    A text is put behind what the model's folder has each begin with; tokens are taken as they are. Raises
    ApiError; `advice` says what to do about one that is too long.
    """
    _, tokenizer, info = state.serving()
    state.admit(len(inputs), param)
    unpooled = 0
    texts = [each for each in inputs if isinstance(each, str)]
    if texts:  # then all of them are
        special = fields.add_special_tokens is not False
        tokens = await state.encode_all(behind_prompt(texts, info), param, add_special_tokens=special)
        unpooled = unpooled_of(tokenizer, info, add_special_tokens=special)
    else:
        tokens = [each for each in inputs if not isinstance(each, str)]
        for each in tokens:
            check_token_ids(each, info.vocab_size, param)
    if labels is None:
        labels = labels_of(param, len(inputs))
    cut = fields.truncate_prompt_tokens
    prompts = [PooledPrompt(each, unpooled) for each in tokens]
    return [fitted(each, info, label, cut, advice) for each, label in zip(prompts, labels, strict=True)]


def labels_of(param: str, count: int) -> list[Label]:
    """Return the labels of so many items of a field, which may be one alone."""
    return [Label(f"{param}[{i}]" if count > 1 else param) for i in range(count)]


def behind_prompt(texts: list[str], info: EngineInfo) -> list[str]:
    """Return texts as they are embedded, each behind the prompt that the model's folder has for all."""
    prompt = "" if info.pooling is None else info.pooling.texts.prompt
    return [prompt + text for text in texts] if prompt else texts


def unpooled_of(tokenizer: Tokenizer, info: EngineInfo, *, add_special_tokens: bool) -> int:
    """Return how many of its first tokens a text's vector is not of."""
    texts = PooledTexts() if info.pooling is None else info.pooling.texts
    return unpooled_tokens(tokenizer, texts, add_special_tokens=add_special_tokens)


def fitted(
    prompt: PooledPrompt, info: EngineInfo, label: Label, truncate: int | None, advice: str = CUT
) -> PooledPrompt:
    """Return a prompt, of the last tokens if it is to be cut. Raises ApiError 400 if it does not fit."""
    limit, (param, beside) = info.max_request_tokens, label
    tokens, unpooled = prompt
    if truncate is not None:
        tokens = tokens[-(limit if truncate == -1 else truncate) :]
        unpooled = max(unpooled - (len(prompt.tokens) - len(tokens)), 0)
    if len(tokens) <= unpooled:
        behind = " behind its prompt, which is no part of the vector" if unpooled else ""
        raise bad_value(param, f"{param} must not be empty: it has no tokens{behind}")
    if len(tokens) > limit:
        has = f"{param} has" if beside is None else f"{param} and {beside} have together"
        message = f"{has} {len(tokens)} tokens, more than the {limit} that fit; {advice}"
        raise bad_value(param, message, "context_length_exceeded")
    return PooledPrompt(tokens, unpooled)


def respond(
    state: ServerState,
    request: Request,
    prompts: list[PooledPrompt],
    pooling: PoolingParams,
    times: RequestTimes,
    salt: str | None,
    reply: Callable[[list[bytes]], msgspec.Struct],
) -> Response:
    """Hand the prompts to the engine; their vectors, float32 each, become the `reply`. Raises ApiError."""
    engine, _, _ = state.serving()
    pooled = PooledPrompts(state.admission, engine, prompts, pooling, cache_salt(request, salt), times)

    async def make(connection: Connection) -> bytes:
        vectors = await pooled.complete()
        takes_long = sum(map(len, vectors)) > INLINE_BYTES
        return await encoded_reply(lambda: reply(vectors), state.pool, takes_long=takes_long)

    return GenerationResponse(state.config, state.generations, pooled, make)
