"""From a validated request to what the engine is asked, with every bound checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace
from starlette.requests import HTTPConnection

from quire.engine.config import EngineInfo
from quire.engine.errors import FieldError
from quire.engine.messages import MAX_LOGIT_BIAS, SamplingParams
from quire.service.answer.group import Prompt
from quire.service.api.requests.sampling import SamplingFields
from quire.service.api.sampling_defaults import with_defaults
from quire.service.errors import bad_value, no_room, refused
from quire.service.state import ServerState
from quire.service.text.sizes import utf8_size
from quire.service.text.structured import Form
from quire.service.text.tools.use import ToolRequest, ToolUse

if TYPE_CHECKING:
    from quire.service.text.tokenizer import Tokenizer


MAX_REPEATED_BYTES = 64 << 20  # of prompts, in all choices of an answer together
_ID_BYTES = 7  # of a token's id, as JSON


class TokenLimit(Protocol):
    """A request that may say how many tokens it wants, of each of how many sequences."""

    @property
    def token_limit(self) -> int | None: ...

    @property
    def token_limit_name(self) -> str: ...

    @property
    def min_tokens(self) -> int | None: ...

    @property
    def num_sequences(self) -> int: ...

    @property
    def num_sequences_name(self) -> str: ...


class SampledTokens(Protocol):
    """A request that names tokens to stop at or to prefer."""

    @property
    def stop_token_ids(self) -> list[int] | None: ...

    @property
    def logit_bias(self) -> dict[int, float] | None: ...


def check_token_ids(tokens: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises ApiError 400 if a token is not of the model's vocabulary."""
    if tokens and max(tokens) >= vocab_size:
        raise bad_value(param, f"{param}: token id {max(tokens)} is not below the vocabulary's {vocab_size}")


def check_sampled_ids(body: SampledTokens, info: EngineInfo) -> None:
    """Raises ApiError 400 if a token id of the sampling parameters is not of the model's vocabulary."""
    check_token_ids(body.stop_token_ids or [], info.vocab_size, "stop_token_ids")
    biased = list(body.logit_bias or ())
    check_token_ids(biased, info.vocab_size, "logit_bias")
    if biased and min(biased) < 0:
        raise bad_value("logit_bias", f"logit_bias: {min(biased)} is no token id")


def check_sampling(body: SamplingFields, info: EngineInfo) -> None:
    """Check them, and how many sequences there are. Raises ApiError 400."""
    check_sampled_ids(body, info)
    check_token_ids(body.allowed_token_ids or [], info.vocab_size, "allowed_token_ids")
    for name, count in (("best_of", body.best_of), ("n", body.n)):
        if count is not None and count > info.max_num_seqs:
            raise bad_value(
                name, f"{name} is {count}, and this server runs at most {info.max_num_seqs} sequences at once"
            )


def cache_salt(request: HTTPConnection, own: str | None) -> str:
    """Prompts share cached blocks only with those of the same salt: of one tenant, and of one `own` salt.

    A server's tenants are all equally long, so that no choice of `own` makes another tenant's salt.
    """
    tenant: str = request.state.tenant
    return tenant + (own or "")


def token_budget(
    body: TokenLimit, prompt: list[int], param: str, info: EngineInfo, default: int | None
) -> int:
    """Return how many tokens each sequence may have; `default` None is all that fit. Raises ApiError 400.

    The KV cache must hold all sequences of a request at once, so that they share what it has.
    """
    limit, n = info.max_request_tokens, body.num_sequences
    if not prompt:
        raise bad_value(param, f"{param} must not be empty: it has no tokens")
    if len(prompt) >= limit:
        raise no_room(param, f"the prompt has {len(prompt)} tokens", limit)
    room = info.capacity.room(len(prompt), n)
    if room < 1:
        most = next(fewer for fewer in range(n, 0, -1) if info.capacity.room(len(prompt), fewer) >= 1)
        name = body.num_sequences_name
        raise bad_value(
            name,
            f"{name} is {n}, but after a prompt of {len(prompt)} tokens the KV cache has room for at most "
            f"{most} sequences at once",
        )
    asked = body.token_limit
    if asked is None:
        return _at_least_min(body, room if default is None else min(default, room))
    if asked > room:
        name, fit = body.token_limit_name, f"together more than the {limit} tokens that fit"
        if n > 1:
            fit = f"for {n} sequences more than the {room} that fit for each of so many"
        raise bad_value(
            name,
            f"the prompt has {len(prompt)} tokens and {name} is {asked}: {fit}",
            "context_length_exceeded",
        )
    return _at_least_min(body, asked)


