"""What the model's folder says of sampling, where a request says nothing."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from quire.engine.errors import FieldError
from quire.engine.messages import SamplingParams
from quire.engine.models.generation_config import SamplingDefaults

_NOT_OF_BEAMS: tuple[tuple[str, object, str], ...] = (  # a field, what switches it off, what the file does
    ("repetition_penalty", 1.0, "has one"),
    ("logit_bias", {}, "suppresses tokens"),
)


def with_defaults(body: object, params: SamplingParams, defaults: SamplingDefaults) -> SamplingParams:
    """Return params with the folder's values for the fields that the request left out or null.

    Beam search has none of how tokens are drawn: by transformers' own rule its beams are not sampled. What
    the folder has besides, that beams would have there, is refused. Raises FieldError.
    """
    left_out = {name: value for name, value in defaults.said.items() if getattr(body, name, None) is None}
    if params.beam_width:
        _refuse_beside_beams(left_out)
        return params
    if "logit_bias" in left_out:
        left_out["logit_bias"] = (
            left_out["logit_bias"] | params.logit_bias
        )  # what other fields of the request ban
    return structs.replace(params, **left_out) if left_out else params


def _refuse_beside_beams(left_out: dict[str, Any]) -> None:
    """Raise FieldError for a default that transformers' beams have and these do not."""
    for name, off, what in _NOT_OF_BEAMS:
        if left_out.get(name, off) != off:
            raise FieldError(
                name,
                f"{name} is left out, and the model's generation_config.json {what}, which beam search here "
                f"does not do: give {name} {off} to go without it, or start with --generation-config vllm",
            )
