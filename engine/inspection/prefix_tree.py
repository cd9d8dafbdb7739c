"""The prefix cache as a tree of texts: runs of blocks, each after the run that comes before it."""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np

from quire.engine.hashing import Digest, Prefix
from quire.engine.inspection.messages import PrefixAnswer, PrefixNode
from quire.engine.inspection.prefix_counts import PrefixCounts
from quire.engine.memory.manager import BlockManager

MAX_NODES = 400


def prefix_tree(blocks: BlockManager, counts: PrefixCounts | None) -> PrefixAnswer:
    """Return the published blocks of the device as runs that nothing branches off from. O(blocks)."""
    begin = time.monotonic()
    published = {prefix.digest: prefix for prefix in blocks.cache.prefixes()}
    children: defaultdict[Digest | None, list[Prefix]] = defaultdict(list)
    for prefix in published.values():
        before = prefix.before.digest if prefix.before is not None else None
        children[before if before in published else None].append(prefix)
    nodes: list[PrefixNode] = []
    left = [(-1, prefix) for prefix in children[None]]
    while left:
        parent, first = left.pop()
        run = [first]
        while len(following := children[run[-1].digest]) == 1:
            run.append(following[0])
        left += [(len(nodes), prefix) for prefix in following]
        nodes.append(_node(blocks, counts, parent, run))
    kept = _largest(nodes)
    return PrefixAnswer(
        seconds=time.monotonic() - begin,
        nodes=kept,
        num_left_out=len(nodes) - len(kept),
        hits=0 if counts is None else counts.hits.total(),
        evictions=0 if counts is None else counts.num_evictions,
    )


def _node(blocks: BlockManager, counts: PrefixCounts | None, parent: int, run: list[Prefix]) -> PrefixNode:
    held = [blocks.cache.find(prefix) for prefix in run]
    numbers = [block for block in held if block is not None]
    return PrefixNode(
        parent=parent,
        blocks=np.array(numbers, np.int32).tobytes(),
        active=sum(blocks.pool.count(block) > 0 for block in numbers),
        pinned=blocks.pool.is_pinned(numbers[0]),
        hits=0 if counts is None else counts.hits[run[0].digest],
        evictions=0 if counts is None else sum(counts.evictions[prefix.digest] for prefix in run),
        digest=run[-1].digest.hex()[:16],
    )


def _largest(nodes: list[PrefixNode]) -> list[PrefixNode]:
    """Return the nodes whose subtrees have most blocks, with their parents' places among them."""
    if len(nodes) <= MAX_NODES:
        return nodes
    sizes = [len(node.blocks) for node in nodes]
    for place in range(len(nodes) - 1, -1, -1):  # children come after their parents
        if nodes[place].parent >= 0:
            sizes[nodes[place].parent] += sizes[place]
    most = sorted(range(len(nodes)), key=lambda place: (-sizes[place], place))[:MAX_NODES]
    place_of = {old: new for new, old in enumerate(sorted(most))}  # a parent is never smaller than its child
    for old in place_of:
        nodes[old].parent = place_of.get(nodes[old].parent, -1)
    return [nodes[old] for old in sorted(most)]
