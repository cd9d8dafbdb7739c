"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import json
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from quire.service.answer.choice import Choice, LogprobEntry
from quire.service.answer.encoder import ChunkStyle, Identity
from quire.service.answer.generation import Generation
from quire.service.answer.group import Prompt
from quire.service.answer.logprobs import MIN_LOGPROB
from quire.service.answer.options import Options
from quire.service.answer.replies import (
    ChatChoice,
    ChatLogprobs,
    ChatReply,
    ReplyMessage,
    TokenLogprobs,
    TopLogprob,
)
from quire.service.api.answers import Answer, chunked_answer, reply_choices
from quire.service.api.logprob_budget import LogprobBudget
from quire.service.api.request_params import (
    cache_salt,
    check_repeated,
    check_sampling,
    checked_grammar,
    checked_tools,
    sampling_params,
    token_budget,
    tokenising_limit,
    truncated,
)
from quire.service.api.requests.chat import ChatRequest
from quire.service.api.requests.forms import UNWRAPPED
from quire.service.api.streams import answer
from quire.service.api.unread import unread_fields
from quire.service.errors import bad_value
from quire.service.http.codec import decode
from quire.service.http.gate import note_ignored
from quire.service.state import ServerState
from quire.service.text.reasoning.use import Reasoning
from quire.service.text.rendering import render, template_arguments
from quire.service.text.structured import Form
from quire.service.text.tools.calls import whole_calls

if TYPE_CHECKING:
    from quire.service.text.template_renderer import TemplateRenderer
    from quire.service.text.tokenizer import Tokenizer

_decoder = json.Decoder(ChatRequest)


def logprobs_of(generation: Generation, entries: list[LogprobEntry]) -> ChatLogprobs:
    """Return them in the chat format: one object a token, with its bytes."""
    tokenizer, content = generation.tokenizer, []
    for token, logprob, *_ in entries:
        if logprob is None:
            continue
        top = [
            TopLogprob(
                generation.token_text(candidate),
                max(value, MIN_LOGPROB),
                list(tokenizer.token_bytes(candidate)),
            )
            for candidate, value in zip(logprob.top_tokens, logprob.top_logprobs, strict=True)
        ]
        content.append(
            TokenLogprobs(
                generation.token_text(token),
                max(logprob.logprob, MIN_LOGPROB),
                list(tokenizer.token_bytes(token)),
                top,
            )
        )
    return ChatLogprobs(content)


STYLE = ChunkStyle(
    "chat.completion.chunk",
    b'"delta":{"role":"assistant","refusal":null,"content":',
    b'"delta":{"content":',
    b"}",
    logprobs_of,
)


async def prompt_text(renderer: TemplateRenderer, tokenizer: Tokenizer, model: str, body: ChatRequest) -> str:
    """Return what the model gets to see. Routers hash it, too. Raises ApiError."""
    arguments, _ = template_arguments(tokenizer, body.chat_template_kwargs, body.reasoning_effort)
    return await render(
        renderer,
        tokenizer,
        model,
        [message.as_template_message() for message in body.messages],
        add_generation_prompt=not body.continue_final_message and body.add_generation_prompt is not False,
        continues=body.continue_final_message,
        arguments=arguments,
        tools=[function.as_template_tool() for function in body.offered_functions],
    )


def _message(choice: Choice) -> ReplyMessage:
    if choice.parts is None:
        return ReplyMessage("assistant", choice.take_text())
    text, thinking, calls = choice.parts.take_apart()
    message = ReplyMessage("assistant", text or (None if thinking or calls else ""))
    if calls:
        message.tool_calls = whole_calls(calls)
    if thinking:
        message.reasoning = message.reasoning_content = thinking
    return message


async def chat_completions(state: ServerState, request: Request) -> Response:
    state.generating()
    body = await decode(request, _decoder)
    return answer(state, request, await begin(state, request, body), streamed=bool(body.stream))


