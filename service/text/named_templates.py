"""Chat templates for models that come without one, such as base models: by name, or from a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from quire.service.text.model_templates import templates_of

_FOLDER = Path(__file__).parent / "templates"


def template_names() -> list[str]:
    return sorted(file.stem for file in _FOLDER.glob("*.jinja"))


def template_of(folder: Path, given: str) -> tuple[str, bool]:
    """Return the source of what --chat-template names, and whether it is one of the model's own.

    Raises ValueError. Templates of the model that cannot be read keep no other from being used.
    """
    try:
        own = templates_of(folder)
    except ValueError:
        own = {}
    return (own[given], True) if given in own else (read_template(given, own), False)


def read_template(given: str, own: Iterable[str] = ()) -> str:
    """Return the source of one of our templates, or of a file. Raises ValueError.

    own: names of templates that the model has itself, which the error tells.
    """
    names = template_names()
    file = _FOLDER / f"{given}.jinja" if given in names else Path(given)
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--chat-template must be a file, or one of {', '.join([*names, *own])}: {given} cannot be read: "
            f"{error.strerror}"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(f"--chat-template {given} is not UTF-8 text") from None
