"""An engine whose weights stay in few bits gives what one with expanded weights does, however it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine import rank
from quire.engine.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import Request, SamplingParams
from quire.engine.startup import start_engine
from tests.models import kept_experts_folder, kept_products_folder
from tests.models.kept_folder import KEEPING, save

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "n": {"temperature": 1.0, "n": 3, "seed": 5},
    "beams": {"temperature": 0.0, "beam_width": 3, "n": 3, "early_stopping": "never"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 9, "max_num_seqs": 4},
    "swapped": {"num_gpu_blocks_override": 12, "preemption_mode": "swap", "swap_space": 1},
    "recomputed": {"num_gpu_blocks_override": 12, "preemption_mode": "recompute"},
}
Answers = dict[tuple[int, int], list[int]]


@pytest.fixture(params=["awq", "rows"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(request.param, tmp_path)


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rank, "torch_backend", lambda: KEEPING)
    yield


def start(folder: Path, **settings: Any) -> tuple[EngineCore, float]:
    """Return an engine on the CPU, whose sums are the same in any batch, and in how many bits it keeps."""
    defaults: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 12, "num_gpu_blocks_override": 200}
    defaults |= {"swap_space": 0}
    core, info = start_engine(EngineConfig(model=str(folder), device="cpu", **(defaults | settings)))
    return core, info.kept_bits


def requests(kind: str) -> list[Request]:
    params = SamplingParams(max_tokens=10, ignore_eos=True, **PARAMS[kind])
    prompts = [
        [3 + (11 * at + 5 * which) % 90 for at in range(size)] for which, size in enumerate((30, 1, 17))
    ]
    return [Request(at, prompt, params) for at, prompt in enumerate(prompts)]


def run(core: EngineCore, asked: list[Request]) -> Answers:
    answers: Answers = {}
    core.add_all(asked)
    while core.has_work:
        for output in core.step():
            answers.setdefault((output.request_id, output.index), []).extend(output.tokens)
    return answers


# A format is another product, and a kind of request other rows: neither asks about the other.
@pytest.mark.usefixtures("keeping")
@pytest.mark.parametrize(
    ("folder", "kind"), [*(("awq", kind) for kind in PARAMS), ("rows", "greedy")], indirect=["folder"]
)
def test_tokens_are_the_same_alone_in_a_batch_and_preempted(folder: Path, kind: str) -> None:
    core, bits = start(folder)
    assert bits
    alone: Answers = {}
    for request in requests(kind):
        alone |= run(core, [request])
    assert run(core, requests(kind)) == alone
    for settings in SETTINGS.values():
        assert run(start(folder, **settings)[0], requests(kind)) == alone


def test_tokens_are_those_of_expanded_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core, bits = start(folder)
    assert not bits
    expanded = run(core, requests("greedy"))
    monkeypatch.setattr(rank, "torch_backend", lambda: KEEPING)
    assert run(start(folder)[0], requests("greedy")) == expanded


@pytest.mark.usefixtures("keeping")
def test_an_engine_that_is_asked_to_expand_keeps_none(folder: Path) -> None:
    core, bits = start(folder, quantized_weights="expand")
    assert not bits
    kept, bits = start(folder, quantized_weights="keep")
    assert bits
    assert run(core, requests("greedy")) == run(kept, requests("greedy"))


def test_keeping_is_no_demand_where_nothing_can_be_kept(folder: Path) -> None:
    assert not start(folder, quantized_weights="keep")[1]


@pytest.mark.parametrize(("kind", "form"), [("gemma3_text", "awq"), ("qwen3_next", "blocks")])
def test_products_by_transformers_code_give_the_tokens_of_expanded_ones(
    kind: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = kept_products_folder.save(kind, form, tmp_path)
    monkeypatch.setattr(rank, "torch_backend", lambda: kept_products_folder.EXPANDING)
    core, bits = start(folder)
    assert not bits
    expanded = run(core, requests("greedy"))
    monkeypatch.setattr(rank, "torch_backend", lambda: kept_products_folder.KEEPING)
    core, bits = start(folder)
    assert bits
    assert run(core, requests("greedy")) == expanded
    assert not start(folder, quantized_weights="expand")[1]


@pytest.mark.parametrize("form", ["mxfp4", "blocks of qwen3_moe", "gptq of qwen3_moe"])
def test_experts_in_few_bits_give_the_tokens_of_expanded_ones(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = kept_experts_folder.save(form, tmp_path)
    core, bits = start(folder)
    assert not bits
    expanded = run(core, requests("greedy"))
    monkeypatch.setattr(rank, "torch_backend", lambda: kept_experts_folder.KEEPING)
    core, bits = start(folder)
    assert bits
    assert run(core, requests("greedy")) == expanded
    assert not start(folder, quantized_weights="expand")[1]
