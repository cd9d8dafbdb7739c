"""Coding agents as people install them: a task for which a command has to be run."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.clients.conftest import CLIENTS, SAID
from tests.service.live import Live

COMMAND, GIVES = "echo $((6 * 7))-quire", "42-quire"


def run(folder: Path, *command: str, **environment: str) -> str:
    """Run one of the agents, at home in an empty folder; return what it prints."""
    program = Path(CLIENTS or "").resolve() / "node_modules/.bin" / command[0]
    done = subprocess.run(
        [program, *command[1:]],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_claude_code(serve_model: Callable[..., Live], tmp_path: Path) -> None:
    live = serve_model("Bash", {"command": COMMAND, "description": "Count"}, GIVES)
    out = run(
        tmp_path,
        *("claude", "-p", "Count.", "--output-format", "json", "--allowedTools", "Bash"),
        ANTHROPIC_BASE_URL=live.url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL="tiny",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="tiny",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    result = json.loads(out)
    assert (result["result"], result["num_turns"], result["is_error"]) == (SAID, 2, False)


def test_codex(serve_model: Callable[..., Live], tmp_path: Path) -> None:
    live = serve_model("exec_command", {"cmd": COMMAND}, GIVES)
    settings = f"""
model = "tiny"
model_provider = "quire"

[model_providers.quire]
name = "Quire"
base_url = "{live.url}/v1"
wire_api = "responses"
"""
    (tmp_path / "config.toml").write_text(settings)
    free = "--dangerously-bypass-approvals-and-sandbox"
    out = run(tmp_path, "codex", "exec", "--skip-git-repo-check", free, "Count.", CODEX_HOME=str(tmp_path))
    assert out.strip() == SAID
    first, second = live.engine.streams
    assert len(second.prompt) > len(first.prompt)
