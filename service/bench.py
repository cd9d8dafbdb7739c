"""`quire bench`: offline throughput of a workload, beside what the hardware would allow."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from engine.config import EngineInfo, StepStats
from engine.core import EngineCore
from engine.request import Request, SamplingParams
from loadtest.provenance import Provenance
from loadtest.workloads import Work

PHASES = ("schedule", "launch", "wait", "commit")


class WorkloadFailed(Exception):
    """A request ended with an error, so there is nothing to report of its workload."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured on the device: bytes/s of a large copy (read + written), FLOP/s of a matrix product."""

    bandwidth: float
    flops: float


@dataclass(slots=True)
class Run:
    """One pass over a workload, from its first step to its last commit."""

    seconds: float = 0.0
    steps: int = 0
    bound_seconds: float = 0.0
    preemptions: int = 0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))


@dataclass(frozen=True, slots=True)
class Result:
    """One line of loadtest/results/*.jsonl. Rates are per second; `bound_share` is bound ÷ measured time."""

    engine: str
    model: str
    workload: str
    mode: str
    out_tok_s: float
    in_tok_s: float
    req_s: float
    seconds: float
    bound_seconds: float
    bound_share: float
    copy_tb_s: float  # the ceilings that the bound is for
    product_tflop_s: float
    runs: int
    steps: int
    preemptions: int
    step_ms: dict[str, float]
    device: str
    dtype: str
    kv_cache_dtype: str
    commit: str
    date: str
    command: str


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Time a large copy and a large matrix product, best of five."""
    cuda = device.type == "cuda"
    source = torch.empty((1 << 31 if cuda else 1 << 27) // 4, device=device)
    target = torch.empty_like(source)
    side = 8192 if cuda else 512  # a CPU may need seconds for a larger product in bfloat16
    a = torch.randn(side, side, device=device).to(dtype)
    copy = _best_time(lambda: target.copy_(source), device)
    product = _best_time(lambda: a @ a, device)
    return Ceilings(2 * source.nbytes / copy, 2 * side**3 / product)


def _best_time(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that `work` takes; on a GPU of several in a row, so that asking for one hardly counts."""
    cuda = device.type == "cuda"
    calls = 8 if cuda else 1
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        if cuda:
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - begin) / calls)
    return min(times[1:])


def requests(work: list[Work], seed: int) -> list[Request]:
    """A salt for each seed: no run finds what an earlier one left in the prefix cache."""
    return [
        Request(
            seed + i,
            one.prompt,
            SamplingParams(
                n=one.n,
                beam_width=one.beam_width,
                temperature=one.temperature,
                max_tokens=one.output_len,
                ignore_eos=True,
                seed=seed + i,
            ),
            cache_salt=str(seed),
        )
        for i, one in enumerate(work)
    ]


def fit(name: str, work: list[Work], info: EngineInfo) -> list[Work]:
    """Workload `name` in token ids that the vocabulary has: which they are changes no amount of work.

    Raises ValueError if a request of it could never run.
    """
    fitted = [replace(one, prompt=[token % info.vocab_size for token in one.prompt]) for one in work]
    for request in requests(fitted, seed=0):
        try:
            info.capacity.check(request)
        except ValueError as error:
            raise ValueError(
                f"request {request.id} of workload {name} does not fit: {error}; raise that limit (of blocks "
                "by --gpu-memory-utilization or --num-gpu-blocks-override), or take another --workload"
            ) from None
    return fitted


def queue(core: EngineCore, requests: list[Request], *, in_order: bool) -> None:
    """All at once, as LLM.generate does; `in_order`: one after the other, as a server gets them."""
    if not in_order:
        core.add_all(requests)
        return
    for request in requests:
        core.add(request)


def run_workload(core: EngineCore, info: EngineInfo, ceilings: Ceilings) -> Run:
    """Step until the last of the queued requests has finished. Raises WorkloadFailed if one fails."""
    run = Run()
    preemptions = core.stats.preemptions_recompute + core.stats.preemptions_swap
    begin = time.perf_counter()
    while core.has_work:
        for output in core.step().others:
            if output.error is not None:
                raise WorkloadFailed(
                    f"a request of the workload failed: {output.error} (the log says where); if it was "
                    "memory, lower --max-num-batched-tokens or --gpu-memory-utilization"
                )
        stats = core.stats
        run.steps += 1
        run.bound_seconds += _bound(stats, info, ceilings)
        for phase in PHASES:
            run.phases[phase] += getattr(stats, f"{phase}_seconds")
    run.seconds = time.perf_counter() - begin
    run.preemptions = core.stats.preemptions_recompute + core.stats.preemptions_swap - preemptions
    return run


