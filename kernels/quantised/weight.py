"""A weight [outputs, inputs] that is kept in few bits: codes, and scales and zero points of groups of inputs.

A number is (code - zero point) times the scale of its group. Of 8-bit floats the codes are the numbers that
they stand for, without zero points; those of 4-bit floats are places in `FOURS`, and their scales are powers
of two (OCP Microscaling Formats 1.0, MXFP4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.quantised.order import (
    in_order_of_inputs,
    in_order_of_products,
    pairs_in_order,
    pairs_in_order_of_inputs,
)

Codes = Literal["float8", "int4", "float4"]
LINE = 128  # inputs: a weight has a multiple of them, and so has a part of it
_MIDDLE = 8  # the zero point of 4 bits where there are none
FOURS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of 4-bit floats, by three bits; the fourth is the sign
BIAS = 127  # of a scale that is an exponent
MOST_EXPONENT = 128  # of a scale: kernels multiply by a power of two that is 2^126 times as large


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """codes: float8 is e4m3. group: inputs that share a scale; 0: all of an output. scales: their dtype.

    Scales of float4 are bytes, exponents of two, of 32 inputs each.
    """

    codes: Codes
    group: int
    zero_points: bool
    scales: torch.dtype

    def groups_of(self, inputs: int) -> int:
        return inputs // self.group if self.group else 1

    @property
    def has_whole_lines(self) -> bool:
        """Return whether each half of a line has one group, and both the same unless a group is no longer."""
        return self.group == LINE // 2 or self.group % LINE == 0

    def takes(self, inputs: int) -> bool:
        """Tell whether a weight of so many inputs, or a part that begins at a multiple of them, can be so."""
        if self.codes == "float4":  # the last line is filled up with zeros
            return inputs % self.group == 0
        whole = not self.group or (self.has_whole_lines and inputs % self.group == 0)
        return whole and inputs % LINE == 0

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """Return how many bytes a weight takes."""
        if self.codes == "float4":
            return outputs * lines_of(inputs) * (LINE // 2 + LINE // self.group)
        codes = outputs * inputs // (2 if self.codes == "int4" else 1)
        of_group = self.scales.itemsize + (1 if self.zero_points else 0)
        return codes + outputs * self.groups_of(inputs) * of_group


def lines_of(inputs: int) -> int:
    return -(-inputs // LINE)


@dataclass(frozen=True, slots=True)
class Numbers:
    """A part of a weight [outputs, inputs], in the order of outputs and inputs.

    codes: float8_e4m3fn [outputs, inputs], or uint8 from 0 to 15. scales [outputs, groups]; of 4-bit floats
    exponents of two in uint8, less BIAS. zeros: zero points, uint8 [outputs, groups]; None: 8 for all
    integers of 4 bits. most_exponent: which no scale of 4-bit floats is beyond, where the host knows one.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    most_exponent: int | None = None


