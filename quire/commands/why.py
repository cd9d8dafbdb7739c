"""`quire why`: where the time of a request went, and why."""

from __future__ import annotations

from argparse import Namespace

from quire.service.commands.flags import add_client_flags
from quire.service.commands.parser import Flag, Parser
from quire.service.commands.usage_error import UsageError


def add_flags(parser: Parser) -> None:
    parser.add(
        Flag(
            name="request_id",
            dest="request_id",
            metavar="ID",
            help="The X-Request-Id that came with its answer. Default: none, it must be given.",
        )
    )
    add_client_flags(parser)


def run(arguments: Namespace) -> int:
    """Print it."""
    from rich.console import Console

    from quire.why import ask, show

    if arguments.request_id is None:
        raise UsageError("give the X-Request-Id that came with the answer: quire why ID")
    show(ask(arguments.url, arguments.api_key, arguments.request_id), Console())
    return 0
