"""Records in CUDA graphs what functions do on a stream."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Recorder:
    """Records runs of functions on one stream, while work launched earlier goes on there.

    All graphs share the memory that their runs take, results included: one stream runs one after the other,
    and what a run gives has to be used before the next.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
        """Capture `function`, whose kernels must all be loaded, in a CUDA graph; return its replay.

        RuntimeError: it cannot be captured, or its memory is not there; the stream is as it was.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # torch.cuda.graph would first wait for the device and give back all memory kept for steps.
            with torch.inference_mode(), _garbage_kept(), torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    results = tuple(result.contiguous() for result in function())
                finally:
                    graph.capture_end()
        except BaseException:
            _keep_for_ever(graph)
            raise
        lent = tuple(_lent(result) for result in results)

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return lent

        return replay


class _Memory:
    """Bytes on the device, in the form in which torch takes them from others."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _lent(tensor: Tensor) -> Tensor:
    """Return the same elements without a claim to their memory: it is free for the next graph."""
    if tensor.nbytes == 0:
        return tensor
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)


def _keep_for_ever(graph: torch.cuda.CUDAGraph) -> None:
    """Never destroy a graph that could not be recorded: torch's destructor would end the process for it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))


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
