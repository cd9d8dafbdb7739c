"""What a command line, an environment or a configuration may not say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(ValueError):
    """Says what was given, by its own name, and what may be. The command exits with 2."""


@contextmanager
def of_flags() -> Iterator[None]:
    """Have it be a UsageError what values of flags may not be, which those who take them tell of."""
    try:
        yield
    except ValueError as error:
        raise error if isinstance(error, UsageError) else UsageError(str(error)) from error
