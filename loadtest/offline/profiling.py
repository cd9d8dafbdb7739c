"""`quire bench --profile FOLDER`: where a workload's steps spend the device's time, and a trace of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from quire.engine.core import EngineCore
from quire.engine.messages import Request
from quire.loadtest.offline.bench import Traced

SHOWN = 16  # kernels in the table; the rest are summed up
PAUSE = 10.0  # µs; kernels of one graph follow each other within 3 on an H100, so longer ones are the host's


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel, or on a CPU an operator, over all traced steps."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Traced steps. The device ran something for `busy_seconds` and paused longer for `waiting_seconds`.

    Tracing slows the host, so that it waits less untraced.
    """

    workload: str
    steps: int
    seconds: float
    busy_seconds: float
    waiting_seconds: float | None  # None on a CPU, which is the host
    kernels: list[KernelTime]
    trace: Path

    def summary(self) -> Traced:
        """Return what goes into the workload's result."""
        return Traced(
            steps=self.steps,
            step_ms=round(1e3 * self.seconds / self.steps, 3),
            busy_share=round(self.busy_seconds / self.seconds, 3),
            waiting_us=None
            if self.waiting_seconds is None
            else round(1e6 * self.waiting_seconds / self.steps, 1),
        )


def profile_steps(
    core: EngineCore, workload: str, requests: list[Request], skip: int, steps: int, folder: Path
) -> Profile:
    """Run `requests`, which are queued, for `skip` steps, trace the next `steps` and drop the rest.

    Writes folder/workload.json, which Perfetto and chrome://tracing open.
    """
    while core.has_work and skip:
        core.step()
        skip -= 1
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    traced = 0
    # On a CPU the steps run on a thread of their own.
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=everywhere) as profiler:
        while core.has_work and traced < steps:
            with record_function(f"step {traced}"):
                core.step()
            traced += 1
        if cuda:
            torch.cuda.synchronize()
    for request in requests:
        core.abort(request.id)
    while core.has_work:
        core.step()
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / f"{workload}.json"
    profiler.export_chrome_trace(str(trace))

    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    totals: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    intervals: list[tuple[float, float]] = []
    begin, end = float("inf"), 0.0
    for event in profiler.events():
        if event.name.startswith("step "):
            begin, end = min(begin, event.time_range.start), max(end, event.time_range.end)
        elif event.device_type == wanted:
            calls, total = totals[event.name]
            totals[event.name] = (
                calls + 1,
                total + (event.self_device_time_total if cuda else event.self_cpu_time_total),
            )
            intervals.append((event.time_range.start, event.time_range.end))
    kernels = [KernelTime(name, calls, 1e-6 * total) for name, (calls, total) in totals.items()]
    kernels.sort(key=lambda kernel: -kernel.seconds)
    busy, waiting = busy_and_waiting(intervals, PAUSE)
    waited = 1e-6 * waiting if cuda else None
    return Profile(workload, traced, 1e-6 * (end - begin), 1e-6 * busy, waited, kernels, trace)


def busy_and_waiting(intervals: list[tuple[float, float]], pause: float) -> tuple[float, float]:
    """Return the length of the union of (begin, end) intervals, and of its gaps longer than `pause`."""
    busy = waiting = 0.0
    reached: float | None = None
    for begin, end in sorted(intervals):
        if reached is None or begin >= reached:
            gap = 0.0 if reached is None else begin - reached
            waiting += gap if gap > pause else 0.0
            busy, reached = busy + end - begin, end
        elif end > reached:
            busy, reached = busy + end - reached, end
    return busy, waiting


def show_profile(result: Profile) -> None:
    """Print the kernels that take most of a step."""
    steps = max(result.steps, 1)
    waiting = ""
    if result.waiting_seconds is not None:
        waiting = f", waiting for the host {1e6 * result.waiting_seconds / steps:.0f} µs"
    table = Table(
        title=f"{result.workload}: {result.steps} steps of {1e3 * result.seconds / steps:.2f} ms, "
        f"the device busy {result.busy_seconds / result.seconds:.0%} of it{waiting}",
        caption=f"trace: {result.trace}",
    )
    for column in ("kernel", "calls a step", "µs a step", "share"):
        table.add_column(column, justify="left" if column == "kernel" else "right", no_wrap=True)
    rest = result.kernels[SHOWN:]
    others = KernelTime(
        f"{len(rest)} others", sum(one.calls for one in rest), sum(one.seconds for one in rest)
    )
    for kernel in [*result.kernels[:SHOWN], *([others] if rest else [])]:
        table.add_row(
            kernel.name[:90],
            f"{kernel.calls / steps:.1f}",
            f"{1e6 * kernel.seconds / steps:.1f}",
            f"{kernel.seconds / result.seconds:.1%}",
        )
    console = Console()
    Console(width=max(console.width, 132)).print(table)
