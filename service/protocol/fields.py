"""Types of fields that several requests have, and their limits."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from engine.request import MAX_LOGPROBS

MAX_TOKEN_ID = (1 << 31) - 1
MAX_TOKENS = 1 << 24
MAX_PROMPT_TOKENS = 1 << 20
MAX_TEXT = 4 << 20

TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
ModelName = Annotated[str, Meta(max_length=256)]
