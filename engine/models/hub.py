"""Where a model's files are: a folder, or the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Configs and tokenizer at the top of the repository, and weights: no pickles, no other framework's copies.
TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]
FILES = ["model*.safetensors", "[0-9]_*/model.safetensors", *TOKENIZER_FILES]
# The only folders of a repository that have what is wanted: templates, and of sentence-transformers one for
# each module, as 1_Pooling.
_TEMPLATES = "additional_chat_templates"
ELSEWHERE = ["[!a0-9]*/*", "[0-9][!_]*/*"]
ELSEWHERE += [f"{_TEMPLATES[:at]}[!{letter}]*/*" for at, letter in enumerate(_TEMPLATES) if at]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def check_model(name_or_path: str) -> None:
    """Raise ValueError for what is neither a folder with a config.json nor the form of a Hub id."""
    folder = Path(name_or_path).expanduser()
    if name_or_path and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} has no config.json; give a folder that save_pretrained wrote")
    elif folder.is_file() or _HUB_ID.fullmatch(name_or_path) is None:
        kind = "a file" if folder.is_file() else "no folder"
        raise ValueError(
            f"{name_or_path or repr('')} is {kind}, and no Hub id (owner/name) either; give a folder that "
            "save_pretrained wrote"
        )


def resolve_model(
    name_or_path: str,
    on_progress: Callable[[int, int], None] | None = None,
    files: list[str] = FILES,
) -> Path:
    """Return the model's folder, downloaded when it is a Hub id (`owner/name` or `name`).

    `on_progress` gets (done, total) bytes; the total grows while files are found; only `files` are fetched.
    Raises ValueError that says what was tried.
    """
    folder = Path(name_or_path).expanduser()
    if name_or_path and folder.is_dir():
        return folder
    check_model(name_or_path)
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(
            name_or_path,
            allow_patterns=files,
            ignore_patterns=ELSEWHERE,
            tqdm_class=_progress_bar(on_progress) if on_progress else None,
        )
    except Exception as error:  # the client raises its own, httpx's and the operating system's kinds
        told = " ".join(str(error).split()).rstrip(".")  # some are of several lines
        raise ValueError(
            f"{name_or_path} is no folder here, and could not be downloaded from the Hub: {told}. Give a "
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
