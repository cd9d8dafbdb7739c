"""The refusals of SamplingParams, by name; and the seed of a request that has none."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.engine.messages import Request, SamplingParams

NUMBERS = (
    *("n", "temperature", "beam_width", "length_penalty", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "min_tokens", "max_tokens", "seed", "logprobs"),
    "prompt_logprobs",
)
OTHERS = {
    "logit_bias": ([1], 5, {"a": 1.0}, {1: "x"}, {1: None}, {1: True}),
    "ignore_eos": (1, "yes", None),
    "stop_token_ids": (5, "ab", (1, "two"), (1.0,), (True,)),
    "early_stopping": (1, None),
    "grammar": (5, None, b"x"),
}


def test_every_field_is_looked_at() -> None:
    assert {*NUMBERS, *OTHERS} == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["hot", [], True, math.nan, math.inf, -math.inf, 10**30, -(10**30), 1j])
def test_a_number_that_is_none_or_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{name} must be .*got ") as refused:
        SamplingParams(**{name: value})
    told = str(refused.value)
    assert repr(value) in told
    assert ("number" in told or "integer" in told) == isinstance(refused.value, TypeError)


@pytest.mark.parametrize(("name", "value"), [(name, each) for name, all_ in OTHERS.items() for each in all_])
def test_what_is_of_another_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"{name}.* must be .*, got "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("bias", [math.nan, math.inf, -math.inf, 1e300])
def test_a_bias_that_no_logit_bears_is_refused(bias: float) -> None:
    with pytest.raises(
        ValueError, match=rf"logit_bias of token 7 must be between .*, got {re.escape(str(bias))}"
    ):
        SamplingParams(logit_bias={3: 1.0, 7: bias})


def test_early_stopping_is_one_of_three() -> None:
    with pytest.raises(ValueError, match="early_stopping must be True, False or 'never', got 'now'"):
        SamplingParams(early_stopping="now")  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    """They can be sent to another process, as Python's own can."""
    params = SamplingParams(
        max_tokens=np.int64(3),
        temperature=np.float32(0.5),
        top_p=np.float64(0.5),
        logit_bias={np.int64(7): np.float32(2)},
        stop_token_ids=(np.int32(4),),
    )
    plain = SamplingParams(max_tokens=3, temperature=0.5, top_p=0.5, logit_bias={7: 2.0}, stop_token_ids=(4,))
    assert msgspec.msgpack.encode(params) == msgspec.msgpack.encode(plain)


def test_each_request_draws_a_seed_where_none_was_given() -> None:
    params = SamplingParams()
    first, second = Request(0, [1], params), Request(1, [1], params)
    assert params.seed is None and first.params.seed is not None
    assert first.params.seed != second.params.seed
    assert msgspec.structs.replace(first.params, seed=None) == params
    given = SamplingParams(seed=0)
    assert Request(2, [1], given).params is given


def test_a_drawn_seed_goes_over_the_seam() -> None:
    request = Request(0, [1], SamplingParams(max_tokens=3))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request


def test_greedy_requests_draw_none() -> None:
    greedy = SamplingParams(temperature=0)
    assert Request(0, [1], greedy).params is greedy
