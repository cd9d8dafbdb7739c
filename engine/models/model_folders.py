"""The folders that a model is made of: its own, and that of an adapter that is merged into it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from quire.engine.models.adapter_config import CONFIG, FILE, base_of, is_adapter, read_adapter
from quire.engine.models.gguf.folder import only_file
from quire.engine.models.hub import FILES, TOKENIZER_FILES, check_model, resolve_model
from quire.engine.models.tokenizer_json import has_tokenizer

ADAPTER_FILES = [FILE, *TOKENIZER_FILES]
_TEMPLATE = "chat_template.jinja"


class ModelFolders(NamedTuple):
    """Where a model's configuration and weights are, and what is merged into these."""

    base: Path
    adapter: Path | None = None

    @property
    def tokenizer(self) -> Path:
        """Return the folder of the tokenizer: the adapter's if it has one, since it was trained with that."""
        if self.adapter is not None and has_tokenizer(self.adapter):
            return self.adapter
        return self.base

    @property
    def template(self) -> str | None:
        """Return a chat template that the adapter has beside no tokenizer; None: the tokenizer's is used."""
        if self.adapter is None or self.tokenizer == self.adapter or not (self.adapter / _TEMPLATE).is_file():
            return None
        return str(self.adapter / _TEMPLATE)


def local_folders(model: str, lora: str | None) -> ModelFolders | None:
    """Return the folders of a model if they are all here, and none is of a GGUF file; nothing is downloaded.

    Raises ValueError for an adapter that names no model.
    """
    base, adapter = Path(model).expanduser(), None if lora is None else Path(lora).expanduser()
    if is_adapter(base):
        base, adapter = Path(base_of(base)[0]).expanduser(), base
    here = base.is_dir() and only_file(base) is None and (adapter is None or adapter.is_dir())
    return ModelFolders(base, adapter) if here else None


def check_names(model: str, lora: str | None) -> None:
    """Raise ValueError for what is no folder of a model or of an adapter, and no form of a Hub id either."""
    folder = Path(model).expanduser()
    if is_adapter(folder):
        _refuse_two(model, lora)
        read_adapter(folder)
        _check_base(base_of(folder)[0], model)
        return
    check_model(model)
    if lora is not None:
        _check_lora(lora)


def resolve_folders(
    model: str,
    lora: str | None,
    on_progress: Callable[[int, int], None] | None = None,
    files: list[str] = FILES,
) -> ModelFolders:
    """Return the folders of a model, downloaded where they are on the Hub.

    model: a folder or a Hub id, of a model or of an adapter, which names its base model. lora: the same of an
    adapter that is merged into it. Of the adapter all files are fetched, of the model `files`, as
    `resolve_model` does. Raises ValueError that says what was tried.
    """
    base = resolve_model(model, on_progress, files)
    if is_adapter(base):
        _refuse_two(model, lora)
        adapter = resolve_model(model, on_progress, ADAPTER_FILES)
        name, revision = base_of(adapter)
        _check_base(name, model)
        return ModelFolders(resolve_model(name, on_progress, files, revision), adapter)
    return ModelFolders(base, None if lora is None else resolve_model(lora, on_progress, ADAPTER_FILES))


def merged_names(model: str, lora: str | None, folders: ModelFolders) -> tuple[str, str] | None:
    """Return what an adapter and its base model are called, None if there is no adapter."""
    if folders.adapter is None:
        return None
    return (model, base_of(folders.adapter)[0]) if lora is None else (lora, model)


def _refuse_two(model: str, lora: str | None) -> None:
    if lora is not None:
        raise ValueError(
            f"--lora {lora}: {model} is an adapter itself, and one is merged; give its base model instead of "
            "it, or leave --lora out"
        )


def _check_lora(lora: str) -> None:
    try:
        folder = Path(lora).expanduser()
        if folder.is_dir():
            read_adapter(folder)
        else:
            check_model(lora)
    except ValueError as error:
        raise ValueError(f"--lora: {error}") from error


def _check_base(base: str, adapter: str) -> None:
    """Raise ValueError if what an adapter names as its base model is neither a folder here nor a Hub id."""
    try:
        check_model(base)
    except ValueError as error:
        raise ValueError(
            f"{adapter}: the base model that {CONFIG} names is not here: {error}. Give the model, and the "
            f"adapter with --lora {adapter}"
        ) from error
