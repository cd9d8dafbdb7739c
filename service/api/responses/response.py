"""A response of the model while it is generated, from the request to the object that clients get."""

from __future__ import annotations

import secrets
import time
from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import HTTPConnection

from quire.engine.errors import FieldError
from quire.engine.messages import SamplingParams
from quire.service.answer.choice import Choice
from quire.service.answer.generation import Generation
from quire.service.answer.group import Prompt
from quire.service.answer.history import History, Turn
from quire.service.answer.options import Options
from quire.service.answer.replies import TokenLogprobs
from quire.service.answer.stored_responses import StoredResponse
from quire.service.api.chat import logprobs_of
from quire.service.api.logprob_budget import LogprobBudget
from quire.service.api.request_params import (
    cache_salt,
    check_sampled_ids,
    checked_grammar,
    checked_tools,
    token_budget,
)
from quire.service.api.responses.input_items import as_listed
from quire.service.api.responses.messages import with_input, with_output
from quire.service.api.responses.protocol import InputItem, ResponseRequest
from quire.service.api.responses.protocol import Reasoning as ReasoningOptions
from quire.service.api.responses.replies import (
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputTokensDetails,
    ResponseFailure,
    ResponseReply,
    ResponseUsage,
    Status,
    TextConfig,
)
from quire.service.api.sampling_defaults import with_defaults
from quire.service.errors import ApiError, bad_value, refused
from quire.service.http.gate import note_ignored
from quire.service.json_fields import MAX_REPLY_LOGPROBS
from quire.service.state import ServerState
from quire.service.text.reasoning.use import Reasoning
from quire.service.text.rendering import TemplateMessage, render, template_arguments
from quire.service.text.structured import Form

if TYPE_CHECKING:
    from quire.service.text.template_renderer import TemplateRenderer
    from quire.service.text.tokenizer import Tokenizer


_item = msgspec.json.Decoder(InputItem)


class ModelResponse:
    """Its `output` grows as its events are made; `generation` is to be closed by whoever drives it."""

    def __init__(
        self,
        body: ResponseRequest,
        model: str,
        generation: Generation,
        said: list[TemplateMessage],
        params: SamplingParams,
        inputs: list[tuple[str, bytes]],
        before: list[Turn],
    ) -> None:
        self.id = f"resp_{secrets.token_hex(24)}"
        self.generation = generation
        self.output: list[OutputItem] = []
        self._body = body
        self._model = model
        self._created = int(time.time())
        self._completed: int | None = None  # when it was first told of as completed
        self._said = said
        self._params = params
        self._inputs = inputs
        self._before = before

    @property
    def choice(self) -> Choice:
        return self.generation.choices[0]

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Return those of the tokens that have come, but for its thinking's, if they were asked for."""
        entries = [entry for entry in self.choice.take_logprobs() if not entry.thought]
        return [] if self._body.logprobs is None else logprobs_of(self.generation, entries).content

    @property
    def final_status(self) -> Status:
        """Return the status of a response whose choice has finished."""
        return "incomplete" if self.choice.finish_reason == "length" else "completed"

    def stored(self, reply: ResponseReply) -> StoredResponse:
        """Return what is kept of it once it has ended with this `reply`."""
        items = {item.id: msgspec.json.encode(item) for item in self.output}
        conversation = self.history().messages
        return StoredResponse(msgspec.json.encode(reply), conversation, items, self._inputs, self._before)

    def history(self) -> History:
        """Return all that was said, the output so far included, for a response that goes on from here."""
        own = Turn(self.id, [*(name for name, _ in self._inputs), *(item.id for item in self.output)])
        return History(with_output(self._said, self.output), [*self._before, own])

    def snapshot(self, status: Status, error: ApiError | None = None) -> ResponseReply:
        """Return the response as it stands."""
        body, params = self._body, self._params
        if status == "completed" and self._completed is None:
            self._completed = int(time.time())
        return ResponseReply(
            id=self.id,
            created_at=self._created,
            completed_at=self._completed if status == "completed" else None,
            status=status,
            error=None if error is None else ResponseFailure.of(error),
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._model,
            output=self.output,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            store=body.is_stored,
            safety_identifier=body.safety_identifier,
            prompt_cache_key=body.prompt_cache_key,
            max_tool_calls=body.max_tool_calls,
            reasoning=body.reasoning or ReasoningOptions(),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            top_logprobs=body.top_logprobs or 0,
            temperature=params.temperature,
            text=TextConfig(body.text_format),
            tool_choice=body.tool_choice or "auto",
            tools=body.functions,
            top_p=params.top_p,
            usage=None if status == "in_progress" else self._usage(),
        )

    def _usage(self) -> ResponseUsage:
        usage = self.generation.usage()
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
            total_tokens=usage.total_tokens,
        )


