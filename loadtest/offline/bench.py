"""`quire bench`: offline throughput of a workload, beside what the hardware would allow.

It is what `LLM.generate` gives. The engine alone, stepped without making text of its tokens, runs in turn.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from quire.engine.config import EngineInfo
from quire.engine.core import EngineCore
from quire.engine.messages import Request, SamplingParams
from quire.engine.schedule.plan import StepPlan
from quire.loadtest.offline import roofline
from quire.loadtest.offline.columns import COLUMNS, explain
from quire.loadtest.offline.roofline import Ceilings, Needs
from quire.loadtest.provenance import Provenance
from quire.loadtest.workloads import Work
from quire.offline_engine import OfflineEngine, without_collections
from quire.offline_requests import RequestFailed

PHASES = ("schedule", "launch", "wait", "commit")


class WorkloadFailed(Exception):
    """A request ended with an error, so there is nothing to report of its workload."""


@dataclass(slots=True)
class Run:
    """One pass of the engine alone over a workload, from its first step to its last commit."""

    seconds: float = 0.0
    steps: int = 0
    plans: list[tuple[StepPlan | None, int]] = field(default_factory=list)  # and tokens in distinct blocks
    preemptions: int = 0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))


@dataclass(frozen=True, slots=True)
class Traced:
    """Some steps of a workload under a tracer (see `profiling`), by which the host takes longer."""

    steps: int
    step_ms: float
    busy_share: float  # of a step the device runs something
    waiting_us: float | None  # of a step it pauses for the host; None: it is the host


@dataclass(frozen=True, slots=True)
class Result:
    """One line of loadtest/results/*.jsonl. Rates are per second; `bound_share` is bound ÷ measured time.

    Steps and what is of them are of the engine alone.
    """

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
    step_needs: Needs
    device: str
    dtype: str
    kv_cache_dtype: str
    commit: str
    date: str
    command: str
    engine_out_tok_s: float  # of the engine alone
    traced: Traced | None = None
    tensor_parallel_size: int = 1  # what a step needs is of one of so many ranks


def requests(work: list[Work], seed: int) -> list[Request]:
    """Make requests with a salt for each seed: no run finds what an earlier one left in the prefix cache."""
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
    """Put workload `name` in token ids that the vocabulary has: which they are changes no amount of work.

    Raise ValueError if a request of it could never run.
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
    """Queue all at once, as LLM.generate does; `in_order`: one after the other, as a server gets them."""
    if not in_order:
        core.add_all(requests)
        return
    for request in requests:
        core.add(request)


def run_workload(core: EngineCore) -> Run:
    """Step until the last of the queued requests has finished. Raises WorkloadFailed if one fails."""
    run = Run()
    preemptions = core.stats.preemptions_recompute + core.stats.preemptions_swap
    begin = time.perf_counter()
    while core.has_work:
        for output in core.step().others:
            if output.error is not None:
                raise _failure(output.error)
        stats = core.stats
        run.steps += 1
        run.plans.append((core.plan, stats.tokens_filled))
        for phase in PHASES:
            run.phases[phase] += getattr(stats, f"{phase}_seconds")
    run.seconds = time.perf_counter() - begin
    run.preemptions = core.stats.preemptions_recompute + core.stats.preemptions_swap - preemptions
    return run


def _failure(error: str) -> WorkloadFailed:
    return WorkloadFailed(
        f"a request of the workload failed: {error} (the log says where); if it was memory, lower "
        "--max-num-batched-tokens or --gpu-memory-utilization"
    )


def seconds_to_answer(engine: OfflineEngine, requests: list[Request], *, in_order: bool) -> float:
    """Time what `LLM.generate` does, from prompts of token ids to texts. Raise WorkloadFailed."""
    begin = time.perf_counter()
    try:
        engine.answer(requests, partial(queue, engine.core, in_order=in_order))
    except RequestFailed as failed:
        raise _failure(failed.error) from None
    return time.perf_counter() - begin


def bench(
    engine: OfflineEngine,
    info: EngineInfo,
    name: str,
    work: list[Work],
    runs: int,
    ceilings: Ceilings,
    *,
    in_order: bool = False,
) -> Result:
    """Warm up, run `runs` times and report the median run of a workload that fits."""
    core = engine.core
    warm = [replace(one, output_len=min(one.output_len, 8)) for one in work[: info.max_num_seqs]]
    queue(core, requests(warm, seed=1 << 40), in_order=in_order)
    run_workload(core)
    alone, answered = [], []
    for run in range(0, 2 * runs, 2):
        queue(core, requests(work, seed=run << 20), in_order=in_order)
        with without_collections():  # as there are none while answers are made
            alone.append(run_workload(core))
        answered.append(seconds_to_answer(engine, requests(work, seed=(run + 1) << 20), in_order=in_order))
    middle = sorted(alone, key=lambda run: run.seconds)[(len(alone) - 1) // 2]
    seconds = statistics.median(answered)
    output_tokens = sum(one.output_tokens for one in work)
    needs = [roofline.needs_of(plan, filled, info) for plan, filled in middle.plans]
    bound = sum(each.seconds(ceilings) for each in needs)
    return Result(
        engine="quire",
        model=Path(info.model).name,
        workload=name,
        mode="offline" if in_order else "offline, longest first",
        out_tok_s=round(output_tokens / seconds, 1),
        in_tok_s=round(sum(len(one.prompt) for one in work) / seconds, 1),
        req_s=round(len(work) / seconds, 2),
        seconds=round(seconds, 3),
        bound_seconds=round(bound, 3),
        bound_share=round(bound / seconds, 3),
        copy_tb_s=round(ceilings.bandwidth / 1e12, 3),
        product_tflop_s=round(ceilings.flops / 1e12, 1),
        runs=runs,
        steps=middle.steps,
        preemptions=middle.preemptions,
        step_ms={phase: round(1000 * total / middle.steps, 3) for phase, total in middle.phases.items()},
        step_needs=roofline.mean(needs),
        device=info.device,
        dtype=info.dtype,
        kv_cache_dtype=info.kv_cache_dtype,
        tensor_parallel_size=info.tensor_parallel_size,
        engine_out_tok_s=round(output_tokens / statistics.median(run.seconds for run in alone), 1),
        **asdict(Provenance.here()),
    )


def show(results: list[Result], ceilings: Ceilings, info: EngineInfo) -> None:
    """Print the results as a table, and with the first of them what its columns are."""
    table = Table(
        title=f"{info.architecture} {info.dtype} on {info.device}: weights {info.weight_bytes / 1e9:.2f} GB, "
        f"{info.num_blocks:,} blocks of {info.block_size} in {info.kv_cache_dtype}",
        caption=f"bound: {ceilings.bandwidth / 1e12:.2f} TB/s, {ceilings.flops / 1e12:.1f} TFLOP/s, "
        "measured here",
    )
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "workload" else "right")
    for result in results:
        table.add_row(
            result.workload,
            f"{result.out_tok_s:,.0f}",
            f"{result.in_tok_s:,.0f}",
            f"{result.req_s:,.1f}",
            f"{result.seconds:.2f}",
            f"{result.bound_seconds:.2f}",
            f"{result.bound_share:.0%}",
            f"{result.engine_out_tok_s:,.0f}",
            f"{result.steps:,}",
            *(f"{result.step_ms[phase]:.3f}" for phase in PHASES),
        )
    console = Console()
    Console(width=max(console.width, 144)).print(table)
    if len(results) == 1:
        explain(console)


def show_step(result: Result, ceilings: Ceilings) -> None:
    """Print what a step of the workload needs as a table."""
    needs, steps = result.step_needs, result.steps
    table = Table(
        title=f"{result.workload}: what a step needs, on average",
        caption="bound: in each step the longer of both, "
        f"{1000 * result.bound_seconds / steps:.2f} ms on average;\n"
        f"a step took {1000 * result.seconds / steps:.2f} ms, of which this is {result.bound_share:.0%}",
    )
    for column in ("of it", "tokens", "MB", "ms to read", "GFLOP", "ms to compute"):
        table.add_column(column, justify="left" if column == "of it" else "right")
    tokens = needs.prefill_tokens + needs.decode_tokens
    for name, computed, read, flops in (
        ("weights", None, needs.weight_bytes, None),
        ("prefill", needs.prefill_tokens, needs.prefill_bytes, needs.prefill_flops),
        ("decode", needs.decode_tokens, needs.decode_bytes, needs.decode_flops),
        ("all", tokens, needs.bytes, needs.flops),
    ):
        table.add_row(
            name,
            "" if computed is None else f"{computed:,.1f}",
            f"{read / 1e6:,.1f}",
            f"{1000 * read / ceilings.bandwidth:,.2f}",
            "" if flops is None else f"{flops / 1e9:,.1f}",
            "" if flops is None else f"{1000 * flops / ceilings.flops:,.2f}",
        )
    Console().print(table)
