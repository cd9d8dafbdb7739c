"""Clients too large for every run. `make clients` installs them; QUIRE_CLIENTS says where they are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import json
from msgspec.structs import replace

from quire.engine.models.pooling import Pooling
from quire.service.text.template import ChatTemplate
from quire.service.text.tokenizer import Tokenizer
from tests.service import tiny_tokenizers, tool_templates
from tests.service.live import Live

CLIENTS = os.environ.get("QUIRE_CLIENTS")
collect_ignore_glob = [] if CLIENTS else ["test_*.py"]
if CLIENTS:
    sys.path.append(str(Path(CLIENTS) / "python"))  # after our own, which some of them use, too

SAID = "Hello from Quire."


def run_at_home(folder: Path, *command: str, **environment: str) -> str:
    """Run a program whose home is `folder`; return what it prints."""
    done = subprocess.run(
        command,
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


@contextmanager
def answering(answer: Callable[[str], str], template: str = tool_templates.HERMES) -> Iterator[Live]:
    """Serve a model that answers the text of a prompt with what `answer` returns for it."""
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(template, {}))

    def script(prompt: list[int], params: object, index: int) -> list[int]:
        said = answer(tokenizer.decode(prompt, skip_special_tokens=False))
        return tokenizer.encode(f"{said}<|end|>", add_special_tokens=False)

    live = Live(tokenizer, script=script)
    engine = live.engine  # agents have long prompts, here of a token a byte or two
    engine._info = engine.info = replace(engine._info, max_model_len=400_000, num_blocks=40_000)
    try:
        yield live
    finally:
        assert live.end() == 0


def call_of(tool: str, arguments: dict[str, Any]) -> str:
    """Return a call as models write it."""
    call = json.encode({"name": tool, "arguments": arguments}).decode()
    call = call.replace('":', '": ').replace(',"', ', "')
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.fixture
def serve_model() -> Iterator[Callable[..., Live]]:
    """A server whose model calls a tool until its prompt has what that gives, and then greets."""
    with ExitStack() as servers:

        def make(tool: str = "", arguments: dict[str, Any] | None = None, gives: str = "") -> Live:
            calling = f"I look.\n{call_of(tool, arguments or {})}"
            return servers.enter_context(answering(lambda prompt: SAID if gives in prompt else calling))

        yield make


@contextmanager
def embedding() -> Iterator[Live]:
    """Serve a model that embeds."""
    live = Live(Tokenizer(tiny_tokenizers.byte_level(), None), pooling=Pooling(normalize=True))
    try:
        yield live
    finally:
        live.end()


@pytest.fixture
def serve_embeddings() -> Iterator[Live]:
    with embedding() as live:
        yield live
