"""A bar that counts prompts while they are answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Tell = Callable[[int], object]  # how many more have been answered


@contextmanager
def prompt_bar(total: int, use_tqdm: bool | Callable[..., Any]) -> Iterator[Tell | None]:
    """Yield what to tell, None for nobody. Without a terminal there is no bar, unless tqdm's kin is given."""
    if not use_tqdm or not total:
        yield None
        return
    if callable(use_tqdm):
        bar = use_tqdm(total=total, desc="prompts")
    else:
        from tqdm.auto import tqdm

        bar = tqdm(total=total, desc="prompts", unit="prompt", disable=None)
    try:
        yield bar.update
    finally:
        bar.close()
