"""What a shell completes, asked of bash as a Tab asks it."""

from __future__ import annotations

import subprocess

import pytest

from quire.commands.table import COMMANDS
from quire.completions import SHELLS, script

ASK = """
{script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_quire
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(*words: str) -> list[str]:
    quoted = " ".join(f"'{word}'" for word in words)
    program = ASK.format(script=script("bash"), words=quoted)
    done = subprocess.run(["bash", "-c", program], check=True, capture_output=True, text=True)
    assert not done.stderr
    return done.stdout.split()


def test_bash_completes_commands_flags_and_their_values() -> None:
    assert completed("quire", "") == [command.name for command in COMMANDS]
    assert completed("quire", "se") == ["serve"]
    assert completed("quire", "serve", "--max-num-b") == ["--max-num-batched-tokens"]
    assert completed("quire", "serve", "--device", "c") == ["cuda", "cpu"]
    assert "--replica" not in completed("quire", "serve", "--r")
    assert completed("quire", "serve", "./mod") == []  # files, by bash itself


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_has_every_flag_of_every_command(shell: str) -> None:
    text = script(shell)
    for command in COMMANDS:
        for flag in command.parser().flags:
            if flag.name.startswith("-"):
                name = f"-l {flag.name[2:]} " if shell == "fish" and not flag.switches else flag.name
                assert name in text or f"-l {flag.name[2:]} " in text, (command.name, flag.name)
