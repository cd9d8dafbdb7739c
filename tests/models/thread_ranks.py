"""Ranks that are threads of one process, each with a model of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from quire.kernels.pointwise.norm import add_rms_norm_reference

Result = TypeVar("Result")


@dataclass
class Meeting:
    """Where threads that are ranks meet."""

    size: int
    terms: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.terms = [torch.empty(0)] * self.size
        self.barrier = threading.Barrier(self.size, timeout=60)


class Rank:
    """A thread that is one of the ranks."""

    buffers = None

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self.size = meeting.size
        self._meeting = meeting

    def all_gather(self, x: Tensor) -> Tensor:
        self._meeting.terms[self.rank] = x
        self._meeting.barrier.wait()
        gathered = torch.stack(self._meeting.terms)
        self._meeting.barrier.wait()
        return gathered

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_gather(x).sum(0)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm_reference(self.all_reduce(x), residual, weight, eps)


def on_all(meeting: Meeting, work: Callable[[int], Result]) -> list[Result]:
    """Run the work of each rank at the same time. Raises what the first that fails raises."""

    def run(rank: int) -> Result:
        try:
            return work(rank)
        except BaseException:
            meeting.barrier.abort()  # nobody waits for it
            raise

    with ThreadPoolExecutor(meeting.size) as pool:
        running = [pool.submit(run, rank) for rank in range(meeting.size)]
        errors = [error for each in running if (error := each.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [each.result() for each in running]
