"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, cast

from msgspec import Meta

from quire.engine.errors import FieldError
from quire.service.api.requests.sampling import SamplingFields
from quire.service.json_fields import MAX_PROMPT_TOKENS, LogprobCount, Text, TokenId, TokenIds

MAX_PROMPTS = 1024

PromptItem = Text | TokenId | TokenIds


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    prompt: Text | Annotated[list[PromptItem], Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]
    echo: bool | None = None
    logprobs: LogprobCount | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.echo and self.truncate_prompt_tokens is not None:
            raise FieldError(
                "truncate_prompt_tokens", "truncate_prompt_tokens may not be given together with echo"
            )
        if isinstance(self.prompt, str):
            return
        if len(set(map(type, self.prompt))) > 1:
            raise FieldError(
                "prompt", "prompt must hold only strings, only token ids, or only lists of token ids"
            )
        if not isinstance(self.prompt[0], int) and len(self.prompt) > MAX_PROMPTS:
            raise FieldError(
                "prompt", f"prompt may hold at most {MAX_PROMPTS} prompts, got {len(self.prompt)}"
            )

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):  # as all of them
            return [cast(list[int], self.prompt)]
        return cast(list[str | list[int]], self.prompt)
