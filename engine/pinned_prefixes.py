"""Prefixes that an operator wants kept: computed at start, never evicted, found by every tenant."""

from __future__ import annotations

from quire.engine.core import EngineCore
from quire.engine.messages import Request, SamplingParams

PINNED_SHARE = 0.5  # of the device's blocks, at most; the others are for requests


def pin_prefixes(core: EngineCore, prefixes: list[list[int]]) -> int:
    """Pin the full blocks of `prefixes` in an engine without requests; how many blocks that makes.

    Raises ValueError, with the numbers, for a prefix that cannot be pinned or when they are too many blocks.
    """
    blocks = core.scheduler.blocks
    size, num_blocks = blocks.block_size, blocks.pool.num_blocks
    for number, tokens in enumerate(prefixes, 1):
        if len(tokens) < size:
            raise ValueError(
                f"prefix {number} of --pin-prefix has {len(tokens)} tokens; whole blocks are pinned, so it "
                f"needs at least {size} (--block-size)"
            )
    wanted = {prefix for tokens in prefixes for prefix in blocks.open_to_all(tokens)}
    budget = int(num_blocks * PINNED_SHARE)
    if len(wanted) > budget:
        raise ValueError(
            f"--pin-prefix needs {len(wanted)} KV blocks of {size} tokens, but at most {budget} of the "
            f"{num_blocks} there are can be pinned ({PINNED_SHARE:.0%}): pin less, or give the KV cache "
            "more memory"
        )
    for number, tokens in enumerate(prefixes, 1):
        whole = tokens[: len(tokens) // size * size]
        core.add(Request(-1, whole, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)))
        while core.has_work:
            for output in core.step():
                if output.error is not None:
                    raise ValueError(f"prefix {number} of --pin-prefix cannot be computed: {output.error}")
        core.scheduler.queue.pin(whole)
    return blocks.pool.num_pinned
