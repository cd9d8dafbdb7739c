"""What the steps that a runner is given ask of the model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from engine.config import EngineConfig
from engine.device_queue import (
    CudaFlight,
    CudaQueue,
    DeviceLogprobs,
    DeviceResult,
    ThreadFlight,
    ThreadQueue,
)
from engine.models.decoder import Decoder
from engine.plan import StepPlan, empty_int32
from engine.request import Request, SamplingParams
from engine.runner import ModelRunner
from engine.staging import Staging
from engine.startup import start_engine
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
    runner.model.most_fused = 0  # few tokens would go past the layers' own products
    *before, last = runner.model.layers
    watched = Watched(last.output)
    runner.model.layers = [*before, replace(last, output=watched)]
    plans: list[StepPlan] = []
    launch = runner.launch

    def note(plan: StepPlan) -> CudaFlight | ThreadFlight:
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


def test_what_a_step_gave_is_there_when_the_next_has_written_over_it() -> None:
    """A graph's results lie where the next run writes its own; and no step waits for blocks that move.

    On a GPU so many of them do, out and in, that they take a hundred times as long as these steps.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    place = torch.zeros(300, dtype=torch.int32, device=device)
    size = 1 << 31 if on_gpu else 1 << 10
    blocks, into = (torch.full((size,), value, dtype=torch.uint8, device=device) for value in (1, 2))
    moved, back = (torch.full((size,), value, dtype=torch.uint8, pin_memory=on_gpu) for value in (3, 4))
    queue = CudaQueue(device) if on_gpu else ThreadQueue()
    staging = Staging(1000, device)

    def step(value: int) -> DeviceResult:
        uploaded = staging.upload([np.full(300, value, np.int32)])[0]
        place.copy_(uploaded)
        given = place if on_gpu else place.clone()
        logprobs = DeviceLogprobs(given.float(), given + 1, given.view(3, 100), given.view(3, 100).T.float())
        return DeviceResult(given, empty_int32(), logprobs, ())

    def transfer() -> None:
        moved.copy_(blocks, non_blocking=True)
        into.copy_(back, non_blocking=True)

    queue.submit(partial(step, 0), None).wait()  # all is compiled
    first = queue.submit(partial(step, 1), transfer)
    flights = [first, *(queue.submit(partial(step, value), None) for value in range(2, 8))]
    for value, flight in enumerate(flights, 1):
        result, full = flight.wait(), np.full(300, value)
        assert result.logprobs is not None
        assert (result.tokens == full).all() and (result.logprobs.rank == full + 1).all()
        assert (result.logprobs.chosen == full).all() and (result.logprobs.top_tokens == value).all()
        assert (
            result.logprobs.top_logprobs.shape == (100, 3) and (result.logprobs.top_logprobs == value).all()
        )
    assert first.has_moved() == (not on_gpu)
    assert first.has_moved(wait=True) and (moved == 1).all() and (into == 4).all()


def test_steps_see_what_was_written_before_their_queue_was_there() -> None:
    """Weights and block tables, for instance, though the device may be far from having written them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    value = torch.zeros(3, dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda._sleep(1 << 28)  # about a tenth of a second
    value.fill_(7)
    queue = CudaQueue(device) if device.type == "cuda" else ThreadQueue()
    flight = queue.submit(lambda: DeviceResult(value.clone(), empty_int32(), None, ()), None)
    assert flight.wait().tokens.tolist() == [7, 7, 7]
