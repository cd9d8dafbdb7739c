"""The block tables of all cache groups as one tensor, for kernels that need a block of each."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def stacked(tables: Sequence[Tensor]) -> Tensor:
    """View tables of groups [*, max_blocks] that lie one behind the other -> [G, *, max_blocks].

    Raise ValueError if they lie elsewhere.
    """
    first = tables[0]
    begins = [table.data_ptr() - first.data_ptr() for table in tables]
    if begins != [group * first.nbytes for group in range(len(tables))] or not first.is_contiguous():
        raise ValueError(f"block tables must lie one behind the other, these begin at {begins}")
    return first.as_strided((len(tables), *first.shape), (first.numel(), *first.stride()))
