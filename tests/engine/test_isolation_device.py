"""Steps that raise on the device that there is, a GPU or a CPU, with the runner that serves."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from quire.engine.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.device.runner import ModelRunner
from quire.engine.device.streams import DeviceResult
from quire.engine.messages import Output, Request, SamplingParams
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.schedule.plan import StepPlan
from quire.engine.startup import start_engine

CULPRITS = {3, 5, 8, 10}  # the seeds, too, by which a row is known to be theirs
BUDGET, ROWS = 96, 24


def requests() -> list[Request]:
    """Greedy ones, samples and beams, in prompts of 5 to 60 tokens."""
    kinds = [{"temperature": 0.0}, {"temperature": 0.9, "n": 3}, {"temperature": 0.0, "beam_width": 2}, {}]
    return [
        Request(
            i,
            [2 + (7 * i + 3 * j) % 190 for j in range(5 + 5 * i)],
            SamplingParams(max_tokens=14 + i, ignore_eos=True, seed=i, **kinds[i % 4]),
        )
        for i in range(12)
    ]


def start(folder: Path) -> tuple[EngineCore, ModelRunner]:
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        max_num_seqs=ROWS,
        max_num_batched_tokens=BUDGET,
        num_gpu_blocks_override=120,
    )
    core, _ = start_engine(config)
    while core.capture():
        pass
    assert isinstance(core.runner, ModelRunner)
    return core, core.runner


def run(core: EngineCore) -> dict[tuple[int, int], list[Output]]:
    """Return the tokens of each choice of `requests`."""
    got: dict[tuple[int, int], list[Output]] = {}
    waiting = requests()
    while waiting or core.has_work:
        if waiting:
            core.add(waiting.pop(0))
        for output in core.step():
            got.setdefault((output.request_id, output.index), []).append(output)
    check_scheduler(core.scheduler.state)
    return got


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def ends(outputs: list[Output]) -> list[str]:
    return [output.finish_reason for output in outputs if output.finish_reason is not None]


@pytest.mark.parametrize("generated", [0, 5])  # tokens from which on a culprit raises: in prefill, in decode
def test_who_makes_steps_raise_ends_alone(
    llama: tuple[Path, LlamaForCausalLM], generated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, runner = start(llama[0])
    well = run(core)
    core, runner = start(llama[0])
    execute, seeds = runner._execute, {}
    prompts = {request.id: len(request.prompt) for request in requests()}

    def poisoned(plan: StepPlan) -> DeviceResult:
        seeds.update({start.row: start.params.seed or 0 for start in plan.starts})
        for row, length in zip(plan.rows.tolist(), plan.context_lens.tolist(), strict=True):
            if seeds[row] in CULPRITS and length >= prompts[seeds[row]] + generated:
                raise RuntimeError("an index out of bounds")
        return execute(plan)

    monkeypatch.setattr(runner, "_execute", poisoned)
    got = run(core)
    assert got.keys() == well.keys()
    for choice, outputs in got.items():
        if choice[0] in CULPRITS:
            assert ends(outputs) == ["error"]
            assert tokens(outputs) == tokens(well[choice])[: len(tokens(outputs))]
        else:
            assert ends(outputs) == ends(well[choice])
            assert tokens(outputs) == tokens(well[choice])


def test_steps_that_find_no_memory_get_smaller(
    llama: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, runner = start(llama[0])
    well = run(core)
    core, runner = start(llama[0])
    execute = runner._execute

    def limited(plan: StepPlan) -> DeviceResult:
        if plan.num_tokens > BUDGET // 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return execute(plan)

    monkeypatch.setattr(runner, "_execute", limited)
    got = run(core)
    assert core.scheduler.max_num_batched_tokens == BUDGET // 2
    assert {choice: (ends(outputs), tokens(outputs)) for choice, outputs in got.items()} == {
        choice: (ends(outputs), tokens(outputs)) for choice, outputs in well.items()
    }


@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError])
def test_a_step_that_raised_keeps_no_memory(
    llama: tuple[Path, LlamaForCausalLM], kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while the runner settles, which gives free memory back, nor once the error is known."""
    core, runner = start(llama[0])
    execute, settle = runner._execute, runner.settle
    computed: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def compute(hidden: torch.Tensor) -> None:
        computed.append(weakref.ref(hidden))
        raise KeyError

    def fail() -> None:
        hidden = torch.zeros(1000, device=runner.device)
        try:
            compute(hidden)
        except KeyError as error:
            raise kind("once") from error

    def failing(plan: StepPlan) -> DeviceResult:
        if not computed:
            fail()
        return execute(plan)

    def settling() -> None:
        alive.append(computed[0]() is not None)
        settle()

    monkeypatch.setattr(runner, "_execute", failing)
    monkeypatch.setattr(runner, "settle", settling)
    run(core)
    assert alive == [False] and computed[0]() is None
