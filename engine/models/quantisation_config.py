"""What a config.json says of quantised weights. Imports neither torch nor transformers."""

from __future__ import annotations

from typing import Any

_LOADED = (
    "8-bit floats are loaded, by the methods fp8, fbgemm_fp8, compressed-tensors and modelopt, integers by "
    "gptq, awq, auto-round, compressed-tensors, modelopt and hqq, what bitsandbytes has, NVFP4 by "
    "compressed-tensors and modelopt, and MXFP4 by compressed-tensors and of gpt-oss"
)


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


def compressed_groups(given: dict[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Return how weights are quantised by compressed-tensors, by the names of groups of layers.

    Raises ValueError where there are none, and for what is done to weights beside that.
    """
    groups = object_of(given, "config_groups")
    if not groups:
        raise refused(where, "no config_groups")
    sparsity = object_of(given, "sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise refused(where, f"a sparsity_config of the format {sparsity['format']!r}")
    if object_of(given, "transform_config").get("config_groups"):
        raise refused(where, "a transform_config")
    found = {name: object_of(object_of(groups, name), "weights") for name in groups}
    for name, weights in found.items():
        if not weights:
            raise refused(where, f"{name}: no weights")
    return found


def refuse_formats(given: dict[str, Any], formats: tuple[str, ...], where: str) -> None:
    """Raise ValueError if all weights, or those of a group, are in another of compressed-tensors' formats."""
    groups = object_of(given, "config_groups")
    for each in (given, *(object_of(groups, name) for name in groups)):
        if (each is given or each.get("format") is not None) and each.get("format") not in formats:
            raise refused(where, f"the format {each.get('format')!r}")


def strategy_of(weights: dict[str, Any]) -> str:
    """Return what has a scale: as compressed-tensors reads it where none is given."""
    return weights.get("strategy") or ("tensor" if weights.get("group_size") is None else "group")


def object_of(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object that is among the fields; an empty one, if what is there is none."""
    value = fields.get(name)
    return value if isinstance(value, dict) else {}


def refused(where: str, what: str) -> ValueError:
    return ValueError(f"{where}: quantization_config has {what}; of quantised weights only {_LOADED}")
