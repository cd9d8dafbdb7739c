"""A refusal names the field at fault and says whether it is one of length: nobody has to read its words."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.capacity import Capacity
from quire.engine.errors import FieldError
from quire.engine.messages import Request, SamplingParams

CAPACITY = Capacity(num_blocks=4, block_size=4, max_num_seqs=2, max_model_len=64, vocab_size=10)


@pytest.mark.parametrize(
    ("prompt", "params", "field", "code"),
    [
        ([], {}, "prompt", "invalid_value"),
        ([1, 10], {}, "prompt", "invalid_value"),
        ([1], {"stop_token_ids": (10,)}, "stop_token_ids", "invalid_value"),
        ([1], {"logit_bias": {10: 1.0}}, "logit_bias", "invalid_value"),
        ([1], {"logprobs": 11}, "logprobs", "invalid_value"),
        ([1], {"prompt_logprobs": 11}, "prompt_logprobs", "invalid_value"),
        ([1], {"n": 3}, "n", "invalid_value"),
        ([1], {"max_tokens": 64}, "prompt", "context_length_exceeded"),
        ([1], {"max_tokens": 17}, "prompt", "context_length_exceeded"),
    ],
)
def test_a_request_that_could_never_run(
    prompt: list[int], params: dict[str, Any], field: str, code: str
) -> None:
    with pytest.raises(FieldError) as caught:
        CAPACITY.check(Request(0, prompt, SamplingParams(**params)))
    assert (caught.value.field, caught.value.code) == (field, code)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": 3.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"grammar": "start: x", "ignore_eos": True}, "ignore_eos"),
        ({"n": 2, "beam_width": 1}, "n"),
        ({"beam_width": 2}, "temperature"),
    ],
)
def test_params_that_are_none(params: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        SamplingParams(**params)
    assert caught.value.field == field
