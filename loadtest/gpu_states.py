"""Time models whose layers keep states, by kernels and by transformers' own code: `python -m
quire.loadtest.gpu_states [--json FILE]`.

Dummy weights, a process a model and way. Prints milliseconds of decode steps of 1, 8, 64 and 256 sequences,
the share of the bound that is (weights read, of experts those that the tokens ask for, states read and
written, at the rate of a large copy), and tokens a second of prompts alone, one and eight at once. Needs one
CUDA device.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch

from quire.engine import rank
from quire.engine.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.models.reading import read_model
from quire.engine.startup import start_with_graphs
from quire.kernels.backend import triton_backend
from quire.loadtest.command import command_parser, parse_for_cuda, write_json
from quire.loadtest.gpu_shapes import Experts
from quire.loadtest.model_configs import write_model_folder
from quire.loadtest.offline.bench import requests
from quire.loadtest.offline.roofline import measure_ceilings
from quire.loadtest.shape_configs import STATES
from quire.loadtest.workloads import Work

ROWS = "1,8,64,256"
PROMPT, STEPS = 64, 24  # tokens of each sequence that decodes, and steps that are timed
PROMPTS = ((1, 4096), (8, 1024))
RUNS = 3
WAYS = "kernels,transformers"


@dataclass(frozen=True, slots=True)
class Timing:
    """rows: that decode, or prompts of `tokens` each. bound_share: of steps of decodes."""

    model: str
    way: str
    rows: int
    tokens: int
    milliseconds: float
    bound_share: float | None


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--models", default=",".join(STATES), help=f"some of {', '.join(STATES)} (all)")
    parser.add_argument("--ways", default=WAYS, help=f"by which states are computed ({WAYS})")
    parser.add_argument("--rows", default=ROWS, help=f"sequences that decode at once ({ROWS})")
    parser.add_argument("--json", type=Path, help="where one JSON object goes, anew after each model")
    arguments = parse_for_cuda(parser)
    rows = [int(number) for number in arguments.rows.split(",")]
    timings: list[Timing] = []
    failed: dict[str, str] = {}
    for name in arguments.models.split(","):
        for way in arguments.ways.split(","):
            try:
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    found = process.submit(time_model, name, way, rows).result()
            except Exception as error:  # the others are still worth their time
                failed[f"{name} {way}"] = f"{type(error).__name__}: {error}"
                print(name, way, "failed:", error, file=sys.stderr, flush=True)
                continue
            for each in found:
                print(_line(each), flush=True)
            timings += found
            if arguments.json is not None:
                figures = {"timings": [asdict(each) for each in timings], "failed": failed}
                write_json(arguments.json, torch.cuda.get_device_name(), figures)
    return 1 if failed else 0


def _line(timing: Timing) -> str:
    name = f"{timing.model:26} {timing.way:13}"
    if timing.bound_share is None:
        rate = 1e3 * timing.rows * timing.tokens / timing.milliseconds
        what = f"{timing.rows} prompts of {timing.tokens}"
        return f"{name} {what:18} {timing.milliseconds:9.2f} ms, {rate:,.0f} tokens/s"
    share = f"{timing.bound_share:4.0%} of the bound"
    return f"{name} {timing.rows:4} decodes {timing.milliseconds:9.3f} ms, {share}"


@contextlib.contextmanager
def computed(way: str) -> Iterator[None]:
    """Have states computed by kernels, or by transformers' own code."""
    if way == "kernels":
        yield
        return
    without = replace(triton_backend(), recurrences=None)
    with mock.patch.object(rank, "triton_backend", lambda: without):
        yield


def time_model(name: str, way: str, rows: list[int]) -> list[Timing]:
    """Time steps of the configuration `name` by a way."""
    with tempfile.TemporaryDirectory() as folder, computed(way):
        write_model_folder(Path(folder), STATES[name])
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            max_model_len=8192,
            max_num_seqs=max(*rows, 16),
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
        )
        core, info = start_with_graphs(config)
        keeps = read_model(folder).states
    bandwidth = measure_ceilings(torch.device("cuda"), getattr(torch, info.dtype)).bandwidth
    state_bytes = 2 * sum(layer.computed_in("bfloat16").num_bytes for layer in keeps)
    weights, experts = info.body_weight_bytes + info.head_weight_bytes, Experts.of(STATES[name], info)
    timings = []
    for count in rows:
        step = _decodes(core, info.vocab_size, count)
        bound = (weights - experts.unread_bytes(count) + count * state_bytes) / bandwidth
        timings.append(Timing(name, way, count, 1, round(1e3 * step, 4), round(bound / step, 3)))
    for count, tokens in PROMPTS:
        taken = statistics.median(
            _prompts(core, info.vocab_size, count, tokens, seed) for seed in range(RUNS + 1)
        )
        timings.append(Timing(name, way, count, tokens, round(1e3 * taken, 3), None))
    return timings


def _add(core: EngineCore, vocabulary: int, rows: int, tokens: int, answer: int, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(2, vocabulary) for _ in range(tokens)] for _ in range(rows)]
    core.add_all(requests([Work(prompt, answer) for prompt in prompts], seed << 12))


def _decodes(core: EngineCore, vocabulary: int, rows: int) -> float:
    """Return the seconds of the median step."""
    steps: list[float] = []
    for run in range(RUNS):
        _add(core, vocabulary, rows, PROMPT, STEPS + 2, seed=(rows << 3) + run + 1)
        ends: list[float] = []
        while core.has_work:
            core.step()
            plan = core.plan
            if plan is not None and plan.num_decodes == rows and not len(plan.prefill_tokens):
                ends.append(time.perf_counter())
        if run:  # the first run of a kernel takes longer
            steps += [end - begin for begin, end in pairwise(ends)]
    return statistics.median(steps)


def _prompts(core: EngineCore, vocabulary: int, rows: int, tokens: int, seed: int) -> float:
    _add(core, vocabulary, rows, tokens, 1, seed=seed + (tokens << 4) + rows)
    begin = time.perf_counter()
    while core.has_work:
        core.step()
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
