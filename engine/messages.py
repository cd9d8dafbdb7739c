"""The messages between a front end and the engine: requests in, outputs out.

Plain msgspec structs, array-encoded, so that one frame per step carries them between processes.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from numbers import Integral, Real
from operator import attrgetter, is_not
from typing import Any, Literal, NamedTuple

import msgspec

from quire.engine.errors import FieldError

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20
MAX_SEQUENCES = 128
MIN_REPETITION_PENALTY = 0.01  # logits are divided by it
MAX_LOGIT_BIAS = 1e6  # far beyond any logit, and far from where float32 ends


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parameters by which a request's tokens are chosen.

    Processing order: logit bias, penalties, temperature, min-p, top-k, top-p. Temperature 0 is greedy.
    Logprobs are of the raw logits. Without a `seed` each Request that is made with these params draws its
    own. Raises FieldError, or TypeError for a value of another type.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    max_tokens: int = 16
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None  # of what is sampled; None: drawn
    beam_width: int = 0  # 0: no beam search; else the n best of so many beams, by transformers' scores
    length_penalty: float = 1.0  # of beam search: score = sum of log-probabilities / length ** penalty
    early_stopping: bool | Literal["never"] = False  # of beam search
    logprobs: int | None = None  # None: off; 0: the sampled token only; k: the k best as well
    prompt_logprobs: int | None = None
    grammar: str = (
        ""  # what the text must be, in llguidance's words; an end before it is whole is not sampled
    )

    @property
    def num_sequences(self) -> int:
        """Return how many sequences run at once: all beams, or the n samples."""
        return self.beam_width or self.n

    def __post_init__(self) -> None:
        for value, rule in zip(_VALUES(self), _RULES, strict=True):
            if value is not rule.default:
                plain = rule.checked(value)
                if plain is not value:
                    msgspec.structs.force_setattr(self, rule.name, plain)
        if self.logit_bias:
            self._check_bias()
        tokens = tuple(map(_STOP_TOKEN.checked, self.stop_token_ids))
        if any(map(is_not, tokens, self.stop_token_ids)):
            msgspec.structs.force_setattr(self, "stop_token_ids", tokens)
        if self.early_stopping.__class__ is str and self.early_stopping != "never":
            raise FieldError(
                "early_stopping",
                f"early_stopping must be True, False or 'never', got {self.early_stopping!r}",
            )
        if self.top_p == 0:
            raise FieldError("top_p", "top_p must be greater than 0, got 0")
        if self.beam_width:
            self._check_beams()
        if self.grammar and self.ignore_eos:
            raise FieldError(
                "ignore_eos", "ignore_eos may not be given with a grammar: its end is an eos token"
            )
        if self.min_tokens > self.max_tokens:
            raise FieldError(
                "min_tokens",
                f"min_tokens must not exceed max_tokens ({self.max_tokens}), got {self.min_tokens}",
            )

    def _check_bias(self) -> None:
        tokens = [*map(_BIASED_TOKEN.checked, self.logit_bias)]
        biases = [
            _Rule("logit_bias", None, _REAL, "a number", _BIASES, f" of token {token}").checked(bias)
            for token, bias in self.logit_bias.items()
        ]
        if any(map(is_not, (*tokens, *biases), (*self.logit_bias, *self.logit_bias.values()))):
            plain = dict(zip(tokens, biases, strict=True))
            msgspec.structs.force_setattr(self, "logit_bias", plain)

    def _check_beams(self) -> None:
        if self.n > self.beam_width:
            raise FieldError("n", f"n must not exceed the beam width ({self.beam_width}), got {self.n}")
        for name in _NOT_WITH_BEAMS:
            neutral = getattr(_GREEDY, name)
            if getattr(self, name) != neutral:
                raise FieldError(
                    name, f"{name} must be {neutral!r} with beam search, got {getattr(self, name)}"
                )


class _Rule(NamedTuple):
    """The values that a field may have, besides its default."""

    name: str
    default: Any
    kinds: tuple[type, ...]
    expected: str
    bounds: tuple[float, float] | None = None
    part: str = ""  # of the field, as messages name it

    def checked(self, value: Any) -> Any:
        """Return it, a number as Python's own: others cannot be sent to another process."""
        name, _, kinds, expected, bounds, part = self
        kind = value.__class__
        if kind not in kinds:
            if kind is bool or not issubclass(kind, kinds):  # True is no number
                raise TypeError(f"{name}{part} must be {expected}, got {value!r}")
            if kinds in (_INTEGER, _REAL):
                value = int(value) if kinds is _INTEGER else float(value)
        if bounds is not None and not bounds[0] <= value <= bounds[1]:  # also false for NaN
            message = f"{name}{part} must be between {bounds[0]} and {bounds[1]}, got {value}"
            raise FieldError(name, message)
        return value


