"""The bodies of POST /v1/embeddings, /v1/rerank and /v1/score."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quire.engine.errors import FieldError
from quire.service.api.requests.completions import PromptItem, check_prompts, check_special, each_prompt
from quire.service.json_fields import MAX_PROMPT_TOKENS, ModelName, Priority, Text, check_priority

MAX_INPUTS = 2048  # as OpenAI has it
MAX_DIMENSIONS = 1 << 16

_SPECIAL = "Whether the tokenizer adds its special tokens, as it does if this is left out"
_TRUNCATE = "Of a longer text only so many last tokens are taken; -1: as many as the model takes"
_CACHE_SALT = "Cached blocks are shared only with requests of the same salt, and never between API keys"
_DIMENSIONS = (
    "Only so many first numbers, of length 1 again. For models that were trained for it (is_matryoshka, or "
    "matryoshka_dimensions, in config.json)"
)
_NORMALIZE = "Whether the vector is scaled to length 1; left out, as the model's folder says"
_ACTIVATION = "Whether the head's number goes through the model's activation (true if left out)"
_PROBABILITIES = (
    "Whether numbers become probabilities, which are all labels' together if there are several (true if left "
    "out)"
)
_TOP_N = "Only so many best documents; left out, all"

Texts = Annotated[list[Text], Meta(min_length=1, max_length=MAX_INPUTS)]
Dimensions = Annotated[int, Meta(ge=1, le=MAX_DIMENSIONS, description=_DIMENSIONS)]


class PoolingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that all of them share."""

    model: ModelName | None = None
    add_special_tokens: Annotated[bool, Meta(description=_SPECIAL)] | None = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, le=MAX_PROMPT_TOKENS, description=_TRUNCATE)] | None
    ) = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256, description=_CACHE_SALT)] | None = None

    priority: Priority | None = None

    def __post_init__(self) -> None:
        check_priority(self.priority)
        if self.truncate_prompt_tokens == 0:
            raise FieldError(
                "truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1, got 0"
            )


class EmbeddingRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    input: Text | Annotated[list[PromptItem], Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    normalize: Annotated[bool, Meta(description=_NORMALIZE)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_prompts("input", self.input, MAX_INPUTS, "texts")
        check_special("input", self.input, self.add_special_tokens)

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        return each_prompt(self.input)


class ClassifyRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    input: Text | Texts
    use_activation: Annotated[bool, Meta(description=_PROBABILITIES)] | None = None

    @property
    def inputs(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input


class Document(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    text: Text


class RerankRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    query: Text
    documents: Annotated[list[Text | Document], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Meta(ge=0, le=1 << 31, description=_TOP_N)] | None = None
    return_documents: Annotated[bool, Meta(description="true if left out")] | None = None
    use_activation: Annotated[bool, Meta(description=_ACTIVATION)] | None = None

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]

    @property
    def names(self) -> list[tuple[str, str]]:
        """Name what is compared: the query with each document."""
        return [("query", f"documents[{i}]") for i in range(len(self.documents))]


class ScoreRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """One text with each of several, or two lists pair by pair."""

    text_1: Text | Texts
    text_2: Text | Texts
    use_activation: Annotated[bool, Meta(description=_ACTIVATION)] | None = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Raises FieldError."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise FieldError(
                "text_2",
                f"text_1 holds {len(first)} texts and text_2 {len(second)}: give one text_1 for all, or as "
                "many as text_2 has",
            )
        return list(zip(first, second, strict=True))

    @property
    def names(self) -> list[tuple[str, str]]:
        """Name both texts of each pair."""
        first, second = _names("text_1", self.text_1), _names("text_2", self.text_2)
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


def _names(field: str, texts: str | list[str]) -> list[str]:
    return [field] if isinstance(texts, str) else [f"{field}[{i}]" for i in range(len(texts))]
