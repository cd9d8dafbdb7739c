"""Time what waits for each other: `python -m quire.loadtest.gpu_dependences [--json FILE]`.

Steps that each need all that the one before wrote, a few kilobytes, and else do next to nothing: as kernels
of one CUDA graph, each launched ahead of the end of the one before, and in one kernel whose programs wait for
each other between steps. It is the least that a layer's kernels take for one token beside reading their
weights, as they are and if a layer were one kernel. Needs one CUDA device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch
from quire.loadtest.command import command_parser, parse_for_cuda, write_json
from quire.loadtest.device_time import capture, replay_seconds

WIDTHS = (1024, 2048, 4096)  # numbers that pass from step to step
PROGRAMS = (128, 256, 512)  # of a kernel of its own
TOGETHER = 128  # programs that wait for each other, each on a multiprocessor
WARPS = (2, 4, 8)
FEW, MANY = 100, 400  # steps: what more of them take is free of what a graph or a launch takes
ROUNDS, REPLAYS = 5, 20


@dataclass(frozen=True, slots=True)
class StepTime:
    """Microseconds of one step. `by` kernels of their own, or a barrier in one kernel."""

    by: str
    width: int
    programs: int
    warps: int
    us: float


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--json", type=Path, help="where one JSON object goes")
    arguments = parse_for_cuda(parser)
    device = torch.device("cuda")
    found = []
    for width in WIDTHS:
        pair = torch.randn(2, width, device=device).bfloat16()
        for warps in WARPS:
            for programs in PROGRAMS:
                run = partial(by_kernels, pair, programs=programs, warps=warps)
                found.append(_timed("kernels", run, width, programs, warps))
            run = partial(by_barriers, pair, programs=TOGETHER, warps=warps)
            found.append(_timed("barriers", run, width, TOGETHER, warps))
    write_json(arguments.json, torch.cuda.get_device_name(), {"steps": [asdict(each) for each in found]})
    return 0


def _timed(by: str, run: Callable[[int], object], width: int, programs: int, warps: int) -> StepTime:
    few, many = (min(replay_seconds(capture([partial(run, n)]), ROUNDS, REPLAYS)) for n in (FEW, MANY))
    us = round(1e6 * (many - few) / (MANY - FEW), 3)
    print(
        f"{width:5} numbers, {programs:4} programs of {warps} warps, by {by}: {us:.2f} µs a step", flush=True
    )
    return StepTime(by, width, programs, warps, us)


def by_kernels(pair: Tensor, steps: int, *, programs: int, warps: int) -> None:
    """Take steps from pair[0] to pair[1] and back [2, N], each by a kernel."""
    width = pair.shape[1]
    for step in range(steps):
        _step_kernel[(programs,)](
            pair[step % 2], pair[(step + 1) % 2], width, width // programs,
            num_warps=warps, **dependent_launch(pair.device),
        )  # fmt: skip


def by_barriers(pair: Tensor, steps: int, *, programs: int, warps: int) -> None:
    """Take the same steps in one kernel, all of whose programs run at once."""
    width = pair.shape[1]
    arrived = torch.zeros(1, dtype=torch.int32, device=pair.device)
    _steps_kernel[(programs,)](
        pair, arrived, steps, width, width // programs, programs,
        num_warps=warps, launch_cooperative_grid=True,
    )  # fmt: skip


def reference(state: Tensor, steps: int) -> Tensor:
    """Return what either leaves after so many steps from a state [N]."""
    for _ in range(steps):
        wide = state.float()
        state = (wide / (1 + (wide * wide).mean()) + 0.5).to(state.dtype)
    return state


@triton.jit
def _step(here: tl.tensor, there: tl.tensor, WIDTH: tl.constexpr, ROWS: tl.constexpr) -> None:
    """Compute a program's ROWS numbers of the next state from all of this one."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    state = tl.load(here + tl.arange(0, WIDTH), cache_modifier=".cg").to(tl.float32)
    own = tl.load(here + row, cache_modifier=".cg").to(tl.float32)
    scale = 1.0 + tl.sum(state * state) / WIDTH
    tl.store(there + row, (own / scale + 0.5).to(there.dtype.element_ty))


@triton.jit
def _step_kernel(
    here: tl.tensor, there: tl.tensor, WIDTH: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr
) -> None:
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    _step(here, there, WIDTH, ROWS)


@triton.jit
def _steps_kernel(
    pair: tl.tensor,
    arrived: tl.tensor,
    steps: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
) -> None:
    for step in range(steps):
        _step(pair + step % 2 * WIDTH, pair + (step + 1) % 2 * WIDTH, WIDTH, ROWS)
        tl.debug_barrier()  # all warps have written
        seen = tl.atomic_add(arrived, 1, sem="acq_rel") + 1
        while seen < (step + 1) * PROGRAMS:
            seen = tl.atomic_add(arrived, 0, sem="acquire")
        tl.debug_barrier()


if __name__ == "__main__":
    sys.exit(main())
