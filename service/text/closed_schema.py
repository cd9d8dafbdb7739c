"""Objects that name their properties have no others, where a schema does not say whether they may.

By JSON Schema's standard they may have any. But who writes a schema of properties, or has Pydantic write it,
wants these, and a small model goes on and on with others. XGrammar, which vLLM uses, and llama.cpp read
schemas so, too.
"""

from __future__ import annotations

from typing import Any

from quire.service.text.schema_keywords import rewritten, within

# What else may be of an object is said elsewhere than beside its properties, where these are.
_COMBINING = frozenset(
    ("not", "if", "then", "else", "dependentSchemas", "dependencies", "unevaluatedProperties")
) | {"$dynamicRef", "$recursiveRef"}
_BESIDE = frozenset(("allOf", "anyOf", "oneOf", "$ref"))  # of one object with what they stand beside
_OPEN = frozenset(("additionalProperties", "patternProperties", "propertyNames", "minProperties"))
_OF_OBJECTS = _OPEN | {"properties", "required"}


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with additionalProperties false where it says nothing of others than `properties`.

    As it is, if it combines schemas of one object: there none knows of all properties.
    """
    if any(_combines(each) for each in within(schema)):
        return schema
    return rewritten(schema, _closed)


def _combines(schema: dict[str, Any]) -> bool:
    """Tell whether other schemas say something of the same object."""
    beside, all_of = _BESIDE.intersection(schema), schema.get("allOf", [])
    several = len(beside) > 1 or not isinstance(all_of, list) or len(all_of) > 1
    of_it = bool(beside) and not _OF_OBJECTS.isdisjoint(schema)
    return several or of_it or not _COMBINING.isdisjoint(schema)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {"additionalProperties": False} if _names_its_properties(schema) else schema


def _names_its_properties(schema: dict[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    return (
        isinstance(properties, dict)
        and bool(properties)
        and _OPEN.isdisjoint(schema)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
    )
