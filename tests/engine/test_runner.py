"""What the steps that a runner is given ask of the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.config import EngineConfig
from engine.cuda_graphs import Size
from engine.device_queue import CudaFlight, CudaQueue, DeviceResult, ThreadFlight, ThreadQueue
from engine.models.decoder import Decoder
from engine.plan import StepPlan, empty_int32
from engine.request import Request, SamplingParams
from engine.runner import ModelRunner
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


@pytest.mark.parametrize("graphs", [False, True])
def test_no_step_computes_before_the_last_ones_results_are_kept(
    llama: tuple[Path, LlamaForCausalLM], graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a graph gives lies where the next one writes, and uploads need not wait for it to leave."""
    core, _ = start_engine(
        EngineConfig(model=str(llama[0]), device="cpu", max_num_seqs=4, num_gpu_blocks_override=40)
    )
    runner = core.runner
    assert isinstance(runner, ModelRunner)
    if graphs:
        runner.add_graphs(lambda run: run)
    called: list[str] = []

    def noted(owner: object, name: str, letter: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: called.append(letter) or function(*given))

    noted(runner.queue, "keep_results", "k")
    noted(runner.staging, "upload", "u")
    noted(runner.staging, "upload_into", "u")
    noted(*((Size, "run") if graphs else (runner.model, "forward")), "c")  # computes
    core.add(Request(0, [5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True)))
    core.step()
    core.add(Request(1, [9] * 20, SamplingParams(max_tokens=4, ignore_eos=True)))
    while core.has_work:
        core.step()
    *before_each, after = "".join(called).split("c")
    assert len(before_each) > 4
    assert all(step.endswith("uk") and step.count("k") == 1 for step in before_each)
    assert "k" not in after


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
