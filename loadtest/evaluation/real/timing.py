"""How long work takes on a device, seen from the host and on the device alone."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

ROUNDS = 9


def host_seconds(work: Callable[[], object], device: torch.device, rounds: int = ROUNDS) -> float:
    """Median time from the call until the device is done, launches included, after a warm-up."""
    times = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def device_seconds(calls: list[Callable[[], object]], device: torch.device, rounds: int = ROUNDS) -> float:
    """Median time of one of `calls`, all in a row: in a CUDA graph, so without the time to launch them.

    Calls that read memory of their own, together more than the L2 cache, find nothing in it, as layers do.
    """

    def all_calls() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        return host_seconds(all_calls, device, rounds) / len(calls)
    all_calls()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    gc.disable()  # garbage that frees device memory breaks a capture
    try:
        with torch.cuda.graph(graph):
            all_calls()
    finally:
        gc.enable()
    return host_seconds(graph.replay, device, rounds) / len(calls)
