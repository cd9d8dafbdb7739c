"""How many tokens a KV block has, and how many layers keep their states in one."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.engine.config import BLOCK_SIZE
from quire.engine.device.kv_cache import bytes_per_block
from quire.engine.models.config import ModelConfig
from quire.kernels.formats.kv_format import UNSCALED, KVFormat

# Of a model that keeps states: a block has them as they were at its end, so that with small blocks prompts
# are computed in small pieces. With large ones less is found again of prompts that begin alike.
TOKENS_WITH_STATES = (64, 128, 256, 512, 1024)
OF_STATES_ALONE = 256
MOST_STATE_GROUPS = 8


def in_blocks(
    config: ModelConfig, given: int | None, held: KVFormat, dtype: torch.dtype
) -> tuple[ModelConfig, int]:
    """Return a model computed in dtype, of which it is known how many layers' states a block has; and tokens.

    given: the tokens of a block by --block-size; None: as few as let a block of keys and values have room for
    the states of so many layers that those are in few groups.
    """
    if not config.states:
        return config, given or BLOCK_SIZE
    states = tuple(each.computed_in(UNSCALED[dtype].name) for each in config.states)  # type: ignore[arg-type]
    config = replace(config, states=states)
    if not config.cache_specs:
        return config, given or OF_STATES_ALONE
    largest = max(each.num_bytes for each in states)
    sizes = (given,) if given else TOKENS_WITH_STATES
    for block_size in sizes:
        room = bytes_per_block(replace(config, states=()), block_size, held) // largest
        if room and -(-len(states) // room) <= MOST_STATE_GROUPS:
            return replace(config, states_in_group=room), block_size
    return replace(config, states_in_group=-(-len(states) // MOST_STATE_GROUPS)), sizes[-1]
