"""`quire chat`: a conversation on this terminal, with a model here or at a server."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.commands.settings import load_llm, model_name, sampling_settings
from quire.engine.config import EngineConfig
from quire.service.commands.engine_flags import add_batch_flags, add_cache_flags, add_model_flags
from quire.service.commands.flags import (
    add_chat_template,
    add_sampling_flags,
    first_line,
    flag,
    is_address,
    server_url,
)
from quire.service.commands.parser import Parser
from quire.service.commands.usage_error import UsageError, of_flags
from quire.service.demo import MODEL_FOLDER

if TYPE_CHECKING:
    from quire.chat.speakers import Speaker

_URL = re.compile(r"https?://", re.IGNORECASE)


def add_flags(parser: Parser) -> None:
    flag(
        parser,
        "model",
        default=MODEL_FOLDER,
        shown="the bundled demo model",
        metavar="MODEL|URL",
        help="A folder, a Hub id (owner/name), or the URL of a server that speaks OpenAI's API.",
    )
    group = parser.group("Conversation", "/help in it tells of its commands")
    flag(group, "--system", shown="nothing", help="What the model is told before the conversation.")
    add_chat_template(group)
    flag(group, "--max-tokens", type=int, shown="as many as fit", help="Most tokens of an answer.")
    add_sampling_flags(group)
    group = parser.group("Server", "where MODEL is a URL")
    flag(group, "--api-key", type=first_line, metavar="KEY", shown="none", help="The server's key.")
    flag(group, "--model-name", metavar="NAME", shown="its first", help="Which of the server's models.")
    add_model_flags(parser.group("Model", "where it is not"))
    add_batch_flags(parser.group("Batch"))
    add_cache_flags(parser.group("KV cache"))


def run(arguments: Namespace) -> int:
    """Talk until Ctrl-D."""
    from quire.chat.terminal import converse
    from quire.engine.messages import SamplingParams

    settings = sampling_settings(arguments)
    if arguments.max_tokens is not None:
        settings["max_tokens"] = arguments.max_tokens
    with of_flags():
        SamplingParams(**settings)
    converse(_speaker(arguments), arguments.system or "", settings)
    return 0


def _speaker(arguments: Namespace) -> Speaker:
    from quire.chat.speakers import EngineSpeaker, ServerSpeaker

    if is_address(arguments.model) and not Path(arguments.model).exists():
        raise UsageError(f"{arguments.model} is no folder and no URL: did you mean http://{arguments.model}?")
    if _URL.match(arguments.model):
        for name in (*EngineConfig.__struct_fields__, "chat_template"):
            if name != "model" and name in arguments.given:
                told = name.replace("_", "-")
                raise UsageError(f"--{told} is of a model in this process, and {arguments.model} is a server")
        with of_flags():
            server_url(arguments.model)
        return ServerSpeaker(arguments.model, arguments.api_key, arguments.model_name)
    for name in ("api_key", "model_name"):
        if name in arguments.given:
            raise UsageError(f"--{name.replace('_', '-')} is for a server: give its URL instead of a model")
    return EngineSpeaker(load_llm(arguments), model_name(arguments.model, arguments.lora))
