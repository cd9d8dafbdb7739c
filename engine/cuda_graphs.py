"""CUDA graphs of the decode step: forward, logits and sampling in one replay."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.plan import Int32

DecodeStep = Callable[[Tensor], tuple[Tensor, Tensor]]
"""[2, B] int32 of device rows and context lengths -> (logits [B, V], tokens [B]), all on the device."""


def graph_sizes(max_batch: int) -> list[int]:
    """Batch sizes worth a graph: dense, since a padded row costs a row's work."""
    sizes = {1, 2, 4, *range(8, max_batch, 8), max_batch}
    return sorted(size for size in sizes if size <= max_batch)


class DecodeGraphs:
    """One graph for each batch size; a batch runs in the next larger one, padded with idle rows."""

    def __init__(self, step: DecodeStep, max_batch: int, padding_row: int, device: torch.device) -> None:
        self._step = step
        self._sizes = graph_sizes(max_batch)
        self._padding = np.array([[padding_row], [0]], np.int32)
        self._inputs = {
            size: torch.tensor(self._padding, device=device).repeat(1, size) for size in self._sizes
        }
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}

    def capture(self, on_progress: Callable[[int, int], None]) -> None:
        """Capture every size, largest first, so that the smaller ones reuse its memory."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        for done, size in enumerate(reversed(self._sizes)):
            on_progress(done, len(self._sizes))
            inputs = self._inputs[size]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(inputs)  # compiles and warms what the capture will record
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self._outputs[size] = self._step(inputs)
            self._graphs[size] = graph
        torch.cuda.synchronize()
        on_progress(len(self._sizes), len(self._sizes))

    def pad(self, inputs: Int32) -> Int32:
        """Host inputs [2, B] widened to the batch size of the graph that will run them."""
        batch = inputs.shape[1]
        size = self._sizes[bisect_left(self._sizes, batch)]
        return np.concatenate([inputs, np.repeat(self._padding, size - batch, axis=1)], axis=1)

    def run(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, tokens) of padded inputs [2, size]; the same memory is written again by later runs."""
        size = inputs.shape[1]
        self._inputs[size].copy_(inputs)
        self._graphs[size].replay()
        return self._outputs[size]
