"""What is wrong with a grammar, told in the words of the schema that it was made of."""

from __future__ import annotations

import re
from collections.abc import Callable

_OF_SCHEMA = "failed to compile JSON schema: "
_QUOTED = re.compile(r" \d+ \| \w+(\[\w+\])?: .*")  # the lines of the grammar that llguidance shows
_NO_TEXT = "NoExtensionBias"  # nothing can come next, and the text has not ended

_REASONS: tuple[tuple[str, Callable[[str], str]], ...] = (
    (r"Unimplemented keys: \[(.*)\]", lambda keys: f"it has {keys}, which cannot be enforced: leave it out"),
    (
        r"oneOf constraints are not supported()",
        lambda _: (
            "it has a oneOf of which more than one alternative may fit: make it anyOf, or give each "
            "alternative a required property with a const of its own"
        ),
    ),
    (
        r"Pointer '(.*)' does not exist",
        lambda place: f"a $ref names '#{place}', which it does not have: add that, or name what it has",
    ),
    (
        r"Resource '(.*)' is not present",
        lambda url: f"it refers to '{url}', and nothing is fetched: put what is needed into its $defs",
    ),
    (
        r"Invalid type: (.*)",
        lambda name: (
            f"it has the type '{name}', which must be string, number, integer, boolean, object, array or null"
        ),
    ),
    (
        r"Unsatisfiable schema: Regex is empty()",
        lambda _: "pattern, format and lengths of a text exclude each other: leave one of them out",
    ),
    (
        r"Unsatisfiable schema: (.*)",
        lambda why: f"nothing fits it ({why}): change it so that something does",
    ),
    (
        r"regex parse error: (.*)",
        lambda why: f"a pattern must have the syntax of Rust's regex, without lookaround: {why}",
    ),
)


def in_own_words(error: str) -> str:
    """Return llguidance's message about a schema as what was refused and what to do; others as they are."""
    if error == _NO_TEXT:
        return "no text fits it, as where a $ref refers only to itself: change it so that one does"
    _, found, reason = error.partition(_OF_SCHEMA)
    if not found:
        return error
    reason = _QUOTED.sub("", reason)
    for form, told in _REASONS:
        match = re.match(form, reason)
        if match is not None:
            return f"the schema is refused: {told(match.group(1))}"
    return f"the schema is refused: {reason}"
