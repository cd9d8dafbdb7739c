"""The device as a queue of steps: submitted in order, computed while the host does other things."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.plan import Int32, Logprobs, StepResult


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """As plan.Logprobs, still on the device."""

    chosen: Tensor
    rank: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor

    def map(self, move: Callable[[Tensor], Tensor]) -> DeviceLogprobs:
        return DeviceLogprobs(
            move(self.chosen), move(self.rank), move(self.top_tokens), move(self.top_logprobs)
        )

    def numpy(self) -> Logprobs:
        return Logprobs(
            self.chosen.numpy(), self.rank.numpy(), self.top_tokens.numpy(), self.top_logprobs.numpy()
        )


@dataclass(frozen=True, slots=True)
class DeviceResult:
    """As plan.StepResult, still on the device."""

    tokens: Tensor
    logprob_samples: Int32
    logprobs: DeviceLogprobs | None
    prompt_logprobs: tuple[DeviceLogprobs, ...]

    def map(self, move: Callable[[Tensor], Tensor]) -> DeviceResult:
        return DeviceResult(
            move(self.tokens),
            self.logprob_samples,
            None if self.logprobs is None else self.logprobs.map(move),
            tuple(entry.map(move) for entry in self.prompt_logprobs),
        )

    def numpy(self) -> StepResult:
        return StepResult(
            self.tokens.numpy().astype(np.int32, copy=False),
            self.logprob_samples,
            None if self.logprobs is None else self.logprobs.numpy(),
            tuple(entry.numpy() for entry in self.prompt_logprobs),
        )


class CudaFlight:
    """Results on their way to pinned memory; the event says when they are there."""

    def __init__(self, result: DeviceResult) -> None:
        self._result = result.map(_to_pinned)
        self._done = torch.cuda.Event()
        self._done.record()

    def wait(self) -> StepResult:
        self._done.synchronize()
        return self._result.numpy()


def _to_pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class CudaQueue:
    """Steps are enqueued on one stream of the device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, step: Callable[[], DeviceResult]) -> CudaFlight:
        with torch.cuda.stream(self._stream):
            return CudaFlight(step())


class ThreadFlight:
    def __init__(self, future: Future[DeviceResult]) -> None:
        self._future = future

    def wait(self) -> StepResult:
        return self._future.result().numpy()


class ThreadQueue:
    """Steps run on one worker thread: torch computes there without the interpreter lock."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="quire-step")

    def submit(self, step: Callable[[], DeviceResult]) -> ThreadFlight:
        return ThreadFlight(self._worker.submit(step))
