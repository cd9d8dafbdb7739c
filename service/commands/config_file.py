"""The file of --config: YAML, with the names of flags, as vLLM's."""

from __future__ import annotations

from pathlib import Path

from quire.service.commands.usage_error import UsageError


def read_config(file: Path) -> dict[str, object]:
    """Return its entries. Raises UsageError that names the file and the line."""
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"--config {file} cannot be read: {reason}") from None
    try:
        entries = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise UsageError(f"--config {file}{line} is no YAML: {getattr(error, 'problem', error)}") from None
    if entries is None:
        return {}
    if not isinstance(entries, dict) or not all(isinstance(key, str) for key in entries):
        raise UsageError(f"--config {file} must have a line for each flag, such as 'port: 8001'")
    return entries
