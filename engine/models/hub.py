"""Where a model's files are: a folder, a GGUF file, or the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from quire.engine.models.gguf.folder import check_file, folder_of, is_gguf, one_of, only_file
from quire.engine.models.gguf.header import stem_of

# Configs and tokenizer at the top of the repository, and weights: no pickles, no other framework's copies.
TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]
FILES = ["model*.safetensors", "[0-9]_*/model.safetensors", *TOKENIZER_FILES]
# The only folders of a repository that have what is wanted: templates, and of sentence-transformers one for
# each module, as 1_Pooling.
_TEMPLATES = "additional_chat_templates"
ELSEWHERE = ["[!a0-9]*/*", "[0-9][!_]*/*"]
ELSEWHERE += [f"{_TEMPLATES[:at]}[!{letter}]*/*" for at, letter in enumerate(_TEMPLATES) if at]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# A repository's GGUF file by how its weights are quantised, as llama.cpp and vLLM name it.
_HUB_GGUF = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*):([\w.-]+)")


def check_model(name_or_path: str) -> None:
    """Raise ValueError for what is no folder with a config.json, no GGUF file, nor the form of a Hub id."""
    path = Path(name_or_path).expanduser()
    if is_gguf(path):
        check_file(path)
    elif name_or_path and path.is_dir():
        if (file := only_file(path)) is not None:
            check_file(file)
        elif not (path / "config.json").is_file():
            raise ValueError(f"{path} has no config.json; give a folder that save_pretrained wrote")
    elif path.is_file() or not (_HUB_ID.fullmatch(name_or_path) or _HUB_GGUF.fullmatch(name_or_path)):
        kind = "a file" if path.is_file() else "no folder"
        raise ValueError(
            f"{name_or_path or repr('')} is {kind}, and no Hub id (owner/name) either; give a folder that "
            "save_pretrained wrote, or a GGUF file"
        )


def describes_itself(name_or_path: str) -> bool:
    """Return whether what a model is stands in the file that has its weights: nothing is fetched before."""
    return _HUB_GGUF.fullmatch(name_or_path) is not None and not Path(name_or_path).expanduser().exists()


def model_name(name_or_path: str) -> str:
    """Return a folder's own name, a GGUF file's without its ending, or the Hub id as it was given."""
    path = Path(name_or_path).expanduser()
    if is_gguf(path):
        return stem_of(path.name)
    return path.resolve().name if path.is_dir() else name_or_path


def resolve_model(
    name_or_path: str,
    on_progress: Callable[[int, int], None] | None = None,
    files: list[str] = FILES,
    revision: str | None = None,
) -> Path:
    """Return the model's folder, downloaded when it is a Hub id (`owner/name` or `name`).

    Of a GGUF file, a folder with nothing else, or a Hub id with how weights are quantised
    (`owner/name:Q4_K_M`) it is a folder that describes it. `on_progress` gets (done, total) bytes; the total
    grows while files are found; only `files` are fetched, and GGUF files whole. revision:
    of what is on the Hub; None: its newest. Raises ValueError that says what was tried.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path and path.is_dir():
        file = only_file(path)
        return path if file is None else folder_of(file)
    if is_gguf(path):
        return folder_of(path)
    check_model(name_or_path)
    if (named := _HUB_GGUF.fullmatch(name_or_path)) is None:
        return _fetched(name_or_path, on_progress, files, ELSEWHERE, revision)
    repository, quantised = named[1], named[2]
    endings = {quantised, quantised.upper(), quantised.lower()}
    wanted = [
        f"{before}{each}{part}.gguf"
        for each in sorted(endings)
        for before in ("", "*[-._/]")
        for part in ("", "-[0-9]*-of-[0-9]*")
    ]
    folder = _fetched(repository, on_progress, wanted, ["*mmproj*"], revision)
    names = sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*.gguf"))
    named_so = (name for name in names if any(fnmatch(name, each) for each in wanted))
    found = [folder / name for name in named_so if "mmproj" not in name]
    if not found:
        raise ValueError(
            f"{repository} has no GGUF file on the Hub whose name ends with {quantised}.gguf: give how one "
            "ends that it has, as in owner/name:Q4_K_M"
        )
    return folder_of(one_of(found, f"{repository} on the Hub, by {quantised},"))


def _fetched(
    repository: str,
    on_progress: Callable[[int, int], None] | None,
    wanted: list[str],
    unwanted: list[str],
    revision: str | None,
) -> Path:
    """Return the folder of a repository with the files that patterns name. Raises ValueError."""
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=wanted,
            ignore_patterns=unwanted,
            tqdm_class=_progress_bar(on_progress) if on_progress else None,
        )
    except Exception as error:  # the client raises its own, httpx's and the operating system's kinds
        told = " ".join(str(error).split()).rstrip(".")  # some are of several lines
        raise ValueError(
            f"{repository} is no folder here, and could not be downloaded from the Hub: {told}. Give a "
            f"folder that save_pretrained wrote, or check name, network and (for a gated model) HF_TOKEN."
        ) from error
    return Path(path)


def _progress_bar(on_progress: Callable[[int, int], None]) -> Any:
    """Return a tqdm class that draws nothing and reports the bar that counts the bytes of all files."""
    from huggingface_hub.utils import tqdm

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("name") == "huggingface_hub.snapshot_download"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.counts_bytes and self.total:
                on_progress(int(self.n), int(self.total))

    return ReportingBar
