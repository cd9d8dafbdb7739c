"""Logs say what happened to whom, and hold nothing that a client said: no prompt, no answer, no key."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from quire.engine.logs import JsonFormatter, TextFormatter, configure_logging
from quire.engine.messages import Output, SamplingParams
from quire.llm import LLM
from tests.service.asgi import Exchange, exchange, get, post
from tests.service.asgi_socket import Socket
from tests.service.conftest import Service
from tests.service.live import Live
from tests.service.processes import serving
from tests.waiting import SECONDS, until

SECRET = "xyzzy"
PATH = "/v1/completions"


class Log:
    """What the service has logged, at any level, as lines in both formats."""

    def __init__(self) -> None:
        self.streams = {}
        self.handlers = []
        for name, formatter in (("json", JsonFormatter()), ("text", TextFormatter())):
            self.streams[name] = io.StringIO()
            handler = logging.StreamHandler(self.streams[name])
            handler.setFormatter(formatter)
            self.handlers.append(handler)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.streams["json"].getvalue().splitlines()]

    def __str__(self) -> str:
        return "".join(stream.getvalue() for stream in self.streams.values())


@pytest.fixture
def log() -> Iterator[Log]:
    log, root = Log(), logging.getLogger()
    level = root.level
    root.setLevel(logging.DEBUG)
    for handler in log.handlers:
        root.addHandler(handler)
    yield log
    for handler in log.handlers:
        root.removeHandler(handler)
    root.setLevel(level)


@pytest.mark.anyio
async def test_each_request_is_a_line_without_content(make_service: Callable[..., Service], log: Log) -> None:
    service = make_service(api_keys=(SECRET,))
    key = {"authorization": f"Bearer {SECRET}"}
    prompt = {"prompt": f"the {SECRET} word", "max_tokens": 3, "user": SECRET, "cache_salt": SECRET}
    chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 3, "stream": True}
    assert (await post(service.app, PATH, prompt, **key, x_request_id="mine")).status == 200
    assert (await post(service.app, "/v1/chat/completions", chat, **key)).status == 200
    assert (await post(service.app, PATH, prompt | {SECRET: 1}, **key)).status == 400
    assert (await post(service.app, PATH, f'{{"prompt": "{SECRET}'.encode(), **key)).status == 400
    assert (await post(service.app, PATH, prompt, authorization=f"Bearer not-{SECRET}")).status == 401
    query = Exchange(service.app, "GET", "/v1/models", headers=key)
    query.scope["query_string"] = f"api_key={SECRET}".encode()
    assert (await query.start().finish()).status == 200
    service.engine.auto = False
    left = exchange(service.app, PATH, prompt, **key)
    await service.engine.until_added(3)
    left.leave()
    assert left.task is not None
    await left.task
    assert SECRET not in str(log)
    requests = [line for line in log.lines if line["logger"] == "quire.service.request"]
    assert [line["status"] for line in requests] == [200, 200, 400, 400, 401, 200, 0]
    first = requests[0]
    assert (first["method"], first["path"], first["request_id"]) == ("POST", PATH, "mine")
    cost = rf"POST {PATH} 200 key-1: \d+ in, 0 cached, 3 out, first after [\d.]+ s, all after [\d.]+ s"
    assert re.fullmatch(cost, first["message"]) and first["level"] == "info"
    assert (first["prompt_tokens"], first["cached_tokens"], first["output_tokens"]) == (9, 0, 3)
    assert 0 <= first["first_token"] <= first["seconds"]
    assert requests[-1]["message"].startswith(f"POST {PATH} gone key-1: ")
    assert ", 0 out, no token, " in requests[-1]["message"]
    assert [line.get("key") for line in requests] == ["key-1"] * 4 + [None] + ["key-1"] * 2
    assert first["seconds"] >= 0
    assert first["time"].endswith("+00:00")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("stream", "headers"), [(False, {}), (True, {}), (True, {"x_stream_id": "to-be-picked-up"})]
)
async def test_a_failure_is_told_with_the_numbers_of_the_engines_log(
    make_service: Callable[..., Service], log: Log, stream: bool, headers: dict[str, str]
) -> None:
    service = make_service(auto=False)
    body = {"prompt": ["a", "b"], "stream": stream}
    sent = exchange(service.app, PATH, body, x_request_id="mine", **headers)
    await service.engine.until_added(2)
    first, second = service.engine.streams
    service.engine.step()
    if stream:
        await sent.until(b"data: ")
    second.push(Output(second.request_id, 0, [], finish_reason="error", error="computing it raised it"))
    await sent.finish()
    (line,) = [line for line in log.lines if line["logger"] == "quire.service.request"]
    assert (line["request_id"], line["status"]) == ("mine", 200 if stream else 500)
    assert (line["error"], line["engine_requests"]) == ("engine_error", [first.request_id, second.request_id])


@pytest.mark.anyio
async def test_each_response_of_a_socket_that_fails_is_a_line(
    make_service: Callable[..., Service], log: Log
) -> None:
    service = make_service(auto=False)
    socket = Socket(service.app, x_request_id="mine").start()
    socket.create("never let in", max_output_tokens=10**6)
    socket.create("well")
    socket.create(SECRET)
    await socket.until_type("error")
    await service.engine.until_added(2)
    _, poisoned = service.engine.streams
    service.engine.step()
    poisoned.push(Output(poisoned.request_id, 0, [], finish_reason="error", error="computing it raised it"))
    failed = await socket.until_type("response.failed")
    (line,) = [line for line in log.lines if "engine_requests" in line]
    assert (line["request_id"], line["response_id"]) == ("mine", failed["response_id"])
    assert (line["error"], line["engine_requests"]) == ("engine_error", [poisoned.request_id])
    assert SECRET not in str(log)
    socket.leave()


@pytest.mark.anyio
async def test_a_bug_is_told_by_place_and_kind(
    service: Service, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(prompt: list[int], *rest: object) -> None:
        raise ZeroDivisionError(f"a word that quotes {SECRET}")

    monkeypatch.setattr("quire.service.answer.generation.Generation.finished", property(broken))
    reply = await post(service.app, PATH, {"prompt": SECRET, "max_tokens": 3})
    assert (reply.status, reply.error["message"]) == (500, "internal error")
    assert SECRET not in str(log)
    (failure,) = [line for line in log.lines if line["message"] == "a request failed"]
    assert failure["trace"][-1] == "ZeroDivisionError"
    assert any("test_logs.py" in frame and frame.endswith(" broken") for frame in failure["trace"])
    assert (log.lines[-1]["status"], log.lines[-1]["error"]) == (500, "internal_error")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_start_tells_each_phase_once_and_of_no_probe(
    capfd: pytest.CaptureFixture[str], log_format: str
) -> None:
    flags = ["--device", "cpu", "--swap-space", "0", "--log-format", log_format]
    with serving("quire.cli", "serve", *flags):
        lines: list[str] = []

        def ended() -> bool:
            lines.extend(capfd.readouterr().err.splitlines())
            return any("ready" in line and " after " in line for line in lines)

        until(ended, "the start is told")  # /ready was asked all the while
    for phase in ("weights", "memory", "warm-up"):
        assert sum(f"{phase}: " in line or f"{phase} after " in line for line in lines) == 1, lines
    assert not any("/ready" in line for line in lines)
    assert "" not in lines


@pytest.mark.anyio
async def test_probes_are_for_debugging_unless_they_fail(service: Service, log: Log) -> None:
    for path in ("/health", "/ready", "/metrics"):
        await get(service.app, path)
    assert {line["level"] for line in log.lines if "path" in line} == {"debug"}
    service.engine.die("gone")
    for path, level in (("/health", "info"), ("/ready", "debug")):  # not to be ready is no fault
        await get(service.app, path)
        assert (log.lines[-1]["level"], log.lines[-1]["status"]) == (level, 503)


def test_what_is_no_request_keeps_its_words(log: Log) -> None:
    try:
        raise OSError("no route to the registry")
    except OSError:
        logging.getLogger("quire.registry").exception("publishing starts anew")
    assert log.lines[-1]["trace"][-1] == "OSError: no route to the registry"
    assert "\n  OSError: no route to the registry\n" in str(log)


def test_configured_format_is_that_of_the_processes_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    monkeypatch.setenv("QUIRE_LOG_FORMAT", "text")
    configure_logging("json")
    (handler,) = logging.root.handlers
    assert isinstance(handler.formatter, JsonFormatter)
    logging.root.handlers = []
    configure_logging()  # as the engine process does
    (handler,) = logging.root.handlers
    assert isinstance(handler.formatter, JsonFormatter)


def test_configured_level_is_that_of_the_processes_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, others = logging.getLogger("quire.scheduler"), logging.getLogger("uvicorn")
    for logger in (logging.root, logging.getLogger("quire")):
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "info")
    configure_logging("text", "error")
    assert not ours.isEnabledFor(logging.WARNING) and ours.isEnabledFor(logging.ERROR)
    logging.root.handlers = []
    configure_logging("text", "debug")
    logging.root.handlers = []
    logging.getLogger("quire").setLevel(logging.NOTSET)
    configure_logging()  # as the engine process does
    assert ours.isEnabledFor(logging.DEBUG)
    assert others.isEnabledFor(logging.INFO) and not others.isEnabledFor(logging.DEBUG)


def test_a_preemption_is_told_with_who_for_whom_how_and_what_it_cost(log: Log) -> None:
    llm = LLM(device="cpu", num_gpu_blocks_override=12, swap_space=0, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=70, ignore_eos=True, temperature=0)
    llm.generate([[5] * 40, [6] * 40, [7] * 40], params)
    told = [line for line in log.lines if line["logger"] == "quire.scheduler"]
    assert len(told) == llm.core.stats.preemptions_recompute > 0
    first = told[0]
    assert (first["level"], first["request"], first["beneficiary"]) == ("debug", 2, 0)
    assert (first["mode"], first["blocks"]) == ("recompute", 4)
    assert 48 < first["tokens"] <= 64


def test_a_server_tells_of_the_longest_request_and_its_engine_of_preemptions(
    capfd: pytest.CaptureFixture[str],
) -> None:
    lines: list[dict[str, Any]] = []

    def told(logger: str, words: str) -> bool:
        lines.extend(json.loads(line) for line in capfd.readouterr().err.splitlines())
        return any(line["logger"] == logger and re.search(words, line["message"]) for line in lines)

    few = ["--device", "cpu", "--num-gpu-blocks-override", "12", "--swap-space", "0"]
    with serving("quire.cli", "serve", *few, "--log-format", "json", "--log-level", "debug") as server:
        flag = r"at most 192 tokens: .* more than 12 as --num-gpu-blocks-override"
        until(lambda: told("quire.service", flag), "the limit is told")
        prompts = {"prompt": [[5] * 40, [6] * 40, [7] * 40], "max_tokens": 70, "ignore_eos": True}
        reply = httpx.post(f"{server.url}/v1/completions", json=prompts, timeout=SECONDS)
        assert reply.status_code == 200
        until(lambda: told("quire.scheduler", "^preempted request="), "the preemption is told")


@pytest.mark.parametrize("form", [TextFormatter(), JsonFormatter()])
@pytest.mark.parametrize("code", [*range(32), 0x7F, 0x85, 0x9B, 0x2028, 0x2029])
def test_no_text_begins_a_line_of_its_own(form: logging.Formatter, code: int) -> None:
    text = f"a{chr(code)}2026-01-01 00:00:00,000 quire.service INFO the key is valid"
    record = logging.LogRecord("quire.service", logging.INFO, "", 0, "%s", (text,), None)
    record.path = text
    line = form.format(record)
    assert len(line.splitlines()) == 1
    assert chr(code) not in line
    if isinstance(form, JsonFormatter):
        assert (json.loads(line)["message"], json.loads(line)["path"]) == (text, text)


def test_no_path_makes_up_a_line(live: Live, log: Log) -> None:
    path = "/%0a2026-01-01%2000:00:00,000%20quire.service%20INFO%20forged%0d%1b%5b2J"
    key = {"authorization": "Bearer key"}
    assert httpx.get(f"{live.url}{path}", headers=key, timeout=SECONDS).status_code == 404
    until(lambda: "404" in str(log), "it is told")
    assert not [line for line in str(log).splitlines() if line.startswith("2026-01-01 00")]
    assert [line["path"] for line in log.lines if "path" in line] == [path]
