"""The device as a queue of steps: submitted in order, computed while the host does other things."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.engine.arrays import Int32, Logprobs
from quire.engine.schedule.plan import StepResult
from quire.kernels.pointwise.pinned_copy import copy_pinned


class DeviceLogprobs(NamedTuple):
    """`arrays.Logprobs`, still on the device."""

    chosen: Tensor
    rank: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor

    def numpy(self) -> Logprobs:
        return Logprobs(*(tensor.numpy() for tensor in self))


@dataclass(frozen=True, slots=True)
class DeviceResult:
    """`plan.StepResult`, still on the device: tensors of 32-bit words."""

    tokens: Tensor
    logprob_samples: Int32
    logprobs: DeviceLogprobs | None
    prompt_logprobs: tuple[DeviceLogprobs, ...]
    vectors: Tensor | None = None

    def packed(self) -> Tensor:
        """Return the words of all tensors, one after the other: [N] i32."""
        words = [tensor.reshape(-1).view(torch.int32) for tensor in self._tensors()]
        return words[0] if len(words) == 1 else torch.cat(words)

    def unpacked(self, words: Tensor) -> DeviceResult:
        """Return the same with tensors that are views of `words` [N] i32, which lie as `packed` has them."""
        tensors = self._tensors()
        parts = words.split([tensor.numel() for tensor in tensors])
        tokens, *rest = (
            part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
        )
        vectors = None if self.vectors is None else rest.pop()
        width = len(DeviceLogprobs._fields)
        entries = [DeviceLogprobs(*rest[begin : begin + width]) for begin in range(0, len(rest), width)]
        logprobs = None if self.logprobs is None else entries.pop(0)
        return DeviceResult(tokens, self.logprob_samples, logprobs, tuple(entries), vectors)

    def _tensors(self) -> list[Tensor]:
        entries = self.prompt_logprobs if self.logprobs is None else (self.logprobs, *self.prompt_logprobs)
        vectors = () if self.vectors is None else (self.vectors,)
        return [self.tokens, *chain(*entries), *vectors]

    def numpy(self) -> StepResult:
        return StepResult(
            self.tokens.numpy().astype(np.int32, copy=False),
            self.logprob_samples,
            None if self.logprobs is None else self.logprobs.numpy(),
            tuple(entry.numpy() for entry in self.prompt_logprobs),
            None if self.vectors is None else self.vectors.numpy(),
        )


Transfer = Callable[[], None]


class Gate:
    """Lets steps be computed until one has raised: what those after it build on is not there."""

    def __init__(self) -> None:
        self.open = True

    @contextmanager
    def passed(self) -> Iterator[None]:
        """Enclose a step. Raises MemoryError when the device has not enough memory for it.

        What is raised keeps no tensor of the step alive, for as long as anybody keeps it.
        """
        if not self.open:
            raise RuntimeError("a step before this one has raised")
        self.open = False
        try:
            yield
        except Exception as error:
            _let_go(error)
            if isinstance(error, torch.OutOfMemoryError):
                raise MemoryError(str(error)) from error
            raise
        self.open = True


def _let_go(error: BaseException | None) -> None:
    """Forget the variables of the functions that `error`, and what it was raised for, came through."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


class CudaHandle:
    """A step on a CUDA stream: one event says when its results are in pinned memory, one when all has moved.

    Whoever drops one before they are there lets the device come to an end first (`CudaQueue.settle`).
    """

    def __init__(self, result: DeviceResult, transferred: torch.cuda.Event | None) -> None:
        """Copy the results in the order of the current stream: before its next step overwrites them."""
        words = result.packed()
        pinned = torch.empty(len(words), dtype=torch.int32, pin_memory=True)
        copy_pinned(pinned, words)
        self._result = result.unpacked(pinned)
        self._arrived = torch.cuda.Event()
        self._arrived.record()
        self.transferred = transferred

    def wait(self) -> StepResult:
        self._arrived.synchronize()
        return self._result.numpy()

    def arrived(self, seconds: float) -> bool:
        """Return whether the results are there, once they are or so many seconds have passed."""
        end = time.perf_counter() + seconds
        while not self._arrived.query():
            if time.perf_counter() > end:
                return False
        return True

    def has_moved(self, *, wait: bool = False) -> bool:
        if self.transferred is not None and wait:
            self.transferred.synchronize()
        return self.transferred is None or bool(self.transferred.query())


class CudaQueue:
    """Steps are enqueued on one stream of the device, transfers between the tiers on another.

    A transfer starts when all earlier steps are done and runs beside its own step and the next ones: none
    waits for it, since the scheduler gives its blocks to nobody before it is done.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))  # which writes what steps begin with
        self._copy_stream = torch.cuda.Stream(device)
        self._gate = Gate()

    def submit(self, step: Callable[[], DeviceResult], transfer: Transfer | None) -> CudaHandle:
        with self._gate.passed():
            return self._submit(step, transfer)

    def settle(self) -> None:
        """Wait until nothing is under way, and compute steps again. Raises if the device cannot any more."""
        torch.cuda.synchronize(self.stream.device)
        torch.cuda.empty_cache()
        self._gate.open = True

    def _submit(self, step: Callable[[], DeviceResult], transfer: Transfer | None) -> CudaHandle:
        transferred = None
        if transfer is not None:
            self._copy_stream.wait_stream(self.stream)
            with torch.cuda.stream(self._copy_stream):
                transfer()
                transferred = torch.cuda.Event()
                transferred.record()
        with torch.cuda.stream(self.stream):
            return CudaHandle(step(), transferred)

    def order_after(self, handle: CudaHandle) -> None:
        """Have later steps begin once the blocks of this one have moved."""
        if handle.transferred is not None:
            self.stream.wait_event(handle.transferred)

    def run(self, work: Callable[[], object]) -> None:
        """Run what is no step where steps run, and wait until the device has done it."""
        with torch.cuda.stream(self.stream):
            work()
        self.stream.synchronize()


class ThreadHandle:
    """A step on the worker thread."""

    def __init__(self, future: Future[DeviceResult]) -> None:
        self._future = future

    def wait(self) -> StepResult:
        return self._future.result().numpy()

    def arrived(self, seconds: float) -> bool:
        """Return whether the results are there, once they are or so many seconds have passed."""
        return bool(wait([self._future], seconds).done)

    def has_moved(self, *, wait: bool = False) -> bool:
        return wait or self._future.done()


class ThreadQueue:
    """Steps run on one worker thread: torch computes there without the interpreter lock."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="quire-step")
        self._gate = Gate()

    def submit(self, step: Callable[[], DeviceResult], transfer: Transfer | None) -> ThreadHandle:
        def both() -> DeviceResult:
            with self._gate.passed():
                if transfer is not None:
                    transfer()
                return step()

        return ThreadHandle(self._worker.submit(both))

    def settle(self) -> None:
        """Wait until nothing is under way, and compute steps again."""
        self._worker.submit(lambda: None).result()
        self._gate.open = True

    def run(self, work: Callable[[], object]) -> None:
        """Run what is no step where steps run, and wait until it is done."""
        self._worker.submit(work).result()
