"""Models whose layers see windows or keep states give transformers' own tokens, whatever becomes of blocks.

Each cell runs the same requests; greedy tokens are held to transformers, and what is sampled or searched to
what each request gives alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine import rank
from quire.engine.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import Request, SamplingParams
from quire.engine.models.reading import read_model
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.startup import start_engine
from quire.kernels.attention.kv_tile import LARGEST_KEY_TILE
from tests.models.any_model import save_tiny, tiny_model

MIXED = ("gemma3_text", "gpt_oss")  # every second layer sees the last seven tokens
WITH_STATES = ("qwen3_next",)  # every second layer keeps some
OF_ONE_WINDOW = ("starcoder2", "mistral")  # all layers do; the second has a decoder of ours
BLOCK_SIZE = 4
BESIDE = LARGEST_KEY_TILE - 1 if torch.cuda.is_available() else 0  # that kernels read before a window
LENGTHS = (40, 1, 23, 33, 7)
NEW = {"greedy": 24, "n": 16, "beams": 16}  # tokens: more than two windows, and three times as many rows
CELLS: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 9, "max_num_seqs": 4},
    "cached": {"enable_prefix_caching": True},
    "recomputed": {"preemption_mode": "recompute", "enable_prefix_caching": True},
    "recomputed, nothing cached": {"preemption_mode": "recompute"},
    "swapped": {"preemption_mode": "swap", "swap_space": 1},
}
SIZES = {"starcoder2": {"sliding_window": 7}}  # that transformers' default leaves out
FEW_BLOCKS = {"greedy": 44, "n": 82, "beams": 82}
FEW_WITH_STATES = {"greedy": 26, "n": 70, "beams": 62}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "n": {"temperature": 1.0, "n": 3, "seed": 5},
    "beams": {"temperature": 0.0, "beam_width": 3, "n": 3, "early_stopping": "never"},
}
KINDS = ["greedy"] if torch.cuda.is_available() else list(PARAMS)
Answers = dict[tuple[int, int], list[int]]


@pytest.fixture(scope="module", params=(*MIXED, *OF_ONE_WINDOW, *WITH_STATES))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(folder, the same model in transformers)."""
    folder = tmp_path_factory.mktemp("models") / request.param
    return folder, tiny_model(request.param, folder, **SIZES.get(request.param, {}))


