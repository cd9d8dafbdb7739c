"""Every subcommand of `quire`. A new one is a row here, and a module with `add_flags` and `run`."""

from __future__ import annotations

import difflib
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from quire.service.commands.parser import Parser
from quire.service.commands.usage_error import UsageError


@dataclass(frozen=True)
class Command:
    """A name, what it does, and examples. Its module, `quire.commands.NAME`, is imported when needed.

    The module has `add_flags(parser)`, and `run(arguments)`, which returns the exit code.
    """

    name: str
    summary: str
    examples: tuple[str, ...] = ()

    @property
    def module(self) -> ModuleType:
        return import_module(f"quire.commands.{self.name}")

    def parser(self) -> Parser:
        """Return what reads its words."""
        summary = f"{self.summary[0].upper()}{self.summary[1:]}."
        parser = Parser(self.name, summary, self.examples)
        self.module.add_flags(parser)
        parser.take_config_file()
        return parser

    def run(self, arguments: Namespace) -> int:
        code: int = self.module.run(arguments)
        return code


COMMANDS = (
    Command(
        "serve",
        "serve the OpenAI API and a chat page",
        (
            "quire serve                                  the demo model, at http://127.0.0.1:8000",
            "quire serve Qwen/Qwen3-0.6B --port 8001",
            "quire serve ./model --host 0.0.0.0 --api-key-file keys.txt",
            "quire serve --config serve.yaml",
        ),
    ),
    Command(
        "chat",
        "talk with a model on this terminal, here or at a server",
        (
            "quire chat                                   the demo model, in this process",
            "quire chat Qwen/Qwen3-0.6B --temperature 0.6",
            "quire chat http://127.0.0.1:8000             a server; its key in QUIRE_API_KEY",
        ),
    ),
    Command(
        "generate",
        "continue one prompt, from --prompt or standard input",
        (
            "quire generate --prompt 'A block table is' --max-tokens 64",
            "quire generate Qwen/Qwen3-0.6B --chat < question.txt",
        ),
    ),
    Command(
        "bench",
        "measure offline throughput beside the hardware's bound",
        ("quire bench Qwen/Qwen3-0.6B --workload single,mixed",),
    ),
    Command(
        "doctor",
        "tell what fits, and which flag to change where it does not",
        (
            "quire doctor Qwen/Qwen3-0.6B",
            "quire doctor Qwen/Qwen3-0.6B --plan --gpu H100",
        ),
    ),
    Command(
        "route",
        "one address for several replicas, aware of their prefix caches",
        (
            "quire route --replica http://10.0.0.7:8000 --replica http://10.0.0.8:8000",
            "quire route Qwen/Qwen3-0.6B --redis-url redis://10.0.0.9",
        ),
    ),
    Command(
        "top",
        "show a server's requests and blocks in this terminal",
        ("quire top --url http://127.0.0.1:8000",),
    ),
    Command(
        "why",
        "tell where the time of a request went, and why",
        ("quire why chatcmpl-7 --url http://127.0.0.1:8000",),
    ),
    Command(
        "completion",
        "print the script by which a shell completes all this",
        (
            "quire completion bash > ~/.local/share/bash-completion/completions/quire",
            "quire completion zsh > ~/.zfunc/_quire",
            "quire completion fish > ~/.config/fish/completions/quire.fish",
        ),
    ),
)


def find(name: str) -> Command:
    """Raises UsageError, which names the nearest one, if there is none."""
    for command in COMMANDS:
        if command.name == name:
            return command
    names = [command.name for command in COMMANDS]
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(names)}"
    raise UsageError(f"there is no command {name!r}: {hint}")


def parse(words: Sequence[str]) -> Namespace:
    """Return the values of a whole command line, `command` among them. Raises UsageError."""
    return find(words[0]).parser().parse(words[1:])


def overview() -> str:
    """Return the help of `quire` itself."""
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS]
    return "\n".join(
        (
            "usage: quire COMMAND [flags]",
            "",
            "Serve large language models from a paged KV cache.",
            "",
            *lines,
            "",
            "quire COMMAND --help lists its flags; quire --version tells the version.",
            "Try: quire chat",
            "",
        )
    )
