"""The equality matrix: tokens alone, batched, chunked, found, computing, recomputed, swapped and overlapped.

Each cell runs the same requests on a tiny real model; what `plain` gives is what all others must give. On a
CPU every token is the same. On a GPU logits differ in their last bits with the batch, so there the matrix is
of greedy requests, and where a cell goes another way its margin, top-1 minus top-2 log-probability at the
first difference, is reported and must be one that rounding explains.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quire.engine.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import Output, Request, SamplingParams
from quire.engine.models.reading import read_model
from quire.engine.schedule.commit import finish_transfers
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.startup import start_engine
from tests.models.tiny_models import MODELS

ON_GPU = torch.cuda.is_available()
NAMES = ["mistral-window", "qwen3"]
NEAR_TIE = 1e-2  # most that two log-probabilities may differ by where rounding can swap them
MAX_LEN = 96
FEW_BLOCKS = 12
FEW_OF_ONE_WINDOW = {"greedy": 5, "n": 9, "beam": 11}  # where a sequence needs no more than it sees
Answers = dict[tuple[int, int], list[Output]]  # by request and sequence

GREEDY: dict[str, Any] = {"temperature": 0.0, "logprobs": 2}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "n": {"temperature": 0.9, "top_p": 0.95, "n": 3},
    "beam": {"temperature": 0.0, "beam_width": 3, "n": 3, "early_stopping": "never"},
}
CELLS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 12},
    "prefix hit": {"enable_prefix_caching": True},
    "computing": {"enable_prefix_caching": True},
    "recompute": {"num_gpu_blocks_override": FEW_BLOCKS, "preemption_mode": "recompute"},
    "swap": {"num_gpu_blocks_override": FEW_BLOCKS, "preemption_mode": "swap", "swap_space": 1},
    "overlap": {},
}


def start(folder: Path, settings: dict[str, Any]) -> EngineCore:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": MAX_LEN,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 200,
        "swap_space": 0,
        "enable_prefix_caching": False,
    }
    return start_engine(EngineConfig(model=str(folder), **{**defaults, **settings}))[0]


def requests(vocab_size: int, params: dict[str, Any]) -> list[Request]:
    rng = random.Random(8)
    lengths = [(rng.randint(1, 40), rng.randint(8, 24)) for _ in range(8)]
    return [
        Request(
            i,
            [rng.randrange(4, vocab_size) for _ in range(prompt)],
            SamplingParams(max_tokens=answer, ignore_eos=True, seed=i, **params),
        )
        for i, (prompt, answer) in enumerate(lengths)
    ]


def step(core: EngineCore, *, overlap: bool) -> Iterator[Output]:
    """The outputs of one step, which is committed before the next is scheduled unless they overlap."""
    if overlap:
        yield from core.step()
    elif (plan := core.scheduler.schedule()) is not None:
        handle = core.runner.launch(plan)
        yield from core.scheduler.commit(handle.wait())
        if len(core.scheduler.state.transfers) and handle.has_moved(wait=True):
            finish_transfers(core.scheduler.state)


def run(core: EngineCore, asked: list[Request], *, overlap: bool = False) -> Answers:
    """All at once."""
    answers: Answers = {}
    for request in asked:
        core.add(request)
    while core.has_work:
        for output in step(core, overlap=overlap):
            answers.setdefault((output.request_id, output.index), []).append(output)
        check_scheduler(core.scheduler.state)
    return answers


def run_cell(cell: str, folder: Path, kind: str, asked: list[Request]) -> Answers:
    """Return the answers to `asked` in this cell, which must do what it is named after."""
    settings, has_window = dict(CELLS[cell]), read_model(folder).cache_groups[0].window > 0
    if cell in ("recompute", "swap") and has_window:
        settings["num_gpu_blocks_override"] = FEW_OF_ONE_WINDOW[kind]
    core = start(folder, settings)
    if cell == "prefix hit":
        run(core, asked)
    if cell == "computing":  # to the second of two that arrive together by the first
        asked = [
            msgspec.structs.replace(request, id=request.id + half) for request in asked for half in (0, 8)
        ]
    answers = run(core, asked, overlap=cell == "overlap")
    preemption = core.scheduler.preemption
    assert (preemption.recomputes > 0, preemption.swaps > 0) == (cell == "recompute", cell == "swap")
    if cell == "prefix hit":
        found = [answers[request.id, 0][0].cached_tokens for request in asked]
        lengths = [len(request.prompt) for request in asked]
        last = 1 if has_window else 0  # whose block a window's prompt computes
        assert found == [min((length - last) // 16 * 16, length - 1) for length in lengths]
    if cell == "computing":
        found = [answers[request.id, 0][0].cached_tokens for request in asked[1::2]]
        assert found == [(len(request.prompt) - 1) // 16 * 16 for request in asked[1::2]]
        answers = {(i, index): answers.pop((i + 8, index)) for i, index in list(answers) if i < 8}
    return answers


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def margin(outputs: list[Output], position: int) -> float:
    """Return how much more likely the best token at `position` is than the second best."""
    best = [entry.top_logprobs for output in outputs for entry in output.logprobs or []][position]
    return best[0] - best[1]


@pytest.mark.parametrize("kind", ["greedy"] if ON_GPU else list(KINDS))
@pytest.mark.parametrize("name", NAMES)
def test_all_cells_give_the_same_tokens(
    name: str, kind: str, model_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder(name)
    asked = requests(MODELS[name][1]["vocab_size"], KINDS[kind])
    plain_core = start(folder, {})
    plain: Answers = {}
    for request in asked:
        plain |= run(plain_core, [request])
    assert len({tuple(tokens_of(outputs)) for outputs in plain.values()}) >= len(asked)
    report = []
    for cell in CELLS:
        answers = run_cell(cell, folder, kind, asked)
        assert answers.keys() == plain.keys()
        for key, outputs in answers.items():
            got, expected = tokens_of(outputs), tokens_of(plain[key])
            if got != expected:
                assert ON_GPU, f"{cell}, request {key}: {got} instead of {expected}"
                first = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
                margins = margin(outputs, first), margin(plain[key], first)
                report.append(f"{name}, {cell}, request {key[0]}, token {first}: margins {margins}")
                assert max(margins) < NEAR_TIE, report[-1]
    with capsys.disabled():
        print("".join(f"\n{line}" for line in report), end="")
