"""Compiles kernels side by side, before what they are needed for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode, FutureKernel
from triton.runtime import JITFunction

from kernels.token_places import token_places_kernel


class _Compilers(ThreadPoolExecutor):
    """As many threads as there are processors."""

    def __init__(self) -> None:
        super().__init__(len(os.sched_getaffinity(0)))

    def submit(self, compiled: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """A kernel, loaded, and with what launches it: Triton 3.6 has a C compiler make that of each."""

        def ready() -> Any:
            kernel = compiled(*arguments, **options)
            kernel.run  # noqa: B018, to read it makes both
            return kernel

        return super().submit(ready)


@contextmanager
def compiling_beside(on_progress: Callable[[int, int], None]) -> Iterator[None]:
    """Kernels that are asked for within are compiled and loaded by as many threads as there are processors.

    Who launches one waits for that one. All are there at the end, where `on_progress` gets how many of how
    many. Raises what a compiler raised.
    """
    with _Compilers() as pool, AsyncCompileMode(pool) as mode:
        yield
        for done, _ in enumerate(as_completed(mode.raw_futures), 1):
            on_progress(done, len(mode.raw_futures))


@contextmanager
def only_compiled() -> Iterator[None]:
    """Kernels launched within do not run, and what they were to write is left as it was.

    But for `token_places`: its results are indices to torch's own kernels, which check them. Triton's
    interpreter has nothing to compile, and runs them all.
    """
    run = JITFunction.run

    def compile_alone(kernel: JITFunction[Any], *arguments: Any, **options: Any) -> Any:
        found = run(kernel, *arguments, **options | {"warmup": kernel is not token_places_kernel})
        if isinstance(found, FutureKernel) and found.future.done():
            found.result()  # now Triton finds it at once
        return found

    JITFunction.run = compile_alone
    try:
        yield
    finally:
        JITFunction.run = run
