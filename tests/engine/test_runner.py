"""The runner: the work that its steps ask of the model."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from quire.engine.arrays import Int32, empty_int32
from quire.engine.config import EngineConfig
from quire.engine.device.runner import ModelRunner
from quire.engine.device.staging import ROTATION, Staging
from quire.engine.device.streams import (
    CudaHandle,
    CudaQueue,
    DeviceLogprobs,
    DeviceResult,
    ThreadHandle,
    ThreadQueue,
)
from quire.engine.messages import Request, SamplingParams
from quire.engine.models.decoder import Decoder
from quire.engine.schedule.plan import StepPlan
from quire.engine.startup import start_engine
from tests.models.watched import Watched


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_the_last_layer_computes_all_tokens_only_where_a_prompts_logprobs_are_wanted(
    llama: tuple[Path, LlamaForCausalLM], prompt_logprobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, _ = start_engine(
        EngineConfig(
            model=str(llama[0]),
            device="cpu",
            max_num_seqs=4,
            max_num_batched_tokens=16,
            num_gpu_blocks_override=40,
        )
    )
    runner = core.runner
    assert isinstance(runner, ModelRunner) and isinstance(runner.model, Decoder)
    *before, last = runner.model.layers
    watched = Watched(last.output)
    runner.model.layers = [*before, replace(last, output=watched)]
    plans: list[StepPlan] = []
    launch = runner.launch

    def note(plan: StepPlan) -> CudaHandle | ThreadHandle:
        plans.append(plan)
        return launch(plan)

    monkeypatch.setattr(runner, "launch", note)
    core.add(Request(0, [5, 6, 7], SamplingParams(max_tokens=12, ignore_eos=True)))
    core.step()
    asked = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=prompt_logprobs)
    core.add(Request(1, [9] * 40, asked))  # in chunks, most of which sample nothing
    while core.has_work:
        core.step()

    assert watched.counts == [
        plan.num_tokens if plan.prompt_logprobs else len(plan.rows) for plan in plans if len(plan.rows)
    ]
    mixed = [plan for plan in plans if 0 < plan.num_decodes < len(plan.rows) < plan.num_tokens]
    assert len(mixed) >= 3
    assert all(bool(plan.prompt_logprobs) == (prompt_logprobs is not None) for plan in mixed)


@pytest.mark.parametrize("way", ["out", "in"])
def test_what_a_step_gave_is_there_when_the_next_has_written_over_it(way: str) -> None:
    """A graph's results lie where the next run writes its own; and no step waits for blocks that move.

    On a GPU, where so many of them do that they take a hundred times as long as these steps.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    place = torch.zeros(300, dtype=torch.int32, device=device)
    size = 1 << 31 if on_gpu else 1 << 10
    blocks = torch.full((size,), 1, dtype=torch.uint8, device=device)
    host = torch.full((size,), 2, dtype=torch.uint8, pin_memory=on_gpu)
    source, target = (blocks, host) if way == "out" else (host, blocks)
    queue = CudaQueue(device) if on_gpu else ThreadQueue()
    staging = Staging(1000, device)

    def step(value: int) -> DeviceResult:
        uploaded = staging.upload([np.full(300, value, np.int32)])[0]
        place.copy_(uploaded)
        return DeviceResult(place if on_gpu else place.clone(), empty_int32(), None, ())

    def transfer() -> None:
        for _ in range(4):
            target.copy_(source, non_blocking=True)

    queue.submit(partial(step, 0), None).wait()  # all is compiled
    first = queue.submit(partial(step, 1), transfer)
    # No more are under way than have buffers of their own to come from.
    handles = [first, *(queue.submit(partial(step, value), None) for value in range(2, ROTATION + 1))]
    for value, handle in enumerate(handles, 1):
        assert handle.wait().tokens.tolist() == [value] * 300
    assert first.has_moved() == (not on_gpu)
    assert first.has_moved(wait=True) and torch.equal(target.cpu(), source.cpu())


