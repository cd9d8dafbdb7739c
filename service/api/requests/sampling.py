"""The fields that completions and chat share: how to sample, how many, when to stop, what to write."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quire.engine.errors import FieldError
from quire.engine.messages import MAX_SEQUENCES, SamplingParams
from quire.service.answer.replies import UsageInStream
from quire.service.api.requests.forms import FormFields
from quire.service.json_fields import (
    MAX_PROMPT_TOKENS,
    MAX_TOKENS,
    LogprobCount,
    ModelName,
    Priority,
    check_priority,
)

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

_MAX_TOKENS = (
    "Of each of the n (or best_of) sequences. Left out, it is the rest of the context in a chat and 16 in a "
    "completion, and no more than the sequence's share of the KV cache: all of a request's fit at once"
)
_SPECIAL = (
    "Whether the tokenizer adds its special tokens; left out, to a completion's prompt and not to a chat's"
)
_TRUNCATE = (
    "Of a longer prompt only so many last tokens are taken; -1: as many as leave room for max_tokens, or for "
    "one token"
)


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """As OpenAI's, and vLLM's `continuous_usage_stats`."""

    include_usage: bool | None = None
    continuous_usage_stats: (
        Annotated[bool, Meta(description="A choice's usage so far in its chunks; needs include_usage")] | None
    ) = None

    def __post_init__(self) -> None:
        if self.continuous_usage_stats and not self.include_usage:
            raise FieldError("continuous_usage_stats", "continuous_usage_stats needs include_usage: true")


class SamplingFields(FormFields, kw_only=True, forbid_unknown_fields=True):
    """The parameters that completions and chat share."""

    model: ModelName | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS, description=_MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS, description=_MAX_TOKENS)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    add_special_tokens: Annotated[bool, Meta(description=_SPECIAL)] | None = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, le=MAX_PROMPT_TOKENS, description=_TRUNCATE)] | None
    ) = None
    prompt_logprobs: LogprobCount | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256, description=_CACHE_SALT)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES, description=_BEST_OF)] | None = None
    use_beam_search: Annotated[bool, Meta(description=_BEAMS)] | None = None
    length_penalty: Annotated[float, Meta(ge=-5, le=5, description=_LENGTH_PENALTY)] | None = None
    early_stopping: Annotated[bool | Literal["never"], Meta(description=_EARLY_STOPPING)] | None = None
    priority: Priority | None = None

    def __post_init__(self) -> None:
        check_priority(self.priority)
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options may only be given with stream: true")
        if self.truncate_prompt_tokens == 0:
            raise FieldError(
                "truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1, got 0"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise FieldError("prompt_logprobs", "prompt_logprobs may not be asked for with stream: true")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise FieldError(
                "max_completion_tokens", "max_completion_tokens and max_tokens differ: give one of them"
            )
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise FieldError("best_of", f"best_of must be at least n ({self.n or 1}), got {self.best_of}")
        self._check_form()
        if self.use_beam_search:
            self._check_beams()
            return
        if (self.best_of or 1) > 1 and self.stream:
            raise FieldError(
                "best_of", "best_of may not be given with stream: true, unless use_beam_search is"
            )
        for name, neutral in (("length_penalty", 1), ("early_stopping", False)):
            if getattr(self, name) not in (None, neutral):
                raise FieldError(name, f"{name} needs use_beam_search")

    def _check_form(self) -> None:
        given = self.form_fields
        if len(given) > 1:
            raise FieldError(given[1], f"{given[1]} may not be given together with {given[0]}")
        for name in ("use_beam_search", "ignore_eos"):
            if given and getattr(self, name):
                raise FieldError(name, f"{name} may not be given together with {given[0]}")

    def _check_beams(self) -> None:
        """Check what the engine's own check of beam search cannot see, or would call by another name."""
        if self.stop:
            raise FieldError("stop", "stop may not be given with use_beam_search; stop_token_ids may")
        if self.token_limit == 0:
            name = self.token_limit_name
            raise FieldError(name, f"{name} must be at least 1 with use_beam_search, got 0")

    @property
    def ranked(self) -> int | None:
        """Return how many of the samples are returned, the best of best_of; None: all of them."""
        return (self.n or 1) if (self.best_of or 1) > 1 and not self.use_beam_search else None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_sequences(self) -> int:
        """Return how many samples or beams run at once after each prompt."""
        return self.best_of or self.n or 1

    @property
    def num_sequences_name(self) -> str:
        return "n" if self.best_of is None else "best_of"

    @property
    def usage_in_stream(self) -> UsageInStream:
        options = self.stream_options
        if options is None or not options.include_usage:
            return "nowhere"
        return "each chunk" if options.continuous_usage_stats else "end"

    def sampling_params(self, max_tokens: int, logprobs: int | None, grammar: str = "") -> SamplingParams:
        """Return what the engine is asked, with a seed drawn if none was given. Raises FieldError."""
        given = self.drawing()
        for name in ("n", "prompt_logprobs"):
            if getattr(self, name) is not None:
                given[name] = getattr(self, name)
        if self.use_beam_search:
            if logprobs is not None:
                raise FieldError("logprobs", "logprobs may not be asked for with use_beam_search")
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
            grammar=grammar,
            **given,
        )
