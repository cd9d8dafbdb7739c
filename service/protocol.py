"""What clients may send. Each type is declared once: it validates, converts and describes itself.

Unknown fields, wrong types (a boolean is no number, a float no integer) and values out of range are
refused by msgspec with the field's name. `null` means left out, as in the OpenAI API.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from engine.request import MAX_LOGPROBS, MAX_SEQUENCES, SamplingParams
from service.structured_output import (
    MAX_SCHEMA_BYTES,
    Choices,
    Form,
    Regex,
    ResponseFormat,
    Schema,
    TextFormat,
    choice_grammar,
    json_form,
    json_grammar,
    regex_grammar,
)
from service.tools.protocol import CallId, Function, ParallelCalls, ToolCalls, ToolChoice, Tools, check_tools

MAX_PROMPTS = 1024
MAX_TOKEN_ID = (1 << 31) - 1
MAX_TOKENS = 1 << 24
MAX_PROMPT_TOKENS = 1 << 20
MAX_TEXT = 4 << 20

TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
ModelName = Annotated[str, Meta(max_length=256)]
GuidedJsonText = Annotated[str, Meta(max_length=MAX_SCHEMA_BYTES, description="A schema as JSON text")]
PromptItem = Text | TokenId | TokenIds

_CACHE_SALT = "Cached blocks are shared only with requests of the same salt, and never between API keys"
_BEST_OF = (
    "How many samples are made, of which the n with the highest mean log-probability per token come back, "
    "best first; usage.completion_tokens counts the tokens of all of them. Not with stream. With "
    "use_beam_search it is the beam width (n if left out), and only beams that come back are counted"
)
_LENGTH_PENALTY = (
    "Beams are ranked by the sum of log-probabilities / length ** length_penalty (1 if left out). Needs "
    "use_beam_search"
)
_EARLY_STOPPING = (
    "When beam search ends, with as many finished beams as its width: true: at once; false: when the best "
    'unfinished one would not be among them now; "never": when it could not be at any length. Needs '
    "use_beam_search"
)
_BEAMS = (
    "Beam search: the n best sequences come back, best first, with cumulative_logprob; streamed, as one "
    "delta per choice when the search ends. Not with sampling parameters, penalties, logit_bias, logprobs "
    "or stop; temperature is left out or 0"
)

# SamplingParams fields that a request has under the same name
_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "seed",
    "prompt_logprobs",
)


_GUIDED = ("guided_json", "guided_regex", "guided_choice")


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters that completions and chat share."""

    model: ModelName | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 20, description="-1 or 0: off")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[
            dict[int, Annotated[float, Meta(ge=-100, le=100)]],
            Meta(max_length=1024, extra_json_schema={"propertyNames": {"pattern": "^[0-9]+$"}}),
        ]
        | None
    ) = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool = True
    prompt_logprobs: LogprobCount | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256, description=_CACHE_SALT)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES, description=_BEST_OF)] | None = None
    use_beam_search: Annotated[bool, Meta(description=_BEAMS)] | None = None
    guided_json: Schema | GuidedJsonText | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    length_penalty: Annotated[float, Meta(ge=-5, le=5, description=_LENGTH_PENALTY)] | None = None
    early_stopping: Annotated[bool | Literal["never"], Meta(description=_EARLY_STOPPING)] | None = None
    user: Annotated[str, Meta(max_length=256, description="Your own label; it changes nothing")] | None = None

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options may only be given with stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs may not be asked for with stream: true")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise ValueError("max_completion_tokens and max_tokens differ: give one of them")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError(f"best_of must be at least n ({self.n or 1}), got {self.best_of}")
        self._check_form()
        if self.use_beam_search:
            self._check_beams()
            return
        if self.best_of is not None and self.stream:
            raise ValueError("best_of may not be given with stream: true, unless use_beam_search is")
        for name in ("length_penalty", "early_stopping"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} needs use_beam_search")

    def _check_form(self) -> None:
        given = self.form_fields
        if len(given) > 1:
            raise ValueError(f"{given[1]} may not be given together with {given[0]}")
        for name in ("use_beam_search", "ignore_eos"):
            if given and getattr(self, name):
                raise ValueError(f"{name} may not be given together with {given[0]}")

    @property
    def form_fields(self) -> list[str]:
        """The fields that say what the text must be."""
        return [name for name in _GUIDED if getattr(self, name) is not None]

    def form(self) -> Form | None:
        """What the text must be. Raises ValueError that names the field."""
        if self.guided_regex is not None:
            return Form("guided_regex", regex_grammar(self.guided_regex))
        if self.guided_choice is not None:
            return Form("guided_choice", choice_grammar(self.guided_choice))
        if self.guided_json is None:
            return None
        try:
            schema = self.guided_json
            if isinstance(schema, str):
                schema = msgspec.json.decode(schema, type=dict[str, Any])
            return Form("guided_json", json_grammar(schema))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"guided_json is no schema that can be followed: {error}") from None

    def _check_beams(self) -> None:
        """What the engine's own check of beam search cannot see, or would name as it is not named here."""
        if self.stop:
            raise ValueError("stop may not be given with use_beam_search; stop_token_ids may")
        if self.token_limit == 0:
            raise ValueError("max_tokens must be at least 1 with use_beam_search, got 0")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def ranked(self) -> int | None:
        """How many of the samples are returned, the best of best_of; None: all of them."""
        return (self.n or 1) if (self.best_of or 1) > 1 and not self.use_beam_search else None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling_params(self, max_tokens: int, logprobs: int | None, grammar: str = "") -> SamplingParams:
        """For the engine, with a seed drawn if none was given. Raises ValueError that names the field."""
        given = {name: getattr(self, name) for name in _SAME_NAME if getattr(self, name) is not None}
        given.setdefault("seed", secrets.randbits(63))
        if self.use_beam_search:
            if logprobs is not None:
                raise ValueError("logprobs may not be asked for with use_beam_search")
            given.setdefault("temperature", 0.0)
            given["beam_width"] = self.best_of or self.n or 1
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) is not None:
                    given[name] = getattr(self, name)
        elif self.ranked is not None:
            given["n"] = self.best_of
            logprobs = logprobs or 0
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            top_k=max(self.top_k or 0, 0),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            grammar=grammar,
            **given,
        )


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    prompt: Text | Annotated[list[PromptItem], Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]
    echo: bool | None = None
    logprobs: LogprobCount | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.prompt, str):
            return
        if len(set(map(type, self.prompt))) > 1:
            raise ValueError("prompt must hold only strings, only token ids, or only lists of token ids")
        if not isinstance(self.prompt[0], int) and len(self.prompt) > MAX_PROMPTS:
            raise ValueError(f"prompt may hold at most {MAX_PROMPTS} prompts, got {len(self.prompt)}")

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):  # as all of them
            return [cast(list[int], self.prompt)]
        return cast(list[str | list[int]], self.prompt)


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: Text


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The assistant's may have calls beside or instead of content; a tool's answers one of them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Meta(min_length=1, max_length=1024)] | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: CallId | None = None

    def __post_init__(self) -> None:
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"tool_calls belongs to the role 'assistant', not to {self.role!r}")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("tool_call_id belongs to the role 'tool', which needs it")
        if self.content is None and self.tool_calls is None:
            raise ValueError("content may be left out only with tool_calls")

    def as_template_message(self) -> dict[str, Any]:
        """Plain types, as templates expect; a developer speaks as the system."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text}
        if self.tool_calls is not None:
            message["tool_calls"] = [call.as_template_call() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class TemplateArguments(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The template variables that a client may set."""

    enable_thinking: bool | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=4096)]


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: ParallelCalls | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateArguments | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_calls()
        functions = None if self.tools is None else [tool.function for tool in self.tools]
        check_tools(functions, self.tool_choice, self.parallel_tool_calls)
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs may only be given with logprobs: true")

    def _check_calls(self) -> None:
        """What a tool says must answer a call."""
        known: set[str] = set()
        for at, message in enumerate(self.messages):
            known |= {call.id for call in message.tool_calls or ()}
            if message.tool_call_id is not None and message.tool_call_id not in known:
                raise ValueError(
                    f"messages[{at}].tool_call_id is {message.tool_call_id!r}, which no call before it has"
                )

    @property
    def offered_functions(self) -> list[Function]:
        """Those that the model may call."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or []]

    @property
    def form_fields(self) -> list[str]:
        asks = not isinstance(self.response_format, TextFormat | None)
        offers = ["tools"] * bool(self.offered_functions)
        return offers + ["response_format"] * asks + super().form_fields

    def form(self) -> Form | None:
        return json_form("response_format", self.response_format) or super().form()


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either `prompt`, or `messages` (which the chat template turns into a prompt)."""

    model: ModelName | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # left out: true for a prompt, false for messages
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    return_token_strs: bool = False

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages must be given, and not both")
        if self.prompt is not None:
            for name in ("add_generation_prompt", "chat_template_kwargs"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} belongs to messages, not to a prompt")


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: ModelName | None = None
    tokens: TokenIds