def _bound(stats: StepStats, info: EngineInfo, ceilings: Ceilings) -> float:
    """Least seconds a step can take: weights and context read once, or its matrix products' arithmetic.

    The last layer owes a prompt's tokens no more than K and V, bar the newest; it is not counted for them.
    """
    tokens = stats.prefill_tokens + stats.decode_tokens
    if not tokens:
        return 0.0
    context_bytes = stats.tokens_filled * info.bytes_per_block / info.block_size
    reading = (info.body_weight_bytes + info.head_weight_bytes + context_bytes) / ceilings.bandwidth
    dtype: torch.dtype = getattr(torch, info.dtype)
    through_all = tokens - stats.prefill_tokens / info.num_layers
    products = info.body_weight_bytes * through_all + info.head_weight_bytes * stats.decode_tokens
    return max(reading, 2 * products / dtype.itemsize / ceilings.flops)


def bench(
    core: EngineCore,
    info: EngineInfo,
    name: str,
    work: list[Work],
    runs: int,
    ceilings: Ceilings,
    *,
    in_order: bool = False,
) -> Result:
    """Warm up, run `runs` times and report the median run of a workload that fits."""
    warm = [replace(one, output_len=min(one.output_len, 8)) for one in work[: info.max_num_seqs]]
    queue(core, requests(warm, seed=1 << 40), in_order=in_order)
    run_workload(core, info, ceilings)
    measured = []
    for run in range(runs):
        queue(core, requests(work, seed=run << 20), in_order=in_order)
        measured.append(run_workload(core, info, ceilings))
    middle = sorted(measured, key=lambda run: run.seconds)[(len(measured) - 1) // 2]
    seconds = statistics.median(run.seconds for run in measured)
    return Result(
        engine="quire",
        model=Path(info.model).name,
        workload=name,
        mode="offline" if in_order else "offline, longest first",
        out_tok_s=round(sum(one.output_tokens for one in work) / seconds, 1),
        in_tok_s=round(sum(len(one.prompt) for one in work) / seconds, 1),
        req_s=round(len(work) / seconds, 2),
        seconds=round(seconds, 3),
        bound_seconds=round(middle.bound_seconds, 3),
        bound_share=round(middle.bound_seconds / seconds, 3),
        copy_tb_s=round(ceilings.bandwidth / 1e12, 3),
        product_tflop_s=round(ceilings.flops / 1e12, 1),
        runs=runs,
        steps=middle.steps,
        preemptions=middle.preemptions,
        step_ms={phase: round(1000 * total / middle.steps, 3) for phase, total in middle.phases.items()},
        device=info.device,
        dtype=info.dtype,
        kv_cache_dtype=info.kv_cache_dtype,
        **asdict(Provenance.here()),
    )


def show(results: list[Result], ceilings: Ceilings, info: EngineInfo) -> None:
    """The results as a table on stdout."""
    table = Table(
        title=f"{info.architecture} {info.dtype} on {info.device}: weights {info.weight_bytes / 1e9:.2f} GB, "
        f"{info.num_blocks:,} blocks of {info.block_size} in {info.kv_cache_dtype}",
        caption=f"bound: {ceilings.bandwidth / 1e12:.2f} TB/s, {ceilings.flops / 1e12:.1f} TFLOP/s, measured "
        "here; phases are ms a step",
    )
    for column in ("workload", "out tok/s", "in tok/s", "req/s", "seconds", "bound s", "share", "steps"):
        table.add_column(column, justify="left" if column == "workload" else "right")
    for phase in PHASES:
        table.add_column(phase, justify="right")
    for result in results:
        table.add_row(
            result.workload,
            f"{result.out_tok_s:,.0f}",
            f"{result.in_tok_s:,.0f}",
            f"{result.req_s:,.1f}",
            f"{result.seconds:.2f}",
            f"{result.bound_seconds:.2f}",
            f"{result.bound_share:.0%}",
            f"{result.steps:,}",
            *(f"{result.step_ms[phase]:.3f}" for phase in PHASES),
        )
    console = Console()
    Console(width=max(console.width, 132)).print(table)


def append_result(result: Result, path: Path) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result)) + "\n")