async def _resolved(
    state: ServerState, connection: HTTPConnection, given: str | list[InputItem]
) -> str | list[InputItem]:
    """Return the input with the items that it refers to. Raises ApiError 400 if one is not there."""
    if isinstance(given, str):
        return given
    items = list(given)
    for at, item in enumerate(items):
        if item.type == "item_reference":
            items[at] = await _referred_to(state, connection, item.id, f"input[{at}].id")
    return items


async def _referred_to(
    state: ServerState, connection: HTTPConnection, item_id: str | None, name: str
) -> InputItem:
    """Return an item of a stored response. Raises ApiError 400 that names the field `name`."""
    found = await state.responses.item(connection.state.tenant, item_id or "")
    if found is None:
        message = f"{name} is {item_id!r}, which no stored response has: send the item itself"
        raise bad_value(name, message, "item_not_found")
    return _item.decode(found)


def _logprob_budget(body: ResponseRequest) -> LogprobBudget:
    """Return what carries its log-probabilities: those of a stream are sent as they come."""
    of_output = 0 if body.is_streamed or body.logprobs is None else 1 + body.logprobs
    return LogprobBudget("top_logprobs", 0, of_output, MAX_REPLY_LOGPROBS)


def _with_one_head(messages: list[TemplateMessage]) -> list[TemplateMessage]:
    """Make what the system says first one message: most chat templates take no second one."""
    heads = list(takewhile(lambda message: message["role"] == "system", messages))
    if len(heads) < 2:
        return messages
    text = "\n\n".join(head["content"] for head in heads)
    return [{"role": "system", "content": text}, *messages[len(heads) :]]


async def prompt_text(
    renderer: TemplateRenderer,
    tokenizer: Tokenizer,
    model: str,
    body: ResponseRequest,
    said: list[TemplateMessage],
) -> str:
    """Return what the model gets to see once this was `said`. Routers hash it, too. Raises ApiError."""
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    tools = [function.as_template_tool() for function in body.offered_functions]
    arguments, _ = template_arguments(tokenizer, None, body.effort)
    messages = _with_one_head(instructions + said)
    return await render(renderer, tokenizer, model, messages, param="input", arguments=arguments, tools=tools)


async def begin(
    state: ServerState, connection: HTTPConnection, body: ResponseRequest, history: History
) -> ModelResponse:
    """Hands the request to the engine. `history` is what was said before. Raises ApiError."""
    engine, tokenizer, info = state.generating()
    model = state.check_model(body.model)
    check_sampled_ids(body, info)
    arguments, unused = template_arguments(tokenizer, None, body.effort)
    unread = tokenizer.chat_template is not None and not tokenizer.chat_template.reads_names
    names = ["input[].name"] * (unread and body.names_results)
    note_ignored(connection.scope, [*body.ignored_fields, *names, *["reasoning.effort"] * bool(unused)])
    times = state.times_of(connection, model)
    state.admit(1)
    given = await _resolved(state, connection, body.input)
    said = with_input(history.messages, given)
    text = await prompt_text(state.renderer, tokenizer, model, body, said)
    limit = info.max_request_tokens
    tokens = await state.encode(text, "input", add_special_tokens=False, limit=limit)
    tools = await checked_tools(state, body, tokenizer)
    reasoning = Reasoning.of(state.config.reasoning_parser, tokenizer, tokens, arguments)

    def form() -> Form | None:
        answer = body.form() if tools is None else tools.form()
        return answer if reasoning is None else reasoning.form(answer, None)

    grammar = await checked_grammar(state, form)
    budget = token_budget(body, tokens, "input", info, info.sampling_defaults.max_tokens)
    carried = _logprob_budget(body)
    if body.token_limit is None:
        budget = carried.room(len(tokens), budget)
    carried.check(len(tokens), budget)
    try:
        params = with_defaults(body, body.sampling_params(budget, grammar), info.sampling_defaults)
    except FieldError as error:
        raise refused(error) from None
    options = Options(
        stops=body.stop_strings,
        skip_special_tokens=True,
        continues=False,
        tools=tools,
        reasoning=reasoning,
        num_logprobs=carried.total(len(tokens), budget),
    )
    salt = cache_salt(connection, None)
    generation = Generation(
        state.admission, engine, tokenizer, [Prompt(tokens, None)], [params], options, salt, times
    )
    inputs = as_listed(given) if body.is_stored else []
    return ModelResponse(body, model, generation, said, params, inputs, history.turns)
