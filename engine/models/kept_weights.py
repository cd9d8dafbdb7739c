"""Which weights of a native decoder stay in few bits on a device, and why others do not.

They are those of its layers' products; of a model by transformers' code they are its linear layers' and its
experts', see `general.kept_choice`. A product may have several of a checkpoint's matrices, which must all
be in the same format. Formats are told by the files' headers, see `stored_weights`, or by config.json; or
weights are rounded to one as they are loaded, see `rounded_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from quire.engine.config import QuantizedWeights
from quire.engine.models.config import ModelConfig
from quire.engine.models.float8 import Float8
from quire.engine.models.layers import PRODUCTS, layer_shape, names_of
from quire.engine.models.packed import Packed
from quire.engine.models.quantisation import COMPRESSED_MXFP4, MXFP4, ROUNDED, weights_of
from quire.engine.models.rounded_files import ROUNDED_FORMAT
from quire.kernels.linear.linear import Matrix
from quire.kernels.quantised.weight import LINE, WeightFormat

# By names of weights that are read in few bits: in which format one can be kept, or why in none.
Stored: TypeAlias = Mapping[str, WeightFormat | str]
ADAPTED = "an adapter is merged into them"
NO_PRODUCT = "no product of a layer"
BASE = "model."  # before names, which a checkpoint of the bare decoder leaves out
_OF_EXPERTS = MXFP4, COMPRESSED_MXFP4  # in which experts alone have weights in few bits
_BITS = {"float8": 8, "int4": 4, "float4": 4}


@dataclass(frozen=True, slots=True)
class Kept:
    """formats: of weights that are kept in few bits, by name. reasons: why others are not, by name.

    of: whose weights those may be, in words.
    """

    formats: Mapping[str, WeightFormat] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    of: str = "layers"


Keep: TypeAlias = Callable[[ModelConfig], Kept]  # of a rank's part of a model
Supports: TypeAlias = Callable[[WeightFormat, torch.dtype], bool]  # whether products by them are, in a dtype


def bits_of(formats: Mapping[str, WeightFormat]) -> tuple[int, ...]:
    """Return in how many bits weights are kept."""
    return tuple(sorted({_BITS[form.codes] for form in formats.values()}))


def of_experts_alone(names: Iterable[str]) -> bool:
    """Tell whether weights of these names are those of experts, which no layer of their own has."""
    return not any(name.endswith(".weight") for name in names)


def may_keep(config: ModelConfig) -> bool:
    """Tell whether a model's layers, or its experts, may have weights in few bits, by its configuration."""
    quantised = weights_of(config.quantised)
    if config.implementation == "transformers":
        of_layers = isinstance(quantised, Float8 | Packed) or quantised == ROUNDED
        return of_layers or (config.has_experts and quantised in _OF_EXPERTS)
    decodes = config.rope is not None  # see `decoder.Decoder`
    return decodes and (isinstance(quantised, Float8 | Packed) or quantised == ROUNDED)


def keep(part: ModelConfig, stored: Stored, dtype: torch.dtype, supports: Supports) -> Kept:
    """Choose which weights are kept for products in dtype; `part` is the configuration of a rank."""
    formats: dict[str, WeightFormat] = {}
    reasons: dict[str, str] = {}
    for names, matrix in _products(part, dtype) if stored else ():
        found = [stored.get(name, stored.get(name.removeprefix(BASE))) for name in names]
        form = fused(found, matrix.inputs)
        if isinstance(form, WeightFormat) and not supports(form, dtype):
            form = unsupported(dtype)
        if isinstance(form, WeightFormat):
            formats |= dict.fromkeys(names, form)
        else:
            reasons |= {name: form for name, each in zip(names, found, strict=True) if each is not None}
    of_products = formats.keys() | reasons.keys()
    reasons |= {
        name: NO_PRODUCT for name in stored if name not in of_products and BASE + name not in of_products
    }
    return Kept(formats, reasons)


def as_asked(stored: Stored, quantized_weights: QuantizedWeights) -> Stored:
    """Return the formats of a folder's weights, none of which can be kept if all are to be expanded."""
    if quantized_weights == "keep":
        return stored
    return dict.fromkeys(stored, "--quantized-weights is expand")


