"""Time work on a device, as seen from the host and on the device alone."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence

import torch

ROUNDS = 9


def host_seconds(work: Callable[[], object], device: torch.device, rounds: int = ROUNDS) -> float:
    """Return the median time from the call until the device is done, with launches, after a warm-up."""
    times = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def device_seconds(
    calls: Sequence[Callable[[], object]], device: torch.device, rounds: int = ROUNDS
) -> float:
    """Return the median time of one of `calls`, all in a row, without the time to launch them (CUDA graph).

    Calls that read memory of their own, together more than the L2 cache, find nothing in it, as layers do.
    """
    if device.type == "cuda":
        return host_seconds(capture(calls).replay, device, rounds) / len(calls)

    def all_calls() -> None:
        for call in calls:
            call()

    return host_seconds(all_calls, device, rounds) / len(calls)


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Run `calls` once, to warm them up, and capture them all in one CUDA graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    gc.disable()  # garbage that frees device memory breaks a capture
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    finally:
        gc.enable()
    return graph


def replay_seconds(graph: torch.cuda.CUDAGraph, rounds: int, replays: int = 1) -> list[float]:
    """Return what one replay takes on the device, in each of some rounds of `replays`, after a warm-up."""
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    seconds = []
    for _ in range(rounds):
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / replays)
    return seconds
