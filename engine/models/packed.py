"""Which weights of packed integers a config.json tells of. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from quire.engine.models.quantisation_config import object_of, refuse_formats, refused, strategy_of

BITS = (2, 3, 4, 5, 6, 7, 8)  # of an integer
_GPTQ_BITS = (2, 3, 4, 8)  # of others GPTQModel has the higher bits in words of their own
Form: TypeAlias = Literal["gptq", "gptq_v2", "awq", "awq_rows", "compressed", "modelopt"]
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")  # of compressed-tensors
_GPTQ_FORMS: dict[str, Form] = {"gptq": "gptq", "gptq_v2": "gptq_v2"}
_AWQ_FORMS: dict[str, Form] = {"gemm": "awq", "gemv": "awq_rows"}
_AUTO_ROUND_FORMS: dict[str, Form] = {
    "auto": "gptq",  # as AutoRound reads folders that do not tell
    "auto_round:gptq": "gptq",
    "auto_round:auto_gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:awq": "awq",
    "auto_round:auto_awq": "awq",
}
_NOT_QUANTISED = (16, 32)  # bits
_WAYS = ("quant_method", "method", "checkpoint_format", "format", "packing_format", "pack_dtype")
_ROTATIONS = ("rotation_config", "transform_config", "hadamard_config", "spinquant_config")  # of inputs
_ACT_ORDERS = (True, "group", "dynamic")  # by others of compressed-tensors groups stay in the inputs' order
_ALL = -1  # a group_size: all inputs


@dataclass(frozen=True, slots=True)
class Packed:
    """Weights of integers, which stand for their differences from a zero point, times a scale.

    A group of inputs of each output has a zero point and a scale. Which weights are so is told by the files.

    form: how files have them, see `packed_layouts`. bits: that an integer may have. groups: inputs that a
    group may have; 0: all that there are. zero_points: files must have some; else the middle of the range is
    one where they have none. act_order: inputs of a group need not stand beside each other; files tell.
    """

    form: Form
    bits: tuple[int, ...]
    groups: tuple[int, ...]
    zero_points: bool = True
    act_order: bool = False

    def group_of(self, inputs: int, count: int) -> int | None:
        """Return how many inputs a group has, if there are so many of both; None if that cannot be."""
        sizes = {min(size, inputs) or inputs for size in self.groups}
        found = [size for size in sizes if -(-inputs // size) == count]
        return found[0] if len(found) == 1 else None  # else two sizes would have groups end elsewhere

    def with_layers(self, layers: Iterable[Packed]) -> Packed:
        """Return what layers with bits and groups of their own may have, too: files tell which they do."""
        every = [self, *layers]
        bits, groups = (
            {each for one in every for each in one.bits},
            {each for one in every for each in one.groups},
        )
        return replace(self, bits=tuple(sorted(bits)), groups=tuple(sorted(groups)))


def read_gptq(given: dict[str, Any], where: str) -> Packed:
    """Read a quantization_config of the method gptq, as AutoGPTQ and GPTQModel write it."""
    # The second is what GPTQModel calls it since its fifth version.
    form = given.get("checkpoint_format") or given.get("format") or "gptq"
    if form not in _GPTQ_FORMS or given.get("is_marlin_format"):
        named = "marlin" if given.get("is_marlin_format") else form
        raise refused(where, f"the checkpoint_format {named!r}")
    if given.get("pack_dtype", "int32") != "int32":
        raise refused(where, f"the pack_dtype {given['pack_dtype']!r}")
    whole = Packed(
        _GPTQ_FORMS[form],
        _bits(given.get("bits"), "bits", _GPTQ_BITS, where),
        _group(given, where),
        act_order=bool(given.get("desc_act")),
    )
    layers = _layers(given, "dynamic", where)
    return whole.with_layers(
        read_gptq(fields, f"{where} of {name}")
        for name, fields in layers.items()
        if not name.startswith("-:")  # which are not quantised
    )


def read_awq(given: dict[str, Any], where: str) -> Packed:
    """Read a quantization_config of the method awq, as AutoAWQ writes it."""
    # The others are what GPTQModel calls it.
    version = str(given.get("version") or given.get("checkpoint_format") or given.get("format") or "gemm")
    form = _AWQ_FORMS.get(version.lower())
    if form is None:
        raise refused(where, f"the version {version!r}")
    bits = given.get("bits", given.get("w_bit"))
    return Packed(form, _bits(bits, "bits", (4,), where), _group(given, where, "q_group_size"))


def read_auto_round(given: dict[str, Any], where: str) -> Packed:
    """Read a quantization_config of the method auto-round, as AutoRound writes it for integers."""
    packing = given.get("packing_format") or given.get("backend") or "auto"
    form = _AUTO_ROUND_FORMS.get(str(packing))
    if form is None:
        raise refused(where, f"the packing_format {packing!r}")
    if (given.get("data_type") or "int") not in ("int", "int_sym", "int_asym"):
        raise refused(where, f"the data_type {given['data_type']!r}")
    if given.get("act_bits") not in (None, *_NOT_QUANTISED):
        raise refused(where, f"act_bits {given['act_bits']!r}")
    if rotations := [name for name in _ROTATIONS if given.get(name)]:
        raise refused(where, f"a {rotations[0]}")
    bits = _bits(given.get("bits"), "bits", (4,) if form == "awq" else BITS, where)
    layers = _layers(given, "extra_config", where)
    return Packed(form, bits, _group(given, where)).with_layers(
        read_auto_round(fields, f"{where} of {name}")
        for name, fields in layers.items()
        if fields.get("bits") not in _NOT_QUANTISED
    )


def read_compressed_integers(given: dict[str, Any], groups: dict[str, dict[str, Any]], where: str) -> Packed:
    """Read a quantization_config of compressed-tensors whose groups have weights of integers."""
    refuse_formats(given, _FORMATS, where)
    bits: list[int] = []
    sizes: list[int] = []
    for name, weights in groups.items():
        bits += _bits(weights.get("num_bits", 8), f"{name}: num_bits", BITS, where)
        strategy = strategy_of(weights)
        if strategy not in ("tensor", "channel", "group"):
            raise refused(where, f"{name}: the strategy {strategy!r}")
        sizes += _group(weights, where) if strategy == "group" else (0,)
    zero_points = not any(weights.get("symmetric", True) for weights in groups.values())
    act_order = any(weights.get("actorder") in _ACT_ORDERS for weights in groups.values())
    return Packed("compressed", tuple(bits), tuple(sizes), zero_points, act_order)


def _layers(given: dict[str, Any], field: str, where: str) -> dict[str, dict[str, Any]]:
    """Return what is said of layers of their own, by their names, each beside what is said of all.

    Raises ValueError for layers that are packed in another way than all.
    """
    own = object_of(given, field)
    for name in own:
        fields = object_of(own, name)
        if others := [each for each in _WAYS if each in fields and fields[each] != given.get(each)]:
            raise refused(where, f"{name}: the {others[0]} {fields[others[0]]!r}, of a layer alone")
    return {name: given | object_of(own, name) | {field: None} for name in own}


def _bits(bits: Any, name: str, known: tuple[int, ...], where: str) -> tuple[int, ...]:
    if bits not in known:
        raise refused(where, f"{name} {bits!r}, which may be {' or '.join(map(str, known))}")
    return (bits,)


def _group(given: dict[str, Any], where: str, other: str = "group_size") -> tuple[int, ...]:
    size = given.get("group_size", given.get(other, _ALL))
    if type(size) is not int or (size < 1 and size != _ALL):
        raise refused(where, f"group_size {size!r}, which must be a number of inputs, or {_ALL} for all")
    return (0 if size == _ALL else size,)
