"""Prefixes that an operator wants kept: computed at start, never evicted, found by every tenant."""

from __future__ import annotations

from itertools import chain

from quire.engine.core import EngineCore
from quire.engine.errors import FieldError
from quire.engine.messages import PoolingParams, Request, SamplingParams
from quire.engine.schedule.lifecycle import pin

PINNED_SHARE = 0.5  # of the device's blocks, at most; the others are for requests


def pin_prefixes(core: EngineCore, prefixes: list[list[int]]) -> int:
    """Pin the blocks of `prefixes` in an engine without requests; return how many blocks that makes.

    The last block of each is kept partly filled; who goes on from it gets a copy (section 4.4). With window
    groups only full blocks are kept, and of windows what is read behind the last of them.

    Raises ValueError, with the numbers, for a prefix that cannot be pinned or when they are too many blocks.
    """
    blocks = core.scheduler.blocks
    size, num_blocks = blocks.block_size, blocks.pool.num_blocks
    for number, tokens in enumerate(prefixes, 1):
        if not tokens:
            raise ValueError(f"prefix {number} of --pin-prefix has no tokens: there is nothing to pin")
    runs = [blocks.contents.open_to_all(tokens) for tokens in prefixes]
    wanted = blocks.tails.num_wanted
    if blocks.full is not None:
        wanted += len(set(chain.from_iterable(runs)))
    if blocks.windows is not None:  # and what is read where each of them ends
        wanted += sum(blocks.windows.blocks_behind(len(run)) for run in runs)
    budget = int(num_blocks * PINNED_SHARE)
    if wanted > budget:
        most, longest = max((len(tokens), number) for number, tokens in enumerate(prefixes, 1))
        raise ValueError(
            f"--pin-prefix needs {wanted} KV blocks of {size} tokens, but at most {budget} of the "
            f"{num_blocks} there are can be pinned ({PINNED_SHARE:.0%}): pin less, or give the KV cache "
            f"more memory; the longest is prefix {longest}, with {most} tokens"
        )
    for number, tokens in enumerate(prefixes, 1):
        pooling = PoolingParams() if core.scheduler.state.capacity.pools else None
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        try:
            core.add(Request(-1, tokens, params, pooling=pooling))
        except FieldError as error:
            message = (
                f"prefix {number} of --pin-prefix has {len(tokens)} tokens and cannot be computed: {error}"
            )
            raise ValueError(message) from None
        while core.has_work:
            for output in core.step():
                if output.error is not None:
                    raise ValueError(f"prefix {number} of --pin-prefix cannot be computed: {output.error}")
        pin(core.scheduler.state, tokens)
    return blocks.pool.num_pinned
