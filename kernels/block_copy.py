"""Copies whole KV-cache blocks: what a copy-on-write asks for."""

from __future__ import annotations

from torch import Tensor


def copy_blocks_reference(cache: Tensor, pairs: Tensor) -> None:
    """cache[dst] = cache[src] for each (src, dst) of pairs [C, 2]; no dst is another pair's src or dst."""
    source, destination = pairs.long().unbind(1)
    cache[destination] = cache[source]
