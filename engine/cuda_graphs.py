"""CUDA graphs of a step: recorded runs of a function, one for each of several sizes of its inputs."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor

from engine.plan import Int32
from engine.staging import Staging, padded_words, split_aligned

Result = TypeVar("Result")
MAX_MIXED_TOKENS = 2048  # from there on computing a step takes longer than launching it


def decode_sizes(max_batch: int) -> list[int]:
    """Batch sizes worth a graph: dense, since a padded row costs a row's work."""
    sizes = {1, 2, 4, *range(8, max_batch, 8), max_batch}
    return sorted(size for size in sizes if size <= max_batch)


def sharing_sizes(max_batch: int) -> list[int]:
    """Batch sizes worth a graph of their own for rows that share prefixes."""
    return sorted({*range(32, max_batch, 32), max_batch} if max_batch >= 32 else ())


def mixed_sizes(max_tokens: int) -> list[int]:
    """Token counts of mixed steps worth a graph: at most a quarter of a step is padding, later an eighth."""
    most = min(max_tokens, MAX_MIXED_TOKENS)
    sizes = {16, *range(32, 256, 32), *range(256, 512, 64), *range(512, 1024, 128), *range(1024, 2049, 256)}
    return sorted(size for size in sizes if size <= most)


class Graphs(Generic[Result]):
    """A function of int32 arrays on the device, recorded once for each size.

    What a run gives is written again by the next run of the same size, in stream order.
    """

    def __init__(
        self, function: Callable[[list[Tensor]], Result], idle: list[list[Int32]], device: torch.device
    ) -> None:
        """`idle`: for each size, in rising order, inputs that have the function do nothing."""
        self._function = function
        self._idle = idle
        self._lengths = [len(inputs[0]) for inputs in idle]
        self._buffers = [
            torch.zeros(padded_words(inputs), dtype=torch.int32, device=device) for inputs in idle
        ]
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._results: list[Result] = []

    def __len__(self) -> int:
        return len(self._idle)

    def capture(self, staging: Staging, on_capture: Callable[[], None]) -> None:
        """Record every size, the largest first, so that the smaller ones reuse its memory."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        for idle, buffer in zip(reversed(self._idle), reversed(self._buffers), strict=True):
            inputs = staging.upload(idle, buffer)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._function(inputs)  # compiles and warms what the capture will record
            graph = torch.cuda.CUDAGraph()
            with _garbage_kept(), torch.cuda.graph(graph, pool=pool, stream=stream):
                result = self._function(split_aligned(buffer, idle))
            self._graphs.insert(0, graph)
            self._results.insert(0, result)
            on_capture()
        torch.cuda.synchronize()

    def run(self, inputs: list[Int32], staging: Staging) -> Result | None:
        """Of the first size into which `inputs` fit, padded; None if they fit none."""
        size = bisect_left(self._lengths, len(inputs[0]))
        while size < len(self._idle) and not _fit(inputs, self._idle[size]):
            size += 1
        if size == len(self._idle):
            return None
        padded = [most.copy() for most in self._idle[size]]
        for given, into in zip(inputs, padded, strict=True):
            into[: len(given)] = given
        staging.upload(padded, self._buffers[size])
        self._graphs[size].replay()
        return self._results[size]


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Collect no garbage: if that frees device memory, it breaks the capture under way."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _fit(inputs: list[Int32], most: list[Int32]) -> bool:
    return all(len(given) <= len(idle) for given, idle in zip(inputs, most, strict=True))
