"""POST /v1/completions."""

from __future__ import annotations

from msgspec import json, structs
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from quire.service.answer.choice import Choice, LogprobEntry
from quire.service.answer.encoder import ChunkStyle, Identity
from quire.service.answer.generation import Generation
from quire.service.answer.group import Prompt
from quire.service.answer.logprobs import MIN_LOGPROB
from quire.service.answer.options import Options
from quire.service.answer.replies import CompletionChoice, CompletionLogprobs, CompletionReply
from quire.service.api.answers import Answer, chunked_answer, reply_choices
from quire.service.api.logprob_budget import LogprobBudget
from quire.service.api.request_params import (
    cache_salt,
    check_repeated,
    check_sampling,
    check_token_ids,
    checked_grammar,
    sampling_params,
    token_budget,
    tokenising_limit,
    truncated,
)
from quire.service.api.requests.completions import CompletionRequest
from quire.service.api.streams import answer
from quire.service.errors import bad_value
from quire.service.http.codec import decode
from quire.service.state import ServerState

DEFAULT_MAX_TOKENS = 16

_decoder = json.Decoder(CompletionRequest)


def logprobs_of(generation: Generation, entries: list[LogprobEntry]) -> CompletionLogprobs:
    """Return them in the completions format: parallel lists, candidates by their text."""
    result = CompletionLogprobs([], [], [], [])
    for token, logprob, offset, _ in entries:
        name = generation.token_text(token)
        result.tokens.append(name)
        result.text_offset.append(offset)
        if logprob is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        chosen = max(logprob.logprob, MIN_LOGPROB)
        top: dict[str, float] = {}
        for candidate, value in zip(logprob.top_tokens, logprob.top_logprobs, strict=True):
            top.setdefault(generation.token_text(candidate), max(value, MIN_LOGPROB))
        top.setdefault(name, chosen)
        result.token_logprobs.append(chosen)
        result.top_logprobs.append(top)
    return result


def echoed_logprobs(generation: Generation) -> dict[int, CompletionLogprobs]:
    """Return those of each prompt that its choices begin with, by its request's number."""
    if not generation.options.echo_logprobs:
        return {}
    echoed = {}
    for group in generation.groups:
        entries = group.choices[0].logprobs[: len(group.prompt_logprobs or ())]
        echoed[group.stream.request_id] = logprobs_of(generation, entries)
    return echoed


def _of_choice(
    generation: Generation, choice: Choice, echoed: CompletionLogprobs | None
) -> CompletionLogprobs:
    if echoed is None:
        return logprobs_of(generation, choice.logprobs)
    own = logprobs_of(generation, choice.logprobs[len(echoed.tokens) :])
    return CompletionLogprobs(
        echoed.tokens + own.tokens,
        echoed.token_logprobs + own.token_logprobs,
        echoed.top_logprobs + own.top_logprobs,
        echoed.text_offset + own.text_offset,
    )


STYLE = ChunkStyle("text_completion", b'"text":', b'"text":', b"", logprobs_of)


async def _read_prompts(state: ServerState, body: CompletionRequest) -> list[Prompt]:
    """Raises ApiError."""
    _, _, info = state.serving()
    texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
    if texts:  # then all of them are
        special = body.add_special_tokens is not False
        limit = tokenising_limit(body, info)
        tokens = await state.encode_all(texts, "prompt", add_special_tokens=special, limit=limit)
    else:
        tokens = [prompt for prompt in body.prompts if not isinstance(prompt, str)]
        for prompt in tokens:
            check_token_ids(prompt, info.vocab_size, "prompt")
        if body.echo:
            texts = await state.decode_all(tokens, skip_special_tokens=body.skip_special_tokens)
    if not body.echo:
        return [Prompt(truncated(body, each, info), None) for each in tokens]
    return [Prompt(each, text) for each, text in zip(tokens, texts, strict=True)]


async def completions(state: ServerState, request: Request) -> Response:
    state.generating()
    body = await decode(request, _decoder)
    return answer(state, request, await begin(state, request, body), streamed=bool(body.stream))


async def begin(state: ServerState, connection: HTTPConnection, body: CompletionRequest) -> Answer:
    """Hand the request to the engine. Raises ApiError."""
    engine, tokenizer, info = state.generating()
    model = state.check_model(body.model)
    times = state.times_of(connection, model)
    check_sampling(body, info)
    state.admit(len(body.prompts))
    echo, logprobs = bool(body.echo), body.logprobs is not None
    if body.token_limit == 0 and not echo:
        name = body.token_limit_name
        raise bad_value(name, f"{name} must be at least 1 without echo, got 0")
    grammar = await checked_grammar(state, body.form)
    carried = LogprobBudget.of(body, body.logprobs, echo)
    prompts, params = await _read_prompts(state, body), []
    check_repeated(prompts, body)
    for prompt in prompts:
        budget = token_budget(
            body, prompt.tokens, "prompt", info, info.sampling_defaults.max_tokens or DEFAULT_MAX_TOKENS
        )
        sampling = sampling_params(body, max(budget, 1), body.logprobs, grammar, info)
        if echo and logprobs and body.prompt_logprobs is None:
            sampling = structs.replace(sampling, prompt_logprobs=body.logprobs)
        params.append(sampling)
    num_tokens, most = sum(len(prompt.tokens) for prompt in prompts), sum(own.max_tokens for own in params)
    carried.check(num_tokens, most)
    options = Options(
        stops=body.stop_strings,
        skip_special_tokens=body.skip_special_tokens,
        include_stop=body.include_stop_str_in_output,
        continues=True,
        is_turn=False,
        echo_logprobs=echo and logprobs,
        discard_output=body.token_limit == 0,
        token_ids=body.return_token_ids,
        tokens_as_ids=body.return_tokens_as_token_ids,
        best=body.ranked,
        num_logprobs=carried.total(num_tokens, most),
    )
    salt = cache_salt(connection, body.cache_salt)
    generation = Generation(state.admission, engine, tokenizer, prompts, params, options, salt, times)

    def choices() -> list[CompletionChoice]:
        of_echo = echoed_logprobs(generation)
        return [
            CompletionChoice(
                text=choice.take_text(),
                logprobs=_of_choice(generation, choice, of_echo.get(group.stream.request_id))
                if logprobs
                else None,
                **fields,
            )
            for group, choice, fields in reply_choices(generation, body)
        ]

    identity = Identity.new("cmpl", model)
    return chunked_answer(generation, identity, STYLE, body, CompletionReply, choices, logprobs=logprobs)
