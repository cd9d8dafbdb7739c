"""Typed reads from a JSON configuration; every refusal names file, field, value and what was expected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

Choice = TypeVar("Choice")
_MEND = "mend it, or download it again"


class Fields:
    """The fields of one JSON object; `where` begins every refusal."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def error(self, name: str, value: object, expected: str) -> ValueError:
        return ValueError(f"{self.where}: {name} is {value!r}; it must be {expected}")

    def has(self, name: str) -> bool:
        """Tell whether the field is there; null counts as left out."""
        return self.raw.get(name) is not None

    def size(self, name: str, default: int | None = None) -> int:
        """Return a positive integer; without a default it must be there."""
        value = self.raw[name] if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, value, "a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw[name] if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(name, value, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw[name] if self.has(name) else default
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def choice(self, name: str, default: Choice, choices: dict[str, Choice]) -> Choice:
        """Return what `choices` holds for the field's value."""
        if not self.has(name):
            return default
        value = self.raw[name]
        if not isinstance(value, str) or value not in choices:
            raise self.error(name, value, f"one of {', '.join(choices)}")
        return choices[value]

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return the ids of one, of a list of them, or of none."""
        value = self.raw.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
            raise self.error(name, value, "a token id or a list of them")
        return tuple(ids)

    def refuse_unless(self, name: str, *accepted: object) -> None:
        """Refuse a variation that we do not compute; a field that is not there is accepted."""
        if name in self.raw and self.raw[name] not in accepted:
            expected = " or ".join(json.dumps(value) for value in accepted)
            raise ValueError(
                f"{self.where}: {name} = {json.dumps(self.raw[name])} is not supported, only {expected}"
            )


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None where there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}; {_MEND}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}; {_MEND}")
    return value
