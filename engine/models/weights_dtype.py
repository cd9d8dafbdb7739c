"""The dtype of a model whose configuration names none: that of its weights, as transformers has it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from quire.engine.models.dtype_names import FIELDS, usual_name
from quire.engine.models.json_fields import read_json
from quire.engine.models.weight_files import INDEX, SINGLE_FILE, open_weights, weight_files

_DTYPES: dict[str, Literal["float32", "float16", "bfloat16"]] = {
    "F64": "float32",  # in which nothing is computed
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
}
_NAMES = {name: name for name in _DTYPES.values()}


def names_dtype(folder: Path) -> bool:
    """Return whether config.json names a dtype, of all or of text. Raises ValueError if it is no object."""
    raw = read_json(folder / "config.json") or {}
    of_text = raw.get("text_config")
    parts = (raw, of_text if isinstance(of_text, dict) else {})
    return any(usual_name(part.get(field)) is not None for part in parts for field in FIELDS)


def weights_dtype(folder: Path) -> Literal["float32", "float16", "bfloat16"]:
    """Return what an index names, or the dtype of the first file's first floating weight, by its header.

    float32 where no weight is of a kind that is computed with, or no file is here. Raises ValueError for a
    file that is not whole.
    """
    try:
        files = weight_files(folder)
    except ValueError:  # which is for loading to tell
        return "float32"
    if files[0].name != SINGLE_FILE:
        metadata = (read_json(folder / INDEX) or {}).get("metadata")
        named = usual_name(metadata.get("dtype")) if isinstance(metadata, dict) else None
        if isinstance(named, str) and named in _NAMES:
            return _NAMES[named]
    file = open_weights(files[0])
    kinds = (file.get_slice(name).get_dtype() for name in file.keys())  # noqa: SIM118 - it is no mapping
    return next((_DTYPES[kind] for kind in kinds if kind in _DTYPES), "float32")
