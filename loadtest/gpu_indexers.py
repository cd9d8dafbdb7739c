"""Time a model whose layers attend to chosen tokens, beside one that attends to all.

`python -m quire.loadtest.gpu_indexers [--models …] [--json FILE]`

Three layers of DeepSeek V3.2's attention, of which an indexer chooses 2,048 tokens, and three of V3's, which
is the same without an indexer; both with narrow MLPs and random weights, in bf16, each in a process of its
own. Prints the seconds that prompts take to their first tokens, the milliseconds of a step in which all rows
decode behind them, and how long a short prompt takes that comes while rows decode. Needs one CUDA device.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from quire.engine.config import EngineConfig, EngineInfo
from quire.engine.core import EngineCore
from quire.engine.startup import start_with_graphs
from quire.loadtest.command import command_parser, parse_for_cuda, write_json
from quire.loadtest.model_configs import write_model_folder
from quire.loadtest.offline.bench import requests
from quire.loadtest.shape_configs import LATENT
from quire.loadtest.workloads import Work


@dataclass(frozen=True, slots=True)
class Case:
    """So many rows, each with so many tokens of a prompt."""

    rows: int
    tokens: int


CASES = (Case(1, 1500), Case(16, 1500), Case(1, 8000), Case(16, 8000), Case(1, 32000))
DECODING, SHORT = Case(15, 8000), 100  # rows that decode when a prompt of so many tokens comes
CHUNK = 2048  # tokens of a step, at most
STEPS = 48  # in which all rows decode


@dataclass(frozen=True, slots=True)
class Timing:
    """Prompts until the last row's first token, and a step with all rows behind them."""

    model: str
    rows: int
    tokens: int
    prefill_s: float
    step_ms: float


@dataclass(frozen=True, slots=True)
class Beside:
    """A short prompt until its first token, which takes so many steps, beside rows that decode."""

    model: str
    short: int
    rows: int
    tokens: int
    ms: float
    steps: int


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--models", default=",".join(LATENT), help="some of them, by commas")
    parser.add_argument("--json", type=Path, help="where one JSON object goes, anew after each model")
    arguments = parse_for_cuda(parser)
    timings: list[Timing] = []
    besides: list[Beside] = []
    for name in arguments.models.split(","):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            found, beside = process.submit(time_model, name, CASES, DECODING).result()
        print(f"{name}:")
        for each in found:
            what = f"{each.rows:4} rows of {each.tokens:6}"
            print(f"  {what}: prompts {each.prefill_s:.3f} s, then {each.step_ms:.2f} ms a step", flush=True)
        what = f"{beside.short} tokens beside {beside.rows} rows of {beside.tokens}"
        print(f"  {what}: {beside.ms:.2f} ms in {beside.steps} steps", flush=True)
        timings += found
        besides.append(beside)
        figures = {
            "timings": [asdict(each) for each in timings],
            "beside": [asdict(each) for each in besides],
        }
        write_json(arguments.json, torch.cuda.get_device_name(), figures)
    return 0


def time_model(name: str, cases: Sequence[Case], decoding: Case) -> tuple[list[Timing], Beside]:
    """Time the configuration `name`, each case twice, of which the second counts: kernels are warm then."""
    every = [*cases, decoding]
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(Path(folder), LATENT[name])
        core, info = start_with_graphs(
            EngineConfig(
                model=folder,
                load_format="dummy",
                max_model_len=max(case.tokens + _answer(case) for case in every),
                max_num_seqs=max(decoding.rows + 1, *(case.rows for case in cases)),
                max_num_batched_tokens=CHUNK,
                gpu_memory_utilization=0.4,
            )
        )
    driver = _Driver(name, core, info)
    timings = [(driver.rows(case), driver.rows(case))[1] for case in cases]
    return timings, (driver.beside(decoding), driver.beside(decoding))[1]


def _answer(case: Case) -> int:
    """Return how many tokens each row decodes, so that the first one still does when the last begins."""
    return STEPS + case.rows * -(-case.tokens // CHUNK) + case.rows


class _Driver:
    """Steps an engine through requests of a case."""

    def __init__(self, model: str, core: EngineCore, info: EngineInfo) -> None:
        self.model = model
        self.core = core
        self._rng = random.Random(0)
        self._vocab = info.vocab_size
        self._asked = 0

    def rows(self, case: Case) -> Timing:
        """Time the prompts of a case, and then the steps in which all its rows decode."""
        self._ask(case.rows, case.tokens, _answer(case))
        begin = time.perf_counter()
        self._until_all_begin(case.rows)
        filled = time.perf_counter()
        ends: list[float] = []
        while self.core.has_work:
            self.core.step()
            plan = self.core.plan
            if plan is not None and plan.num_decodes == case.rows and not len(plan.prefill_tokens):
                ends.append(time.perf_counter())
        step = (ends[-1] - ends[0]) / (len(ends) - 1)
        return Timing(self.model, case.rows, case.tokens, round(filled - begin, 4), round(1e3 * step, 3))

    def beside(self, decoding: Case) -> Beside:
        """Time a short prompt that comes while the case's rows decode."""
        self._ask(decoding.rows, decoding.tokens, _answer(decoding))
        self._until_all_begin(decoding.rows)
        for _ in range(5):
            self.core.step()
        self._ask(1, SHORT, 1)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        steps = self._until_all_begin(1)
        ms = round(1e3 * (time.perf_counter() - begin), 3)
        while self.core.has_work:
            self.core.step()
        return Beside(self.model, SHORT, decoding.rows, decoding.tokens, ms, steps)

    def _ask(self, rows: int, tokens: int, answer: int) -> None:
        prompts = [[self._rng.randrange(2, self._vocab) for _ in range(tokens)] for _ in range(rows)]
        self.core.add_all(requests([Work(prompt, answer) for prompt in prompts], self._asked))
        self._asked += rows

    def _until_all_begin(self, newest: int) -> int:
        """Step until the newest requests all have a token; return how many steps that took."""
        steps, missing = 0, set(range(self._asked - newest, self._asked))
        while missing:
            if not self.core.has_work:
                raise RuntimeError(f"requests {sorted(missing)} ended without a token")
            steps += 1
            missing -= {output.request_id for output in self.core.step() if output.tokens}
        return steps


if __name__ == "__main__":
    sys.exit(main())
