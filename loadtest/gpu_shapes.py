"""Time decode steps over the shapes that people run: `python -m quire.loadtest.gpu_shapes [--json FILE]`.

Ten configurations without experts and three with them (`quire.loadtest.shape_configs`), dummy weights, each
in a process of its own. Prints a step's time with 1, 8 and 256 sequences, and its share of the bound: the
bytes that it has to read at the rate of a large copy, measured in the same process, or its arithmetic where
that takes longer. Of experts those count that so many tokens ask for, if each asks by chance. Needs one CUDA
device.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from quire.engine.config import EngineConfig, EngineInfo, KVCacheDtype
from quire.engine.core import EngineCore
from quire.engine.schedule.plan import StepPlan
from quire.engine.startup import start_with_graphs
from quire.loadtest.command import command_parser, parse_for_cuda, write_json
from quire.loadtest.model_configs import write_model_folder
from quire.loadtest.offline.bench import requests
from quire.loadtest.offline.roofline import Ceilings, measure_ceilings, needs_of
from quire.loadtest.shape_configs import DENSE, EXPERTS, OTHERS, QUANTISED
from quire.loadtest.workloads import Work

ROWS = "1,8,256"
PROMPT, STEPS = 512, 64  # tokens of each sequence, and steps that are timed
RUNS = 3
GRID = {**DENSE, **EXPERTS}
CONFIGS = {**GRID, **OTHERS, **QUANTISED}
BYTES_OF = {"mxfp4": 17 / 32, "fp8": 1, "awq": 67 / 128}  # of a number, with its share of a scale


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of a model: how many each layer has, how many a token asks for, and bytes of them all."""

    count: int
    asked: int
    bytes: int

    @classmethod
    def of(cls, config: dict[str, Any], info: EngineInfo) -> Experts:
        count = config.get("num_experts") or config.get("num_local_experts") or 0
        width = config.get("moe_intermediate_size") or config["intermediate_size"]
        layers = config["num_hidden_layers"] - config.get("mlp_layer_types", []).count("dense")
        weights = 3 * count * layers * config["hidden_size"] * width
        itemsize = getattr(torch, info.dtype).itemsize
        if info.kept_bits:
            itemsize = BYTES_OF[config["quantization_config"]["quant_method"]]
        asked = config.get("num_experts_per_tok") or config.get("num_experts_per_token") or 0
        return cls(count, asked, int(weights * itemsize))

    def unread_bytes(self, tokens: int) -> float:
        """Return the bytes of experts that none of so many tokens asks for, if each asks by chance."""
        return self.bytes * (1 - self.asked / self.count) ** tokens if self.count else 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Decode steps of one configuration with so many sequences, without prompts among them.

    step_ms: the median step. mean_ms: with pauses, of which one of 10 ms is a tenth of a small model's 64
    steps; of the median run.
    """

    model: str
    rows: int
    step_ms: float
    mean_ms: float
    bound_ms: float
    bound_share: float
    kv_cache_dtype: str
    copy_tb_s: float


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--models", default=",".join(GRID), help=f"some of {', '.join(CONFIGS)} (the grid)")
    parser.add_argument("--rows", default=ROWS, help=f"sequences that decode at once ({ROWS})")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as `quire serve` takes it (auto)")
    parser.add_argument("--json", type=Path, help="where one JSON object goes, anew after each model")
    arguments = parse_for_cuda(parser)
    rows = [int(number) for number in arguments.rows.split(",")]
    timings: list[Timing] = []
    failed: dict[str, str] = {}
    for name in arguments.models.split(","):
        try:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                found = process.submit(time_model, name, rows, arguments.kv_cache_dtype).result()
        except Exception as error:  # the others are still worth their time
            failed[name] = f"{type(error).__name__}: {error}"
            print(name, "failed:", failed[name], file=sys.stderr, flush=True)
            continue
        for each in found:
            share = f"{each.bound_share:4.0%} of the bound ({each.kv_cache_dtype})"
            times = f"{each.step_ms:8.3f} ms ({each.mean_ms:.3f} in the mean)"
            print(f"{each.model:24} {each.rows:4} rows {times}, {share}", flush=True)
        timings += found
        if arguments.json is not None:
            figures = {"timings": [asdict(each) for each in timings], "failed": failed}
            write_json(arguments.json, torch.cuda.get_device_name(), figures)
    return 1 if failed else 0


def time_model(name: str, rows: Sequence[int], kv_cache_dtype: KVCacheDtype = "auto") -> list[Timing]:
    """Time steps of the configuration `name` with each of `rows` sequences."""
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(Path(folder), CONFIGS[name])
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=2048,
            max_num_seqs=max(rows),
        )
        core, info = start_with_graphs(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ceilings = measure_ceilings(device, getattr(torch, info.dtype))
    experts = Experts.of(CONFIGS[name], info)
    return [_time_rows(core, info, name, experts, count, ceilings) for count in rows]


def _time_rows(
    core: EngineCore, info: EngineInfo, name: str, experts: Experts, rows: int, ceilings: Ceilings
) -> Timing:
    _decode(core, info, rows, seed=0)  # the first run of a kernel takes longer
    steps: list[float] = []
    means: list[float] = []
    for run in range(RUNS):
        ends, plans = _decode(core, info, rows, seed=(run + 1) << 20)
        taken = [end - begin for begin, end in pairwise(ends)]
        means.append(statistics.mean(taken))
        steps += taken
    step = statistics.median(steps)
    unread = experts.unread_bytes(rows)
    needs = [needs_of(plan, filled, info) for plan, filled in plans[1:]]
    read = [replace(each, weight_bytes=each.weight_bytes - unread) for each in needs]
    bound = sum(each.seconds(ceilings) for each in read) / len(read)
    return Timing(
        name,
        rows,
        round(1e3 * step, 4),
        round(1e3 * statistics.median(means), 4),
        round(1e3 * bound, 4),
        round(bound / step, 3),
        info.kv_cache_dtype,
        round(ceilings.bandwidth / 1e12, 3),
    )


def _decode(
    core: EngineCore, info: EngineInfo, rows: int, seed: int
) -> tuple[list[float], list[tuple[StepPlan, int]]]:
    """Return when steps without prompts ended, in seconds, and their plans with tokens in distinct blocks."""
    rng = random.Random(seed + rows)
    prompts = [[rng.randrange(2, info.vocab_size) for _ in range(PROMPT)] for _ in range(rows)]
    core.add_all(requests([Work(prompt, STEPS + 2) for prompt in prompts], seed + (rows << 24)))
    ends: list[float] = []
    plans: list[tuple[StepPlan, int]] = []
    while core.has_work:
        core.step()
        if core.plan is not None and core.plan.num_decodes == rows and not len(core.plan.prefill_tokens):
            ends.append(time.perf_counter())
            plans.append((core.plan, core.stats.tokens_filled))
    return ends, plans


if __name__ == "__main__":
    sys.exit(main())
