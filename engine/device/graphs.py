"""A step's functions at several sizes of their inputs, each recorded in a CUDA graph when there is time."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.engine.arrays import Int32
from quire.engine.device.staging import PaddedInputs, Staging

logger = logging.getLogger("quire.engine")

Results = tuple[Tensor, ...]
Run = Callable[[], Results]
Record = Callable[[Run], Run]  # what it gives does the same again, and quicker
# Padding costs what tokens do, so there are many sizes; but those are left out for which cuBLAS takes longer
# than for the next one, on an H100 up to half as long again: a layer of Llama-3.1-8B's products takes 434 µs
# of 448 tokens and 296 of 496.
TUNED_SIZES = (
    *(16, 32, 64, 96, 128, 160, 192, 224, 256, 272, 304, 336, 384, 432, 496, 544, 592, 640, 688, 720, 768),
    *(896, 960, 1024, 1152, 1280, 1408, 1536, 1792, 1920, 2048),
)
MOST_SCORES = 1 << 23  # an H100 finds the best of them in about 0.1 ms
LAUNCH_SECONDS = 1.1e-3  # that a slow host takes to launch a layer; a quick one takes 0.3 ms
FLOPS_PER_SECOND = 600e12  # at which an H100 computes it


def decode_sizes(max_batch: int) -> list[int]:
    """Return the batch sizes worth a graph; cuBLAS often takes longer between two than for the larger one."""
    # A graph of 40 divides the few rows that do not run at once with the others further than one of 48 does
    # (`quire.kernels.attention.splits.plan_division`): 34 of Qwen3-0.6B decode 4 % faster on an H100.
    sizes = {1, 2, 4, 8, *range(16, max_batch, 16), 40, max_batch}
    return sorted(size for size in sizes if size <= max_batch)


def sharing_sizes(max_batch: int) -> list[int]:
    """Return the batch sizes worth a graph of their own for rows that share prefixes."""
    return sorted({*range(32, max_batch, 32), max_batch} if max_batch >= 32 else ())


def choosing_sizes(max_tokens: int, max_model_len: int) -> list[int]:
    """Return the token counts worth a graph of mixed steps that choose what they attend to.

    They are few: what pads a step chooses nothing. A graph looks for the best of as many scores as a row may
    have, of all its tokens: beyond some, in longer than the launches take that it saves.
    """
    most = min(max_tokens, MOST_SCORES // max_model_len)
    return [size for size in (16, 32, 64, 128, 256, 512) if size <= most]


def mixed_sizes(max_tokens: int, layer_weights: int) -> list[int]:
    """Return the token counts of mixed steps worth a graph, a full step's too if it is worth one.

    A step is, if its layers, of `layer_weights` each, may take longer to launch than to compute. Past the
    tuned sizes they are multiples of 264, which leave few multiprocessors of an H100 idle at the end.
    """
    launch_bound = int(LAUNCH_SECONDS * FLOPS_PER_SECOND / (2 * layer_weights))
    most = min(max_tokens, max(launch_bound, TUNED_SIZES[-1]))
    sizes = (*TUNED_SIZES, *range(2112, 4224, 264), *range(4224, 8448, 528), *range(8448, most, 2112))
    return [*(size for size in sizes if size < most), most]


class Size:
    """A function with inputs of one size, run as it is until it is recorded."""

    def __init__(
        self, function: Callable[[list[Tensor]], Results], idle: Sequence[Int32], device: torch.device
    ) -> None:
        self.inputs = inputs = PaddedInputs(idle, device)
        self.misses = 0  # runs before it was recorded
        # Without `self`: a cycle would be there, and hold a model, until garbage is collected.
        self._run: Run = lambda: function(inputs.split())
        self._recorded = False

    def warm_up(self) -> None:
        """Run idly, so that what it needs is compiled and loaded."""
        self._run()

    def run(self) -> Results:
        """Run on what has been uploaded into `inputs`."""
        self.misses += not self._recorded
        return self._run()

    def record(self, record: Record) -> None:
        self._run = record(self._run)
        self._recorded = True


class Graphs:
    """A function of int32 arrays on the device, at several sizes of them.

    What a run gives may be written again by the next run of these or other Graphs, in stream order.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[list[Tensor]], Results],
        idle: Sequence[Sequence[Int32]],
        device: torch.device,
    ) -> None:
        """`idle`: for each size, in rising order, inputs that have the function do nothing."""
        self.name = name
        self.sizes = [Size(function, inputs, device) for inputs in idle]
        self._lengths = [size.inputs.lengths[0] for size in self.sizes]

    def load(self, inputs: Sequence[Int32], staging: Staging) -> Size | None:
        """Upload `inputs`, padded, to the first size that holds them; return it, or None if none does."""
        for size in self.sizes[bisect_left(self._lengths, len(inputs[0])) :]:
            if size.inputs.hold(inputs):
                staging.upload_into(size.inputs, inputs)
                return size
        return None


class Captures:
    """Records the sizes that are left, one at a time.

    Of each Graphs the largest is first, so that the others find memory that is enough for them, and then what
    steps have missed most.
    """

    def __init__(self, families: list[Graphs], record: Record) -> None:
        self._left = [(graphs, size) for graphs in families for size in graphs.sizes]
        self._largest = [graphs.sizes[-1] for graphs in families if graphs.sizes]
        self._record = record
        self._done = 0
        self._seconds = 0.0

    def __len__(self) -> int:
        return len(self._left)

    def next(self, *, missed: bool) -> None:
        """Record one size; with `missed`, only if steps have missed any.

        After one that fails, for want of memory for instance, the rest are not tried and run as they are.
        """
        if not self._left or (missed and not any(size.misses for _, size in self._left)):
            return
        chosen = max(self._left, key=lambda entry: self._urgency(entry[1]))
        graphs, size = chosen
        begin = time.perf_counter()
        try:
            size.record(self._record)
        except RuntimeError as failure:  # as torch and CUDA raise them
            logger.warning(
                "no CUDA graph of a %s step of %d; %d sizes run without one, more slowly: %s",
                graphs.name,
                size.inputs.lengths[0],
                len(self._left),
                failure,
            )
            self._left.clear()
            return
        self._left.remove(chosen)
        self._done += 1
        self._seconds += time.perf_counter() - begin
        if not self._left:
            logger.info("graphs ready: %d captured in %.1f s", self._done, self._seconds)

    def _urgency(self, size: Size) -> tuple[bool, int, int]:
        return size in self._largest, size.misses, len(size.inputs.words)
