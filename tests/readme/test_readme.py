"""What README.md and docs/ tell people to type does what it says, on a `quire serve` of the demo model."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from quire.service.demo import MODEL_FOLDER
from tests.grafana.test_live import METRICS, ROUTER_METRICS
from tests.service import tool_templates

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    path: path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
TOUR, FURTHER = PAGES[ROOT / "docs/api.md"].split("## Structured output and tools")
PORT = "8000"  # the one that the README names
SECONDS = 60
# Of `python -m MODULE ...` each, in one process: they import the same for seconds.
HELP_OF_ALL = """
import json, runpy, sys
for module, *arguments in json.loads(sys.argv[1]):
    sys.argv = [module, *arguments, "--help"]
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        assert not end.code, (module, arguments)
"""


def block(language: str, word: str, text: str = README) -> str:
    """The one code block of `text` in this language that holds `word`."""
    (found,) = [block for block in blocks(language, text) if word in block]
    return found


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(command: list[str], **environment: str) -> str:
    """What it prints; it must succeed."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def serving(*model: str) -> Iterator[str]:
    """The port where `quire serve` answers, ready."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        number = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "quire.cli", "serve", *model, "--port", number]
    memory = ["--swap-space", "0", "--num-gpu-blocks-override", "256"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, *memory], cwd=ROOT, env=environment) as server:
        try:
            with httpx.Client(
                transport=httpx.HTTPTransport(retries=8), base_url=f"http://127.0.0.1:{number}"
            ) as client:
                with client.stream("GET", "/startup", timeout=SECONDS) as phases:
                    for _ in phases.iter_lines():  # ends with the phase "ready"
                        pass
                assert client.get("/ready").status_code == 200
            yield number
        finally:
            server.terminate()
            assert server.wait(SECONDS) == 0


@pytest.fixture(scope="module")
def port() -> Iterator[str]:
    with serving() as number:
        yield number


@pytest.fixture(scope="module")
def tools_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The demo model with a chat template that has tools."""
    folder = tmp_path_factory.mktemp("model") / "with-tools"
    shutil.copytree(MODEL_FOLDER, folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(settings | {"chat_template": tool_templates.HERMES}), encoding="utf-8")
    with serving(str(folder)) as number:
        yield number


def test_curl_streams_a_chat(port: str) -> None:
    command = block("sh", "/v1/chat/completions")
    assert command.count(PORT) == 1
    events = run(["bash", "-ec", command.replace(PORT, port)]).strip().split("\n\n")
    assert events.pop() == "data: [DONE]"
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert "KV cache" in "".join(choice["delta"].get("content") or "" for choice in choices)
    assert choices[-1]["finish_reason"] == "stop"


def test_openai_client_streams_a_chat(port: str) -> None:
    program = block("python", "chat.completions")
    assert program.count(PORT) == 1
    assert "block" in run([sys.executable, "-c", program.replace(PORT, port)])


def test_curl_streams_a_response(port: str) -> None:
    command = block("sh", "/v1/responses")
    assert command.count(PORT) == 1
    events = run(["bash", "-ec", command.replace(PORT, port)]).strip().split("\n\n")
    parts = [json.loads(event.split("data: ", 1)[1]) for event in events]
    assert parts[-1]["type"] == "response.completed"
    deltas = [part["delta"] for part in parts if part["type"] == "response.output_text.delta"]
    assert "KV cache" in "".join(deltas)


def test_openai_client_streams_a_response(port: str) -> None:
    program = block("python", "responses.stream")
    assert program.count(PORT) == 1
    assert "block" in run([sys.executable, "-c", program.replace(PORT, port)])


def test_browser_gets_the_page_that_is_pictured(port: str) -> None:
    assert f"http://127.0.0.1:{PORT}/" in README
    page = httpx.get(f"http://127.0.0.1:{port}/")
    assert page.status_code == 200
    assert "<title>Quire</title>" in page.text


def test_offline_use_takes_three_lines() -> None:
    program = block("python", "LLM(", PAGES[ROOT / "docs/commands.md"])
    assert len([line for line in program.splitlines() if line]) == 3
    assert len(run([sys.executable, "-c", program]).split()) > 5


