"""Which of the two ways a model runs: by a decoder of Quire's own, or by transformers' modelling code."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from quire.engine.config import ModelImpl
from quire.engine.models.adapter_config import Adapter, read_adapter
from quire.engine.models.asked_quantisation import with_quantization
from quire.engine.models.config import ModelConfig
from quire.engine.models.json_fields import read_json
from quire.engine.models.merging import unties
from quire.engine.models.model_folders import ModelFolders
from quire.engine.models.native_config import EMBEDDINGS, HEADS, has_native, read_native
from quire.engine.models.pooling import Runner, read_pooling
from quire.engine.models.tokenizer_json import eos_of_tokenizer
from quire.engine.models.weights_dtype import names_dtype, weights_dtype

logger = logging.getLogger("quire.engine")


def read_model(
    folder: str | Path,
    model_impl: ModelImpl = "auto",
    runner: Runner = "auto",
    adapter: Path | None = None,
    quantization: str | None = None,
) -> ModelConfig:
    """Return the shape of the model in a folder; auto: native where there is such a decoder.

    runner: whether it is to generate text or to pool; auto: as the folder says. A model whose configuration
    names no token of its own that ends a text has its tokenizer's, and one that names no dtype that of its
    weights, if they are here. adapter: the folder of one that is merged into its weights. quantization: the
    method by which its weights are quantised, or are to be rounded as they are loaded.

    Raises ValueError that names what cannot run and why.
    """
    folder = Path(folder)
    raw = read_json(folder / "config.json")
    pooling = read_pooling(folder, runner)
    if model_impl == "native" or raw is None:
        config = read_native(folder)
    elif model_impl == "auto" and has_native(raw):
        config = _native_or_general(folder)
    else:
        config = _general(folder)
    if config.quantised is None and not names_dtype(folder):
        config = replace(config, dtype=weights_dtype(folder))
    config = replace(config, eos_token_ids=_sampled(config, config.eos_token_ids))
    if not config.eos_token_ids:
        of_tokenizer = eos_of_tokenizer(ModelFolders(folder, adapter).tokenizer)
        config = replace(config, eos_token_ids=_sampled(config, of_tokenizer))
    if quantization is not None:
        config = with_quantization(config, folder, quantization)
    if adapter is not None:
        config = config.with_adapter(_read_adapter(adapter, folder, config))
    return config if pooling is None else config.with_pooling(pooling)


def _sampled(config: ModelConfig, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Return those tokens that the model has: -1 stands for none, and tokenizers may have further ones."""
    return tuple(token for token in tokens if 0 <= token < config.vocab_size)


def _read_adapter(adapter: Path, folder: Path, config: ModelConfig) -> Adapter:
    """Return what is to be merged into a model. Raises ValueError that names what cannot be."""
    read = read_adapter(adapter)
    if not config.tie_word_embeddings:
        return read
    ends = HEADS, EMBEDDINGS
    if config.implementation == "transformers":
        from quire.engine.models.general.naming import ends_of  # transformers takes seconds to import

        ends = ends_of(folder)
    return replace(read, unties=unties(read, *ends))


def _native_or_general(folder: Path) -> ModelConfig:
    """Return what the native decoder makes of a folder, or of what that cannot do transformers' code.

    Raises ValueError that says why it is not native, if neither can.
    """
    try:
        return read_native(folder)
    except ValueError as why:
        try:
            config = _general(folder)
        except ValueError:
            raise why from None
        logger.info("It runs by transformers' code, since no native decoder has this: %s", why)
        return config


def _general(folder: Path) -> ModelConfig:
    from quire.engine.models.general.config import read_general  # transformers takes seconds to import

    return read_general(folder)
