"""A command's flags: what they are called, what they may be, and where their values come from.

The command line counts before the environment (QUIRE_<NAME>), that before the file of --config, and that
before the default. What is wrong is blamed by the name that it was given under.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from quire.service.commands.config_file import read_config
from quire.service.commands.unknown_flags import explain_key, explain_unknown
from quire.service.commands.usage_error import UsageError

Action = Literal["store", "store_true", "store_false", "append"]

_KINDS: dict[object, str] = {int: "a whole number", float: "a number"}
_METAVARS: dict[object, str] = {int: "N", float: "NUMBER", Path: "FILE"}
_WIDEST = 110  # columns of --help
_CONFIG = "--config"


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag, or a positional argument if its name begins with no dash."""

    name: str
    dest: str
    help: str
    default: object = None
    action: Action = "store"
    type: Callable[[str], object] = str  # raises ValueError with what to do
    choices: tuple[object, ...] = ()
    variable: str | None = None  # of the environment
    metavar: str = ""

    def convert(self, text: str, name: str) -> object:
        """Return what `text` says. Raises UsageError that calls it `name`."""
        try:
            value = self.type(text)
        except ValueError as error:
            kind = _KINDS.get(self.type)
            told = f"{name}: {error}" if kind is None else f"{name} must be {kind}, got {text!r}"
            raise UsageError(told) from None
        if self.choices and value not in self.choices:
            allowed = ", ".join(map(str, self.choices))
            raise UsageError(f"{name} must be one of {allowed}, got {text!r}")
        return value

    def on_command_line(self, given: Any) -> object:
        """Return the value of what argparse has found."""
        if self.action == "append":
            return [self.convert(text, self.name) for text in given]
        return given if self.switches else self.convert(given, self.name)

    def in_environment(self, text: str) -> object:
        """Return the value of an environment variable. What may repeat is a line each there."""
        assert self.variable is not None
        if self.action == "append":
            if not (lines := lines_of(text)):
                raise UsageError(f"{self.variable} is empty: unset it, or give it a line for each value")
            return [self.convert(line, self.variable) for line in lines]
        if not self.switches:
            return self.convert(text, self.variable)
        if text not in ("0", "1"):
            raise UsageError(f"{self.variable} must be 0 or 1, got {text!r}")
        return (text == "1") == (self.action == "store_true")

    def in_file(self, value: object, where: str, *, negated: bool = False) -> object:
        """Return the value of a YAML entry; `negated`: under the name that a --no- flag switches off."""
        if self.switches:
            if not isinstance(value, bool):
                raise UsageError(f"{where} must be true or false, got {value!r}")
            return value == ((self.action == "store_true") != negated)
        if self.action == "append":
            values = value if isinstance(value, list) else [value]
            return [self.convert(_text(each, where), where) for each in values]
        return self.convert(_text(value, where), where)

    @property
    def switches(self) -> bool:
        """Return whether it has no value of its own."""
        return self.action in ("store_true", "store_false")

    @property
    def nothing(self) -> object:
        """Return its value where nobody gives one."""
        if self.switches:
            return self.action == "store_false"
        return [] if self.action == "append" else self.default


def lines_of(text: str) -> list[str]:
    """Return the lines that are not empty."""
    return [line.strip() for line in text.split("\n") if line.strip()]


class FlagGroup:
    """Some of a command's flags, under one heading of its help."""

    def __init__(self, flags: list[Flag], group: argparse._ActionsContainer) -> None:
        self._flags = flags
        self._group = group

    def add(self, flag: Flag) -> None:
        self._flags.append(flag)
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": flag.help.replace("%", "%%")}
        if not flag.name.startswith("-"):
            self._group.add_argument(flag.dest, nargs="?", metavar=flag.metavar, **options)
            return
        if not flag.switches:
            options["metavar"] = flag.metavar
        self._group.add_argument(flag.name, dest=flag.dest, action=flag.action, **options)


