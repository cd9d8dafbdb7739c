"""`quire route`: one address for several replicas."""

from __future__ import annotations

from argparse import Namespace

from quire.commands.settings import chat_template, comma_separated, model_name, service_settings
from quire.engine.models.model_folders import check_names
from quire.service.commands.flags import add_chat_template, add_model, flag
from quire.service.commands.parser import Parser
from quire.service.commands.service_flags import add_address_flags
from quire.service.commands.usage_error import of_flags


def add_flags(parser: Parser) -> None:
    add_model(parser)
    group = parser.group("Replicas", "where they are, and what they hold")
    flag(
        group,
        "--replica",
        action="append",
        metavar="URL",
        shown="the registry's",
        help="A replica's URL, without a path (may repeat).",
    )
    flag(
        group,
        "--replica-dns",
        metavar="NAME:PORT",
        shown="none",
        help="A name whose addresses are the replicas', asked every few seconds.",
    )
    flag(
        group,
        "--redis-url",
        metavar="URL",
        shown="none",
        help="Where replicas tell which blocks they hold; rediss:// for TLS.",
    )
    flag(
        group,
        "--allow-replica",
        action="append",
        metavar="WHOM",
        shown="loopback and private networks",
        help="Whom to believe of those that the registry names: networks, host names, *.domain, separated by "
        "commas (may repeat).",
    )
    flag(
        group,
        "--cache-seed",
        default="",
        shown="empty",
        help="The secret that the replicas' block digests are seeded with.",
    )
    flag(
        group,
        "--lora",
        metavar="ADAPTER",
        shown="none",
        help="The adapter that replicas were started with: a folder that peft wrote, or a Hub id.",
    )
    add_chat_template(group)
    add_address_flags(parser)


def run(arguments: Namespace) -> int:
    """Route until a signal."""
    from quire.service.config import ServiceConfig
    from quire.service.router.config import RouterConfig

    with of_flags():
        service = ServiceConfig(
            served_model_names=(model_name(arguments.model, arguments.lora),),
            keep_alive=86400.0,  # the replicas' own comments pass through
            **service_settings(arguments),
        )
        router = RouterConfig(
            model=arguments.model,
            lora=arguments.lora,
            replicas=tuple(url.rstrip("/") for url in arguments.replica),
            replica_dns=arguments.replica_dns,
            redis_url=arguments.redis_url,
            allow_replicas=comma_separated(arguments.allow_replica),
            cache_seed=arguments.cache_seed,
            chat_template=chat_template(arguments),
        )
        check_names(router.model, router.lora)
    from quire.service.commands.address import check_address
    from quire.service.router.server import RouterServer

    check_address(service.host, service.port)
    with of_flags():  # such as a file of keys
        server = RouterServer(service, router)
    return server.serve_until_stopped()
