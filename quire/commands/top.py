"""`quire top`: a server's requests and blocks in this terminal."""

from __future__ import annotations

from argparse import Namespace

from quire.service.commands.flags import add_client_flags
from quire.service.commands.parser import Parser


def add_flags(parser: Parser) -> None:
    add_client_flags(parser)


def run(arguments: Namespace) -> int:
    """Show it until q is pressed."""
    from quire.service.commands.top import top

    return top(arguments.url, arguments.api_key)