class Parser(FlagGroup):
    """Read one command's words; `group` and `quire.service.commands.flags.flag` say which there are."""

    def __init__(self, command: str, description: str = "", examples: Sequence[str] = ()) -> None:
        self.command = command
        self.flags: list[Flag] = []
        lines = "".join(f"\n  {example}" for example in examples)
        self._argparse = _Words(
            prog=f"quire {command}",
            usage=f"quire {command} [flags]",
            description=description,
            epilog=f"examples:{lines}" if examples else None,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        self._argparse._positionals.title = "Arguments"
        super().__init__(self.flags, self._argparse)
        self._others = self._argparse.add_argument_group("More")
        self._others.add_argument("-h", "--help", action="help", help="Show this.")

    def group(self, title: str, sentence: str = "") -> FlagGroup:
        """Begin a heading of the help."""
        return FlagGroup(self.flags, self._argparse.add_argument_group(title, sentence or None))

    def take_config_file(self) -> None:
        """Let --config name a YAML file with the flags' names."""
        words = "A YAML file with these flags' names, as vLLM's; flags and QUIRE_ variables count before it."
        self._others.add_argument(_CONFIG, metavar="FILE", type=Path, help=words)

    def format_help(self) -> str:
        groups = self._argparse._action_groups  # which argparse has in the order in which they were made
        groups.append(groups.pop(groups.index(self._others)))
        if any(not flag.name.startswith("-") for flag in self.flags):
            names = [flag.metavar for flag in self.flags if not flag.name.startswith("-")]
            self._argparse.usage = f"quire {self.command} [{'] ['.join(names)}] [flags]"
        return self._argparse.format_help()

    def parse(self, words: Sequence[str]) -> Namespace:
        """Return the value of every flag, `command`, and the dests that are `given` by words or file.

        Raises UsageError; exits for --help.
        """
        if "-h" in words or "--help" in words:
            print(self.format_help(), end="")
            raise SystemExit(0)
        found, unknown = self._argparse.parse_known_args([_dashed(word) for word in words])
        names = [flag.name for flag in self.flags]
        if unknown:
            raise UsageError(explain_unknown(unknown[0], names, self.command))
        given = vars(found)
        file = given.pop("config", None)
        written = {} if file is None else self._written(read_config(file), f"{file}: ")
        return self._namespace(given, written)

    def parse_entries(self, entries: Mapping[str, object]) -> Namespace:
        """Return the same of flags that come by their names. Raises UsageError that names the key."""
        return self._namespace({}, self._written(entries, ""))

    def _namespace(self, given: Mapping[str, object], written: Mapping[str, object]) -> Namespace:
        values = {flag.dest: self._value(flag, given, written) for flag in self.flags}
        return Namespace(command=self.command, given=frozenset({*given, *written}), **values)

    def _value(self, flag: Flag, given: Mapping[str, object], written: Mapping[str, object]) -> object:
        values = []
        if flag.variable is not None and flag.variable in os.environ:
            values.append(flag.in_environment(os.environ[flag.variable]))
        if flag.dest in given:
            values.append(flag.on_command_line(given[flag.dest]))
        if not values:
            return written.get(flag.dest, flag.nothing)
        if flag.action == "append":  # what may repeat adds up
            return [each for several in values if isinstance(several, list) for each in several]
        return values[-1]

    def _written(self, entries: Mapping[str, object], before: str) -> dict[str, object]:
        """Return the values by their flags' dests. Raises UsageError that names the key, after `before`."""
        by_name = {flag.name.removeprefix("--"): flag for flag in self.flags}
        by_dest = {flag.dest.replace("_", "-"): flag for flag in self.flags}
        values: dict[str, object] = {}
        for key, value in entries.items():
            name = key.replace("_", "-")
            flag = by_name.get(name) or by_dest.get(name)
            if flag is None:
                raise UsageError(f"{before}{explain_key(key, by_name, self.command)}")
            negated = flag.action == "store_false" and name not in by_name
            values[flag.dest] = flag.in_file(value, f"{before}{key}", negated=negated)
        return values


class _Words(argparse.ArgumentParser):
    """argparse, whose complaints are UsageErrors."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, _WIDEST)
        super().__init__(prog, max_help_position=32, width=width)


def _dashed(word: str) -> str:
    """Return --max-num-seqs for --max_num_seqs, as vLLM has it; values stay as they are."""
    if re.match(r"--\w", word) is None:
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _text(value: object, where: str) -> str:
    """Return a YAML value as it would stand on the command line."""
    if isinstance(value, dict | list):
        return json.dumps(value)
    if value is None or isinstance(value, bool):
        raise UsageError(f"{where} must have a value, got {json.dumps(value)}")
    return str(value)


def metavar_of(kind: Callable[[str], object], choices: tuple[object, ...]) -> str:
    """Return what stands for the value in a flag's help."""
    return f"{{{','.join(map(str, choices))}}}" if choices else _METAVARS.get(kind, "TEXT")