async def prompt_tokens(state: ServerState, body: ChatRequest, begun: str = "") -> list[int]:
    """Return what the model gets to see, and then `begun`, the beginning of its answer. Raises ApiError."""
    _, tokenizer, info = state.serving()
    model = state.check_model(body.model)
    check_sampling(body, info)
    state.admit(1)
    if body.token_limit == 0:
        raise bad_value(body.token_limit_name, f"{body.token_limit_name} must be at least 1, got 0")
    text = await prompt_text(state.renderer, tokenizer, model, body)
    special, limit = bool(body.add_special_tokens), tokenising_limit(body, info)
    tokens = await state.encode(text + begun, "messages", add_special_tokens=special, limit=limit)
    return truncated(body, tokens, info)


async def generate(
    state: ServerState, connection: HTTPConnection, body: ChatRequest, tokens: list[int], *, continues: bool
) -> Generation:
    """Hand the request to the engine; `continues`: its answer has begun in the prompt. Raises ApiError."""
    engine, tokenizer, info = state.generating()
    arguments, unused = template_arguments(tokenizer, body.chat_template_kwargs, body.reasoning_effort)
    reasoning = Reasoning.of(
        state.config.reasoning_parser,
        tokenizer,
        tokens,
        arguments,
        continues=continues,
        shown=body.include_reasoning,
    )
    if reasoning is None and body.thinking_token_budget is not None:
        unused.append("thinking_token_budget")
    note_ignored(connection.scope, unused)
    top = (body.top_logprobs or 0) if body.logprobs else None
    budget = token_budget(body, tokens, "messages", info, info.sampling_defaults.max_tokens)
    carried = LogprobBudget.of(body, top)
    if body.token_limit is None:
        budget = carried.room(len(tokens), budget)
    carried.check(len(tokens), budget)
    prompt = Prompt(tokens, None)
    check_repeated([prompt], body)
    tools = await checked_tools(state, body, tokenizer)

    def form() -> Form | None:
        answer = body.form() if tools is None else tools.form()
        if reasoning is None or (answer is not None and answer.field in UNWRAPPED):
            return answer
        return reasoning.form(answer, body.thinking_token_budget, may_call=tools is not None)

    grammar = await checked_grammar(state, form)
    params = sampling_params(body, budget, top, grammar, info)
    options = Options(
        stops=body.stop_strings,
        skip_special_tokens=body.skip_special_tokens,
        include_stop=body.include_stop_str_in_output,
        continues=continues,
        token_ids=body.return_token_ids,
        tokens_as_ids=body.return_tokens_as_token_ids,
        best=body.ranked,
        num_logprobs=carried.total(len(tokens), budget),
        tools=tools,
        reasoning=reasoning,
    )
    salt = cache_salt(connection, body.cache_salt)
    times = state.times_of(connection, state.check_model(body.model))
    return Generation(state.admission, engine, tokenizer, [prompt], [params], options, salt, times)


async def begin(state: ServerState, connection: HTTPConnection, body: ChatRequest) -> Answer:
    """Hand the request to the engine. Raises ApiError."""
    model = state.check_model(body.model)
    tokens = await prompt_tokens(state, body)
    _, tokenizer, _ = state.serving()
    note_ignored(connection.scope, unread_fields(body.messages, tokenizer.chat_template))
    generation = await generate(state, connection, body, tokens, continues=body.continue_final_message)
    logprobs = bool(body.logprobs)

    def choices() -> list[ChatChoice]:
        return [
            ChatChoice(
                message=_message(choice),
                logprobs=logprobs_of(generation, choice.logprobs) if logprobs else None,
                **fields,
            )
            for _, choice, fields in reply_choices(generation, body)
        ]

    identity = Identity.new("chatcmpl", model)
    return chunked_answer(generation, identity, STYLE, body, ChatReply, choices, logprobs=logprobs)
