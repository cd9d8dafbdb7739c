"""Coding agents as people install them: a task for which a command has to be run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.clients.conftest import CLIENTS, SAID, run_at_home
from tests.clients.recorder import Recorder
from tests.service.live import Live

RECORD = os.environ.get("QUIRE_RECORD")
COMMAND, GIVES = "echo $((6 * 7))-quire", "42-quire"


def run(folder: Path, *command: str, **environment: str) -> str:
    """Run one of the agents, at home in an empty folder; return what it prints."""
    program = Path(CLIENTS or "").resolve() / "node_modules/.bin" / command[0]
    return run_at_home(folder, str(program), *command[1:], **environment)


@contextmanager
def reached(live: Live, name: str, home: Path) -> Iterator[str]:
    """Where an agent reaches the server; with QUIRE_RECORD, a folder, what it sends is kept there."""
    if not RECORD:
        yield live.url
        return
    private = {
        str(home): "/home/dev/project",
        re.sub("[/_]", "-", str(home)): "-home-dev-project",
        os.uname().release: "6.1.0",
    }
    recorder = Recorder(live.url, Path(RECORD) / name, private)
    try:
        yield recorder.url
    finally:
        recorder.close()


def test_claude_code(serve_model: Callable[..., Live], tmp_path: Path) -> None:
    live = serve_model("Bash", {"command": COMMAND, "description": "Count"}, GIVES)
    with reached(live, "claude_code", tmp_path) as url:
        out = run(
            tmp_path,
            *("claude", "-p", "Count.", "--output-format", "json", "--allowedTools", "Bash"),
            ANTHROPIC_BASE_URL=url,
            ANTHROPIC_AUTH_TOKEN="none",
            ANTHROPIC_MODEL="tiny",
            ANTHROPIC_DEFAULT_HAIKU_MODEL="tiny",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
    result = json.loads(out)
    assert (result["result"], result["num_turns"], result["is_error"]) == (SAID, 2, False)


SETTINGS = """
model = "tiny"
model_provider = "quire"

[model_providers.quire]
name = "Quire"
base_url = "URL/v1"
wire_api = "responses"
"""


def test_codex(serve_model: Callable[..., Live], tmp_path: Path) -> None:
    live = serve_model("exec_command", {"cmd": COMMAND}, GIVES)
    free = "--dangerously-bypass-approvals-and-sandbox"
    with reached(live, "codex", tmp_path) as url:
        (tmp_path / "config.toml").write_text(SETTINGS.replace("URL", url))
        out = run(
            tmp_path, "codex", "exec", "--skip-git-repo-check", free, "Count.", CODEX_HOME=str(tmp_path)
        )
    assert out.strip() == SAID
    first, second = live.engine.streams
    assert len(second.prompt) > len(first.prompt)


def test_opencode(serve_model: Callable[..., Live], tmp_path: Path) -> None:
    live = serve_model("bash", {"command": COMMAND, "description": "Count"}, GIVES)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{live.url}/v1", "apiKey": "none"},
        "models": {"tiny": {"name": "tiny"}},
    }
    settings = {"permission": "allow", "autoupdate": False, "provider": {"quire": provider}}
    (tmp_path / "opencode.json").write_text(json.dumps(settings))
    models = tmp_path / "models.json"  # instead of a list from the network
    models.write_text("{}")
    out = run(
        tmp_path,
        *("opencode", "run", "-m", "quire/tiny", "Count."),
        PWD=str(tmp_path),
        OPENCODE_DISABLE_MODELS_FETCH="1",
        OPENCODE_MODELS_PATH=str(models),
    )
    assert SAID in out


CONTINUE = """
name: quire
version: 0.0.1
schema: v1
models:
  - name: tiny
    provider: openai
    model: tiny
    apiBase: URL/v1
    apiKey: none
    roles: [chat]
    capabilities: [tool_use]
"""


def test_continue(serve_model: Callable[..., Live], tmp_path: Path) -> None:
    live = serve_model("Bash", {"command": COMMAND}, GIVES)
    settings = tmp_path / "config.yaml"
    settings.write_text(CONTINUE.replace("URL", live.url))
    assert SAID in run(tmp_path, "cn", "-p", "--auto", "--config", str(settings), "Count.", PWD=str(tmp_path))
