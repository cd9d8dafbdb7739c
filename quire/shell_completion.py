"""Shell completion scripts, made from the table of commands and their flags."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from quire.commands.table import COMMANDS, Command
from quire.service.commands.parser import Flag


def script(shell: str) -> str:
    """Return the script for one of SHELLS."""
    return "\n".join(SHELLS[shell]()) + "\n"


def _flags(command: Command) -> list[Flag]:
    config = Flag(name="--config", dest="config", help="A YAML file with these flags' names.", type=Path)
    named = [flag for flag in command.parser().flags if flag.name.startswith("-")]
    return [*named, config, Flag(name="--help", dest="help", help="Show the flags.", action="store_true")]


def _sentence(flag: Flag) -> str:
    """Return the first sentence of a flag's help, without what zsh would take for its own."""
    first = flag.help.partition(". ")[0].partition(" [QUIRE_")[0]
    return "".join(char for char in first if char not in '[]"\\`$:').rstrip(".")


def _choices(flag: Flag) -> str:
    return " ".join(shlex.quote(str(choice)) for choice in flag.choices)


def _bash() -> Iterator[str]:
    yield "# quire completion bash > ~/.local/share/bash-completion/completions/quire"
    yield "_quire() {"
    yield "    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} flags= values="
    yield "    COMPREPLY=()"
    yield '    if [ "$COMP_CWORD" -eq 1 ]; then'
    names = " ".join(command.name for command in COMMANDS)
    yield f"        COMPREPLY=($(compgen -W '{names}' -- \"$current\"))"
    yield "        return"
    yield "    fi"
    yield '    case "${COMP_WORDS[1]} $previous" in'
    for command in COMMANDS:
        for flag in _flags(command):
            if flag.choices:
                yield f"        '{command.name} {flag.name}') values='{' '.join(map(str, flag.choices))}' ;;"
    yield "    esac"
    yield '    if [ -n "$values" ]; then'
    yield '        COMPREPLY=($(compgen -W "$values" -- "$current"))'
    yield "        return"
    yield "    fi"
    yield '    case "${COMP_WORDS[1]}" in'
    for command in COMMANDS:
        yield f"        {command.name}) flags='{' '.join(flag.name for flag in _flags(command))}' ;;"
    yield "    esac"
    yield '    case "$current" in'
    yield '        -*) COMPREPLY=($(compgen -W "$flags" -- "$current")) ;;'
    yield "        *) compopt -o default 2>/dev/null; COMPREPLY=() ;;"
    yield "    esac"
    yield "}"
    yield "complete -F _quire quire"


def _zsh() -> Iterator[str]:
    yield "#compdef quire"
    yield "# quire completion zsh > a folder of $fpath, as _quire"
    yield "_quire() {"
    yield "    local -a commands"
    yield "    commands=("
    for command in COMMANDS:
        yield f"        {shlex.quote(f'{command.name}:{command.summary}')}"
    yield "    )"
    yield "    if (( CURRENT == 2 )); then _describe command commands; return; fi"
    yield "    local command=$words[2]"
    yield "    shift words; (( CURRENT-- ))"
    yield "    case $command in"
    for command in COMMANDS:
        yield f"        {command.name}) _arguments '*:model:_files' \\"
        for flag in _flags(command):
            value = (
                "" if flag.switches else f":{flag.dest}:{f'({_choices(flag)})' if flag.choices else '_files'}"
            )
            yield f"            {shlex.quote(f'{flag.name}[{_sentence(flag)}]{value}')} \\"
        yield "            ;;"
    yield "    esac"
    yield "}"
    yield 'if [ "$funcstack[1]" = _quire ]; then _quire "$@"; else compdef _quire quire; fi'


def _fish() -> Iterator[str]:
    yield "# quire completion fish > ~/.config/fish/completions/quire.fish"
    for command in COMMANDS:
        name, summary = command.name, _quoted_for_fish(command.summary)
        yield f"complete -c quire -n __fish_use_subcommand -f -a {name} -d {summary}"
    for command in COMMANDS:
        for flag in _flags(command):
            value = "" if flag.switches else f' -x -a "{_choices(flag)}"' if flag.choices else " -r"
            name = flag.name.removeprefix("--")
            seen = f"'__fish_seen_subcommand_from {command.name}'"
            yield f"complete -c quire -n {seen} -l {name}{value} -d {_quoted_for_fish(_sentence(flag))}"


def _quoted_for_fish(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SHELLS: dict[str, Callable[[], Iterator[str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
