"""Paged attention in plain torch, four ways: `python -m quire.loadtest.attention_variants`.

The steps by which tutorials arrive at it, timed in turn with attention over a contiguous cache, which each
of them equals. Ratios count; times on a shared CPU do not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from quire.loadtest.command import command_parser
from quire.loadtest.provenance import Provenance

DECODES = ((2, 60), (1, 512), (16, 256), (4, 2048))  # (batch, context)
PREFILLS = ((2, 60), (4, 64), (2, 1024), (1, 4096))  # (batch, prompt)


@dataclass(frozen=True, slots=True)
class Case:
    """The last Q tokens of each of B sequences of `length` tokens attend to it, causally.

    q [B, H, Q, D]; keys and values [B, H, length, D], contiguous, and the same in blocks: [blocks, H, block
    size, D], found by tables [B, blocks of a sequence].
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    key_blocks: Tensor
    value_blocks: Tensor
    tables: Tensor
    length: int

    @property
    def block_size(self) -> int:
        return self.key_blocks.shape[2]

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def to(self, device: torch.device, dtype: torch.dtype) -> Case:
        floats = (self.q, self.keys, self.values, self.key_blocks, self.value_blocks)
        q, keys, values, key_blocks, value_blocks = (each.to(device, dtype) for each in floats)
        return Case(q, keys, values, key_blocks, value_blocks, self.tables.to(device), self.length)

    def sees(self, first: int, last: int) -> Tensor:
        """Return [Q, last - first]: whether a query may see keys first..last-1; past the end, nobody may."""
        positions = torch.arange(self.length - self.q.shape[2], self.length, device=self.q.device)
        keys = torch.arange(first, last, device=self.q.device)
        return (keys <= positions[:, None]) & (keys < self.length)


def make_case(
    batch: int, length: int, queries: int, heads: int, head_dim: int, block_size: int, seed: int
) -> Case:
    """Draw queries, keys and values, in blocks that lie in random order and are zero where unused."""
    rng = torch.Generator().manual_seed(seed)
    blocks = -(-length // block_size)
    q = torch.randn(batch, heads, queries, head_dim, generator=rng)
    keys, values = (torch.randn(batch, heads, length, head_dim, generator=rng) for _ in range(2))
    tables = torch.randperm(batch * blocks, generator=rng).view(batch, blocks)
    cut = []
    for contiguous in (keys, values):
        padded = F.pad(contiguous, (0, 0, 0, blocks * block_size - length))
        pieces = padded.view(batch, heads, blocks, block_size, head_dim).transpose(1, 2).flatten(0, 1)
        store = torch.empty_like(pieces)
        store[tables.flatten()] = pieces
        cut.append(store)
    return Case(q, keys, values, cut[0], cut[1], tables, length)


def contiguous(case: Case) -> Tensor:
    """Attend without blocks: one call over all sequences."""
    queries = case.q.shape[2]
    if queries in {1, case.length}:
        return F.scaled_dot_product_attention(case.q, case.keys, case.values, is_causal=queries > 1)
    mask = case.sees(0, case.length)
    return F.scaled_dot_product_attention(case.q, case.keys, case.values, attn_mask=mask)


def concatenated(case: Case) -> Tensor:
    """Attend sequence by sequence: join its blocks, then attend as ever."""
    outs = []
    mask = case.sees(0, case.length)
    for q, table in zip(case.q, case.tables, strict=True):
        keys = torch.cat([case.key_blocks[block] for block in table.tolist()], 1)[:, : case.length]
        values = torch.cat([case.value_blocks[block] for block in table.tolist()], 1)[:, : case.length]
        outs.append(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask))
    return torch.stack(outs)


def online_softmax(case: Case) -> Tensor:
    """Attend block by block with a running maximum and sum: nothing of a sequence's length is ever held."""
    outs = []
    for q, table in zip(case.q, case.tables, strict=True):
        most = torch.full((*q.shape[:2], 1), -torch.inf, device=q.device)  # these three in float32
        total = torch.zeros_like(most)
        out = torch.zeros_like(q, dtype=torch.float32)
        for i, block in enumerate(table.tolist()):
            seen = case.sees(i * case.block_size, (i + 1) * case.block_size)
            scores = (q @ case.key_blocks[block].mT * case.scale).masked_fill(~seen, -torch.inf)
            higher = torch.maximum(most, scores.amax(-1, keepdim=True))
            weights = (scores - higher).exp()
            shrink = (most - higher).exp()
            total = total * shrink + weights.sum(-1, keepdim=True)
            out = out * shrink + weights.to(q.dtype) @ case.value_blocks[block]
            most = higher
        outs.append((out / total).to(q.dtype))
    return torch.stack(outs)


def two_pass_softmax(case: Case) -> Tensor:
    """Compute all scores block by block, then one softmax, then the values block by block."""
    outs = []
    mask = case.sees(0, case.tables.shape[1] * case.block_size)
    for q, table in zip(case.q, case.tables, strict=True):
        scores = torch.cat([q @ case.key_blocks[block].mT for block in table.tolist()], -1) * case.scale
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).split(case.block_size, -1)
        parts = [
            weight @ case.value_blocks[block] for weight, block in zip(weights, table.tolist(), strict=True)
        ]
        outs.append(torch.stack(parts).sum(0))
    return torch.stack(outs)


def whole_batch(case: Case) -> Tensor:
    """Attend all sequences at once: one gather through the tables, then one call."""
    shape = (*case.q.shape[:2], -1, case.q.shape[-1])
    keys, values = (
        blocks[case.tables].transpose(1, 2).reshape(shape) for blocks in (case.key_blocks, case.value_blocks)
    )
    mask = case.sees(0, keys.shape[2])
    return F.scaled_dot_product_attention(case.q, keys, values, attn_mask=mask)


VARIANTS: dict[str, Callable[[Case], Tensor]] = {
    "contiguous": contiguous,
    "concatenated": concatenated,
    "online softmax": online_softmax,
    "two-pass softmax": two_pass_softmax,
    "whole batch": whole_batch,
}


def time_in_turn(
    case: Case, rounds: int, variants: dict[str, Callable[[Case], Tensor]] = VARIANTS
) -> dict[str, float]:
    """Return median seconds of each variant, each run once a round, until its device is done."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(rounds + 1):
        for name, variant in variants.items():
            begin = time.perf_counter()
            variant(case)
            if case.q.is_cuda:
                torch.cuda.synchronize()
            if i:  # the first round warms up
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    shape = (arguments.heads, arguments.head_dim, arguments.block_size)
    for title, sizes, is_decode in (("decode", DECODES, True), ("prefill", PREFILLS, False)):
        table = Table(f"batch × tokens, {title}", "contiguous ms", *list(VARIANTS)[1:])
        for batch, length in sizes:
            case = make_case(batch, length, 1 if is_decode else length, *shape, seed=0)
            seconds = time_in_turn(case, arguments.rounds)
            base = seconds.pop("contiguous")
            ratios = [f"{each / base:.1f} ×" for each in seconds.values()]
            table.add_row(f"{batch} × {length}", f"{1e3 * base:.2f}", *ratios)
        Console().print(table)
    where = Provenance.here()
    print(f"on the CPU, torch {torch.__version__}; commit {where.commit}, {where.date}: {where.command}")


if __name__ == "__main__":
    main()
