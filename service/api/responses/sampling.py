"""How a response is sampled: the fields that chat has, too, but for those of several answers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from quire.engine.messages import SamplingParams
from quire.service.api.requests.token_sampling import TokenSampling
from quire.service.json_fields import LogprobCount

LOGPROBS = "message.output_text.logprobs"

_TOP_LOGPROBS = "Each token of the text comes with its log-probability, and with those of so many candidates"
_INCLUDE = f"{LOGPROBS}: as top_logprobs. What else OpenAI has there is without effect here"


class ResponseSampling(TokenSampling, kw_only=True, forbid_unknown_fields=True):
    top_logprobs: Annotated[LogprobCount, Meta(description=_TOP_LOGPROBS)] | None = None
    include: (
        Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=32, description=_INCLUDE)]
        | None
    ) = None

    @property
    def logprobs(self) -> int | None:
        """Return how many candidates come with each token; None: no log-probabilities do."""
        asked = LOGPROBS in (self.include or ())
        return self.top_logprobs or (0 if asked else None)

    def sampling_params(self, max_tokens: int, grammar: str = "") -> SamplingParams:
        """Return what the engine is asked, with a seed drawn if none was given. Raises FieldError."""
        return SamplingParams(
            max_tokens=max_tokens, logprobs=self.logprobs, grammar=grammar, **self.drawing()
        )
