"""Refusals and failures that callers tell apart by type."""

from __future__ import annotations


class FieldError(ValueError):
    """A request cannot be served because of one of its fields.

    field: its name, or its path in the request's JSON. code: the kind of the error, in the API's words.
    """

    def __init__(self, field: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class EngineDeadError(RuntimeError):
    """The engine is not running (any more)."""