@given(
    samples=st.integers(0, 5), k=st.integers(0, 3), with_logprobs=st.booleans(),
    prompts=st.lists(st.integers(0, 4), max_size=3),
)  # fmt: skip
def test_packed_results_are_all_of_them(
    samples: int, k: int, with_logprobs: bool, prompts: list[int]
) -> None:
    numbers = count(1)

    def some(*shape: int, dtype: torch.dtype) -> Tensor:
        values = torch.tensor([next(numbers) for _ in range(math.prod(shape))], dtype=torch.int32)
        return values.view(dtype).view(shape)  # as floats bits that few have

    def entry(rows: int) -> DeviceLogprobs:
        floats, ints = torch.float32, torch.int32
        candidates = some(k, rows, dtype=ints).T, some(rows, k, dtype=floats)
        return DeviceLogprobs(some(rows, dtype=floats), some(rows, dtype=ints), *candidates)

    logprobs = entry(samples) if with_logprobs else None
    result = DeviceResult(
        some(samples, dtype=torch.int32), empty_int32(), logprobs, tuple(entry(rows) for rows in prompts)
    )
    packed = result.packed()
    assert packed.dtype == torch.int32
    assert sorted(packed.tolist()) == list(range(1, next(numbers)))
    again = result.unpacked(packed.clone())
    assert torch.equal(again.tokens, result.tokens) and again.logprob_samples is result.logprob_samples
    assert (again.logprobs is None) == (logprobs is None)
    assert len(again.prompt_logprobs) == len(prompts)
    pairs = zip((again.logprobs, *again.prompt_logprobs), (logprobs, *result.prompt_logprobs), strict=True)
    for got, wanted in pairs:
        assert all(torch.equal(*both) for both in zip(got or (), wanted or (), strict=True))


@pytest.mark.parametrize("graphs", [False, True])
def test_no_step_uploads_more_than_its_share_of_the_buffers(
    llama: tuple[Path, LlamaForCausalLM], graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that take turns: two steps may be under way."""
    core, _ = start_engine(
        EngineConfig(
            model=str(llama[0]),
            device="cpu",
            max_num_seqs=8,
            max_num_batched_tokens=24,
            num_gpu_blocks_override=12,
            preemption_mode="swap",
            swap_space=0.01,
        )
    )
    runner = core.runner
    assert isinstance(runner, ModelRunner)
    if graphs:
        runner.add_graphs(lambda run: run)
    uploads: list[int] = []
    execute, take_turn = runner._execute, runner.staging._next

    def executed(plan: StepPlan) -> DeviceResult:
        uploads.append(0)
        return execute(plan)

    def counted(words: int) -> tuple[Tensor, Int32]:
        uploads[-1] += 1
        return take_turn(words)

    monkeypatch.setattr(runner, "_execute", executed)
    monkeypatch.setattr(runner.staging, "_next", counted)
    core.add(Request(0, [5, 6, 7], SamplingParams(max_tokens=40, n=2, ignore_eos=True, logprobs=1)))
    core.add(
        Request(1, [8] * 20, SamplingParams(max_tokens=30, beam_width=2, temperature=0, ignore_eos=True))
    )
    core.step()
    asked = SamplingParams(max_tokens=40, ignore_eos=True, prompt_logprobs=1, temperature=1, seed=3)
    for number in range(2, 5):
        core.add(Request(number, [9 + number] * 40, asked))
    while core.has_work:
        core.step()
    assert core.stats.preemptions_swap
    assert max(uploads) == ROTATION // 2


def test_steps_see_what_was_written_before_their_queue_was_there() -> None:
    """Weights and block tables, for instance, though the device may be far from having written them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    value = torch.zeros(3, dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda._sleep(1 << 28)  # about a tenth of a second
    value.fill_(7)
    queue = CudaQueue(device) if device.type == "cuda" else ThreadQueue()
    handle = queue.submit(lambda: DeviceResult(value.clone(), empty_int32(), None, ()), None)
    assert handle.wait().tokens.tolist() == [7, 7, 7]
