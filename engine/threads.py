"""Threads that may recurse deeper, or less deep, than those of the process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def one_thread(name: str, stack_bytes: int) -> ThreadPoolExecutor:
    """Return an executor of one thread with such a stack, whatever the process's limit is."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    before = threading.stack_size(stack_bytes)
    try:
        executor.submit(int).result()  # which starts it
    finally:
        threading.stack_size(before)
    return executor
