"""A rank that dies, hangs, disagrees or cannot start ends all: one event a stream, and no orphans."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from transformers import LlamaForCausalLM

from quire.engine import rank, startup
from quire.engine.client import AsyncEngine
from quire.engine.config import EngineConfig
from quire.engine.messages import Output, Request, SamplingParams
from quire.engine.parallel.digest import EVERY
from quire.engine.parallel.follower import has_cores_for
from quire.engine.parallel.leader import Leader, LeadingRunner, RankLost
from quire.engine.startup import start_engine
from tests.waiting import until

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its ranks are on CPUs")


def config(folder: Path, **settings: object) -> EngineConfig:
    defaults: dict[str, object] = {
        "device": "cpu",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "num_gpu_blocks_override": 64,
        "swap_space": 0,
        "tensor_parallel_size": 2,
    }
    return EngineConfig(model=str(folder), **{**defaults, **settings})  # type: ignore[arg-type]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


HANG = """
import signal, time
signal.signal(signal.SIGUSR1, lambda number, frame: time.sleep(1000))
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (signal.SIGKILL, "rank 1 ended unexpectedly"),
        (signal.SIGSTOP, "rank 1 hangs: its process was stopped"),
        (signal.SIGUSR1, "rank 1 hangs: its process sleeps, and the others wait for it"),
    ],
)
def test_a_rank_that_is_lost_ends_every_stream_and_the_process(
    llama: tuple[Path, LlamaForCausalLM],
    fault: signal.Signals,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One dies, one is stopped, and one sleeps in the thread that launches its steps."""
    (tmp_path / "sitecustomize.py").write_text(HANG)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    async def run() -> None:
        engine = AsyncEngine(config(llama[0]))
        await engine.start()
        async for _ in engine.watch_progress():
            pass
        assert engine._process is not None and engine.state == "ready", engine.error
        (follower,) = children(engine._process.pid)
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        streams = [engine.add([5 + i, 6, 7], params) for i in range(3)]
        got: list[list[Output]] = [await stream.get() for stream in streams]
        os.kill(follower, fault)
        for stream, outputs in zip(streams, got, strict=True):
            while outputs[-1].finish_reason is None:
                outputs.extend(await asyncio.wait_for(stream.get(), 60))
            assert [output.finish_reason for output in outputs if output.finish_reason] == ["error"]
            assert said in (outputs[-1].error or "")
        assert engine.state == "dead"
        assert await asyncio.wait_for(engine._process.wait(), 60) == 1
        until(lambda: not is_alive(follower), "no rank is left")

    asyncio.run(run())


def test_a_rank_that_disagrees_is_noticed(llama: tuple[Path, LlamaForCausalLM]) -> None:
    core, _ = start_engine(config(llama[0]))
    runner = core.runner
    assert isinstance(runner, LeadingRunner)
    runner._digest.add = shifted(runner._digest.add)  # type: ignore[method-assign]
    core.add(Request(0, [5, 6, 7], SamplingParams(max_tokens=4 * EVERY, ignore_eos=True)))
    with pytest.raises(RankLost, match="rank 1 disagrees"):
        while core.has_work:
            core.step()
    until(lambda: not any(map(is_alive, runner.leader.pids)), "no rank is left")


class Never:
    """A step that a device does not end."""

    def arrived(self, seconds: float) -> bool:
        time.sleep(seconds)
        return False


def test_a_step_that_does_not_end_on_gpus_ends_the_engine(llama: tuple[Path, LlamaForCausalLM]) -> None:
    core, _ = start_engine(config(llama[0]))
    runner = core.runner
    assert isinstance(runner, LeadingRunner) and runner.leader.step_seconds == math.inf
    runner.leader.step_seconds = 0.2  # as on GPUs after a minute
    runner.runner.launch = lambda plan: Never()  # type: ignore[method-assign, assignment, return-value]
    core.add(Request(0, [5, 6, 7], SamplingParams(max_tokens=4)))
    with pytest.raises(RankLost, match=r"some rank hangs: a step has not ended after 0\.2 s"):
        while core.has_work:
            core.step()
    until(lambda: not any(map(is_alive, runner.leader.pids)), "no rank is left")


def test_no_other_thread_holds_a_leader_that_is_closed() -> None:
    """The group of gloo ends with it, and aborts the process in a thread that the interpreter ends."""
    leader = Leader(config(Path("none"), tensor_parallel_size=1))
    ended_in: list[threading.Thread] = []
    weakref.finalize(leader, lambda: ended_in.append(threading.current_thread()))
    leader.close()
    del leader
    assert ended_in == [threading.current_thread()]


def shifted(add: Callable[..., int | None]) -> Callable[..., int | None]:
    """Return the same, as if other tokens had been sampled."""

    def changed(result: object) -> int | None:
        mark = add(result)
        return None if mark is None else mark ^ 1

    return changed


def test_the_ranks_end_with_their_engine(llama: tuple[Path, LlamaForCausalLM]) -> None:
    core, info = start_engine(config(llama[0]))
    assert isinstance(core.runner, LeadingRunner) and info.tensor_parallel_size == 2
    pids = core.runner.leader.pids
    assert all(map(is_alive, pids))
    del core
    assert not any(map(is_alive, pids))


def test_what_its_config_json_forbids_is_refused_before_processes_and_weights(
    llama: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Hub's weights are not downloaded either."""
    asked: list[str] = []

    def download(name: str, *, allow_patterns: list[str], **options: object) -> str:
        asked.extend(allow_patterns)
        return str(llama[0])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(startup, "Leader", Mock(side_effect=AssertionError("processes were started")))
    monkeypatch.setattr(rank, "load_model", Mock(side_effect=AssertionError("weights were read")))
    too_long = r"--max-model-len \(257\) is more than the model's max_position_embeddings \(256\)"
    for settings, refused in (
        ({"tensor_parallel_size": 1, "max_model_len": 257}, too_long),
        ({"tensor_parallel_size": 2, "max_model_len": 257}, too_long),
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size 3 .* 4 attention heads.*one of 1, 2, 4"),
    ):
        with pytest.raises(ValueError, match=refused):
            start_engine(config(Path("owner/name"), **settings))
    assert "*.json" in asked and not any("safetensors" in pattern for pattern in asked)


def test_what_cannot_start_says_why(llama: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama[0] / "config.json").read_bytes())
    with pytest.raises((ValueError, RankLost), match=r"model\.safetensors"):
        start_engine(config(tmp_path))


def test_as_many_gpus_as_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.engine.device import choice
    from quire.kernels.gpu import KNOWN

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(choice, "gpu_of", lambda device: KNOWN["H100"])
    asked = EngineConfig(model="any", tensor_parallel_size=4)
    with pytest.raises(ValueError, match="--tensor-parallel-size 4 needs 4 GPUs, and this process sees 2"):
        choice.choose_device(asked)
    asked = EngineConfig(model="any", tensor_parallel_size=2)
    assert [choice.choose_device(asked, rank) for rank in range(2)] == [
        torch.device("cuda", rank) for rank in range(2)
    ]


def test_ranks_look_for_steps_where_each_has_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert has_cores_for(7) and not has_cores_for(8)
