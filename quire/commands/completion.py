"""`quire completion`: the script by which a shell completes commands and flags."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from quire.service.commands.parser import Flag, Parser
from quire.service.commands.usage_error import UsageError

SHELLS = ("bash", "zsh", "fish")


def add_flags(parser: Parser) -> None:
    parser.add(
        Flag(
            name="shell",
            dest="shell",
            choices=SHELLS,
            metavar="SHELL",
            help="bash, zsh or fish. Default: the one of $SHELL.",
        )
    )


def run(arguments: Namespace) -> int:
    """Print it."""
    from quire.shell_completion import script

    shell = arguments.shell or Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        raise UsageError(f"there is no completion for {shell or 'no shell'}: give one of {', '.join(SHELLS)}")
    print(script(shell), end="")
    return 0
