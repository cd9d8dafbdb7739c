"""The tokenizer of a model that is to run, by which texts are read as it was trained on them."""

from __future__ import annotations

from quire.engine.config import EngineConfig
from quire.engine.models.hub import TOKENIZER_FILES
from quire.engine.models.model_folders import resolve_folders
from quire.engine.models.pooling import read_pooling
from quire.service.text.tokenizer import Tokenizer


def tokenizer_of(config: EngineConfig, template: str | None) -> Tokenizer:
    """Return it with a chat template, as `Tokenizer.from_folder` has that. Raises ValueError."""
    # The engine fetches the weights.
    folders = resolve_folders(config.model, config.lora, files=TOKENIZER_FILES)
    pooling = read_pooling(folders.base, config.runner)
    lower_case = pooling is not None and pooling.texts.lower_case
    return Tokenizer.from_folder(folders.tokenizer, template or folders.template, lower_case=lower_case)
