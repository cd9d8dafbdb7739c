"""A GGUF file as a folder that has what `save_pretrained` writes, but for weights, which stay in the file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

from quire.engine.models.gguf.architectures import architecture_of
from quire.engine.models.gguf.config import config_of, generation_of
from quire.engine.models.gguf.header import SUFFIX, parts_of, read_headers, stem_of
from quire.engine.models.gguf.tokenizer import save_tokenizer

_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_FOR_IMAGES = "mmproj"


def is_gguf(path: Path) -> bool:
    """Return whether a path is, by its name, that of a GGUF file that is here."""
    return path.suffix == SUFFIX and path.is_file()


def check_file(path: Path) -> None:
    """Raise ValueError, by its header, for a file that is not whole, or of a model that is not served."""
    headers = read_headers(path)
    try:
        architecture_of(headers.metadata)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


def only_file(folder: Path) -> Path | None:
    """Return the GGUF file of a folder that has no other weights; None if it has none, or others.

    Raises ValueError that names them, where they are of several models.
    """
    if any((folder / each).is_file() for each in _SAFETENSORS):
        return None
    files = sorted(each for each in folder.glob(f"*{SUFFIX}") if not each.name.startswith(_FOR_IMAGES))
    return one_of(files, str(folder)) if files else None


def one_of(files: list[Path], where: str) -> Path:
    """Return the first file of the model that all are of. Raises ValueError if they are of several."""
    stems = {stem_of(each.name): each for each in reversed(files)}
    if len(stems) > 1:
        names = ", ".join(each.name for each in reversed(stems.values()))
        raise ValueError(f"{where} has several GGUF files: {names}; give the path of one of them")
    return next(iter(stems.values()))


def folder_of(path: Path) -> Path:
    """Return a folder that describes the model of a GGUF file, and has links to it; it is made once.

    Raises ValueError that names the file, and what is not served of it.
    """
    parts = [part.resolve() for part in parts_of(path)]
    folder = _place(parts) / stem_of(path.name)
    if folder.is_dir():
        return folder
    headers = read_headers(path)
    config, generation = config_of(headers), generation_of(headers)
    try:
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent.parent))
        try:
            (inner := made / folder.name).mkdir()
            (inner / "config.json").write_text(json.dumps(config, indent=1))
            (inner / "generation_config.json").write_text(json.dumps(generation, indent=1))
            save_tokenizer(headers.files[0].path, headers.metadata, inner)
            for part, name in zip(parts, _names(len(parts)), strict=True):
                (inner / name).symlink_to(part)
            made.rename(folder.parent)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        if not folder.is_dir():  # nor has another process made it meanwhile
            raise ValueError(
                f"what {path} says of its model cannot be written to {folder.parent.parent} "
                f"({error.strerror}): set XDG_CACHE_HOME to a folder that can be written"
            ) from error
    return folder


def _names(count: int) -> list[str]:
    if count == 1:
        return [f"model{SUFFIX}"]
    return [f"model-{part:05}-of-{count:05}{SUFFIX}" for part in range(1, count + 1)]


def _place(parts: list[Path]) -> Path:
    """Return where the folder of such files is, by what they are and by what reads them."""
    files = [(str(part), part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    said = hashlib.sha256(json.dumps([files, version("transformers"), version("tokenizers")]).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        said.update(source.read_bytes())
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return caches / "quire" / "gguf" / said.hexdigest()[:16]
