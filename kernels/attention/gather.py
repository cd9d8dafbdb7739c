"""The slots that rows of a decode read in plain torch: found once a step, and shared by its layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

WORTH_A_PART = 2**17  # so many floats of padding take longer to read than the operations of one more part


@dataclass(frozen=True, slots=True)
class _Part:
    """N rows of a batch that attend together, padded to the longest context among them."""

    members: torch.Tensor | slice  # where the N are in the batch; a slice if they are all of it
    longest: int
    index: tuple[torch.Tensor, ...]  # kv[index] is [N, 2 or 1, Hkv, blocks, block_size, D]
    hidden: torch.Tensor | None  # [N, 1, 1, longest]; None: every row sees all of it


class DecodeGather:
    """Which slots each row of a step reads, and which of them it sees.

    Made once and passed as the workspace; it is computed anew when other rows or context lengths come.
    """

    def __init__(self) -> None:
        self._key: tuple[torch.Tensor, torch.Tensor, torch.Size, int, bool] | None = None
        self._parts: list[_Part] = []

    def parts(
        self,
        block_tables: torch.Tensor,
        rows: torch.Tensor,
        context_lens: torch.Tensor,
        kv_shape: torch.Size,
        window: int,
        *,
        chunked: bool = False,
    ) -> list[_Part]:
        """Return parts; each row with a context is in one. kv_shape [blocks, 2 or 1, Hkv, block_size, D].

        window and chunked as `attention.batch.AttentionLayer` has them.
        """
        key = self._key
        rest = (kv_shape, window, chunked)
        if key is None or key[0] is not rows or key[1] is not context_lens or key[2:] != rest:
            self._key = (rows, context_lens, *rest)
            lens = context_lens.tolist()
            self._parts = []
            for indices in _of_like_length(lens, kv_shape[1] * kv_shape[2] * kv_shape[4]):
                members: torch.Tensor | slice = slice(len(lens))  # which copies nothing
                if len(indices) < len(lens):
                    members = torch.tensor(indices, device=rows.device)
                longest = lens[indices[0]]
                tables = block_tables[rows[members], : -(-longest // kv_shape[3])]
                lens_of_part = context_lens[members]
                first_seen = None
                if chunked:
                    first_seen = (lens_of_part - 1) // window * window
                elif window:
                    first_seen = lens_of_part - window
                self._parts.append(_part(members, longest, tables, lens_of_part, kv_shape, first_seen))
        return self._parts


def _of_like_length(context_lens: list[int], floats: int) -> list[list[int]]:
    """Return the rows with a context, by falling length; a new part begins where padding the rest is dear.

    `floats` is how many a token's keys and values are.
    """
    falling = sorted(range(len(context_lens)), key=context_lens.__getitem__, reverse=True)
    falling = falling[: len(falling) - context_lens.count(0)]
    parts: list[list[int]] = []
    longest = 0
    for done, row in enumerate(falling):
        padding = (longest - context_lens[row]) * (len(falling) - done)
        if not parts or padding * floats > WORTH_A_PART:
            parts.append([])
            longest = context_lens[row]
        parts[-1].append(row)
    return parts


def _part(
    members: torch.Tensor | slice,
    longest: int,
    tables: torch.Tensor,
    context_lens: torch.Tensor,
    kv_shape: torch.Size,
    first_seen: torch.Tensor | None,
) -> _Part:
    vectors, num_kv_heads, block_size = kv_shape[1:4]
    position = torch.arange(longest, device=tables.device)
    ends = context_lens[:, None]
    seen = position < ends
    blocks = tables.long().masked_fill_(~seen[:, ::block_size], 0)  # what follows a row's own may be anything
    parts_and_heads = torch.arange(vectors * num_kv_heads, device=tables.device).view(-1, num_kv_heads, 1)
    index = (blocks[:, None, None], parts_and_heads // num_kv_heads, parts_and_heads % num_kv_heads)
    if first_seen is not None:
        seen = seen & (position >= first_seen[:, None])
    hidden = None if bool(seen.all()) else ~seen[:, None, None]
    return _Part(members, longest, index, hidden)
