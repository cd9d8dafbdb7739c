"""How a folder of NVIDIA's ModelOpt has its weights quantised. Imports neither torch nor transformers.

A file of its own tells. By now config.json tells as well, as compressed-tensors' does with the `quant_algo`
beside, but of some not the sizes of groups.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from quire.engine.models.float8 import MXFP8, Block, Float8
from quire.engine.models.json_fields import read_json
from quire.engine.models.packed import Packed
from quire.engine.models.quantisation_config import method_of, object_of, quantisation_of, refused

MODELOPT: Final = "modelopt"
MODELOPT_NVFP4: Final = "modelopt_nvfp4"  # floats of 4 bits in blocks of 16, under names of its own
_FILE, _OWN = "hf_quant_config.json", "quantization"  # the second: an object in the file
_GROUP = 128  # inputs that have a scale, and rows and columns of a block, where nothing tells
_FOURS = ("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "NVFP4_AWQ")
_BLOCKS = ("FP8_PB_WO", "FP8_PB_REAL")
_BYTES = ("W8A16", "W8A8_SQ_PER_CHANNEL")


def with_modelopt(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json's fields, with what ModelOpt's own file says beside them.

    What config.json says goes first. Raises ValueError for a file that holds no object.
    """
    if quantisation_of(raw) and method_of(raw) != MODELOPT:
        return raw
    given = object_of(read_json(folder / _FILE) or {}, _OWN)
    if not given:
        return raw
    return raw | {"quantization_config": given | quantisation_of(raw) | {"quant_method": MODELOPT}}


def read_modelopt(given: dict[str, Any], where: str) -> Float8 | Packed | Literal["modelopt_nvfp4"] | None:
    """Read a quantization_config of the method modelopt, or what its own file says.

    None: weights are as they were, and at most a cache is to be quantised.
    """
    fields = object_of(given, _OWN) or given
    named = fields.get("quant_algo")
    if named is None:
        return None
    algorithm = str(named).upper()  # which some versions write in small letters
    if algorithm == "FP8":
        return Float8(row=True, matrix=True)
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return Float8(row=True)
    if algorithm in _BLOCKS:
        size = _group(fields, _GROUP, where)
        return Float8(block=Block(size, size))
    if algorithm == "MXFP8":
        return MXFP8
    if algorithm in _FOURS:
        if _group(fields, 16, where) != 16:
            raise refused(where, f"{algorithm} in groups of {_group(fields, 16, where)}")
        return MODELOPT_NVFP4
    if algorithm == "W4A16_AWQ":
        return Packed(MODELOPT, (4,), (_group(fields, _GROUP, where),), zero_points=False)
    if algorithm in _BYTES:
        return Packed(MODELOPT, (8,), (0,), zero_points=False)
    raise refused(where, f"ModelOpt's quant_algo {named!r}")


def _group(fields: dict[str, Any], default: int, where: str) -> int:
    """Return how many inputs have a scale, as one of the two places says it."""
    groups = object_of(fields, "config_groups")
    sizes = [object_of(object_of(groups, name), "weights").get("group_size") for name in groups]
    found = {size for size in (fields.get("group_size"), *sizes) if size}
    if len(found) > 1 or any(type(size) is not int or size < 1 for size in found):
        raise refused(where, f"a group_size of {' and '.join(sorted(map(repr, found)))}")
    return next(iter(found), default)
