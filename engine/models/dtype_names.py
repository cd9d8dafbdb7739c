"""Names of dtypes as configurations have them, some of which transformers itself does not read any more."""

from __future__ import annotations

from typing import Any

FIELDS = ("dtype", "torch_dtype")  # the newer one counts
_NOT_SAID = "auto"


def usual_name(value: Any) -> Any:
    """Return a name as torch's modules have it, without "torch."; None of "auto". All else is as it was."""
    if not isinstance(value, str):
        return value
    return None if value == _NOT_SAID else value.removeprefix("torch.")


def with_usual_names(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration, and the parts that it has, with such names alone."""
    named: dict[str, Any] = {}
    for field, value in raw.items():
        if field in FIELDS:
            named[field] = usual_name(value)
        else:
            named[field] = with_usual_names(value) if isinstance(value, dict) else value
    return named
