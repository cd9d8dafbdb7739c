"""Time few tokens' products by weights that are asked for ahead: `python -m quire.loadtest.gpu_streamed`.

Of steps of one token or a few, in CUDA graphs: as they are served, and with each subset of a layer's products
by `linear.hopper_stream`: into a branch, gate, out of attention or what mixes tokens, and down. Attention
stays as it is. All rows read the same block, which takes longer than a cache's blocks do, in all ways alike.
Dummy weights. Prints microseconds of a step. Needs one CUDA device.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from quire.engine.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.device.inputs import DecodeInputs
from quire.engine.startup import start_engine
from quire.kernels import plan
from quire.kernels.linear import alone
from quire.kernels.linear.recipes import ADD_LAYER_NORM, ADD_SANDWICH, GATE, PROJECT_IN, PROJECT_OUT, Product
from quire.kernels.recipes import Chosen, choose
from quire.loadtest.command import command_parser, parse_for_cuda, write_json
from quire.loadtest.model_configs import write_model_folder
from quire.loadtest.shape_configs import DENSE, OTHERS, STATES

CONFIGS = {**DENSE, **OTHERS, **STATES}
MODELS = "lfm2-1.2b,qwen3.5-4b,llama-3.2-1b,qwen2.5-1.5b,qwen3-4b"
ROLES = ("in", "gate", "out", "down")
SUBSETS = [subset for count in range(5) for subset in itertools.combinations(ROLES, count)]
KERNEL = "linear.hopper_stream"
CONTEXT, BLOCKS = 512, 96
ROUNDS, REPLAYS = 3, 40
OUT = (PROJECT_OUT, ADD_LAYER_NORM, ADD_SANDWICH)
PLANS = (alone.plan_linear, alone.plan_gated_linear, alone.plan_add_linear, alone.plan_add_normed_linear)


@dataclass(frozen=True, slots=True)
class Timing:
    """streamed: products that are asked for ahead; none: as served."""

    model: str
    tokens: int
    streamed: tuple[str, ...]
    microseconds: float


@contextmanager
def streamed(roles: tuple[str, ...], tokens: int, hidden: int) -> Iterator[None]:
    """Have these products of so many tokens be asked for ahead where that can be, of a model so wide."""

    def chosen(table: tuple[Any, ...], case: Any) -> Chosen[Any]:
        role = role_of(table, case, hidden)
        if role in roles and case.tokens == tokens and not case.unmerged:
            gated, divided = role == "gate", role in ("out", "down")
            for recipe in table:
                fits = KERNEL in recipe.name and recipe.supports(case)
                if fits and case.tiling(gated=gated, divided=divided) is not None:
                    return Chosen(recipe.name, recipe.make(case))
        return choose(table, case)

    with ExitStack() as stack:
        for module in (alone, plan):
            stack.enter_context(mock.patch.object(module, "choose", chosen))
        stack.callback(_forget)
        _forget()
        yield


def role_of(table: tuple[Any, ...], case: Any, hidden: int) -> str | None:
    """Return which of a layer's products a table of recipes is asked for."""
    if not isinstance(case, Product):
        return None
    if table is PROJECT_IN or table is GATE:
        return "in" if table is PROJECT_IN else "gate"
    if not any(table is each for each in OUT):
        return None
    return "down" if case.weight.inputs > 2 * hidden else "out"


def _forget() -> None:
    for each in (*PLANS, plan.plan_layer):
        each.cache_clear()


def time_model(name: str, tokens: int) -> list[Timing]:
    """Time all subsets of the configuration `name`; the quickest come first."""
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(Path(folder), CONFIGS[name])
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            max_model_len=2 * CONTEXT,
            max_num_seqs=tokens,
            max_num_batched_tokens=max(256, tokens),
            num_gpu_blocks_override=BLOCKS,
            enable_prefix_caching=False,
            enforce_eager=True,
        )
        core, _ = start_engine(config)
    run, stream = step_of(core, tokens), torch.cuda.Stream()
    graphs: dict[tuple[str, ...], torch.cuda.CUDAGraph] = {}
    for roles in SUBSETS:
        with streamed(roles, tokens, CONFIGS[name]["hidden_size"]), torch.cuda.stream(stream):
            run()
            stream.synchronize()
            graphs[roles] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[roles], stream=stream):
                run()
    rounds = [{roles: _replayed(graph, stream) for roles, graph in graphs.items()} for _ in range(ROUNDS)]
    found = [
        Timing(name, tokens, roles, round(statistics.median(each[roles] for each in rounds), 1))
        for roles in graphs
    ]
    return sorted(found, key=lambda each: each.microseconds)


def step_of(core: EngineCore, tokens: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Return what computes a decode of so many rows, whose tables have one block all over."""
    runner: Any = core.runner
    device = runner.device

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    inputs = DecodeInputs(
        rows=numbers(*range(tokens)),
        positions=numbers(*[CONTEXT - 1] * tokens),
        context_lens=numbers(*[CONTEXT] * tokens),
        order=numbers(*range(tokens)),
        members=numbers(),
        cascade_of=numbers(),
    )

    @torch.inference_mode()
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        logits, sampled = runner._decode(inputs)
        return logits, sampled

    return run


def _replayed(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    """Return the microseconds of a replay, in the mean of many."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        graph.replay()
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / REPLAYS


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--models", default=MODELS, help=f"some of {', '.join(CONFIGS)} ({MODELS})")
    parser.add_argument("--tokens", type=int, default=1, help="of a step (1)")
    parser.add_argument("--json", type=Path, help="where one JSON object goes, anew after each model")
    arguments = parse_for_cuda(parser)
    timings: list[Timing] = []
    for name in arguments.models.split(","):
        found = time_model(name, arguments.tokens)
        for each in found:
            roles = ", ".join(each.streamed) or "as served"
            print(f"{name:14} {each.tokens} {each.microseconds:8.1f} µs  {roles}", flush=True)
        timings += found
        figures = {"timings": [asdict(each) for each in timings]}
        write_json(arguments.json, torch.cuda.get_device_name(), figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
