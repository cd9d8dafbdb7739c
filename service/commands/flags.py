"""Flags of the `quire` command. Each can also be given as QUIRE_<NAME>, or in the file of --config.

Here are those that several commands have; an engine's are in `engine_flags`, a server's in `service_flags`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from quire.engine.urls import check_http_url
from quire.service.commands.parser import Action, Flag, FlagGroup, Parser, metavar_of
from quire.service.demo import MODEL_FOLDER
from quire.service.text.named_templates import template_names

_ADDRESS = re.compile(r"[\w.-]+:\d{1,5}(/[\w./-]*)?")
_FOLDERS = "as --generation-config or the server has it, else {}"


def flag(
    group: FlagGroup,
    name: str,
    *,
    help: str,
    default: object = None,
    shown: str = "",
    action: Action = "store",
    type: Callable[[str], object] = str,
    choices: tuple[object, ...] = (),
    dest: str = "",
    metavar: str = "",
) -> None:
    """Add a flag. `help` is a sentence or more; `shown` says the default where None stands for another."""
    variable = f"QUIRE_{name.removeprefix('--').replace('-', '_').upper()}"
    told = shown or ("" if default is None or default == "" else str(default))
    words = f"{help} Default: {told}. [{variable}]" if told else f"{help} [{variable}]"
    group.add(
        Flag(
            name=name,
            dest=dest or name.removeprefix("--").replace("-", "_"),
            help=words,
            default=default,
            action=action,
            type=type,
            choices=choices,
            variable=variable,
            metavar=metavar or metavar_of(type, choices),
        )
    )


def add_model(parser: Parser) -> None:
    flag(
        parser,
        "model",
        default=MODEL_FOLDER,
        shown="the bundled demo model",
        metavar="MODEL",
        help="A folder that save_pretrained wrote, a GGUF file, or a Hub id (owner/name; of a GGUF file "
        "there owner/name:Q4_K_M).",
    )


def add_lora(group: FlagGroup) -> None:
    flag(
        group,
        "--lora",
        metavar="ADAPTER",
        shown="none",
        help="A LoRA adapter, as a folder that peft wrote or a Hub id: it is merged into the model's weights "
        "as they are loaded, and so is in all answers. There is one for all requests.",
    )


def add_chat_template(group: FlagGroup) -> None:
    flag(
        group,
        "--chat-template",
        metavar="NAME|FILE",
        shown="the model's own",
        help="Of chats, also where the model has none: a file, or one of "
        f"{', '.join(template_names())}, whose turns end where the template ends them; or the name of one of "
        "the model's own.",
    )


def add_client_flags(parser: Parser) -> None:
    """Add where a server is that is asked something, and as whom."""
    group = parser.group("Server")
    flag(
        group,
        "--url",
        type=server_url,
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="The server's, or a router's.",
    )
    flag(
        group,
        "--api-key",
        type=first_line,
        metavar="KEY",
        shown="none",
        help="A key that the server knows; whoever may list processes sees it, so rather set QUIRE_API_KEY.",
    )


def server_url(text: str) -> str:
    """Return the URL of a server. Raises ValueError that says what one is like."""
    try:
        check_http_url("a server's URL", text)
    except ValueError as error:
        hint = f"; did you mean http://{text}?" if is_address(text) else ""
        raise ValueError(f"{error}{hint}") from None
    return text


def is_address(text: str) -> bool:
    """Return whether it is the URL of a server but for its http://."""
    return _ADDRESS.fullmatch(text) is not None


def first_line(text: str) -> str | None:
    """Return the first key of those that the environment may hold for a server, a line each."""
    return text.strip().split("\n")[0].strip() or None


def add_sampling_flags(group: FlagGroup) -> None:
    """Add how tokens are drawn, with the defaults that requests to a server have."""
    flag(group, "--temperature", type=float, shown=_FOLDERS.format(1), help="0: always the likeliest token.")
    flag(
        group,
        "--top-p",
        type=float,
        shown=_FOLDERS.format(1),
        help="Draw from the likeliest tokens of this probability.",
    )
    flag(
        group,
        "--top-k",
        type=int,
        shown=_FOLDERS.format(0),
        help="Draw from so many of the likeliest tokens; 0: all.",
    )
    flag(group, "--sampling-seed", type=int, shown="drawn", help="The same seed gives the same answer.")
