"""Chat templates that a model's folder has: in files of their own, or in its tokenizer's configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from quire.engine.models.json_fields import read_json

FILE = "chat_template.jinja"
OTHERS = "additional_chat_templates"  # a folder of those that have other names
OF_PROCESSOR = "chat_template.json"  # of older models that take images, too
DEFAULT, WITH_TOOLS = "default", "tool_use"


def templates_of(folder: Path, config: dict[str, Any] | None = None) -> dict[str, str]:
    """Return the sources of the folder's templates by name. Raises ValueError that names the file.

    config: what tokenizer_config.json says, which is read if it is left out.
    """
    file = folder / "tokenizer_config.json"
    if config is None:
        config = read_json(file) or {}
    named = _of_files(folder) or _named(config.get("chat_template"), file)
    if not named:
        file = folder / OF_PROCESSOR
        named = _named((read_json(file) or {}).get("chat_template"), file)
    return named


def usual_template(named: dict[str, str]) -> str | None:
    """Return the source of what a folder's requests are rendered by; None if it has none.

    That is the template named default, and the one named tool_use where a request has tools, as transformers
    chooses.
    """
    default, with_tools = named.get(DEFAULT), named.get(WITH_TOOLS)
    if default is None or with_tools is None:
        return default
    return f"{{%+ if tools +%}}{_end(with_tools)}{{%+ else +%}}{_end(default)}{{%+ endif +%}}"


def _of_files(folder: Path) -> dict[str, str]:
    files = {file.stem: file for file in (folder / OTHERS).glob("*.jinja")}
    if (folder / FILE).is_file():
        files[DEFAULT] = folder / FILE
    return {name: _text_of(file) for name, file in files.items()}


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text") from None


def _named(given: Any, file: Path) -> dict[str, str]:
    """Return templates by name, of one without a name or a list of those that have one."""
    if given is None:
        return {}
    if isinstance(given, list):
        pairs = [(each.get("name"), each.get("template")) for each in given if isinstance(each, dict)]
    else:
        pairs = [(DEFAULT, given)]
    named = {name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)}
    if len(named) < len(pairs) or (isinstance(given, list) and len(pairs) < len(given)):
        raise ValueError(
            f"chat_template in {file} must be a string, or a list of objects with name and template"
        )
    return named


def _end(source: str) -> str:
    """Return a template without its last line's end, which none has in what it makes."""
    return re.sub(r"\r?\n\Z", "", source)
