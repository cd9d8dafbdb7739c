"""Fig. 18, 19 and the tutorials' tables, measured on a device."""

from __future__ import annotations

from collections.abc import Iterable

from quire.loadtest.evaluation.block_size import LAYOUTS, PAPER_BEST, PAPER_SWAP, cheaper_from
from quire.loadtest.evaluation.figure import Cell, Chart, Figure, Line, Table
from quire.loadtest.evaluation.real.attention import SIZE_BATCH, SIZE_CONTEXT, SIZE_HEADS
from quire.loadtest.evaluation.real.prediction import Compared, RealResults, alike, durations
from quire.loadtest.evaluation.real.rate_figures import OVERLOAD, PLAIN, real_figure
from quire.loadtest.evaluation.setting import ratio

PAPER_OVERHEAD = "20–26"  # per cent above FasterTransformer; section 7.1
ENOUGH = 0.9  # of the best rate


def fig18a(results: RealResults) -> Figure:
    tables, charts = [], []
    for heads in _unique(timed.heads for timed in results.attention):
        times = [timed for timed in results.attention if timed.heads == heads]
        ways = list(times[0].microseconds)
        in_order, scattered = "blocks of 128 in order", "blocks of 16"
        rows: list[list[Cell]] = [
            [
                f"{timed.batch} × {timed.context}",
                *timed.microseconds.values(),
                100 * (timed.microseconds[scattered] / timed.microseconds[in_order] - 1),
                PAPER_OVERHEAD,
            ]
            for timed in times
        ]
        header = [
            "batch × context",
            *(f"{way}, µs" for way in ways),
            "blocks of 16 above in order, %",
            "paper: vLLM above FasterTransformer, %",
        ]
        tables.append(
            Table(title=f"Attention of one decode step, heads of {heads}", header=header, rows=rows)
        )
        for batch in _unique(timed.batch for timed in times):
            of_batch = [timed for timed in times if timed.batch == batch]
            contexts = [float(timed.context) for timed in of_batch]
            charts.append(
                Chart(
                    kind="lines",
                    title=f"Heads of {heads}, batch of {batch}",
                    x="context",
                    y="µs",
                    lines=[
                        Line(way, contexts, [timed.microseconds[way] for timed in of_batch]) for way in ways
                    ],
                    log_x=True,
                )
            )
    error = max((each for timed in results.attention for each in timed.max_error.values()), default=0.0)
    notes = [
        "In CUDA graphs, over layers that together exceed the L2 cache; the largest difference of any way to "
        f"attention in fp64 is {error:.1g}.",
        "Up to a context of 128, blocks of 128 in order are contiguous memory, read by the same kernel: the "
        "difference is what paging costs. torch's attention is another kernel.",
    ]
    title = "Attention over blocks against contiguous keys and values"
    return real_figure(results, "fig18a", title, tables, charts, notes)


def fig18b(results: RealResults) -> Figure:
    rows: list[list[Cell]] = []
    best: list[list[Cell]] = []
    shown: list[Compared] = []
    charts: list[Chart] = []
    for workload, paper in PAPER_BEST.items():
        fields = {**PLAIN, "workload": workload, "kind": "paged", "share": None}
        sizes = sorted(results.costs)
        runs = alike({size: results.find(**{**fields, "block_size": size}) for size in sizes})
        if not runs:
            continue
        shown += runs.values()
        for size, run in runs.items():
            rows.append(
                [
                    workload,
                    float(size),
                    run.real.sustained,
                    run.simulated.sustained,
                    run.real.wasted_in_blocks,
                    run.simulated.wasted_in_blocks,
                ]
            )
        most = max(run.real.sustained for run in runs.values())
        good = [str(size) for size, run in runs.items() if run.real.sustained >= ENOUGH * most]
        best.append([workload, ", ".join(good), paper])
        charts.append(
            Chart(
                kind="lines",
                title=f"{workload}, overloaded",
                x="block size",
                y="sustained, requests/s",
                lines=[
                    Line("real", [*map(float, runs)], [run.real.sustained for run in runs.values()]),
                    Line(
                        "simulated",
                        [*map(float, runs)],
                        [run.simulated.sustained for run in runs.values()],
                        dashed=True,
                    ),
                ],
                log_x=True,
            )
        )
    header = [
        "workload",
        "block size",
        "sustained, requests/s",
        "simulated",
        "wasted inside blocks, %",
        "simulated",
    ]
    kernel: list[list[Cell]] = [
        [float(each.block_size), each.microseconds, 100 * (each.microseconds / least - 1)]
        for least in [min((each.microseconds for each in results.block_sizes), default=0.0)]
        for each in results.block_sizes
    ]
    tables = [
        Table(title="Overloaded, by block size", header=header, rows=rows),
        Table(
            title=f"Attention alone of a decode step, heads of {SIZE_HEADS}, {SIZE_BATCH} × {SIZE_CONTEXT}",
            header=["block size", "µs", "above the best, %"],
            rows=kernel,
        ),
        Table(
            title="Best block sizes",
            header=["workload", "within 10 % of the best here", "paper: best"],
            rows=best,
        ),
    ]
    notes = [
        OVERLOAD,
        durations(shown),
        "Blocks below 16 are read by the plain kernel, a key's address at a time; Hopper's own kernels take "
        "those from 16 on.",
    ]
    return real_figure(results, "fig18b", "Rate by block size, on a real engine", tables, charts, notes)


