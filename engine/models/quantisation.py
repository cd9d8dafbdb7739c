"""How a model's weights are quantised. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias

from quire.engine.models.float8 import Float8, read_compressed_floats, read_fp8
from quire.engine.models.modelopt import NAME, ModelOpt, read_modelopt
from quire.engine.models.packed import Packed, read_auto_round, read_awq, read_compressed_integers, read_gptq
from quire.engine.models.quantisation_config import (
    compressed_groups,
    method_of,
    quantisation_of,
    refuse_formats,
    refused,
)

MXFP4: Final = "mxfp4"  # floats of 4 bits in blocks, as gpt-oss has them
NVFP4: Final = "nvfp4"  # floats of 4 bits in blocks of 16, as compressed-tensors has them
BITSANDBYTES: Final = "bitsandbytes"  # codes of 4 bits, or bytes: files tell
HQQ: Final = "hqq"  # integers of 1 to 4 bits, or bytes: files tell
Quantised: TypeAlias = Float8 | Packed | ModelOpt | Literal["bitsandbytes", "hqq", "nvfp4", "mxfp4"]
_NVFP4_FORMAT = "nvfp4-pack-quantized"  # of compressed-tensors
_OF_NVFP4 = {"type": "float", "num_bits": 4, "group_size": 16}
_READERS: dict[str, Callable[[dict[str, Any], str], Float8 | Packed]] = {
    "fp8": read_fp8,
    "gptq": read_gptq,
    "awq": read_awq,
    "auto-round": read_auto_round,
    "intel/auto-round": read_auto_round,  # as older ones call it
}


def read_quantised(raw: dict[str, Any], where: str) -> Quantised | None:
    """Return how a config.json says that weights are quantised; None if none are.

    Raises ValueError that says how they are, if it is in a way that is not read. Not of MXFP4.
    """
    given = quantisation_of(raw)
    if not given:
        return None
    method = method_of(raw)
    if method == BITSANDBYTES:
        return BITSANDBYTES
    if method == HQQ:
        return HQQ
    if method == NAME:
        return read_modelopt(given, where)
    if method not in (*_READERS, "compressed-tensors"):
        raise refused(where, f"the method {method!r}")
    if given.get("kv_cache_scheme") is not None:
        raise refused(where, "a kv_cache_scheme, which --kv-cache-dtype does not follow")
    if method in _READERS:
        return _READERS[method](given, where)
    groups = compressed_groups(given, where)
    kinds = {weights.get("type", "int") for weights in groups.values()}
    if kinds == {"int"}:
        return read_compressed_integers(given, groups, where)
    if given.get("format") == _NVFP4_FORMAT:
        _refuse_unless_nvfp4(given, groups, where)
        return NVFP4
    return read_compressed_floats(given, groups, where)


def _refuse_unless_nvfp4(given: dict[str, Any], groups: dict[str, dict[str, Any]], where: str) -> None:
    refuse_formats(given, (_NVFP4_FORMAT,), where)
    for name, weights in groups.items():
        if any(weights.get(field) != value for field, value in _OF_NVFP4.items()):
            told = f"{weights.get('num_bits')} bits in groups of {weights.get('group_size')}"
            raise refused(where, f"{name}: weights of {told}")
