"""What docs/api.md tells people to type does what it says, on a `quire serve` of the demo model."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import httpx

from tests.docs.pages import API, PORT, block, blocks, run, section

POOLING = "Embeddings, rerank and score"


def test_tour_of_the_api_runs(port: str, pooling_port: str) -> None:
    """Every command succeeds, and asks for something else."""
    asked = []
    for heading, number in (("One of everything", port), (POOLING, pooling_port)):
        for text in blocks("sh", section(API, heading)):
            if "curl" not in text:
                continue
            asked += re.findall(r"^ask (\S+)", text, re.MULTILINE)
            shown = run(["bash", "-euo", "pipefail", "-c", text.replace(PORT, number)])
            assert 'data: {"error"' not in shown  # a status that tells of an error ends the script
    described = httpx.get(f"http://127.0.0.1:{port}/openapi.json").json()["paths"]
    asked.append("/classify")  # for which the demo model has no head
    assert set(asked) >= {path for path in described if "{" not in path} - {"/"}


def test_openai_client_embeds(pooling_port: str) -> None:
    program = block("python", "embeddings.create", section(API, POOLING))
    count, size, _ = run([sys.executable, "-c", program.replace(PORT, pooling_port)]).split()
    assert count == "2" and int(size) > 1


def test_every_path_is_named(port: str) -> None:
    named = re.findall(r"(/[\w/{}.]*)", "".join(re.findall(r"`[^`]*`", API.split("\n## ")[0])))
    described = httpx.get(f"http://127.0.0.1:{port}/openapi.json").json()["paths"]
    assert set(named) == {re.sub(r"{\w+_id}", "{id}", path) for path in described}


def test_curl_streams_a_response(port: str) -> None:
    command = block("sh", "/v1/responses", section(API, "Responses"))
    assert command.count(PORT) == 1
    events = run(["bash", "-ec", command.replace(PORT, port)]).strip().split("\n\n")
    parts = [json.loads(event.split("data: ", 1)[1]) for event in events]
    assert parts[-1]["type"] == "response.completed"
    deltas = [part["delta"] for part in parts if part["type"] == "response.output_text.delta"]
    assert "KV cache" in "".join(deltas)


def test_openai_client_streams_a_response(port: str) -> None:
    program = block("python", "responses.stream", API)
    assert program.count(PORT) == 1
    assert "block" in run([sys.executable, "-c", program.replace(PORT, port)])


def test_openai_client_goes_on_from_a_stored_response(port: str) -> None:
    run([sys.executable, "-c", block("python", "retrieve", API).replace(PORT, port)])


def test_curl_gets_json_by_a_schema(port: str) -> None:
    reply = json.loads(run(["bash", "-ec", block("sh", "json_schema", API).replace(PORT, port)]))
    answer = json.loads(reply["choices"][0]["message"]["content"])
    assert answer.keys() == {"answer", "sure"}
    assert isinstance(answer["sure"], bool)


def test_openai_client_parses_a_class(port: str) -> None:
    shown = run([sys.executable, "-c", block("python", "BaseModel", API).replace(PORT, port)])
    assert re.fullmatch(r"reason=.* verdict='(good|bad)'\n", shown, re.DOTALL)


def test_curl_offers_a_tool(port: str) -> None:
    events = run(["bash", "-ec", block("sh", '"tools"', API).replace(PORT, port)])
    assert events.strip().endswith("data: [DONE]")


def test_openai_client_calls_a_function(port: str) -> None:
    program = block("python", "function_call_output", API)
    assert run([sys.executable, "-c", program.replace(PORT, port)]).strip()


def test_openai_client_talks_over_a_socket(port: str) -> None:
    program = block("python", "responses.connect", API)
    first, second = run([sys.executable, "-c", program.replace(PORT, port)]).strip().splitlines()
    assert first != second


def test_five_lines_of_python_stream_over_a_socket(port: str) -> None:
    program = block("python", "/v1/completions", API)
    assert len(program.split("\n\n")) == 2 and len(program.splitlines()) == 6
    assert run([sys.executable, "-c", program.replace(PORT, port)]).strip()


def test_curl_picks_a_stream_up_again(port: str, tmp_path: Path) -> None:
    commands = block("sh", "X-Stream-Id", API).replace(PORT, port)
    shown = run(["bash", "-ec", f"cd {tmp_path}\n{commands}"])
    read = (tmp_path / "part.txt").read_text()
    rest = shown.removeprefix(read)
    first, later = (re.findall(r"^id: (.*)$", part, re.MULTILINE) for part in (read, rest))
    assert len(rest) < len(shown) and shown.count("data: [DONE]") >= 1
    assert later[0].startswith(first[-1])  # it may have been cut off in its id
    assert first[-2] not in later
