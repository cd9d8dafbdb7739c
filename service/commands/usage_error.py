"""What a command line, an environment or a configuration may not say."""

from __future__ import annotations


class UsageError(ValueError):
    """Says what was given, by its own name, and what may be. The command exits with 2."""
