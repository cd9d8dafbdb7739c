"""Keys from flags, the environment and a file: which are let in, what they are called, and who sees them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from quire.service.config import ServiceConfig
from quire.service.keys import KeyRing
from tests.service.asgi import get
from tests.service.conftest import Service
from tests.service.live import Live
from tests.service.processes import serving
from tests.service.test_logs import Log, log  # noqa: F401
from tests.usage import usage_error
from tests.waiting import SECONDS, until

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "keys"
        path.write_bytes(text.encode())
        return path

    return write


def names(ring: KeyRing) -> dict[str, str]:
    """By key, of those that are asked after here."""
    found = {key: ring.find(key.encode()) for key in ("a", "b", "c", "d:e")}
    return {key: known.name for key, known in found.items() if known is not None}


def test_keys_have_names(write: Write) -> None:
    file = write("# of the team\r\n\r\nalice: a \r\nb\n\nbob:d:e\n")
    assert names(KeyRing(["c"], file)) == {"a": "alice", "b": "key-3", "c": "key-1", "d:e": "bob"}
    assert names(KeyRing(["a", "c", "c"], file))["a"] == "alice"
    assert [key.name for key in KeyRing(["a", "c"])] == ["key-1", "key-2"]


@pytest.mark.parametrize("key", ["secret", "secret\n", " secret\r\n", "\tsecret"])
@pytest.mark.anyio
async def test_white_space_around_a_key_is_not_of_it(make_service: Callable[..., Service], key: str) -> None:
    service = make_service(api_keys=(key,))
    assert (await get(service.app, "/v1/models", authorization="Bearer secret")).status == 200


@pytest.mark.parametrize("key", ["", " \n", "a\nb", "a\x00b", "a\x7fb", "é"])
def test_what_can_be_no_key_is_refused_by_name(key: str) -> None:
    with pytest.raises(ValueError, match="--api-key number 2"):
        ServiceConfig(served_model_names=("m",), api_keys=("good", key))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no key"),
        ("# alice:a\n", "holds no key"),
        ("alice:a\nalice:b", "name alice twice"),
        ("alice:a\nbob:a", "one key twice, as alice and bob"),
        ("alice:", "line 1: the key is empty"),
        ("a\n:b", "line 2: a name must match"),
        ("al ice:b", "line 1: a name must match"),
        ("a\nbob:x\x01y", "line 2: the key holds the control character U\\+0001"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(write: Write, text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        KeyRing(["z"], write(text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match=r"--api-key-file .* cannot be read"):
            KeyRing([], path)
    (tmp_path / "large").write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(ValueError, match="larger than"):
        KeyRing([], tmp_path / "large")


@pytest.mark.parametrize("command", ["serve", "route"])
def test_an_empty_variable_is_refused(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", " \n")
    said = usage_error([command, "--redis-url", "redis://127.0.0.1:1"], capsys)
    assert "QUIRE_API_KEY is empty" in said


def test_a_file_of_keys_opens_a_server_to_other_hosts(write: Write) -> None:
    file = write("alice:a")
    assert ServiceConfig(served_model_names=("m",), host="0.0.0.0", api_key_file=file).allowed_hosts is None


@pytest.mark.anyio
async def test_who_a_tenant_is_depends_on_the_key_alone(
    make_service: Callable[..., Service], write: Write
) -> None:
    """A new name for a key leaves its cache to it."""
    file = write("alice:a")
    service = make_service(api_keys=("b",), api_key_file=file)
    alone = make_service(api_keys=("a",))
    before = [key.tenant for key in service.state.keys]
    assert before[:1] == [key.tenant for key in alone.state.keys]
    write("carol:a")
    service.state.keys.reload()
    assert [key.tenant for key in service.state.keys] == before
    assert [key.name for key in service.state.keys] == ["carol", "key-1"]


def test_a_file_is_read_again_and_streams_go_on(
    make_live: Callable[..., Live],
    write: Write,
    log: Log,  # noqa: F811
) -> None:
    live = make_live(api_key_file=write("alice:a"), auto=False, keep_alive=0.1)

    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.get(f"{live.url}/v1/models", headers=headers, timeout=SECONDS).status_code

    body = {"prompt": "ab", "max_tokens": 2, "stream": True}
    path, alice = f"{live.url}/v1/completions", {"authorization": "Bearer a"}
    with httpx.stream("POST", path, json=body, headers=alice, timeout=SECONDS) as answer:
        live.call(live.engine.step)
        text = answer.iter_text()
        assert any('"text":"a"' in part for part in text)
        write("bob:b\n")
        live.call(live.server.reload_soon)
        live.wait(lambda: status("b") == 200)
        assert status("a") == 401
        live.call(live.engine.step)
        assert "[DONE]" in "".join(text)
    for bad in ("", "bob:\n", "bob:b\nbob:c"):
        write(bad)
        errors = len([line for line in log.lines if line["level"] == "error"])
        live.call(live.server.reload_soon)
        until(
            lambda errors=errors: len([x for x in log.lines if x["level"] == "error"]) > errors, "it is told"
        )
        assert (status("a"), status("b")) == (401, 200)
    requests = [line for line in log.lines if line["logger"] == "quire.service.request"]
    assert {line.get("key") for line in requests if line["status"] == 200} == {"alice", "bob"}
    assert all(f" {line['key']}: " in line["message"] for line in requests if line["status"] == 200)


def processes_of(root: int) -> list[int]:
    """It and all below it."""
    children = Path(f"/proc/{root}/task/{root}/children").read_text().split()
    return [root, *(each for child in map(int, children) for each in processes_of(child))]


def test_a_server_reads_its_keys_again_at_a_signal_and_shows_none(
    write: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor do its own processes get a key that was given as a flag."""
    file = write("alice:first-of-the-file\n")
    flags = ["--device", "cpu", "--num-gpu-blocks-override", "64", "--swap-space", "0"]
    with serving("quire.cli", "serve", *flags, "--api-key-file", str(file), "--api-key", "a-flag") as server:

        def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.get(f"{server.url}/v1/models", headers=headers, timeout=SECONDS).status_code

        assert (status("first-of-the-file"), status("a-flag"), status("second")) == (200, 200, 401)
        write("alice:second\n")
        os.kill(server.process.pid, signal.SIGHUP)
        until(lambda: status("second") == 200, "the file is read again")
        assert (status("first-of-the-file"), status("a-flag")) == (401, 200)
        first, *others = processes_of(server.process.pid)
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (first, *others)}
        assert others
        assert not any(b"of-the-file" in line or b"second" in line for line in lines.values())
        assert not any(b"a-flag" in lines[pid] for pid in others)
    told = capfd.readouterr().err
    assert "--api-key shows the key" in told
    assert not any(key in told for key in ("a-flag", "of-the-file", "second"))
