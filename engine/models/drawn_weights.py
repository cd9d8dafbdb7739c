"""Normal noise in weights that are rounded to few bits, where no files are read."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.engine.models.expanded_file import rows_at_once
from quire.engine.parallel.share import Share
from quire.kernels.quantised.weight import QuantisedWeight, WeightFormat, expand_numbers, quantise

STD = 0.02
# Numbers that are rounded at once, by kinds of devices: a GPU has some 25 launches for each piece.
PIECES = {"cpu": 1 << 20, "cuda": 1 << 24}


def draw_rounded(
    weight: Tensor | QuantisedWeight,
    form: WeightFormat,
    share: Share | None,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    """Fill a weight with noise in a dtype, rounded to a format: kept in that, or as the numbers of it.

    share: of which larger one it is a part. That is drawn whole, and rounded with all its inputs: a rank has
    the same numbers as one alone, if that rounds them, too. Before they are rounded they are those of a seed
    that others have.
    """
    outputs, inputs = weight.shape
    rows_and_columns = weight.shape if share is None else share.shape
    by_columns = weight.device.type == "cpu"  # as `Weights` has matrices there
    shape = rows_and_columns[::-1] if by_columns else rows_and_columns
    whole = torch.empty(shape, dtype=dtype, device=weight.device).normal_(std=STD, generator=generator)
    whole = whole.T if by_columns else whole
    if share is not None and share.dim == 0:
        whole = share.of(whole)
    begin, end = share.ranges[0] if share is not None and share.dim == 1 else (0, inputs)
    of_groups = slice(begin // form.group, end // form.group) if form.group else slice(None)
    step = rows_at_once(whole.shape[1], PIECES.get(weight.device.type, PIECES["cpu"]))
    for row in range(0, outputs, step):
        rows = slice(row, min(row + step, outputs))
        drawn = quantise(whole[rows].contiguous(), form)
        zeros = None if drawn.zeros is None else drawn.zeros[:, of_groups]
        numbers = replace(
            drawn, codes=drawn.codes[:, begin:end], scales=drawn.scales[:, of_groups], zeros=zeros
        )
        if isinstance(weight, QuantisedWeight):
            weight.rows(rows.start, rows.stop).fill(numbers)
        else:
            weight[rows] = expand_numbers(numbers).to(dtype)
