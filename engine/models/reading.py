"""Which of the two ways a model runs: by a decoder of Quire's own, or by transformers' modelling code."""

from __future__ import annotations

from pathlib import Path

from quire.engine.config import ModelImpl
from quire.engine.models.config import ModelConfig, has_native
from quire.engine.models.json_fields import read_json


def read_model(folder: str | Path, model_impl: ModelImpl = "auto") -> ModelConfig:
    """Return the shape of the model in a folder; auto: native where there is such a decoder.

    Raises ValueError that names what cannot run and why.
    """
    folder = Path(folder)
    raw = read_json(folder / "config.json")
    if model_impl == "native" or raw is None or (model_impl == "auto" and has_native(raw)):
        return ModelConfig.from_folder(folder)
    from quire.engine.models.general.config import read_general  # transformers takes seconds to import

    return read_general(folder)
