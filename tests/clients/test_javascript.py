"""Frameworks in JavaScript, whole and streamed, with tools."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conftest import CLIENTS, SAID
from tests.service.live import Live


@pytest.mark.parametrize(
    ("program", "provider"),
    [("vercel", "openai"), ("vercel", "compatible"), ("vercel", "anthropic"), ("langchain", "openai")],
)
def test_a_tool_is_called(serve_model: Callable[..., Live], program: str, provider: str) -> None:
    live = serve_model("get_weather", {"city": "Bern"}, "21 degrees")
    text = (Path(__file__).parent / f"{program}.mjs").read_text()
    done = subprocess.run(
        ["node", "--input-type=module", "-", provider, live.url],
        input=text,
        cwd=CLIENTS,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    assert out["whole"].endswith(SAID) and out["streamed"].endswith(SAID) and out["steps"] == 2
