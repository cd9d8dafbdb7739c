"""Types of fields that several requests have, and their limits."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from quire.engine.errors import FieldError
from quire.engine.messages import MAX_LOGPROBS

MAX_TOKEN_ID = (1 << 31) - 1
MAX_TOKENS = 1 << 24
MAX_PROMPT_TOKENS = 1 << 20
MAX_TEXT = 4 << 20
MAX_REPLY_LOGPROBS = 1 << 18  # of an answer that is sent at once
MAX_ECHOED_LOGPROBS = 1 << 14  # of prompts that are echoed into a stream, whose first chunks have them all

_LOGPROB_COUNT = (
    f"An answer that is not streamed carries at most {MAX_REPLY_LOGPROBS} log-probabilities: of all choices "
    "each token's own and its candidates', for as many tokens as there may be. A chat without max_tokens is "
    f"as long as they allow. Prompts that are echoed into a stream have at most {MAX_ECHOED_LOGPROBS}"
)

_PRIORITY = "Requests are served first come, first served, so that all have the same priority"

TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS, description=_LOGPROB_COUNT)]
ModelName = Annotated[str, Meta(max_length=256)]
Priority = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": 0}, description=_PRIORITY)]


def check_priority(priority: int | None) -> None:
    """Raises FieldError."""
    if priority:
        message = "priority is not supported here: requests are served first come, first served; leave it out"
        raise FieldError("priority", message, "unsupported_field")
