"""A response of the model while it is generated, from the request to the object that clients get."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection

from quire.service.answer.choice import Choice
from quire.service.answer.generation import Generation, Options, Prompt
from quire.service.api.request_params import cache_salt, checked_grammar, token_budget
from quire.service.api.responses.messages import with_input, with_output
from quire.service.api.responses.protocol import ResponseRequest
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
from quire.service.errors import ApiError
from quire.service.state import ServerState
from quire.service.text.rendering import TemplateMessage, render
from quire.service.text.tools.use import ToolUse

if TYPE_CHECKING:
    from quire.service.text.template_renderer import TemplateRenderer
    from quire.service.text.tokenizer import Tokenizer


class ModelResponse:
    """Its `output` grows as its events are made; `generation` is to be closed by whoever drives it."""

    def __init__(
        self, body: ResponseRequest, model: str, generation: Generation, said: list[TemplateMessage]
    ) -> None:
        self.id = f"resp_{secrets.token_hex(24)}"
        self.generation = generation
        self.output: list[OutputItem] = []
        self._body = body
        self._model = model
        self._created = int(time.time())
        self._said = said

    @property
    def choice(self) -> Choice:
        return self.generation.choices[0]

    @property
    def final_status(self) -> Status:
        """Return the status of a response whose choice has finished."""
        return "incomplete" if self.choice.finish_reason == "length" else "completed"

    def conversation(self) -> list[TemplateMessage]:
        """All that was said, the output so far included, for a response that goes on from here."""
        return with_output(self._said, self.output)

    def snapshot(self, status: Status, error: ApiError | None = None) -> ResponseReply:
        """The response as it stands."""
        body = self._body
        params = body.sampling_params(1)
        return ResponseReply(
            id=self.id,
            created_at=self._created,
            status=status,
            error=None if error is None else ResponseFailure("server_error", error.message),
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._model,
            output=self.output,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            temperature=params.temperature,
            text=TextConfig(body.text_format),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=params.top_p,
            usage=None if status == "in_progress" else self._usage(),
        )

    def _usage(self) -> ResponseUsage:
        usage = self.generation.usage()
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(),
            total_tokens=usage.total_tokens,
        )


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
    return await render(renderer, tokenizer, model, instructions + said, param="input", tools=tools)


async def begin(
    state: ServerState, connection: HTTPConnection, body: ResponseRequest, history: list[TemplateMessage]
) -> ModelResponse:
    """Hands the request to the engine. `history` is what was said before. Raises ApiError."""
    engine, tokenizer, info = state.serving()
    model = state.check_model(body.model)
    times = state.times_of(connection, model)
    state.admit(1)
    said = with_input(history, body.input)
    text = await prompt_text(state.renderer, tokenizer, model, body, said)
    limit = info.max_request_tokens
    tokens = await state.encode(text, "input", add_special_tokens=False, limit=limit)
    tools = ToolUse.of(body, tokenizer)
    grammar = await checked_grammar(state, body.form if tools is None else tools.form)
    params = body.sampling_params(token_budget(body, tokens, "input", info, None), grammar)
    options = Options(stops=(), skip_special_tokens=True, continues=False, tools=tools)
    salt = cache_salt(connection, None)
    generation = Generation(
        state.admission, engine, tokenizer, [Prompt(tokens, None)], [params], options, salt, times
    )
    return ModelResponse(body, model, generation, said)
