"""SamplingParams as users of LLM and AsyncLLM give them: the engine's, and what shapes or ends the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.engine import messages
from quire.engine.errors import FieldError
from quire.service.text.structured import choice_grammar, json_grammar, regex_grammar


class SamplingParams(messages.SamplingParams, frozen=True, kw_only=True, omit_defaults=True):
    """The parameters by which a request's tokens are chosen, with the names that requests over HTTP have.

    Processing order: logit bias, penalties, temperature, min-p, top-k, top-p. Temperature 0 is greedy.
    A text ends before the first of the strings `stop`. One of guided_json (a JSON Schema), guided_regex and
    guided_choice says what it must be. `n` samples share their prompt's blocks; `beam_width` beams are
    searched with temperature 0, of which the best n come back. Without a `seed` each prompt draws its own.
    Raises ValueError that names the field, or TypeError for a value of another type.
    """

    stop: str | Sequence[str] = ()
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Sequence[str] | None = None

    def __post_init__(self) -> None:
        forms = [name for name in _GRAMMARS if getattr(self, name) is not None]
        if len(forms) > 1:
            raise FieldError(forms[1], f"{forms[1]} may not be given together with {forms[0]}")
        if forms:
            grammar = _grammar(forms[0], getattr(self, forms[0]))
            if self.grammar not in ("", grammar):
                raise FieldError("grammar", f"grammar may not be given together with {forms[0]}")
            msgspec.structs.force_setattr(self, "grammar", grammar)
        super().__post_init__()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def for_engine(self) -> messages.SamplingParams:
        """Return the engine's own part, which knows token ids only."""
        names = messages.SamplingParams.__struct_fields__
        return messages.SamplingParams(**{name: getattr(self, name) for name in names})


def _json(schema: object) -> str:
    if isinstance(schema, str):
        schema = msgspec.json.decode(schema, type=dict[str, Any])
    if not isinstance(schema, dict):
        raise TypeError(f"guided_json must be a dict or a string, got {schema!r}")
    return json_grammar(schema)


def _regex(regex: object) -> str:
    if not isinstance(regex, str):
        raise TypeError(f"guided_regex must be a string, got {regex!r}")
    return regex_grammar(regex)


def _choice(choices: object) -> str:
    """Return the grammar of a list's texts; a text alone would be a list of its letters."""
    if isinstance(choices, str) or not isinstance(choices, Sequence):
        raise TypeError(f"guided_choice must be a list of strings, got {choices!r}")
    other = [choice for choice in choices if not isinstance(choice, str)]
    if other:
        raise TypeError(f"guided_choice must be a list of strings, got {other[0]!r} in it")
    if not choices:
        raise ValueError("there must be a text to choose")
    return choice_grammar(list(choices))


_GRAMMARS: dict[str, Callable[[object], str]] = {
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
}


def _grammar(name: str, value: object) -> str:
    try:
        return _GRAMMARS[name](value)
    except (ValueError, RecursionError) as error:
        raise FieldError(name, f"{name} is nothing that can be followed: {error}") from None
