"""The fields by which completions and chat say what the text must be: vLLM's. Each becomes a grammar."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.engine.errors import FieldError
from quire.service.api.requests.token_sampling import TokenSampling
from quire.service.json_fields import TokenId
from quire.service.text.structured import (
    MAX_SCHEMA_BYTES,
    Choices,
    Form,
    Regex,
    Schema,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
)

_GRAMMAR = "In the Lark that llguidance takes, with %json for schemas"
_BAD_WORDS = "Texts that do not come up in the answer, not even within a word"
_ALLOWED = "Only these tokens are sampled; the answer ends early only if an eos token is one of them"

SchemaText = Annotated[str, Meta(max_length=MAX_SCHEMA_BYTES, description="A schema as JSON text")]
Grammar = Annotated[str, Meta(min_length=1, max_length=MAX_SCHEMA_BYTES, description=_GRAMMAR)]
BadWord = Annotated[str, Meta(min_length=1, max_length=256)]

_FIELDS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "structured_outputs",
    "bad_words",
    "allowed_token_ids",
)
UNWRAPPED = ("bad_words", "allowed_token_ids")  # of all that the model says, its thinking too


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the text must be: one of these."""

    json: Schema | SchemaText | None = None
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name in self.__struct_fields__ if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            words = " and ".join(given) or "none"
            raise FieldError(
                "structured_outputs",
                f"structured_outputs must have one of {', '.join(self.__struct_fields__)}, got {words}",
            )

    def grammar_text(self) -> str:
        """Raises ValueError."""
        if self.regex is not None:
            return regex_grammar(self.regex)
        if self.choice is not None:
            return choice_grammar(self.choice)
        if self.grammar is not None:
            return lark_grammar(self.grammar)
        return json_grammar({"type": "object"} if self.json is None else _schema_of(self.json))


class FormFields(TokenSampling, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn, and of which texts. It has but one base, as msgspec asks."""

    guided_json: Schema | SchemaText | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    structured_outputs: StructuredOutputs | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=256, description=_BAD_WORDS)] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, max_length=1 << 16, description=_ALLOWED)] | None
    ) = None

    @property
    def form_fields(self) -> list[str]:
        """Return the fields that say what the text must be."""
        return self._own_form_fields

    @property
    def _own_form_fields(self) -> list[str]:
        return [name for name in _FIELDS if getattr(self, name) not in (None, [])]

    def form(self) -> Form | None:
        """Return what the text must be. Raises FieldError."""
        field = next(iter(self._own_form_fields), None)
        if field is None:
            return None
        try:
            return Form(field, self._grammar(field))
        except (ValueError, RecursionError) as error:
            raise FieldError(field, f"{field} cannot be followed: {error}") from None

    def _grammar(self, field: str) -> str:
        value: Any = getattr(self, field)
        match field:
            case "guided_regex":
                return regex_grammar(value)
            case "guided_choice":
                return choice_grammar(value)
            case "structured_outputs":
                return value.grammar_text()
            case "bad_words":
                return _without(value)
            case "allowed_token_ids":
                return _only(value)
            case _:
                return json_grammar(_schema_of(value))


def _schema_of(given: dict[str, Any] | str) -> dict[str, Any]:
    """Raises ValueError."""
    return msgspec.json.decode(given, type=dict[str, Any]) if isinstance(given, str) else given


def _without(words: list[str]) -> str:
    """Return the grammar of any text but one in which a word comes up."""
    anyhow = r"(.|\n)*"
    either = "|".join(_escaped(word) for word in dict.fromkeys(words))
    return lark_grammar(f"start: TEXT\nTEXT: /{anyhow}/ & ~/{anyhow}({either}){anyhow}/")


def _escaped(word: str) -> str:
    """Write it as an expression between slashes on one line."""
    special = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "/": r"\/"}
    return "".join(special.get(each) or re.sub(r"([\\.+*?()|\[\]{}^$#&~-])", r"\\\1", each) for each in word)


def _only(tokens: list[int]) -> str:
    """Return the grammar of any text of these tokens."""
    runs = []
    for _, run in groupby(enumerate(sorted(set(tokens))), key=lambda pair: pair[1] - pair[0]):
        members = [token for _, token in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return lark_grammar(f"start: (<[{','.join(runs)}]>)*")
