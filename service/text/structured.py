"""Forms that a text can be asked for: JSON, JSON of a schema, one of some texts, a match of an expression."""

from __future__ import annotations

import json
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from quire.engine.errors import FieldError
from quire.service.text.closed_schema import closed
from quire.service.text.schema_keywords import rewritten

MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 64

# One line, with a space after a comma or a colon if the model wants one: where it may put white space
# anywhere a small model does little else.
_JSON_OPTIONS: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,
}

# A format that is none of these says something about a text, as JSON Schema has it, and limits nothing.
_FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)

_SCHEMA = (
    f"A JSON Schema of at most {MAX_SCHEMA_BYTES} bytes and {MAX_SCHEMA_DEPTH} levels. It is always "
    "enforced: a keyword of JSON Schema that cannot be is refused. One that JSON Schema does not have, a "
    "misspelt one too, is ignored, as its standard says, and so is a format other than "
    f"{', '.join(sorted(_FORMATS))}. An object that names its properties has no others, unless "
    "additionalProperties allows them"
)
_NAME = "Your own label; it changes nothing"
_STRICT = "Every schema is enforced, so it changes nothing"

Schema = Annotated[dict[str, Any], Meta(description=_SCHEMA)]
SchemaName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$", description=_NAME)]
Strict = Annotated[bool, Meta(description=_STRICT)]
Regex = Annotated[
    str,
    Meta(
        max_length=8192, description="The whole text matches it; syntax of Rust's regex, without lookaround"
    ),
]
ChoiceText = Annotated[str, Meta(min_length=1, max_length=1024)]
Choices = Annotated[
    list[ChoiceText], Meta(min_length=1, max_length=1024, description="The text is one of these")
]


class TextFormat(msgspec.Struct, tag="text", tag_field="type", forbid_unknown_fields=True):
    """Anything."""


class JsonObjectFormat(msgspec.Struct, tag="json_object", tag_field="type", forbid_unknown_fields=True):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: SchemaName
    schema: Schema
    strict: Strict | None = None


class JsonSchemaFormat(
    msgspec.Struct, kw_only=True, tag="json_schema", tag_field="type", forbid_unknown_fields=True
):
    json_schema: NamedSchema


class FlatSchemaFormat(
    NamedSchema, kw_only=True, tag="json_schema", tag_field="type", forbid_unknown_fields=True
):
    """As the Responses API writes it."""


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat
FlatFormat = TextFormat | JsonObjectFormat | FlatSchemaFormat


class Form(NamedTuple):
    """The form of a text as a grammar in llguidance's words, and the field that asks for it."""

    field: str
    grammar: str


class Document(NamedTuple):
    """A JSON document that a text can be, by its schema, and the field that asks for it."""

    field: str
    schema: dict[str, Any]

    def form(self) -> Form:
        """Return what a text must be that is the document. Raises FieldError."""
        try:
            return Form(self.field, json_grammar(self.schema))
        except ValueError as error:
            raise FieldError(self.field, f"{self.field}: {error}") from None


def document_of(field: str, asked: ResponseFormat | FlatFormat | None) -> Document | None:
    """Return what is asked for, if it is JSON."""
    if asked is None or isinstance(asked, TextFormat):
        return None
    if isinstance(asked, JsonSchemaFormat):
        return Document(field, asked.json_schema.schema)
    return Document(field, asked.schema if isinstance(asked, FlatSchemaFormat) else {"type": "object"})


def json_grammar(schema: dict[str, Any]) -> str:
    """Raises ValueError if it is too large; whether it is a schema shows when the grammar is compiled."""
    check_size(schema)
    return lark_grammar(f"start: {json_rule(schema)}")


def json_rule(schema: dict[str, Any]) -> str:
    """Return a schema within a grammar of several rules."""
    enforced = closed(without_unknown_formats(schema))
    return "%json " + msgspec.json.encode({**enforced, "x-guidance": _JSON_OPTIONS}).decode()


def without_unknown_formats(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without the formats that limit nothing."""
    return rewritten(schema, _without_unknown_format)


def _without_unknown_format(schema: dict[str, Any]) -> dict[str, Any]:
    given = schema.get("format")
    if not isinstance(given, str) or given in _FORMATS:
        return schema
    return {key: value for key, value in schema.items() if key != "format"}


def check_size(schema: dict[str, Any]) -> None:
    """Raises ValueError, with the limit."""
    if _depth_exceeds(schema, MAX_SCHEMA_DEPTH):
        raise ValueError(f"the schema has more than {MAX_SCHEMA_DEPTH} levels")
    length = len(msgspec.json.encode(schema))
    if length > MAX_SCHEMA_BYTES:
        raise ValueError(f"the schema has {length} bytes, more than {MAX_SCHEMA_BYTES}")


def regex_grammar(regex: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(regex)


def choice_grammar(choices: list[str]) -> str:
    return lark_grammar("start: " + " | ".join(json.dumps(choice) for choice in choices))


def lark_grammar(rules: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(rules)


def _depth_exceeds(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        if not level:
            return False
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)
