"""The files that a model's folder has its weights in: safetensors, or what describes a GGUF file links to."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from quire.engine.models.adapter_config import CONFIG

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
logger = logging.getLogger("quire.engine")


def weight_files(folder: Path) -> list[Path]:
    """Return the folder's safetensors files; an index may name only files beside it.

    Without any they are those in GGUF. Raises ValueError that says what is missing.
    """
    if (folder / CONFIG).is_file():
        logger.warning("%s: its adapter is applied only with --lora %s", folder / CONFIG, folder)
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX
    if not index.is_file() and (linked := sorted(folder.glob("model*.gguf"))):
        return linked
    if not index.is_file():
        found = sorted(
            path.name for suffix in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(suffix)
        )
        hint = f" (it has {', '.join(found[:3])})" if found else ""
        if (folder / CONFIG).is_file():
            raise ValueError(
                f"{folder} has no weights of a model{hint}: {CONFIG} is of an adapter. Give the model that "
                f"it is for, and --lora {folder}"
            )
        raise ValueError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX}{hint}. Of GGUF files on the Hub give one, as "
            "owner/name:Q4_K_M; other formats are never opened: convert with transformers, by "
            "AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
        )
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is not an index of safetensors files: {error!r}") from error
    for name in names:
        if not isinstance(name, str) or re.fullmatch(r"[^/\\]+\.safetensors", name) is None:
            raise ValueError(f"{index} names {name!r}; it may only name .safetensors files beside it")
        if not (folder / name).is_file():
            raise ValueError(f"{index} names {name}, which is not in {folder}; download the model again")
    return [folder / name for name in sorted(names)]


def listed(problems: list[str]) -> str:
    """Return what is wrong with a folder's weights as one text, ten of them and how many more there are."""
    rest = f" … and {len(problems) - 10} more" if len(problems) > 10 else ""
    return "; ".join(problems[:10]) + rest


def open_weights(path: Path) -> Any:  # safetensors has no types
    """Return an open file, its header read. Raises ValueError if it is not whole."""
    if path.suffix == ".gguf":
        from quire.engine.models.gguf.file import open_gguf  # which needs its own library

        return open_gguf(path)
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}; download it again") from error
