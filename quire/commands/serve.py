"""`quire serve`: one engine, the OpenAI API and a chat page."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from quire.commands.settings import (
    chat_template,
    check_folders,
    engine_config,
    kv_events_config,
    model_name,
    registry_config,
    service_settings,
)
from quire.engine.config import EngineConfig, KVEventsConfig, RegistryConfig
from quire.service.commands.engine_flags import add_engine_flags
from quire.service.commands.parser import Parser
from quire.service.commands.service_flags import add_service_flags
from quire.service.commands.usage_error import of_flags

if TYPE_CHECKING:
    from quire.service.commands.pinned_prefixes import PinnedPrefix
    from quire.service.config import ServiceConfig


class Settings(NamedTuple):
    """Of one server, all that can be wrong with its flags checked, in the order in which it takes them."""

    service: ServiceConfig
    engine: EngineConfig
    registry: RegistryConfig | None
    pinned: list[PinnedPrefix]
    kv_events: KVEventsConfig | None
    chat_template: str | None


def add_flags(parser: Parser) -> None:
    add_engine_flags(parser)
    add_service_flags(parser)


@of_flags()
def read_settings(arguments: Namespace) -> Settings:
    """Return what the flags come to. Raises UsageError that names the flag and what it may be."""
    from quire.service.commands.pinned_prefixes import read_pinned_prefixes
    from quire.service.config import ServiceConfig

    service = ServiceConfig(
        served_model_names=tuple(
            arguments.served_model_name or [model_name(arguments.model, arguments.lora)]
        ),
        **service_settings(arguments),
    )
    config = engine_config(arguments)
    registry = registry_config(arguments)
    if registry is not None:
        if not config.enable_prefix_caching:
            raise ValueError("--redis-url tells of the prefix cache: leave out --no-enable-prefix-caching")
        if config.cache_seed is None:
            config = msgspec.structs.replace(config, cache_seed="")
    kv_events = kv_events_config(arguments)
    if kv_events is not None and not config.enable_prefix_caching:
        raise ValueError("--kv-events-config tells of the prefix cache: leave out --no-enable-prefix-caching")
    template = chat_template(arguments)
    check_folders(config)
    pinned = read_pinned_prefixes(map(Path, arguments.pin_prefix))
    return Settings(service, config, registry, pinned, kv_events, template)


def run(arguments: Namespace) -> int:
    """Serve until a signal. All that can be wrong with the flags is told before anything starts.

    Return the exit code, 0; raise ServerFailed, as when the engine dies.
    """
    settings = read_settings(arguments)
    from quire.service.commands.address import check_address
    from quire.service.commands.serve import make_server

    check_address(settings.service.host, settings.service.port)
    with of_flags():  # such as a file of keys
        server = make_server(*settings)
    return server.serve_until_stopped()
