"""What a shell completes, asked of bash, zsh and fish as a Tab asks them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest

from quire.commands.table import COMMANDS
from quire.shell_completion import SHELLS, script
from tests.waiting import SECONDS

ASK_BASH = """
{script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_quire
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
# zsh offers completions to its line editor only: a widget that writes them down stands in its place.
ASK_ZSH = """
PS1='ready> '
autoload -Uz compinit && compinit -u -D
source {folder}/script
compadd() {{
    local -a found
    builtin compadd -O found "$@"
    print -l -- $found >> {folder}/found
    builtin compadd "$@"
}}
tell() {{ zle complete-word; print -n 'to''ld' }}
zle -N tell
bindkey '^T' tell
"""

Completed = Callable[..., list[str]]


def in_bash(folder: Path, words: tuple[str, ...]) -> list[str]:
    quoted = " ".join(f"'{word}'" for word in words)
    program = ASK_BASH.format(script=script("bash"), words=quoted)
    done = subprocess.run(["bash", "-c", program], check=True, capture_output=True, text=True)
    assert not done.stderr
    return done.stdout.split()


def in_fish(folder: Path, words: tuple[str, ...]) -> list[str]:
    (folder / "script").write_text(script("fish"))
    program = f"source {folder}/script; complete -C '{' '.join(words)}'"
    home = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(
        ["fish", "--no-config", "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env=home,
        cwd=folder,
    )
    assert not done.stderr
    return [line.partition("\t")[0] for line in done.stdout.splitlines()]


def in_zsh(folder: Path, words: tuple[str, ...]) -> list[str]:
    (folder / "script").write_text(script("zsh"))
    (folder / "ask").write_text(ASK_ZSH.format(folder=folder))
    found = folder / "found"
    found.write_text("")
    terminal = pexpect.spawn("zsh", ["-f", "-i"], cwd=str(folder), timeout=SECONDS, encoding="utf-8")
    try:
        terminal.sendline("source ./ask")
        terminal.expect_exact("ready> ")
        terminal.send(" ".join(words) + "\x14")
        terminal.expect_exact("told")
    finally:
        terminal.close(force=True)
    return sorted(set(found.read_text().split()))  # it looks for some of them twice


ASKED = {"bash": in_bash, "zsh": in_zsh, "fish": in_fish}


@pytest.fixture(params=SHELLS)
def completed(request: pytest.FixtureRequest, tmp_path: Path) -> Completed:
    return lambda *words: ASKED[request.param](tmp_path, words)


def test_a_tab_completes_commands_flags_and_their_values(completed: Completed) -> None:
    assert sorted(completed("quire", "")) == sorted(command.name for command in COMMANDS)
    assert completed("quire", "se") == ["serve"]
    assert completed("quire", "serve", "--max-num-b") == ["--max-num-batched-tokens"]
    assert {"cpu", "cuda"} <= set(completed("quire", "serve", "--device", "c")) <= {"auto", "cpu", "cuda"}
    assert "--replica" not in completed("quire", "serve", "--r")


def test_where_a_model_stands_files_are_completed(completed: Completed, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    # bash does it by itself, and zsh tells the last part.
    assert completed("quire", "serve", "./mod") in ([], ["./model/"], ["model"])


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_has_every_flag_of_every_command(shell: str) -> None:
    text = script(shell)
    for command in COMMANDS:
        for flag in command.parser().flags:
            if flag.name.startswith("-"):
                name = f"-l {flag.name[2:]} " if shell == "fish" and not flag.switches else flag.name
                assert name in text or f"-l {flag.name[2:]} " in text, (command.name, flag.name)
