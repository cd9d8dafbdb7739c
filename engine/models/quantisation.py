"""How a model's weights are quantised. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from quire.engine.models.float8 import Float8, read_compressed_floats, read_fbgemm, read_fp8
from quire.engine.models.measured_cache import measured_cache
from quire.engine.models.modelopt import MODELOPT, read_modelopt
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
COMPRESSED_MXFP4: Final = "compressed_mxfp4"  # of 4 bits in blocks of 32, as compressed-tensors has them
BITSANDBYTES: Final = "bitsandbytes"  # codes of 4 bits, or bytes: files tell
GGUF: Final = "gguf"  # any kinds of llama.cpp's: files tell
HQQ: Final = "hqq"  # integers of 1 to 4 bits, or bytes: files tell
ROUNDED: Final = "rounded"  # numbers, which become 8-bit floats as they are loaded
Weights: TypeAlias = (
    Float8
    | Packed
    | Literal[
        "bitsandbytes", "gguf", "hqq", "nvfp4", "modelopt_nvfp4", "mxfp4", "compressed_mxfp4", "rounded"
    ]
)
_FOURS: dict[str, tuple[int, Literal["nvfp4", "compressed_mxfp4"]]] = {  # by formats of compressed-tensors
    "nvfp4-pack-quantized": (16, NVFP4),
    "mxfp4-pack-quantized": (32, COMPRESSED_MXFP4),
}
_READERS: dict[str, Callable[[dict[str, Any], str], Weights | None]] = {
    "fp8": read_fp8,
    "fbgemm_fp8": read_fbgemm,
    "gptq": read_gptq,
    "awq": read_awq,
    MODELOPT: read_modelopt,
    "auto-round": read_auto_round,
    "intel/auto-round": read_auto_round,  # as older ones call it
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Weights beside scales of keys and values, which were measured for a cache of few bits.

    weights: how they are quantised; None: they are not. cache: what numbers the scales are for, in words.
    """

    weights: Weights | None
    cache: str


Quantised: TypeAlias = Weights | Measured


def weights_of(quantised: Quantised | None) -> Weights | None:
    """Return how weights are quantised, whatever is measured beside them."""
    return quantised.weights if isinstance(quantised, Measured) else quantised


def of_files(quantised: Quantised | None) -> Quantised | None:
    """Return how files have weights, whatever these are rounded to as they are loaded."""
    if weights_of(quantised) != ROUNDED:
        return quantised
    return replace(quantised, weights=None) if isinstance(quantised, Measured) else None


def read_quantised(raw: dict[str, Any], where: str) -> Quantised | None:
    """Return how a config.json says that weights are quantised; None if none are.

    Raises ValueError that says how they are, if it is in a way that is not read. Not of MXFP4.
    """
    given = quantisation_of(raw)
    if not given:
        return None
    weights, cache = _read_weights(given, method_of(raw), where), measured_cache(given)
    return Measured(weights, cache) if cache else weights


def _read_weights(given: dict[str, Any], method: str, where: str) -> Weights | None:
    if method == BITSANDBYTES:
        return BITSANDBYTES
    if method == HQQ:
        return HQQ
    if method == GGUF:
        return GGUF
    if method in _READERS:
        return _READERS[method](given, where)
    if method != "compressed-tensors":
        raise refused(where, f"the method {method!r}")
    groups = compressed_groups(given, where)
    kinds = {weights.get("type", "int") for weights in groups.values()}
    if kinds == {"int"}:
        return read_compressed_integers(given, groups, where)
    if (form := given.get("format")) in _FOURS:
        size, found = _FOURS[form]
        _refuse_unless_fours(given, groups, form, size, where)
        return found
    return read_compressed_floats(given, groups, where)


def _refuse_unless_fours(
    given: dict[str, Any], groups: dict[str, dict[str, Any]], form: str, size: int, where: str
) -> None:
    refuse_formats(given, (form,), where)
    for name, weights in groups.items():
        if [weights.get(each) for each in ("type", "num_bits", "group_size")] != ["float", 4, size]:
            told = f"{weights.get('num_bits')} bits in groups of {weights.get('group_size')}"
            raise refused(where, f"{name}: weights of {told}")
        if not weights.get("symmetric", True):
            raise refused(where, f"{name}: weights with zero points")
