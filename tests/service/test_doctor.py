"""`quire doctor` says what an engine that starts with the same flags has, and what to change."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest

from quire.cli import main
from quire.doctor import describe, doctor
from quire.engine.config import EngineConfig
from quire.engine.startup import start_engine
from quire.machine import Finding, look
from quire.service.commands.advice import advise
from quire.service.demo import MODEL_FOLDER

UNTIMED = ["--preemption-mode", "recompute"]  # so that an engine does not time both at start


def said(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[dict[str, list[int]], str]:
    """The numbers of each line, by its name, and all that was said."""
    with pytest.raises(SystemExit) as end:
        main(["doctor", *flags])
    assert end.value.code == 0
    text = capsys.readouterr().out
    lines = [(line[:10].strip(), line[10:].replace(",", "")) for line in text.split("\n\n")[0].splitlines()]
    return {name: [int(number) for number in re.findall(r"\d+", words)] for name, words in lines}, text


def test_it_says_what_a_server_would_have(capsys: pytest.CaptureFixture[str]) -> None:
    numbers, text = said(capsys, "--num-gpu-blocks-override", "300", "--max-num-seqs", "12")
    info = start_engine(EngineConfig(model=MODEL_FOLDER, num_gpu_blocks_override=300, max_num_seqs=12))[1]
    assert numbers["KV block"][:2] == [info.block_size, round(info.bytes_per_block / 1024)]
    assert numbers["KV cache"][:2] == [info.num_blocks, info.num_blocks * info.block_size]
    assert numbers["host"][0] == info.num_host_blocks
    assert numbers["a request"] == [info.max_request_tokens]
    assert numbers["at once"] == [300 * 16 // info.max_model_len, 12, 300 // 12 * 16]
    assert numbers["a step"] == [info.max_num_batched_tokens]
    assert "--" not in text.split("verdict")[0]
    assert re.search(r"verdict    it runs here\. Type: quire serve --max-num-seqs 12 --num-gpu-blocks-", text)


@pytest.mark.parametrize(("blocks", "at_once"), [(20, [1, 20, 16]), (600, [4, 256, 32])])
def test_sequences_at_once_hold_whole_blocks(
    capsys: pytest.CaptureFixture[str], blocks: int, at_once: list[int]
) -> None:
    numbers, _ = said(capsys, "--num-gpu-blocks-override", str(blocks), *UNTIMED)
    assert numbers["at once"] == at_once


def test_it_says_what_layers_of_one_window_keep() -> None:
    info = start_engine(EngineConfig(model=MODEL_FOLDER, num_gpu_blocks_override=100, swap_space=0))[1]
    window = {"group_windows": (100,), "keeps_all": False, "max_num_batched_tokens": 64}
    told = dict(describe(msgspec.structs.replace(info, max_model_len=50_000, **window)))
    layers = info.group_layers[0]
    assert told["KV group"].startswith(f"{layers} layers keep the last 100 tokens: 8 blocks, ")
    assert told["KV group"].endswith(" of 50,000 tokens")
    assert told["a request"] == "at most 50,000 tokens, prompt and output"
    assert told["at once"].startswith("8 of those, or 100 sequences of 17 tokens")


def test_it_says_what_layers_keep_that_keep_states() -> None:
    info = start_engine(EngineConfig(model=MODEL_FOLDER, num_gpu_blocks_override=100, swap_space=0))[1]
    groups = {"group_windows": (2, 2), "group_layers": (3, 5, 4), "state_groups": 2}
    told = describe(msgspec.structs.replace(info, max_model_len=160, **groups))
    lines = [text for name, text in told if name.startswith("KV group")]
    assert lines[0].startswith("3 layers keep all tokens: 10 blocks, ")
    assert lines[1].startswith("9 layers keep states: 4 blocks, ")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--num-gpu-blocks-override", "40", *UNTIMED], ["--num-gpu-blocks-override", "--max-model-len 640"]),
        (["--num-gpu-blocks-override", "200", *UNTIMED], ["--num-gpu-blocks-override"]),
        (["--num-gpu-blocks-override", "300", "--swap-space", "0"], ["--swap-space"]),
    ],
)
def test_it_names_the_flag_to_change(
    capsys: pytest.CaptureFixture[str], flags: list[str], named: list[str]
) -> None:
    _, text = said(capsys, *flags)
    assert all(name in text for name in named)


@pytest.mark.parametrize(
    ("cache", "offered"),
    [("bfloat16", "fp12_e4m7 or fp8_e4m3"), ("fp12_e4m7", "fp8_e4m3"), ("fp8_e4m3", None)],
)
def test_it_offers_the_caches_that_take_less_on_a_gpu(cache: str, offered: str | None) -> None:
    config = EngineConfig(model=MODEL_FOLDER, num_gpu_blocks_override=40, preemption_mode="recompute")
    info = start_engine(config)[1]
    info = msgspec.structs.replace(info, device="a GPU", kv_cache_dtype=cache)
    (advice,) = advise(info, msgspec.structs.replace(config, num_gpu_blocks_override=None))
    flag = "--kv-cache-dtype" if offered is None else f"or try --kv-cache-dtype {offered}, or say so"
    assert (flag in advice) == (offered is not None)


def test_what_the_engine_refuses_is_a_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def verdict(*words: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["doctor", *words])
        assert end.value.code == 1
        return capsys.readouterr().out.splitlines()[-1]

    no = "verdict    no server starts here: "
    shutil.copytree(MODEL_FOLDER, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    for words, told in [
        ([str(tmp_path)], "model.safetensors is not a complete safetensors file: .* download it again"),
        (["--max-model-len", "100000"], "--max-model-len"),
        (["--kv-cache-memory-bytes", "900T"], "give a lower --num-gpu-blocks-override or --kv-cache-mem"),
    ]:
        assert re.match(f"{no}.*{told}", verdict(*words))
    with monkeypatch.context() as patched:
        known = os.sysconf
        patched.setattr(os, "sysconf", lambda name: 1 if name == "SC_AVPHYS_PAGES" else known(name))
        assert re.match(f"{no}no memory .* --num-gpu-blocks-override", verdict())


def test_a_registry_that_is_away_keeps_no_server_from_starting(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = said(capsys, "--redis-url", "redis://127.0.0.1:1", "--num-gpu-blocks-override", "300")
    told = r"A server starts, but routers .*: see to --redis-url \(.*[^.]\)\.$"
    assert re.search(told, text, re.MULTILINE)
    assert "verdict    it runs here. Type: quire serve --num-gpu-blocks-override 300 --redis-url" in text


def test_a_registry_that_answers_a_byte_at_a_time_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.machine._REDIS_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                while connection.recv(1 << 16):
                    for at in range(7):
                        time.sleep(0.1)
                        connection.sendall(b"+PONG\r\n"[at : at + 1])

        dripping = threading.Thread(target=drip)
        dripping.start()
        *_, found = look("cpu", "127.0.0.1", 0, f"redis://127.0.0.1:{server.getsockname()[1]}")
        dripping.join()
    assert found.words == "no answer" and "Timeout" in found.advice


def test_without_a_gpu_the_command_asks_for_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--device", "cuda", "--max-num-seqs", "12", "--port", "0"])
    assert end.value.code == 1
    told = "see to driver and torch, or leave out --device cuda. Then type: quire serve --max-num-seqs 12"
    assert told in capsys.readouterr().out
    (advice,) = (each.advice for each in look("cuda", "127.0.0.1", 0, None) if each.name == "GPU")
    assert advice == "see to driver and torch, or leave out --device cuda"


def test_it_looks_at_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "version"
    monkeypatch.setattr("quire.machine._DRIVER_FILE", driver)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        def found(device: str) -> dict[str, Finding]:
            return {each.name: each for each in look(device, "127.0.0.1", port, "redis://127.0.0.1:1")}

        here = found("auto")
        assert here["driver"].words == "no NVIDIA driver" and not here["GPU"].fatal
        assert f"port {port} is taken; try --port " in here["port"].advice
        assert here["Redis"].words == "no answer" and not here["Redis"].fatal and not here["disk"].fatal
        driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\n")
        assert "CUDA 13.0 needs a driver of version 580" in found("auto")["driver"].advice
        assert found("cuda")["GPU"].fatal
        driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n")
        assert not found("auto")["driver"].advice


def test_its_verdict_may_be_no(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [Finding("GPU", "none", "see to driver and torch", fatal=True)]
    assert not doctor(EngineConfig(model=MODEL_FOLDER), findings, "quire serve --device cuda")
    assert capsys.readouterr().out.splitlines()[-1] == (
        "verdict    no server starts here: see to driver and torch. Then type: quire serve --device cuda"
    )