@pytest.fixture(scope="module", autouse=True)
def read_once() -> Iterator[None]:
    """Read a folder once for all engines that start with it: what is not native takes a run of its code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "read_model", cache(read_model))
        yield


@cache
def sees_one_window(folder: Path) -> bool:
    """Return whether all layers of the model see a window."""
    return read_model(folder).cache_groups[0].window > 0


def start(folder: Path, **settings: Any) -> EngineCore:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "max_model_len": 100,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 600,
        "enable_prefix_caching": False,
        "swap_space": 0,
    }
    return start_engine(EngineConfig(model=str(folder), **(defaults | settings)))[0]


def requests(kind: str, first_id: int = 0) -> list[Request]:
    params = SamplingParams(max_tokens=NEW[kind], ignore_eos=True, **PARAMS[kind])
    prompts = [[3 + (11 * at + 5 * which) % 90 for at in range(size)] for which, size in enumerate(LENGTHS)]
    return [Request(first_id + at, prompt, params) for at, prompt in enumerate(prompts)]


def run(core: EngineCore, asked: list[Request]) -> Answers:
    answers: Answers = {}
    for request in asked:
        core.add(request)
    while core.has_work:
        for output in core.step():
            answers.setdefault((output.request_id % 100, output.index), []).extend(output.tokens)
        check_scheduler(core.scheduler.state)
    return answers


def run_cell(cell: str, folder: Path, kind: str) -> Answers:
    """Return what the requests give in this cell, which must do what it is named after."""
    settings = dict(CELLS[cell])
    if "preemption_mode" in settings:
        few = FEW_BLOCKS[kind]
        if sees_one_window(folder):
            few, settings["max_num_batched_tokens"], settings["max_num_seqs"] = 8, 4, 4
        elif folder.name in WITH_STATES:  # as long as a chunk's are all there at once
            few, settings["max_num_batched_tokens"], settings["max_num_seqs"] = FEW_WITH_STATES[kind], 12, 12
        beside = 20 if BESIDE and folder.name not in WITH_STATES else 0
        settings["num_gpu_blocks_override"] = few + beside
    core = start(folder, **settings)
    answers = run(core, requests(kind))
    if cell == "cached":
        allocated = core.scheduler.blocks.pool.allocations
        again = run(core, requests(kind, 100))
        assert again == answers
        assert core.scheduler.blocks.pool.allocations - allocated < allocated
    assert (core.scheduler.preemption.recomputes > 0) == cell.startswith("recomputed")
    assert (core.scheduler.preemption.swaps > 0) == (cell == "swapped")
    assert core.scheduler.blocks.pool.num_active == 0
    return answers


@pytest.mark.parametrize(
    ("saved", "kind"),
    [
        *((name, "greedy") for name in (*MIXED, *OF_ONE_WINDOW, *WITH_STATES)),
        # Samples and beams fork blocks, which are alike in both. Those of one window: in the equality matrix.
        *((name, kind) for name, kind in zip(MIXED, KINDS[1:], strict=False)),
        *(("qwen3_next", kind) for kind in KINDS[1:]),
    ],
    indirect=["saved"],
)
def test_all_cells_give_the_same_tokens(saved: tuple[Path, Any], kind: str) -> None:
    folder, reference = saved
    core = start(folder)
    alone: Answers = {}
    for request in requests(kind):
        alone |= run(core, [request])
    if kind == "greedy":
        for request in requests(kind):
            got = alone[request.id, 0]
            with torch.inference_mode():
                logits = reference(torch.tensor([request.prompt + got]), use_cache=False).logits[0]
            assert got == logits[len(request.prompt) - 1 : -1].argmax(-1).tolist()
    assert run(core, requests(kind)) == alone, "batched"
    assert core.scheduler.preemption.recomputes == core.scheduler.preemption.swaps == 0
    assert core.scheduler.blocks.pool.num_active == 0
    for cell in CELLS:
        assert run_cell(cell, folder, kind) == alone, cell


def test_blocks_of_both_that_have_some_windows_are_alike(tmp_path: Path) -> None:
    for name in MIXED:
        save_tiny(name, tmp_path / name)
    one, other = (read_model(tmp_path / name).cache_groups for name in MIXED)
    assert one == other


@pytest.mark.parametrize("saved", [*MIXED], indirect=True)
def test_a_long_sequence_holds_a_window_of_the_layers_that_have_one(saved: tuple[Path, Any]) -> None:
    core = start(saved[0])
    core.add(Request(0, [5] * 60, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)))
    for _ in range(25):
        core.step()
    (group,) = core.scheduler.state.running
    (sequence,) = group.live
    (window,) = sequence.window_tables
    assert sequence.num_blocks >= 20
    assert len(window.blocks) <= (7 + BESIDE) // BLOCK_SIZE + 2
    assert core.stats.behind_window_blocks == window.first > 0 or BESIDE
    assert core.stats.active_blocks == len(sequence.blocks)


@pytest.mark.parametrize("name", ["qwen2-late-window"])
def test_native_decoders_have_groups_too(name: str, model_folder: Callable[[str], Path]) -> None:
    folder = model_folder(name)
    answers = []
    for settings in ({}, {"max_num_batched_tokens": 12}, {"num_gpu_blocks_override": 44 + 20 * bool(BESIDE)}):
        core = start(folder, **settings)
        assert core.scheduler.blocks.pages == 2
        answers.append(run(core, requests("greedy")))
    assert answers[0] == answers[1] == answers[2]
