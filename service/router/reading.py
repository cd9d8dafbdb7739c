"""Has a router read prompts, and the registry: which replica holds how much of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from quire.engine.models.config import read_max_positions
from quire.engine.models.hub import TOKENIZER_FILES
from quire.engine.models.model_folders import ModelFolders, resolve_folders
from quire.engine.registry.deployment import hash_seed, model_id, revision, seed_digest, tokenizer_digest
from quire.service.router.config import RouterConfig
from quire.service.router.directory import Directory, Registered
from quire.service.router.prompt import PromptReader
from quire.service.router.registry_watch import Identity, RegistryWatch
from quire.service.router.state import RouterState
from quire.service.text.tokenizer import Tokenizer


async def start_reading_prompts(
    state: RouterState, model: str, lora: str | None, chat_template: str | None
) -> ModelFolders:
    """Give `state` its reader; return the folders of the model, whose tokenizer's loading may raise.

    chat_template: as `Tokenizer.from_folder` has it.
    """
    folders, tokenizer, max_tokens = await asyncio.to_thread(_load, model, lora, chat_template)
    if tokenizer.chat_template is not None:
        await state.renderer.start(tokenizer.chat_template)
    state.reader = PromptReader(tokenizer, state.pool, state.renderer, max_tokens)
    return folders


async def start_reading(
    state: RouterState, router: RouterConfig, on_registered: Callable[[str, list[Registered]], bool]
) -> Coroutine[None, None, None]:
    """Give `state` its reader and its watch; return what watches, for as long as it is awaited.

    Raises what loading the tokenizer raises. `router` must name a Redis.
    """
    assert router.redis_url is not None
    folders = await start_reading_prompts(state, router.model, router.lora, router.chat_template)
    identity = await asyncio.to_thread(_identify, router, folders)
    seed = hash_seed(router.cache_seed)
    state.watch = RegistryWatch(Directory(router.redis_url), identity, seed, on_registered)
    return state.watch.run(router.poll_seconds, router.scan_seconds)


async def stop_reading(state: RouterState) -> None:
    """Close what `start_reading` has opened; the watching must have ended."""
    if state.watch is not None:
        await state.watch.close()
    await state.renderer.close()
    state.pool.shutdown(wait=False, cancel_futures=True)


def _load(model: str, lora: str | None, chat_template: str | None) -> tuple[ModelFolders, Tokenizer, int]:
    """Return folders, tokenizer, and how many tokens the model can have."""
    folders = resolve_folders(model, lora, files=TOKENIZER_FILES)
    tokenizer = Tokenizer.from_folder(folders.tokenizer, chat_template or folders.template)
    return folders, tokenizer, read_max_positions(folders.base)


def _identify(router: RouterConfig, folders: ModelFolders) -> Identity:
    seed = seed_digest(hash_seed(router.cache_seed))
    named = model_id(router.model, router.lora)
    return Identity(named, revision(folders), tokenizer_digest(folders.tokenizer), seed)
