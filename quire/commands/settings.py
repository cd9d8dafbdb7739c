"""From a command's flags to the configurations of engine, registry and service."""

from __future__ import annotations

import dataclasses
import logging
import os
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.engine.config import EngineConfig, KVEventsConfig, RegistryConfig
from quire.engine.models import hub
from quire.engine.models.generation_config import check_generation_config
from quire.engine.models.hub import TOKENIZER_FILES
from quire.engine.models.model_folders import check_names, local_folders, resolve_folders
from quire.engine.models.pooling import read_pooling
from quire.engine.models.tokenizer_json import check_tokenizer
from quire.service.commands.parser import lines_of
from quire.service.commands.usage_error import UsageError, of_flags
from quire.service.demo import MODEL_FOLDER, MODEL_NAME
from quire.service.text.named_templates import read_template, template_of

if TYPE_CHECKING:
    from quire.llm import LLM

log = logging.getLogger("quire.service")

_API_KEY_VARIABLE = "QUIRE_API_KEY"


def engine_settings(arguments: Namespace) -> dict[str, Any]:
    """Return those of EngineConfig's fields, but for the model, that the command has flags for."""
    names = set(EngineConfig.__struct_fields__) - {"model"}
    return {name: value for name, value in vars(arguments).items() if name in names}


@of_flags()
def engine_config(arguments: Namespace) -> EngineConfig:
    """Raises UsageError that names the flag and what it may be."""
    return msgspec.convert({"model": arguments.model, **engine_settings(arguments)}, EngineConfig)


@of_flags()
def check_folders(config: EngineConfig) -> None:
    """Raises UsageError for a model without its configuration or tokenizer, or a --generation-config."""
    check_names(config.model, config.lora)
    folders = local_folders(config.model, config.lora)
    if folders is not None:
        check_tokenizer(folders.tokenizer)
    check_generation_config(config.generation_config)


def check_gives_text(config: EngineConfig) -> None:
    """Raise ValueError for a model that pools prompts, by its configuration: no weights are fetched or read.

    It is a UsageError if a flag says so. Raises ValueError, too, for a model without a folder, and for one
    that can neither pool nor generate.
    """
    folders = resolve_folders(config.model, config.lora, files=TOKENIZER_FILES)
    pooling = read_pooling(folders.base, config.runner)
    if pooling is None:
        return
    if config.runner == "pooling":
        raise UsageError("--runner pooling gives vectors, and this command is for text: leave it out")
    raise ValueError(
        f"{config.model} was made to embed or to score, by its folder, and this command is for text: have "
        "quire serve run it, or give --runner generate if it has a head for text, too"
    )


def load_llm(arguments: Namespace) -> LLM:
    """Return the model of a command in this process that is for text, with bars that show how it starts.

    Raises UsageError that names the flag and what it may be.
    """
    from quire.llm import LLM
    from quire.service.commands.progress import PhaseBars

    config = engine_config(arguments)
    check_folders(config)  # before anything starts
    check_gives_text(config)
    template, settings = arguments.chat_template, engine_settings(arguments)
    return LLM(arguments.model, chat_template=template, on_progress=PhaseBars().show, **settings)


def sampling_settings(arguments: Namespace) -> dict[str, Any]:
    """Return those of SamplingParams' fields that were given, max_tokens apart."""
    given = {
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "top_k": arguments.top_k,
        "seed": arguments.sampling_seed,
    }
    return {name: value for name, value in given.items() if value is not None}


def registry_config(arguments: Namespace) -> RegistryConfig | None:
    """Return where this replica tells of its cache, None for nowhere. Raises ValueError."""
    if arguments.redis_url is None:
        if arguments.advertise_url is not None:
            raise ValueError("--advertise-url is what the registry tells others: give --redis-url too")
        if arguments.registry_lease is not None:
            raise ValueError("--registry-lease is of what the registry tells others: give --redis-url too")
        return None
    url = arguments.advertise_url
    if url is None:
        if arguments.host in ("0.0.0.0", "::"):
            raise ValueError(
                f"--advertise-url must say where routers reach this replica: {arguments.host} does not"
            )
        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        url = f"http://{host}:{arguments.port}"
    lease = {} if arguments.registry_lease is None else {"lease": float(arguments.registry_lease)}
    return RegistryConfig(redis_url=arguments.redis_url, advertise_url=url.rstrip("/"), **lease)


def kv_events_config(arguments: Namespace) -> KVEventsConfig | None:
    """Return where KV events go, None for nowhere. Raises ValueError."""
    if arguments.kv_events_config is None:
        return None
    try:
        config = msgspec.json.decode(arguments.kv_events_config, type=KVEventsConfig)
    except msgspec.DecodeError as error:
        if isinstance(error.__cause__, ValueError):  # what a key may be, which names the flag
            raise error.__cause__ from None
        raise ValueError(f"--kv-events-config must be JSON with vLLM's keys: {error}") from error
    return config if config.enabled else None


def api_keys(arguments: Namespace) -> tuple[str, ...]:
    """Return those that were given as flags or in the environment."""
    from_environment = lines_of(os.environ.get(_API_KEY_VARIABLE, ""))
    if len(arguments.api_key) > len(from_environment):
        log.warning(
            "--api-key shows the key to whoever may list processes: rather use --api-key-file or %s",
            _API_KEY_VARIABLE,
        )
    return tuple(arguments.api_key)


def service_settings(arguments: Namespace) -> dict[str, Any]:
    """Return those of ServiceConfig's fields, but for the model's names, that the command has flags for."""
    from quire.service.config import ServiceConfig

    names = {field.name for field in dataclasses.fields(ServiceConfig)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    return given | {"api_keys": api_keys(arguments), "cors_origins": tuple(arguments.cors_origin)}


def chat_template(arguments: Namespace) -> str | None:
    """Return what is given, as `Tokenizer.from_folder` takes it. Raises ValueError if there is none such.

    Of a model on the Hub, or of a GGUF file, a name may be one of its own templates, which are known later.
    """
    given: str | None = arguments.chat_template
    if given is not None:
        folders, file = local_folders(arguments.model, arguments.lora), Path(given)
        if folders is not None:
            template_of(folders.tokenizer, given)
        elif file.name != given or file.suffix:
            read_template(given)
    return given


def comma_separated(lists: list[str]) -> tuple[str, ...]:
    """Return what flags give that may repeat, or hold several with commas between."""
    return tuple(entry.strip() for each in lists for entry in each.split(",") if entry.strip())


def model_name(model: str, lora: str | None = None) -> str:
    """Return what requests call it: that of its folder or file, or the Hub id as it was given.

    With an adapter merged it is not the model any more, and is called as the adapter is.
    """
    if lora is not None:
        return hub.model_name(lora)
    return MODEL_NAME if model == MODEL_FOLDER else hub.model_name(model)
