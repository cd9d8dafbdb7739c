"""`quire doctor`: what is here, what fits, and which flag to change where it does not."""

from __future__ import annotations

import shlex
from argparse import Namespace

from quire.commands.settings import check_folders, engine_config
from quire.engine.models.model_folders import check_names
from quire.engine.urls import check_redis_url
from quire.service.commands.engine_flags import add_engine_flags
from quire.service.commands.flags import flag
from quire.service.commands.parser import Flag, Parser
from quire.service.commands.usage_error import UsageError, of_flags
from quire.service.config import check_host_and_port
from quire.service.demo import MODEL_FOLDER

GPU_NAMES = ("A100", "A10", "L4", "H100", "H200", "B200", "RTX 5090")  # `gpu.KNOWN`, which takes torch


def add_flags(parser: Parser) -> None:
    add_engine_flags(parser)
    group = parser.group("Server", "where it is to listen, and whom to tell")
    flag(group, "--host", default="127.0.0.1", help="The address to listen on.")
    flag(group, "--port", type=int, default=8000, help="The port to listen on.")
    flag(group, "--redis-url", metavar="URL", shown="none", help="The registry that is to be told.")
    group = parser.group("Plan")
    flag(
        group,
        "--plan",
        action="store_true",
        help="Print which kernels compute a layer, and start nothing.",
    )
    flag(
        group,
        "--gpu",
        choices=GPU_NAMES,
        shown="this machine's",
        help="With --plan: of this GPU, which need not be here.",
    )


def run(arguments: Namespace) -> int:
    """Look around, start an engine as a server would, and tell what it has; or print a plan."""
    config = engine_config(arguments)
    if arguments.plan:
        from quire.kernel_plan import print_plan

        with of_flags():
            check_names(config.model, config.lora)
        print_plan(config, arguments.gpu)
        return 0
    if arguments.gpu is not None:
        raise UsageError("--gpu goes with --plan: without it, what is here is measured")
    with of_flags():
        check_host_and_port(arguments.host, arguments.port)
        if arguments.redis_url is not None:
            check_redis_url(arguments.redis_url)
    check_folders(config)
    from quire.doctor import doctor
    from quire.machine import look, usable_device

    findings = look(config.device, arguments.host, arguments.port, arguments.redis_url)
    command = serve_command(arguments, usable_device(config.device))
    return 0 if doctor(config, findings, command) else 1


def serve_command(arguments: Namespace, device: str) -> str:
    """Return the command that starts a server with these flags, on a device and at a port that is free."""
    from quire.service.commands.address import free_port

    parser = Parser("doctor")
    add_flags(parser)
    others = {"model", "plan", "gpu", "port", "device"}
    words = ["quire", "serve", *([] if arguments.model == MODEL_FOLDER else [arguments.model])]
    for each in parser.flags:
        if each.dest in arguments.given and each.dest not in others:
            words += _words_of(each, getattr(arguments, each.dest))
    if device != "auto":
        words += ["--device", device]
    port = free_port(arguments.host, arguments.port) or arguments.port
    return shlex.join([*words, *([] if port == 8000 else ["--port", str(port)])])


def _words_of(flag: Flag, value: object) -> list[str]:
    if not flag.switches:
        return [flag.name, str(value)]
    return [flag.name] if value == (flag.action == "store_true") else []
