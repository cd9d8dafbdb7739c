"""What the model's folder says of sampling, where a request says nothing."""

from __future__ import annotations

from msgspec import structs

from quire.engine.messages import SamplingParams
from quire.engine.models.generation_config import SamplingDefaults


def with_defaults(body: object, params: SamplingParams, defaults: SamplingDefaults) -> SamplingParams:
    """Return params with the folder's values for the fields that the request left out or null.

    Beam search has none: by transformers' own rule its beams are not sampled.
    """
    if params.beam_width:
        return params
    left_out = {name: value for name, value in defaults.said.items() if getattr(body, name, None) is None}
    if "logit_bias" in left_out:
        left_out["logit_bias"] = (
            left_out["logit_bias"] | params.logit_bias
        )  # what other fields of the request ban
    return structs.replace(params, **left_out) if left_out else params