def described(config: ModelConfig) -> Stored:
    """Return how files have weights of layers as far as config.json tells, which need not be there."""
    if not may_keep(config):
        return {}
    quantised = weights_of(config.quantised)
    inputs_divided = {name for parts in PRODUCTS[1::2] for name in parts}
    stored: dict[str, WeightFormat | str] = {}
    for names, matrix in _products(config, torch.bfloat16):
        divided = any(names[0].endswith(f"{name}.weight") for name in inputs_divided)
        inputs = matrix.inputs * (config.ranks if divided else 1)
        form: WeightFormat | str = ROUNDED_FORMAT
        if isinstance(quantised, Float8 | Packed):
            form = described_format(quantised, inputs)
        if config.adapter is not None and quantised != ROUNDED:
            form = ADAPTED
        stored |= dict.fromkeys(names, form)
    return stored


def saved_bytes(part: ModelConfig, kept: Kept, itemsize: int) -> int:
    """Return how many bytes fewer a rank's weights take than all in numbers of `itemsize` bytes."""
    every = (replace(matrix, format=kept.formats.get(names[0], "dense")) for names, matrix in _products(part))
    return sum(
        each.elements * itemsize - each.format.num_bytes(each.outputs, each.inputs)
        for each in every
        if each.format != "dense"
    )


def of_layers(formats: Mapping[str, WeightFormat], layers: list[int]) -> dict[str, WeightFormat]:
    """Return the formats of a model that has these layers one after the other."""
    return {
        new: formats[old]
        for at, layer in enumerate(layers)
        for parts in PRODUCTS
        for new, old in zip(names_of(at, parts), names_of(layer, parts), strict=True)
        if old in formats
    }


def _products(part: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[list[str], Matrix]]:
    """Yield the weights' names of each product of each layer, and what a rank has of it."""
    for layer in range(part.num_layers):
        shape = layer_shape(part, layer, dtype)
        for parts, matrix in zip(PRODUCTS, (shape.qkv, shape.output, shape.up, shape.down), strict=True):
            assert matrix is not None
            yield names_of(layer, parts), matrix


def unsupported(dtype: torch.dtype) -> str:
    """Return why weights are not kept that no products in a dtype are by."""
    return f"no kernels here multiply {str(dtype).removeprefix('torch.')} numbers by them"


def fused(found: Sequence[WeightFormat | str | None], inputs: int) -> WeightFormat | str:
    """Return the format of a product by weights in these, of so many inputs on a rank; or why none is."""
    forms = [each for each in found if isinstance(each, WeightFormat)]
    if reasons := [each for each in found if isinstance(each, str)]:
        return reasons[0]
    if len(forms) != len(found):
        return "next to weights that are not quantised"
    scales = {each.scales for each in forms}
    common = scales.pop() if len(scales) == 1 else torch.float32
    zero_points = any(each.zero_points for each in forms)
    form, *others = {replace(each, scales=common, zero_points=zero_points) for each in forms}
    if others:
        return "next to weights in other groups"
    if form.codes != "float4" and not form.has_whole_lines:
        return f"groups of {form.group}"
    return form if form.takes(inputs) else untaken(form, inputs)


def untaken(form: WeightFormat, inputs: int) -> str:
    """Return why a weight of so many inputs is not kept in a format."""
    multiple = form.group if form.codes == "float4" else max(form.group, LINE)
    return f"{inputs} inputs, no multiple of {multiple}"


def described_format(quantised: Float8 | Packed, inputs: int) -> WeightFormat | str:
    """Return how files have a weight of so many inputs, by config.json alone; or why it is not kept."""
    if isinstance(quantised, Packed):
        if 4 not in quantised.bits:
            return " and ".join(map(str, quantised.bits)) + " bits"
        if quantised.act_order:
            return "act order"
        if quantised.form == "modelopt":
            return "factors of inputs"
        group = quantised.groups[0]
        return WeightFormat("int4", group if group < inputs else 0, quantised.zero_points, torch.bfloat16)
    if quantised.powers:
        return "scales that are powers of two"
    group = 0 if quantised.row or quantised.matrix or quantised.block is None else quantised.block.columns
    return WeightFormat("float8", group if group < inputs else 0, False, torch.bfloat16)