_INTEGER = (int, Integral)  # numpy's, too
_REAL = (float, int, Real)
_BIASES = (-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
_DEFAULTS: dict[str, Any] = dict(
    zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True)
)
_RULES = tuple(
    _Rule(name, _DEFAULTS[name], *rest)
    for name, *rest in (
        ("n", _INTEGER, "an integer", (1, MAX_SEQUENCES)),
        ("temperature", _REAL, "a number", (0.0, 2.0)),
        ("beam_width", _INTEGER, "an integer", (0, MAX_SEQUENCES)),
        ("length_penalty", _REAL, "a number", (-5.0, 5.0)),
        ("top_p", _REAL, "a number", (0.0, 1.0)),
        ("top_k", _INTEGER, "an integer", (0, 1 << 20)),
        ("min_p", _REAL, "a number", (0.0, 1.0)),
        ("repetition_penalty", _REAL, "a number", (MIN_REPETITION_PENALTY, 10.0)),
        ("presence_penalty", _REAL, "a number", (-2.0, 2.0)),
        ("frequency_penalty", _REAL, "a number", (-2.0, 2.0)),
        ("min_tokens", _INTEGER, "an integer", (0, 1 << 24)),
        ("max_tokens", _INTEGER, "an integer", (1, 1 << 24)),
        ("seed", _INTEGER, "an integer or None", (-(1 << 63), (1 << 63) - 1)),
        ("logprobs", _INTEGER, "an integer or None", (0, MAX_LOGPROBS)),
        ("prompt_logprobs", _INTEGER, "an integer or None", (0, MAX_LOGPROBS)),
        ("logit_bias", (dict,), "a dict of token ids and numbers"),
        ("ignore_eos", (bool,), "True or False"),
        ("stop_token_ids", (tuple, list, set, frozenset), "a tuple of token ids"),
        ("early_stopping", (bool, str), "True, False or 'never'"),
        ("grammar", (str,), "a string"),
    )
)
_STOP_TOKEN = _Rule("stop_token_ids", None, _INTEGER, "integers")
_BIASED_TOKEN = _Rule("the keys of logit_bias", None, _INTEGER, "token ids, integers")
_VALUES = attrgetter(*(rule.name for rule in _RULES))


class PoolingParams(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens a prompt's vector is not of, and what becomes of it, in this order."""

    dimensions: int | None = None  # so many of its first numbers; None: all
    normalize: bool = False  # to length 1
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    unpooled: int = 0  # tokens at the prompt's beginning that are computed, but no part of its vector


_GREEDY = SamplingParams(temperature=0.0)
_NOT_WITH_BEAMS = (  # fields that must be as those of _GREEDY
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "grammar"),
)
POOLED = SamplingParams(temperature=0.0, max_tokens=1)  # of a request for a vector: nothing is sampled


class Request(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """One group of `params.num_sequences` sequences over one prompt. `id` is never used again.

    Its samples are settled here, by a seed that is drawn if none was given: preemption, and the process that
    it is sent to, change none of its tokens.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    arrival: float = 0.0  # time.monotonic() at the front end, seconds
    cache_salt: str = ""  # prompts share cached blocks only with those of the same salt
    owner: str = ""  # what the salts of its owner begin with, who may be told what these have cached
    pooling: PoolingParams | None = None  # ends with a vector, and no token; its params are POOLED

    @property
    def max_new_tokens(self) -> int:
        """Return the most tokens that come behind the prompt."""
        return self.params.max_tokens if self.pooling is None else 0

    def __post_init__(self) -> None:
        params = self.params
        if params.seed is None and params.temperature:
            drawn = msgspec.structs.replace(params, seed=secrets.randbits(63))
            msgspec.structs.force_setattr(self, "params", drawn)


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Forget request `id`. Its blocks are back within two steps; no further output of it is sent."""

    id: int


class EndSample(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Sample `index` of request `id` is whole, as by a stop string: no further token of it is wanted."""

    id: int
    index: int


class Drain(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """No more requests are going to come: routers should send theirs elsewhere."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token, and the best candidates at its position, best first."""

    token: int
    logprob: float
    rank: int  # 1 is the most likely token
    top_tokens: list[int] = []
    top_logprobs: list[float] = []


class Output(msgspec.Struct, array_like=True):
    """The addition of one step to one sequence of a request."""

    request_id: int
    index: int  # which of the request's n sequences
    tokens: list[int]  # new token ids, a stopping eos included
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the eos or stop_token_ids member that ended it
    logprobs: list[TokenLogprob] | None = None  # one per token, if asked for
    prompt_logprobs: list[TokenLogprob | None] | None = None  # with the first output; None for token 0
    cached_tokens: int = 0  # prompt tokens served from the prefix cache; with the first output
    cached_host_tokens: int = 0  # of those, from blocks in host memory
    queue_seconds: float | None = None  # arrival to first scheduling; with the first output
    cumulative_logprob: float | None = None  # of a beam, with all its tokens, when the search is over
    error: str | None = None  # with finish_reason "error"
    vector: bytes | None = None  # of a pooled prompt: float32


class StepOutputs(msgspec.Struct, array_like=True):
    """The outputs of one step: one token each for many sequences, as columns, and all that is more."""

    request_ids: list[int] = []
    indices: list[int] = []
    tokens: list[int] = []
    others: list[Output] = []

    def __iter__(self) -> Iterator[Output]:
        for request_id, index, token in zip(self.request_ids, self.indices, self.tokens, strict=True):
            yield Output(request_id, index, [token])
        yield from self.others
