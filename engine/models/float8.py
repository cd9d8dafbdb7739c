"""Which weights of 8-bit floats a config.json tells of. Imports neither torch nor transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

MXFP4: Final = "mxfp4"  # floats of 4 bits in blocks, as gpt-oss has them
METHODS = ("fp8", "compressed-tensors")
_FORMATS = ("float-quantized", "naive-quantized")  # the second: where activations are not to be quantised
_LOADED = "8-bit floats are loaded, by the methods fp8 and compressed-tensors, and gpt-oss's MXFP4"


class Block(NamedTuple):
    """Rows and columns of a matrix that have one scale."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Float8:
    """What has a scale in weights of 8-bit floats, which stand for their products with the scales.

    Which weights are so is told by the files alone: those of 8-bit floats.
    """

    block: Block | None = None
    row: bool = False
    matrix: bool = False

    def block_of(self, weight: list[int], scales: list[int]) -> Block | None:
        """Return what one of the scales is of, by the shapes of weight and scales; None if they do not fit.

        A weight may be a stack of matrices [E, rows, columns]; scales stand as the matrices do.
        """
        if len(weight) < 2:
            return None
        *stack, rows, columns = weight
        block = self.block
        if block is not None and scales == [*stack, -(-rows // block.rows), -(-columns // block.columns)]:
            return block
        if self.row and scales in ([*stack, rows, 1], [*stack, rows]):
            return Block(1, columns)
        each = [stack, [*stack, 1], [*stack, 1, 1]]
        return Block(rows, columns) if self.matrix and scales in each else None


Quantised: TypeAlias = Float8 | Literal["mxfp4"]


def quantisation_of(raw: dict[str, Any]) -> dict[str, Any]:
    """Return what a config.json says of quantised weights; nothing, if it does not."""
    text = raw.get("text_config")
    for fields in (raw, text if isinstance(text, dict) else {}):
        for name in ("quantization_config", "compression_config"):
            if fields.get(name):
                return fields[name] if isinstance(fields[name], dict) else {"quant_method": fields[name]}
    return {}


def method_of(raw: dict[str, Any]) -> str:
    """Return by which method the weights are quantised; "" if they are not."""
    given = quantisation_of(raw)
    return str(given.get("quant_method", "of no name")) if given else ""


def read_float8(raw: dict[str, Any], where: str) -> Float8 | None:
    """Return how the weights are 8-bit floats; None if none are quantised.

    Raises ValueError that says how they are, if it is in another way.
    """
    given = quantisation_of(raw)
    if not given:
        return None
    method = method_of(raw)
    if method not in METHODS:
        raise _refused(where, f"the method {method!r}")
    if given.get("kv_cache_scheme") is not None:
        raise _refused(where, "a kv_cache_scheme, which --kv-cache-dtype does not follow")
    return _read_fp8(given, where) if method == "fp8" else _read_compressed(given, where)


def _read_fp8(given: dict[str, Any], where: str) -> Float8:
    if given.get("weight_block_size") is None:
        return Float8(row=True, matrix=True)
    return Float8(block=_block(given["weight_block_size"], "weight_block_size", where))


def _read_compressed(given: dict[str, Any], where: str) -> Float8:
    groups = _object(given, "config_groups")
    if not groups:
        raise _refused(where, "no config_groups")
    _refuse_format(given, where)
    sparsity = _object(given, "sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise _refused(where, f"a sparsity_config of the format {sparsity['format']!r}")
    if _object(given, "transform_config").get("config_groups"):
        raise _refused(where, "a transform_config")
    found = [_read_group(name, _object(groups, name), where) for name in groups]
    blocks = {each.block for each in found if each.block is not None}
    if len(blocks) > 1:
        raise _refused(where, f"blocks of different sizes, {sorted([*each] for each in blocks)}")
    row, matrix = any(each.row for each in found), any(each.matrix for each in found)
    return Float8(next(iter(blocks), None), row, matrix)


def _read_group(name: str, group: dict[str, Any], where: str) -> Float8:
    weights = _object(group, "weights")
    if not weights:
        raise _refused(where, f"{name}: no weights")
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if (kind, bits) != ("float", 8):
        raise _refused(where, f"{name}: weights of {bits} bits and the type {kind!r}")
    if group.get("format") is not None:
        _refuse_format(group, where)
    if not weights.get("symmetric", True):
        raise _refused(where, f"{name}: weights with zero points")
    strategy = weights.get("strategy") or ("tensor" if weights.get("group_size") is None else "group")
    if strategy == "block":
        return Float8(block=_block(weights.get("block_structure"), "block_structure", where))
    if strategy not in ("tensor", "channel"):
        raise _refused(where, f"{name}: the strategy {strategy!r}")
    return Float8(row=strategy == "channel", matrix=strategy == "tensor")


def _refuse_format(given: dict[str, Any], where: str) -> None:
    if given.get("format") not in _FORMATS:
        raise _refused(where, f"the format {given.get('format')!r}")


def _object(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object that is among the fields; an empty one, if what is there is none."""
    value = fields.get(name)
    return value if isinstance(value, dict) else {}


def _block(sizes: Any, name: str, where: str) -> Block:
    """Read the sizes of a block: a list, or as older ones have it "128x128"."""
    if isinstance(sizes, str):
        sizes = [int(size) if size.isdigit() else size for size in sizes.split("x")]
    whole = isinstance(sizes, list) and all(type(size) is int and size > 0 for size in sizes)
    if not whole or len(sizes) != 2:
        raise _refused(where, f"{name} {sizes!r}, which must be two sizes")
    return Block(*sizes)


def _refused(where: str, what: str) -> ValueError:
    return ValueError(f"{where}: quantization_config has {what}; of quantised weights only {_LOADED}")
