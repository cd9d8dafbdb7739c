"""`quire serve`: the engine process, the HTTP server and the terminal, put together.

What imports slowly is imported once the port is bound, in other threads, so that the port answers meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from importlib import import_module
from typing import TYPE_CHECKING

from quire.engine.config import EngineConfig, KVEventsConfig, RegistryConfig
from quire.engine.logs import log_format
from quire.service.commands.advice import too_long
from quire.service.commands.pinned_prefixes import PinnedPrefix, tokenize_pinned_prefixes
from quire.service.config import ServiceConfig
from quire.service.server import QuireServer

if TYPE_CHECKING:
    from quire.engine.client import AsyncEngine
    from quire.service.text.tokenizer import Tokenizer

log = logging.getLogger("quire.service")

_PAIR = '{"text_1": "a fish", "text_2": "a trout"}'


def make_server(
    service: ServiceConfig,
    config: EngineConfig,
    registry: RegistryConfig | None,
    prefixes: list[PinnedPrefix],
    kv_events: KVEventsConfig | None = None,
    chat_template: str | None = None,
) -> QuireServer:
    """Return a server that starts its engine once it listens.

    chat_template: as `Tokenizer.from_folder` has it.
    """
    watchers: list[asyncio.Task[None]] = []

    async def start_engine() -> AsyncEngine:
        await asyncio.to_thread(import_module, "quire.engine.client")
        from quire.engine.client import AsyncEngine

        pinned = (
            await asyncio.to_thread(lambda: tokenize_pinned_prefixes(prefixes, load_tokenizer()))
            if prefixes
            else []
        )
        engine = AsyncEngine(config, registry, pinned, kv_events=kv_events)
        await engine.start()
        watchers.append(
            asyncio.create_task(_tell(engine, server.url, service, config), name="quire-progress")
        )
        return engine

    def load_tokenizer() -> Tokenizer:
        from quire.service.text.model_tokenizer import tokenizer_of

        return tokenizer_of(config, chat_template)

    server = QuireServer(service, start_engine, load_tokenizer)
    return server


async def _tell(engine: AsyncEngine, url: str, service: ServiceConfig, config: EngineConfig) -> None:
    """Tell how starting goes, where the server is once it answers, and what then limits requests."""
    name = service.served_model_names[0]
    await (_log_progress(engine) if log_format() == "json" else _show_progress(engine, name, url))
    if engine.state == "ready" and log_format() == "json":
        log.info("serving %s at %s", name, url)
    if engine.info is not None and (limit := too_long(engine.info, config)):
        log.warning("requests have at most %d tokens: %s", engine.info.max_request_tokens, limit)


async def _log_progress(engine: AsyncEngine) -> None:
    async for event in engine.watch_progress():
        if event.done == event.total:
            log.info("%s after %.1f s", event.phase, event.seconds)


async def _show_progress(engine: AsyncEngine, name: str, url: str) -> None:
    await asyncio.to_thread(import_module, "quire.service.commands.progress")
    from rich.console import Console

    from quire.service.commands.progress import PhaseBars

    console = Console(stderr=True)
    console.print(f"     quire   starts {name}", highlight=False)
    bars = PhaseBars()
    try:
        async for event in engine.watch_progress():
            bars.show(event)
    finally:
        bars.stop()
    if engine.state == "ready":
        pools = engine.info is not None and engine.info.pooling is not None
        page, example = "chat page; API below /v1", f"quire chat {url}"
        if pools:
            page, example = "API below /v1", f"curl {url}/v1/score --json '{_PAIR}'"
        console.print(f"   serving   {name} at [bold]{url}[/bold]  ({page})", highlight=False)
        console.print(f"       try   {example}     Ctrl-C ends the server", highlight=False)
