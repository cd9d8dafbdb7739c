"""Programs in Python that want other versions than the rest: each in a process, and a folder, of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from tests.clients.conftest import CLIENTS, SAID, run_at_home
from tests.service.live import Live

HERE = Path(__file__).parent


def run(client: str, home: Path, *arguments: str) -> str:
    """Run Python with the packages of `client`; return what it prints."""
    path = str(Path(CLIENTS or "").resolve() / client)
    return run_at_home(home, sys.executable, *arguments, PYTHONPATH=path)


def test_llama_index(serve_model: Callable[..., Live], tmp_path: Path) -> None:
    live = serve_model("get_weather", {"city": "Bern"}, "21 degrees")
    out = run("llama-index", tmp_path, str(HERE / "llama_index_agent.py"), f"{live.url}/v1")
    assert out.strip().endswith(SAID)


def test_aider(serve_model: Callable[..., Live], tmp_path: Path) -> None:
    live = serve_model()
    quiet = ("--no-git", "--yes-always", "--no-show-model-warnings", "--no-check-update", "--no-analytics")
    asked = ("--openai-api-base", f"{live.url}/v1", "--openai-api-key", "none", "--model", "openai/tiny")
    assert SAID in run("aider", tmp_path, "-m", "aider", *quiet, *asked, "--message", "Greet.")


def test_lm_eval(serve_model: Callable[..., Live], tmp_path: Path) -> None:
    live = serve_model()
    out = run("lm-eval", tmp_path, str(HERE / "lm_eval_task.py"), f"{live.url}/v1/chat/completions", SAID)
    assert "exact_match 1.0" in out


def test_guidellm(serve_model: Callable[..., Live], tmp_path: Path) -> None:
    live = serve_model()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Greet."}\n' * 5)
    run(
        "guidellm",
        tmp_path,
        *("-m", "guidellm", "run", "--backend", f"kind=openai_http,target={live.url},model=tiny"),
        *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3"),
        *("--data", "kind=json_file,path=prompts.jsonl", "--output", "kind=json,path=out.json"),
    )
    (benchmark,) = json.loads((tmp_path / "out.json").read_bytes())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (3, 0)