def fig19(results: RealResults) -> Figure:
    times = results.transfers
    sizes = [float(timed.block_size) for timed in times]
    columns = (
        [timed.whole_blocks for timed in times],
        [timed.layer_by_layer for timed in times],
        [timed.recompute for timed in times],
    )
    ways = dict(zip((*LAYOUTS, "recompute"), columns, strict=True))
    rows: list[list[Cell]] = [list(row) for row in zip(sizes, *ways.values(), strict=True)]
    tokens = times[0].tokens if times else 0
    title = f"(a) {tokens} tokens out and in again, or prefilled once more: milliseconds"
    moved = Table(title=title, header=["block size", *ways], rows=rows)
    cheaper: list[list[Cell]] = [
        [way, cheaper_from(sizes, ways[way], ways["recompute"]), PAPER_SWAP] for way in LAYOUTS if times
    ]
    meet = Table(
        title="Where they meet",
        header=["", "cheaper than recomputing from blocks of", "paper (section 7.3)"],
        rows=cheaper,
    )
    runs = _preempted(results)
    rows = [
        [
            float(run.case.block_size),
            run.case.preemption,
            run.real.sustained,
            run.simulated.sustained,
            1e3 * run.real.normalized_latency,
            1e3 * run.simulated.normalized_latency,
            float(run.real.preemptions),
        ]
        for run in runs
    ]
    header = [
        "block size",
        "mode",
        "sustained, requests/s",
        "simulated",
        "ms per token",
        "simulated",
        "preemptions",
    ]
    end_to_end = Table(title="(b) ShareGPT, overloaded", header=header, rows=rows)
    chart = Chart(
        kind="lines",
        title=f"(a) {tokens} tokens",
        x="block size",
        y="ms",
        lines=[Line(way, sizes, milliseconds) for way, milliseconds in ways.items()],
        log_x=True,
        log_y=True,
    )
    notes = ["Nothing else runs meanwhile in (a). In (b) transfers run beside the steps.", OVERLOAD]
    notes.append(durations(runs))
    name = "Swapping against recomputing by block size, on a real engine"
    return real_figure(results, "fig19", name, [moved, meet, end_to_end], [chart] if times else [], notes)


def _preempted(results: RealResults) -> list[Compared]:
    """Return ShareGPT's overloads by block size: swapped, and recomputed, with a host memory or without."""
    groups: dict[tuple[int, str], list[Compared]] = {}
    for size in sorted(results.costs):
        plain = {"workload": "ShareGPT", "kind": "paged", "share": None, "n": 1, "beam_width": 0}
        swapped, recomputed = (
            results.find(**plain, block_size=size, preemption=mode) for mode in ("swap", "recompute")
        )
        if swapped and recomputed:
            slots = max(run.case.host_slots for run in recomputed)
            groups[size, "swap"] = swapped
            groups[size, "recompute"] = [run for run in recomputed if run.case.host_slots == slots]
    return list(alike(groups).values())


def tutorials(results: RealResults) -> Figure:
    tables = []
    if results.models:
        rows: list[list[Cell]] = [
            [each.way, each.tokens_per_second, each.peak_mib, f"{each.equal} of {each.requests}"]
            for each in results.models
        ]
        header = ["way", "tokens/s", "MiB beside weights, at most", "answers equal to contiguous ones"]
        title = "Whole engines of one model: Qwen2.5-0.5B's shape, float32, 8 prompts of 100 tokens, 24 more"
        tables.append(Table(title=title, header=header, rows=rows))
    for is_decode, title in ((True, "Decode"), (False, "Prefill")):
        times = [timed for timed in results.variants if timed.is_decode == is_decode]
        if not times:
            continue
        header = [
            "batch × tokens",
            *(f"{name}, ms" for name in times[0].called),
            *(f"{name}, on the device alone" for name in times[0].on_device),
            "device alone: kernel ÷ contiguous",
        ]
        rows = [
            [
                f"{timed.batch} × {timed.length}",
                *timed.called.values(),
                *timed.on_device.values(),
                ratio(timed.on_device["Quire's kernel"], timed.on_device["contiguous"]),
            ]
            for timed in times
        ]
        tables.append(Table(title=f"{title}: milliseconds of one call", header=header, rows=rows))
    error = max((each for timed in results.variants for each in timed.max_error.values()), default=0.0)
    notes = [
        "The same memory and the same queries for each; 16 heads of 128, blocks of 16. On the device alone: "
        "in a CUDA graph, so without what Python and launches cost.",
        f"The largest difference of any of them to attention in fp64 is {error:.1g}.",
        "`python -m quire.loadtest.attention_variants` times them on a CPU.",
    ]
    title = "Paged attention as tutorials arrive at it"
    return real_figure(results, "tutorials", title, tables, [], notes)


def _unique(values: Iterable[Cell]) -> list[Cell]:
    return list(dict.fromkeys(values))
