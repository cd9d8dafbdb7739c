"""Normal noise in weights that are kept in few bits, where no files are read."""

from __future__ import annotations

import torch

from quire.engine.models.expanded_file import rows_at_once
from quire.engine.parallel.share import Share
from quire.kernels.quantised.weight import Numbers, QuantisedWeight, quantise

STD = 0.02


def draw_kept(
    weight: QuantisedWeight, share: Share | None, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Fill a weight with noise in a dtype, rounded to its format.

    share: of which larger one it is a part. That is drawn whole, and rounded with all its inputs: every rank
    has the same numbers as one alone.
    """
    form, (outputs, inputs) = weight.format, weight.shape
    whole = torch.empty(weight.shape if share is None else share.shape, dtype=dtype, device=weight.device)
    whole.normal_(std=STD, generator=generator)
    if share is not None and share.dim == 0:
        whole = share.of(whole)
    begin, end = share.ranges[0] if share is not None and share.dim == 1 else (0, inputs)
    of_groups = slice(begin // form.group, end // form.group) if form.group else slice(None)
    step = rows_at_once(whole.shape[1])
    for row in range(0, outputs, step):
        rows = slice(row, min(row + step, outputs))
        drawn = quantise(whole[rows], form)
        zeros = None if drawn.zeros is None else drawn.zeros[:, of_groups]
        numbers = Numbers(drawn.codes[:, begin:end], drawn.scales[:, of_groups], zeros)
        weight.rows(rows.start, rows.stop).fill(numbers)
