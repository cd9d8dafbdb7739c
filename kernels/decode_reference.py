"""Paged attention with one query per sequence in plain torch: the CPU's, and what the kernel is held to."""

from __future__ import annotations

import torch

from kernels.decode_splits import DecodeWorkspace
from kernels.fp8 import read_cache
from kernels.shared_prefix import SharedPrefixes


class DecodeGather:
    """What all layers of a step share in plain torch: which slots each row reads, and which of them it sees.

    Made once and passed as the workspace; it is computed anew when other context lengths come.
    """

    def __init__(self) -> None:
        self._key: tuple[torch.Tensor, torch.Tensor, int, int] | None = None
        self.longest = 0  # context of the batch
        self.index: tuple[torch.Tensor, ...]  # kv[index] is [B, 2, Hkv, blocks, block_size, D]
        self.hidden: torch.Tensor | None  # [B, longest]; None: every row sees all of it
        self.some_empty = False  # a row sees nothing

    def prepare(
        self,
        block_tables: torch.Tensor,
        rows: torch.Tensor,
        context_lens: torch.Tensor,
        kv_shape: torch.Size,
        window: int,
    ) -> None:
        key, (num_kv_heads, block_size) = self._key, kv_shape[2:4]
        if key is not None and key[0] is rows and key[1] is context_lens and key[2:] == (block_size, window):
            return
        self._key = (rows, context_lens, block_size, window)
        self.longest = int(context_lens.max()) if len(context_lens) else 0
        if self.longest == 0:
            return
        position = torch.arange(self.longest, device=rows.device)
        ends = context_lens[:, None]
        seen = position < ends
        tables = block_tables[rows, : -(-self.longest // block_size)].long()
        blocks = tables.masked_fill(~seen[:, ::block_size], 0)  # what follows a row's own may be anything
        parts_and_heads = torch.arange(2 * num_kv_heads, device=rows.device).view(2, num_kv_heads, 1)
        self.index = (blocks[:, None, None], parts_and_heads // num_kv_heads, parts_and_heads % num_kv_heads)
        if window:
            seen = seen & (position >= ends - window)
        self.hidden = None if bool(seen.all()) else ~seen
        self.some_empty = bool((context_lens == 0).any())


def decode_attention_reference(
    q: torch.Tensor,
    out: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    order: torch.Tensor,
    scale: float,
    window: int,
    workspace: DecodeGather | DecodeWorkspace | None = None,
    shared: SharedPrefixes | None = None,
    kv_scales: torch.Tensor | None = None,
    beside: bool = False,
) -> None:
    """The same as `decode_attention` in plain torch, whatever the order, and whatever runs beside it.

    A DecodeGather as the workspace saves the layers of a step some work.
    """
    batch, (num_q_heads, head_dim) = rows.shape[0], q.shape[1:]
    gather = workspace if isinstance(workspace, DecodeGather) else DecodeGather()
    gather.prepare(block_tables, rows, context_lens, kv.shape, window)
    if gather.longest == 0:
        return
    k, v = read_cache(kv, kv_scales, gather.index).flatten(3, 4)[:, :, :, : gather.longest].unbind(1)

    # Grouped query heads are the matmul's M side, so K and V are never repeated.
    grouped = q[:batch].reshape(batch, kv.shape[2], -1, head_dim).float() * scale
    scores = grouped @ k.mT
    if gather.hidden is None:
        attended = scores.softmax(-1) @ v
    else:
        weights = scores.masked_fill_(gather.hidden[:, None, None], float("-inf")).softmax(-1)
        # Unused slots may hold NaN, and 0 · NaN is NaN.
        attended = weights @ v.masked_fill(gather.hidden[:, None, :, None], 0.0)
    attended = attended.view(batch, num_q_heads, head_dim)
    if gather.some_empty:
        with_context = context_lens > 0
        out[:batch][with_context] = attended[with_context].to(out.dtype)
    else:
        out[:batch] = attended
