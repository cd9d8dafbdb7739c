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
        check_prompts("prompt", self.prompt, MAX_PROMPTS, "prompts")
        check_special("prompt", self.prompt, self.add_special_tokens)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        return each_prompt(self.prompt)


def check_prompts(name: str, given: str | list[PromptItem], most: int, what: str) -> None:
    """Raise FieldError if the field `name` has items of several kinds, or more than `most` prompts."""
    if isinstance(given, str):
        return
    if len(set(map(type, given))) > 1:
        raise FieldError(name, f"{name} must hold only strings, only token ids, or only lists of token ids")
    if not isinstance(given[0], int) and len(given) > most:
        raise FieldError(name, f"{name} may hold at most {most} {what}, got {len(given)}")


def check_special(name: str, given: str | list[PromptItem], add_special_tokens: bool | None) -> None:
    """Raise FieldError if special tokens are to be added to token ids: only a text gets them."""
    if add_special_tokens and not isinstance(given, str) and not isinstance(given[0], str):
        raise FieldError(
            "add_special_tokens",
            f"add_special_tokens may not be true where {name} is token ids, which are taken as they are: put "
            "special tokens among them",
        )


def each_prompt(given: str | list[PromptItem]) -> list[str] | list[list[int]]:
    """Return the prompts of a field that was checked."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):  # as all of them
        return [cast(list[int], given)]
    return cast("list[str] | list[list[int]]", given)
