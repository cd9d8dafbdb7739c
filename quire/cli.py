"""The `quire` command: read what was typed, run it, and let the last line say what was wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import quire
from quire.commands.table import find, overview
from quire.engine.logs import configure_logging, log_format
from quire.service.commands.usage_error import UsageError
from quire.service.errors import ServerFailed


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 when it did what it was for, 1 when it could not, 2 for a usage error."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "--help"
    try:
        if name in ("-h", "--help", "help"):
            print(overview(), end="")
            sys.exit(0 if words else 2)
        if name in ("-V", "--version"):
            print(f"quire {quire.__version__}")
            sys.exit(0)
        _run(name, words[1:])
    except KeyboardInterrupt:
        _end(f"\nquire {name}: interrupted", 130)


def _run(name: str, words: Sequence[str]) -> NoReturn:
    try:
        command = find(name)
    except UsageError as error:
        _end(f"quire: {error}", 2)
    try:
        arguments = command.parser().parse(words)
        configure_logging(getattr(arguments, "log_format", "text"), getattr(arguments, "log_level", "info"))
        sys.exit(command.run(arguments))
    except UsageError as error:
        _end(f"quire {name}: {error}", 2)
    except ServerFailed as error:
        sys.exit(1 if log_format() == "json" else f"quire {name}: {error}")  # the log has it as an object
    except ValueError as error:
        sys.exit(f"quire {name}: {error}")


def _end(words: str, code: int) -> NoReturn:
    print(words, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