def _at_least_min(body: TokenLimit, budget: int) -> int:
    """Return `budget`. Raises ApiError 400 if it is less than what the request wants at least."""
    least = body.min_tokens or 0
    if least > budget:
        limit = f"{body.token_limit_name} ({budget})"
        raise bad_value("min_tokens", f"min_tokens must not exceed {limit}, got {least}")
    return budget


async def checked_grammar(state: ServerState, form_of: Callable[[], Form | None]) -> str:
    """Return the grammar that the text must follow, empty if none. Raises ApiError 400."""
    try:
        form = form_of()
    except FieldError as error:
        raise refused(error) from None
    if form is None:
        return ""
    _, tokenizer, info = state.serving()
    await state.grammar_trials.check(tokenizer, info, form.field, form.grammar)
    return form.grammar


async def checked_tools(state: ServerState, body: ToolRequest, tokenizer: Tokenizer) -> ToolUse | None:
    """Return the tools that it offers, and the document beside them. Raises ApiError 400."""
    try:
        tools = ToolUse.of(body, tokenizer)
    except FieldError as error:
        raise refused(error) from None
    if tools is not None and tools.document is not None:
        await checked_grammar(state, tools.document.form)  # alone, so that errors name its field
    return tools


def sampling_params(
    body: SamplingFields, max_tokens: int, logprobs: int | None, grammar: str, info: EngineInfo
) -> SamplingParams:
    """Return what the engine is asked. Raises ApiError 400."""
    try:
        params = body.sampling_params(max_tokens, logprobs, grammar)
        params = with_defaults(body, params, info.sampling_defaults)
    except FieldError as error:
        raise refused(error) from None
    if body.allowed_token_ids is None:
        return params
    # A grammar always allows what ends a text.
    ends = [*info.eos_token_ids, *params.stop_token_ids]
    unwanted = {token: -MAX_LOGIT_BIAS for token in ends if token not in body.allowed_token_ids}
    return replace(params, logit_bias=params.logit_bias | unwanted)


def truncated(body: SamplingFields, prompt: list[int], info: EngineInfo) -> list[int]:
    """Return the last tokens of a prompt, if it is longer than the request wants it to be."""
    most = body.truncate_prompt_tokens
    if most is None:
        return prompt
    if most == -1:
        most = max(1, info.max_request_tokens - (body.token_limit or 1))
    return prompt[-most:]


def tokenising_limit(body: SamplingFields, info: EngineInfo) -> int | None:
    """Return the number of tokens from which on a prompt is refused, if there is one."""
    return info.max_request_tokens if body.truncate_prompt_tokens is None else None


def check_repeated(prompts: Sequence[Prompt], body: SamplingFields) -> None:
    """Raises ApiError 400 if the choices, of which each has its whole prompt, would have too much of them."""
    each = sum(utf8_size(prompt.text or "") for prompt in prompts)
    if body.return_token_ids:
        each += _ID_BYTES * sum(len(prompt.tokens) for prompt in prompts)
    size = each * (body.n or 1)
    if size > MAX_REPEATED_BYTES:
        raise bad_value(
            "n",
            f"n: the answer would repeat the prompts in some {size} bytes, more than {MAX_REPEATED_BYTES}: "
            "ask for fewer choices or prompts, or leave out echo and return_token_ids",
        )
