"""A folder's configuration as transformers reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from quire.engine.models.dtype_names import with_usual_names
from quire.engine.models.general.text_part import give_text_class
from quire.engine.models.json_fields import read_json

SEE_TYPES = "; docs/models.md tells which types run"


def read_described(folder: Path) -> PreTrainedConfig:
    """Return the configuration, which asks for no attention weights, and for outputs by name.

    Raises ValueError.
    """
    where = folder / "config.json"
    raw = read_json(where) or {}
    try:
        whole = _read(folder, raw)
    except Exception as error:  # beside its own kinds, a configuration's code may raise anything
        if "auto_map" in raw:
            raise ValueError(
                f"{where}: transformers has no model of type {raw.get('model_type')!r}, and the code that "
                "auto_map names is not run: no code of a model's folder is"
            ) from error
        if (kind := raw.get("model_type")) not in CONFIG_MAPPING:
            told = f"model type {kind!r} is not known to transformers {transformers.__version__}"
            raise ValueError(f"{where}: {told}{SEE_TYPES}") from error
        raise ValueError(f"{where}: transformers cannot read it: {' '.join(str(error).split())}") from error
    for part in (whole, whole.get_text_config(decoder=True)):
        part.output_attentions = False  # no kernel has them, nor does a server give them
        part.return_dict = True  # its own code looks for its decoder's output by name
    give_text_class(whole)
    return whole


def _read(folder: Path, raw: dict[str, Any]) -> PreTrainedConfig:
    named = with_usual_names(raw)
    if named == raw or raw.get("model_type") not in CONFIG_MAPPING:
        whole: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
        return whole
    return CONFIG_MAPPING[raw["model_type"]].from_dict(named)
