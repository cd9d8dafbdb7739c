"""Which layers keep their keys and values in blocks together: a block is of as many layers in each group.

Layers that keep all tokens form groups, those that keep a window others, and all draw blocks of the same
bytes from one pool. Where all keep the same, there is one. What is left empty in a kind's last group is
waste, and each group has block tables of its own: so groups are few, and as large as leaves little empty.
After vLLM's hybrid KV cache manager.

A state that every token changes is kept as a window of one token before the next: the block of logical block
i has it as it was behind the newest token there. So it is shared, copied on write, swapped and found again as
keys and values are, at the ends of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quire.kernels.formats.cache_spec import CacheSpec

MOST_GROUPS = 8  # whose tables a step fills and sends
FULL_WEIGHT = 10  # room left empty in a group that keeps all tokens costs so much of a window group's
MOST_WASTE = 0.25  # of what all layers take a token; with more, no windows are told apart
STATE_WINDOW = 2  # tokens: a state is read as the token before the next has left it


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share block tables, and how many of the last tokens they keep; 0: all.

    states: the layers are of those that keep states, by their place among them.
    """

    layers: tuple[int, ...]
    window: int = 0
    states: bool = False


def cache_groups(specs: tuple[CacheSpec, ...]) -> tuple[CacheGroup, ...]:
    """Return the groups of a model's layers, of which the first keeps all tokens if any layer does.

    One group, where layers are all of one kind, or too few of one kind would leave too much empty.
    """
    if not specs:
        return ()
    kinds: dict[int, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec.window, []).append(layer)
    one = (CacheGroup(tuple(range(len(specs))), 0 if 0 in kinds else max(kinds, default=0)),)
    if len(kinds) <= 1:
        return one
    divided = [_divided(kinds, size) for size in range(1, max(map(len, kinds.values())) + 1)]
    allowed = [groups for groups in divided if len(groups) <= MOST_GROUPS]
    if not allowed:
        return one
    best = min(allowed, key=lambda groups: (_cost(groups, specs), len(groups)))
    wasted = len(best) * _page(best, specs) / _elements(range(len(specs)), specs) - 1
    return best if wasted <= MOST_WASTE else one


def state_groups(layers: int, in_group: int) -> tuple[CacheGroup, ...]:
    """Return the groups of so many layers that keep states, `in_group` in each; 0: all are one group."""
    if not layers:
        return ()
    count = -(-layers // (in_group or layers))
    return tuple(CacheGroup((*range(at, layers, count),), STATE_WINDOW, states=True) for at in range(count))


def _divided(kinds: dict[int, list[int]], size: int) -> tuple[CacheGroup, ...]:
    """Return groups of up to `size` layers each, those of a kind as many as possible of one size."""
    groups = []
    for window in sorted(kinds):  # 0 first
        layers = kinds[window]
        count = -(-len(layers) // size)
        groups += [CacheGroup(tuple(layers[at::count]), window) for at in range(count)]
    return tuple(groups)


def _elements(layers: Iterable[int], specs: tuple[CacheSpec, ...]) -> int:
    return sum(specs[layer].numbers for layer in layers)


def _page(groups: tuple[CacheGroup, ...], specs: tuple[CacheSpec, ...]) -> int:
    """Return what a token takes of a block, which has room for the largest group."""
    return max(_elements(group.layers, specs) for group in groups)


def _cost(groups: tuple[CacheGroup, ...], specs: tuple[CacheSpec, ...]) -> int:
    weights = sum(1 if group.window else FULL_WEIGHT for group in groups)
    return weights * _page(groups, specs)
