"""What chunks of prompts have before them in the cache: whose tokens a step expands, and in which pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.attention.batch import PrefillBatch, Span

# By FLOPs and bytes an H100 takes as long to expand a token as it saves by that with so many queries.
LEAST_QUERIES = 128
SAVED = 6.5e-12  # seconds that are saved for each pair of a query and a key, and for each head
MOST_BYTES = 1 << 28  # of keys and values that are there at once, or those of one token


@dataclass(frozen=True, slots=True)
class Piece:
    """N tokens that are expanded at once: their blocks [N], places in those [N], and P + 1 starts of rows."""

    blocks: Tensor
    places: Tensor
    starts: Tensor


@dataclass(frozen=True, slots=True)
class Earlier:
    """pieces: of what is expanded. others: the rows that attend to latents, or None where no row does."""

    pieces: tuple[Piece, ...]
    others: PrefillBatch | None


def plan_earlier(batch: PrefillBatch, block_size: int, token_bytes: int) -> Earlier:
    """Return how the rows' earlier tokens are attended to; token_bytes: of one's keys and values.

    Where the host does not know the rows, they are nobody's to expand.
    """
    spans = batch.spans
    if not spans:
        return Earlier((), batch)
    counts = [_expanded(span) for span in spans]
    others = None
    if any(span.context_len > span.tokens and not count for span, count in zip(spans, counts, strict=True)):
        none = _sent([bool(count) for count in counts], torch.bool, batch.rows.device)
        own = batch.query_starts.diff()
        others = replace(batch, context_lens=torch.where(none, own, batch.context_lens))
    pieces = [_piece(batch, part, block_size) for part in _parts(counts, max(MOST_BYTES // token_bytes, 1))]
    return Earlier(tuple(pieces), others)


def seconds_of_knowing(spans: Sequence[Span], heads: int) -> float:
    """Return how much sooner a layer of a step is done where the host knows its chunks."""
    return SAVED * heads * sum(span.tokens * _expanded(span) for span in spans)


def _expanded(span: Span) -> int:
    """Return how many earlier tokens of a row are expanded."""
    return span.context_len - span.tokens if span.tokens >= LEAST_QUERIES else 0


def _parts(counts: list[int], most: int) -> Iterator[list[tuple[int, int]]]:
    """Divide so many tokens of each row: yield each row's first and how many, up to `most` of all."""
    part, room = [(0, 0)] * len(counts), most
    for row, count in enumerate(counts):
        begin = 0
        while begin < count:
            if room == 0:
                yield part
                part, room = [(0, 0)] * len(counts), most
            taken = min(count - begin, room)
            part[row] = begin, taken
            begin, room = begin + taken, room - taken
    if room < most:
        yield part


def _piece(batch: PrefillBatch, part: list[tuple[int, int]], block_size: int) -> Piece:
    device = batch.rows.device
    firsts, counts = zip(*part, strict=True)
    tokens = sum(counts)
    sent = _sent([firsts, counts], torch.int64, device)
    starts = torch.zeros(len(part) + 1, dtype=torch.int64, device=device)
    torch.cumsum(sent[1], 0, out=starts[1:])
    row = torch.repeat_interleave(sent[1], output_size=tokens)
    position = torch.arange(tokens, device=device) + (sent[0] - starts[:-1])[row]
    blocks = batch.block_tables[batch.rows.long()[row], position // block_size]
    return Piece(blocks.long(), position % block_size, starts.int())


def _sent(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return values on the device, for which nobody on the host waits."""
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
