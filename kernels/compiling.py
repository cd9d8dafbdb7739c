"""Compiles the kernels of some work side by side, before it is done."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from triton import AsyncCompileMode
from triton.runtime import JITFunction


@contextmanager
def only_compiled() -> Iterator[None]:
    """Kernels launched within do not run, but are compiled, as many at a time as there are processors.

    All are at its end. Triton's interpreter has nothing to compile, and runs them.
    """
    launch = JITFunction.run

    def compile_alone(kernel: JITFunction[Any], *arguments: Any, **options: Any) -> Any:
        return launch(kernel, *arguments, **options | {"warmup": True})

    threads = len(os.sched_getaffinity(0))
    with (
        ThreadPoolExecutor(threads) as pool,
        patch.object(JITFunction, "run", compile_alone),
        AsyncCompileMode(pool),
    ):
        yield
