"""Compiles kernels side by side, before what they are needed for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import AsyncCompileMode, FutureKernel
from triton.runtime import JITFunction

from quire.kernels.attention.token_places import token_places_kernel
from quire.kernels.pointwise.pinned_copy import copy_kernel

MOST_THREADS = 16  # each compiler takes memory, and a container may have fewer processors than it sees


class _Compilers(ThreadPoolExecutor):
    """Threads that compile, for the current device where there is one."""

    def __init__(self) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        super().__init__(
            min(len(os.sched_getaffinity(0)), MOST_THREADS),
            initializer=None if device is None else lambda: torch.cuda.set_device(device),
        )

    def submit(self, compiled: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """Compile, and load at once: Triton 3.6 then has a C compiler make what launches the kernel."""

        def ready() -> Any:
            kernel = compiled(*arguments, **options)
            kernel.run  # noqa: B018, to read it loads
            return kernel

        return super().submit(ready)


@contextmanager
def compiling_beside(on_progress: Callable[[int, int], None]) -> Iterator[None]:
    """Kernels that are asked for within are compiled and loaded by threads beside.

    Who launches one waits for that one. All are there at the end, where `on_progress` gets how many of how
    many. Raises what a compiler raised, unless something else has been.
    """
    with _Compilers() as pool, AsyncCompileMode(pool, ignore_errors=True) as mode:
        yield
        for done, future in enumerate(as_completed(mode.raw_futures), 1):
            future.result()
            on_progress(done, len(mode.raw_futures))


@contextmanager
def only_compiled() -> Iterator[None]:
    """Kernels that this thread launches within do not run, and what they were to write is left as it was.

    But for `copy_pinned` and `token_places`: among what they write are indices to torch's own kernels, which
    check them. Triton's interpreter has nothing to compile, and runs them all.
    """
    run, thread = JITFunction.run, threading.get_ident()

    def compile_alone(kernel: JITFunction[Any], *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != thread or kernel in (copy_kernel, token_places_kernel):
            return run(kernel, *arguments, **options)
        found = run(kernel, *arguments, **options | {"warmup": True})
        if isinstance(found, FutureKernel) and found.future.done():
            found.result()  # now Triton finds it at once
        return found

    JITFunction.run = compile_alone
    try:
        yield
    finally:
        JITFunction.run = run


class ZerosForNothing(TorchDispatchMode):
    """Has zeros in what is allocated: where kernels do not write, torch's own find what may be an index."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if str(func.name()).startswith(("aten::empty", "aten::new_empty")) and isinstance(found, Tensor):
            found.zero_()
        return found
