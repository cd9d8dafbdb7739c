"""Has transformers' loader, which renames and merges what files have, read from what we make of the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from quire.engine.models.config import ModelConfig
from quire.engine.models.expansion import expand_files
from quire.engine.models.general.kept_parts import KeptParts
from quire.engine.models.general.naming import naming_of
from quire.engine.models.general.rounded_parts import round_slices
from quire.engine.models.merging import merged_tensors
from quire.engine.models.mxfp4_files import expand_mxfp4
from quire.engine.models.quantisation import MXFP4, ROUNDED, Quantised, of_files, weights_of
from quire.engine.models.weight_files import listed, open_weights


@contextmanager
def slices_of(
    files: list[Path], config: ModelConfig, dtype: torch.dtype, model: Any, mapping: list[Any]
) -> Iterator[dict[str, Any]]:
    """Open files; return their tensors by name, of which nothing is read yet.

    config: how weights are quantised, which are read as the numbers of the dtype that they stand for, or that
    they are rounded, and what adapter is merged into them before. mapping: as transformers' loader has it, of
    names in files to those in the model.
    """
    with ExitStack() as stack:
        opened = [stack.enter_context(open_weights(path)) for path in files]
        quantised = of_files(config.quantised)
        slices = expanded_slices(opened, quantised, dtype)
        if config.adapter is not None:
            bases = expanded_slices(opened, quantised, torch.float32)
            tied = config.tie_word_embeddings or config.adapter.unties
            naming = naming_of(model, mapping, tied=tied)
            slices |= merged_tensors(bases, config.adapter, naming, dtype, torch.device("cpu"))
        if weights_of(config.quantised) == ROUNDED:  # what is merged is
            slices = round_slices(model, slices, mapping, dtype)
        yield slices


def expanded_slices(opened: list[Any], quantised: Quantised | None, dtype: torch.dtype) -> dict[str, Any]:
    """Return the tensors of open files by name, quantised weights as the numbers that they stand for."""
    files = expand_files(opened, quantised, dtype, torch.device("cpu"))
    slices = {name: file.get_slice(name) for file in files for name in file.offset_keys()}
    return expand_mxfp4(slices, dtype) if quantised == MXFP4 else slices


def reading_expanded(
    cls: type, files: list[Path], model_config: ModelConfig, dtype: torch.dtype, kept: KeptParts
) -> type:
    """Return a class of models that reads quantised weights of files as the numbers that they stand for.

    An adapter is merged into them. kept: those that stay in few bits. Of transformers' own files it is
    given none.
    """

    def load(
        model: Any, state: Any, none: Any, config: Any, expected: list[str] | None = None
    ) -> tuple[Any, Any]:
        mapping = config.weight_mapping or []
        with slices_of(files, model_config, dtype, model, mapping) as slices:
            others = kept.take_sources(model, slices, mapping)
            kept.take(model, {})
            loaded: tuple[Any, Any] = cls._load_pretrained_model(model, others, None, config, expected)  # type: ignore[attr-defined]
            kept.fill()
            return loaded

    return loading_by(cls, load, files[0].parent)


def reading_whole(cls: type, folder: Path) -> type:
    """Return a class of models that reads files as they are, and says by name what cannot be merged."""
    return loading_by(cls, cls._load_pretrained_model, folder)  # type: ignore[attr-defined]


def loading_by(cls: type, load: Callable[..., tuple[Any, Any]], folder: Path | None = None) -> type:
    """Return the class with another way to load, under its own name, which transformers looks at.

    It raises ValueError by the names of weights that cannot be made of what a folder's files have, which
    transformers only logs.
    """

    def told(model: Any, state: Any, *others: Any) -> tuple[Any, Any]:
        loaded = load(model, state, *others)
        problems = [f"{name} cannot be made: {_last(text)}" for name, text in _failed(loaded).items()]
        if problems:
            raise ValueError(f"{folder} does not fit its config.json: {listed(problems)}")
        return loaded

    named = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls,), named | {"_load_pretrained_model": staticmethod(told)})


def _failed(loaded: tuple[Any, Any]) -> dict[str, str]:
    """Return what was raised for each weight that files have several tensors of, as transformers notes it."""
    errors: dict[str, str] = loaded[0].conversion_errors
    return errors


def _last(text: str) -> str:
    """Return the message of a traceback, which a line of where it was may follow."""
    return text.split("\nError", maxsplit=1)[0].splitlines()[-1]
