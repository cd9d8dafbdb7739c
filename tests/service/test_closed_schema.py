"""Objects that name their properties have no others, where nothing says that they may."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from quire.service.text.closed_schema import closed
from quire.service.text.structured import json_grammar
from quire.service.text.tokenizer import Tokenizer
from tests.service import tiny_tokenizers
from tests.service.grammar_texts import accepts_grammar

TEXT = {"type": "string"}
OPEN = {"type": "object", "properties": {"a": TEXT}}
CLOSED = OPEN | {"additionalProperties": False}


class City(BaseModel):
    name: str
    river: str | None = None


class Trip(BaseModel):
    cities: list[City]
    by: Literal["train", "foot"]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, CLOSED),
        (OPEN | {"required": ["a"]}, CLOSED | {"required": ["a"]}),
        ({"type": "array", "items": OPEN}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$ref": "#/$defs/x", "$defs": {"x": OPEN}}, {"$ref": "#/$defs/x", "$defs": {"x": CLOSED}}),
        # As Pydantic's first version writes a property with a description.
        ({"allOf": [OPEN], "description": "x"}, {"allOf": [CLOSED], "description": "x"}),
        # Names and values are no keywords.
        (
            {"type": "object", "properties": {"properties": OPEN, "not": TEXT}},
            {
                "type": "object",
                "properties": {"properties": CLOSED, "not": TEXT},
                "additionalProperties": False,
            },
        ),
        ({"const": OPEN}, {"const": OPEN}),
        ({"enum": [OPEN]}, {"enum": [OPEN]}),
    ],
    ids=str,
)
def test_objects_that_name_their_properties_are_closed(
    schema: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {}},
        OPEN | {"additionalProperties": True},
        OPEN | {"additionalProperties": TEXT},
        OPEN | {"patternProperties": {"^x": TEXT}},
        OPEN | {"required": ["b"]},  # which is there, whatever it is
        OPEN | {"minProperties": 2},
    ],
    ids=str,
)
def test_objects_that_say_what_else_they_have_stay_open(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [OPEN, {"type": "object", "properties": {"b": TEXT}}]},
        OPEN | {"anyOf": [{"required": ["a"]}, {"properties": {"b": TEXT}}]},
        OPEN | {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"b": TEXT}}}},
        {"anyOf": [OPEN], "oneOf": [{"properties": {"b": TEXT}}]},
        {"anyOf": [OPEN], "required": ["b"]},
        OPEN | {"if": {"required": ["a"]}, "then": {"properties": {"b": TEXT}}},
        {"type": "array", "items": OPEN | {"not": {"required": ["b"]}}},
        OPEN | {"dependentSchemas": {"a": {"properties": {"b": TEXT}}}},
    ],
    ids=str,
)
def test_a_schema_that_combines_several_of_one_object_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert closed(schema) is schema


NAMES = st.sampled_from("abc")
SCHEMAS: st.SearchStrategy[dict[str, Any]] = st.recursive(
    st.sampled_from([TEXT, {"type": "null"}, {}, {"type": "object"}]),
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(NAMES, inner, max_size=2)},
            optional={"required": st.lists(NAMES, max_size=1), "additionalProperties": inner},
        ),
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)}),
    ),
    max_leaves=5,
)
DOCUMENTS = st.recursive(
    st.sampled_from(["x", None, 1]),
    lambda inner: st.one_of(st.dictionaries(NAMES, inner, max_size=2), st.lists(inner, max_size=2)),
    max_leaves=4,
)


@given(SCHEMAS, DOCUMENTS)
def test_what_is_closed_allows_nothing_that_the_schema_does_not(
    schema: dict[str, Any], document: Any
) -> None:
    if jsonschema.Draft202012Validator(closed(schema)).is_valid(document):
        jsonschema.Draft202012Validator(schema).validate(document)


def test_a_model_of_pydantics_is_written_with_its_own_fields_alone() -> None:
    tokenizer = Tokenizer(tiny_tokenizers.byte_level())
    grammar = json_grammar(Trip.model_json_schema())
    trip = {"cities": [{"name": "x", "river": None}], "by": "foot"}
    assert accepts_grammar(tokenizer, grammar, json.dumps(trip))
    more = {"cities": [{"name": "x", "lake": "y"}], "by": "foot"}
    assert not accepts_grammar(tokenizer, grammar, json.dumps(more))
    assert not accepts_grammar(tokenizer, grammar, json.dumps(trip | {"why": "x"}))