class QuantisedWeight:
    """codes: uint8 [outputs, bytes], in the order of products. scales [groups, outputs]; zeros likewise.

    Of 4-bit floats scales are i32 [lines, outputs], the four exponents of a line each.
    """

    __slots__ = ("codes", "format", "inputs", "scales", "zeros")

    def __init__(
        self, form: WeightFormat, inputs: int, codes: Tensor, scales: Tensor, zeros: Tensor | None
    ) -> None:
        self.format = form
        self.inputs = inputs
        self.codes = codes
        self.scales = scales
        self.zeros = zeros

    @staticmethod
    def empty(form: WeightFormat, outputs: int, inputs: int, device: torch.device) -> QuantisedWeight:
        """Allocate a weight. Raises ValueError for inputs that do not suit the format."""
        if not form.takes(inputs):
            raise ValueError(
                f"{inputs} inputs cannot be kept in groups of {form.group or 'all'}: expected a multiple of "
                f"{LINE} and of the group"
            )

        def allocate(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        if form.codes == "float4":
            lines = lines_of(inputs)
            codes = allocate(outputs, lines * LINE // 2, dtype=torch.uint8)
            return QuantisedWeight(form, inputs, codes, allocate(lines, outputs, dtype=torch.int32), None)
        groups, per_byte = form.groups_of(inputs), 2 if form.codes == "int4" else 1
        return QuantisedWeight(
            form,
            inputs,
            allocate(outputs, inputs // per_byte, dtype=torch.uint8),
            allocate(groups, outputs, dtype=form.scales),
            allocate(groups, outputs, dtype=torch.uint8) if form.zero_points else None,
        )

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.inputs

    @property
    def nbytes(self) -> int:
        return self.format.num_bytes(*self.shape)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def of_sums(self) -> Tensor | None:
        """Return what kernels multiply sums of products by: scales but of 4-bit floats."""
        return None if self.format.codes == "float4" else self.scales

    @property
    def of_codes(self) -> Tensor | None:
        """Return what kernels decode codes with: zero points, or the exponents of 4-bit floats."""
        return self.scales if self.format.codes == "float4" else self.zeros

    @property
    def columns_of_entry(self) -> int:
        """Return of how many inputs there is one entry of scales."""
        return LINE if self.format.codes == "float4" else self.format.group or self.inputs

    def rows(self, begin: int, end: int) -> QuantisedWeight:
        """Return the view of a range of outputs."""
        zeros = None if self.zeros is None else self.zeros[:, begin:end]
        return QuantisedWeight(
            self.format, self.inputs, self.codes[begin:end], self.scales[:, begin:end], zeros
        )

    def fill(self, numbers: Numbers) -> None:
        """Put the numbers of all outputs and inputs.

        Raises ValueError for a scale of 4-bit floats that kernels do not multiply by.
        """
        if self.format.codes == "float4":
            self._fill_fours(numbers)
            return
        if self.format.codes == "float8":
            ordered = in_order_of_products(numbers.codes.view(torch.uint8))
        else:
            ordered = pairs_in_order(numbers.codes)
        self.codes.copy_(ordered)
        self.scales.copy_(numbers.scales.T)
        if self.zeros is not None:
            self.zeros.fill_(_MIDDLE) if numbers.zeros is None else self.zeros.copy_(numbers.zeros.T)

    def _fill_fours(self, numbers: Numbers) -> None:
        most = numbers.most_exponent
        if most is None:
            most = int(numbers.scales.max()) if numbers.scales.numel() else 0  # the host waits for the device
        if most > MOST_EXPONENT:
            raise ValueError(
                f"has a scale of 2^{most - BIAS}; expected 2^{MOST_EXPONENT - BIAS} at "
                "most of weights that are kept in 4 bits: give --quantized-weights expand"
            )
        beyond = lines_of(self.inputs) * LINE - self.inputs
        self.codes.copy_(pairs_in_order(F.pad(numbers.codes, (0, beyond))))
        exponents = F.pad(numbers.scales, (0, beyond // self.format.group)).contiguous()
        self.scales.copy_(exponents.view(torch.int32).T)

    def numbers(self) -> Numbers:
        """Return the numbers in the order of outputs and inputs: what `fill` was given."""
        zeros = None if self.zeros is None else self.zeros.T
        if self.format.codes == "float8":
            codes = in_order_of_inputs(self.codes).view(torch.float8_e4m3fn)
        else:
            codes = pairs_in_order_of_inputs(self.codes)[:, : self.inputs]
        scales = self.scales.T
        if self.format.codes == "float4":
            exponents = self.scales.view(torch.uint8).unflatten(1, (-1, LINE // self.format.group))
            scales = exponents.transpose(0, 1).flatten(1)[:, : self.format.groups_of(self.inputs)]
        return Numbers(codes, scales, zeros)


def expand_reference(weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    """Return the numbers [outputs, inputs] that a weight stands for: products in fp32, rounded once."""
    return expand_numbers(weight.numbers()).to(dtype)


def expand_numbers(numbers: Numbers) -> Tensor:
    """Return in fp32 the numbers [outputs, inputs] that codes and scales stand for."""
    (outputs, inputs), groups = numbers.codes.shape, numbers.scales.shape[1]
    codes, scales = numbers.codes, numbers.scales.float()
    if numbers.scales.dtype == torch.uint8:
        found, scales = _looked_up(codes, _fours_by_code), (scales - BIAS).exp2()
    elif codes.is_floating_point():
        # A CPU converts 8-bit floats a third as fast as it looks them up.
        found = codes.float() if codes.is_cuda else _looked_up(codes, _eights_by_code)
    else:
        found = codes.float()
    grouped = found.view(outputs, groups, inputs // groups)
    if numbers.scales.dtype != torch.uint8 and not codes.is_floating_point():
        grouped -= _MIDDLE if numbers.zeros is None else numbers.zeros.float()[:, :, None]
    return (grouped * scales[:, :, None]).view(outputs, inputs)


def _looked_up(codes: Tensor, by_code: Callable[[torch.device], Tensor]) -> Tensor:
    """Return in fp32 what codes of a byte each stand for."""
    places = codes.view(torch.uint8).flatten().int()
    return by_code(codes.device).index_select(0, places).view(codes.shape)


@cache
def _eights_by_code(device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


@cache
def _fours_by_code(device: torch.device) -> Tensor:
    return torch.tensor((*FOURS, *(-each for each in FOURS)), device=device)


def quantise(numbers: Tensor, form: WeightFormat) -> Numbers:
    """Return numbers [outputs, inputs] rounded to a format, a group's largest to the largest code.

    Of 4 bits codes go from 1 to 15 about 8, so that none is further away than the largest.
    """
    outputs, inputs = numbers.shape
    groups = form.groups_of(inputs)
    grouped = numbers.float().view(outputs, groups, -1)
    if form.codes == "float4":
        return _fours(grouped)
    most = torch.finfo(torch.float8_e4m3fn).max if form.codes == "float8" else 7.0
    scales = (grouped.abs().amax(-1) / most).clamp(min=torch.finfo(form.scales).tiny).to(form.scales)
    scaled = (grouped / scales.float()[:, :, None]).clamp(-most, most).view(outputs, inputs)
    zeros = torch.full((outputs, groups), _MIDDLE, dtype=torch.uint8, device=numbers.device)
    if form.codes == "float8":
        return Numbers(scaled.to(torch.float8_e4m3fn), scales)
    return Numbers((scaled.round() + _MIDDLE).to(torch.uint8), scales, zeros if form.zero_points else None)


def _fours(grouped: Tensor) -> Numbers:
    """Round groups [outputs, groups, inputs] to 4-bit floats, as OCP's formats are made of others."""
    largest = grouped.abs().amax(-1).clamp(min=2.0**-126)
    exponents = (largest.log2().floor() - 2 + BIAS).clamp(0, MOST_EXPONENT)
    scaled = grouped / (exponents - BIAS).exp2()[:, :, None]
    codes = torch.bucketize(scaled.abs(), _between_fours(grouped.device))
    codes += torch.signbit(scaled) * len(FOURS)
    return Numbers(codes.to(torch.uint8).flatten(1), exponents.to(torch.uint8), most_exponent=MOST_EXPONENT)


@cache
def _between_fours(device: torch.device) -> Tensor:
    """Return where the nearest of two that are beside each other changes; a GPU is given them once."""
    fours = torch.tensor(FOURS)
    return ((fours[1:] + fours[:-1]) / 2).to(device)