def test_tour_of_the_api_runs(port: str) -> None:
    """Every command succeeds, and asks for something else."""
    asked = []
    for text in blocks("sh", TOUR):
        asked += re.findall(r"^ask (\S+)", text, re.MULTILINE)
        shown = run(["bash", "-euo", "pipefail", "-c", text.replace(PORT, port)])
        assert 'data: {"error"' not in shown  # a status that tells of an error ends the script
    described = httpx.get(f"http://127.0.0.1:{port}/openapi.json").json()["paths"]
    assert set(asked) >= {path for path in described if "{" not in path} - {"/"}


def test_curl_gets_json_by_a_schema(port: str) -> None:
    reply = json.loads(run(["bash", "-ec", block("sh", "json_schema", FURTHER).replace(PORT, port)]))
    answer = json.loads(reply["choices"][0]["message"]["content"])
    assert answer.keys() == {"answer", "sure"}
    assert isinstance(answer["sure"], bool)


def test_openai_client_parses_a_class(port: str) -> None:
    shown = run([sys.executable, "-c", block("python", "BaseModel", FURTHER).replace(PORT, port)])
    assert re.fullmatch(r"reason=.* verdict='(good|bad)'\n", shown, re.DOTALL)


def test_curl_offers_a_tool(tools_port: str) -> None:
    events = run(["bash", "-ec", block("sh", '"tools"', FURTHER).replace(PORT, tools_port)])
    assert events.strip().endswith("data: [DONE]")


def test_openai_client_calls_a_function(tools_port: str) -> None:
    program = block("python", "function_call_output", FURTHER)
    assert run([sys.executable, "-c", program.replace(PORT, tools_port)]).strip()


def test_openai_client_talks_over_a_socket(port: str) -> None:
    program = block("python", "responses.connect", FURTHER)
    first, second = run([sys.executable, "-c", program.replace(PORT, port)]).strip().splitlines()
    assert first != second


def test_curl_picks_a_stream_up_again(port: str, tmp_path: Path) -> None:
    commands = block("sh", "X-Stream-Id", FURTHER).replace(PORT, port)
    shown = run(["bash", "-ec", f"cd {tmp_path}\n{commands}"])
    read = (tmp_path / "part.txt").read_text()
    rest = shown.removeprefix(read)
    first, later = (re.findall(r"^id: (.*)$", part, re.MULTILINE) for part in (read, rest))
    assert len(rest) < len(shown) and shown.count("data: [DONE]") >= 1
    assert later[0].startswith(first[-1])  # it may have been cut off in its id
    assert first[-2] not in later


def test_files_that_are_named_exist() -> None:
    assert "service/chat.png" in README
    for page in [*PAGES, ROOT / "helm/README.md"]:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)]+)\)", text):
            path, _, section = target.partition("#")
            if not path.startswith("https:"):
                linked = (page.parent / path).resolve() if path else page
                assert linked.exists(), (page.name, target)
                assert not section or section in sections(linked.read_text(encoding="utf-8")), (
                    page.name,
                    target,
                )
        for path in re.findall(r"`((?:engine|kernels|service|loadtest|quire|tests)/[\w./]*)`", text):
            assert (ROOT / path).exists(), (page.name, path)


def sections(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of `text`."""
    return {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.M)
    }


def test_flags_that_are_named_exist() -> None:
    commands = [["quire.cli", name] for name in ("serve", "generate", "bench", "route")]
    commands += [
        ["quire.loadtest", name] for name in ("run", "sweep", "compare", "record", "figures", "simulate")
    ]
    commands += [["quire.loadtest.cluster_demo"], ["quire.loadtest.chaos"]]
    known = run([sys.executable, "-c", HELP_OF_ALL, json.dumps(commands)])
    for flag in set(re.findall(r"`(--[a-z-]+)", "".join(PAGES.values()))):
        assert re.search(rf"{flag}\b(?!-)", known), flag


def test_every_metric_is_explained() -> None:
    section = PAGES[ROOT / "docs/operations.md"].split("\n## Metrics and dashboard\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`((?:quire_|vllm:)\w+)`", section))
    assert named == {*METRICS, *ROUTER_METRICS, "quire_kv_pinned_blocks"}
