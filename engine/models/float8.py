"""Which weights of 8-bit floats a config.json tells of. Imports neither torch nor transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.engine.models.quantisation_config import refuse_formats, refused, strategy_of

_FORMATS = ("float-quantized", "naive-quantized")  # the second: where activations are not to be quantised
_OF_POWERS = "mxfp8-quantized"


class Block(NamedTuple):
    """Rows and columns of a matrix that have one scale."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Float8:
    """What has a scale in weights of 8-bit floats, which stand for their products with the scales.

    Which weights are so is told by the files alone: those of 8-bit floats. powers: scales are bytes,
    exponents of 2 (OCP Microscaling Formats 1.0).
    """

    block: Block | None = None
    row: bool = False
    matrix: bool = False
    powers: bool = False

    def block_of(self, weight: list[int], scales: list[int]) -> Block | None:
        """Return what one of the scales is of, by the shapes of weight and scales; None if they do not fit.

        A weight may be a stack of matrices [E, rows, columns]; scales stand as the matrices do.
        """
        if len(weight) < 2:
            return None
        *stack, rows, columns = weight
        if (block := self.block) is not None:
            of_rows, of_columns = -(-rows // block.rows), -(-columns // block.columns)
            # The second as ModelOpt has them.
            if scales in ([*stack, of_rows, of_columns], [*stack, of_rows, 1, of_columns, 1]):
                return block
        if self.row and scales in ([*stack, rows, 1], [*stack, rows]):
            return Block(1, columns)
        each = [stack, [*stack, 1], [*stack, 1, 1]]
        return Block(rows, columns) if self.matrix and scales in each else None


MXFP8 = Float8(block=Block(1, 32), powers=True)


def read_fp8(given: dict[str, Any], where: str) -> Float8:
    """Read a quantization_config of the method fp8."""
    if given.get("weight_block_size") is None:
        return Float8(row=True, matrix=True)
    return Float8(block=_block(given["weight_block_size"], "weight_block_size", where))


def read_fbgemm(given: dict[str, Any], where: str) -> Float8:
    """Read a quantization_config of the method fbgemm_fp8, which has one way."""
    return Float8(row=True)


def read_compressed_floats(given: dict[str, Any], groups: dict[str, dict[str, Any]], where: str) -> Float8:
    """Read a quantization_config of compressed-tensors whose groups have weights of floats."""
    if given.get("format") == _OF_POWERS:
        refuse_formats(given, (_OF_POWERS,), where)
        for name, weights in groups.items():
            if [weights.get(each) for each in ("type", "num_bits", "group_size")] != ["float", 8, 32]:
                told = f"{weights.get('num_bits')} bits in groups of {weights.get('group_size')}"
                raise refused(where, f"{name}: weights of {told}")
        return MXFP8
    refuse_formats(given, _FORMATS, where)
    found = [_read_group(name, weights, where) for name, weights in groups.items()]
    blocks = {each.block for each in found if each.block is not None}
    if len(blocks) > 1:
        raise refused(where, f"blocks of different sizes, {sorted([*each] for each in blocks)}")
    row, matrix = any(each.row for each in found), any(each.matrix for each in found)
    return Float8(next(iter(blocks), None), row, matrix)


def _read_group(name: str, weights: dict[str, Any], where: str) -> Float8:
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if (kind, bits) != ("float", 8):
        raise refused(where, f"{name}: weights of {bits} bits and the type {kind!r}")
    if not weights.get("symmetric", True):
        raise refused(where, f"{name}: weights with zero points")
    strategy = strategy_of(weights)
    if strategy == "block":
        return Float8(block=_block(weights.get("block_structure"), "block_structure", where))
    if strategy not in ("tensor", "channel"):
        raise refused(where, f"{name}: the strategy {strategy!r}")
    return Float8(row=strategy == "channel", matrix=strategy == "tensor")


def _block(sizes: Any, name: str, where: str) -> Block:
    """Read the sizes of a block: a list, or as older ones have it "128x128"."""
    if isinstance(sizes, str):
        sizes = [int(size) if size.isdigit() else size for size in sizes.split("x")]
    whole = isinstance(sizes, list) and all(type(size) is int and size > 0 for size in sizes)
    if not whole or len(sizes) != 2:
        raise refused(where, f"{name} {sizes!r}, which must be two sizes")
    return Block(*sizes)
