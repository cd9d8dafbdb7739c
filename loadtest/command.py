"""Read a measuring command's flags, and write what it measured beside where and when."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.models.model_folders import check_names
from quire.loadtest.provenance import Provenance, module_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def command_parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a module's own docstring, line by line."""
    return argparse.ArgumentParser(
        prog=f"python -m {module_name()}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parse_for_cuda(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the flags of a command that measures a GPU. Exit with a usage error if there is none."""
    import torch

    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device was found; run this on a machine with one")
    return arguments


def told_of(error: Exception) -> str:
    """Return what an error says: of a file first its name, and what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; give the path of another one"
    return str(error)


def check_model_argument(parser: argparse.ArgumentParser, model: str) -> None:
    """Exit with a usage error for what `quire serve` would not take as its MODEL."""
    try:
        check_names(model, None)
    except ValueError as error:
        parser.error(str(error))


def write_json(path: Path | None, device: str, figures: Mapping[str, object]) -> None:
    """Write one JSON object, if a file is given: the device, where the figures come from, and the figures."""
    if path is not None:
        found = {"device": device, **asdict(Provenance.here()), **figures}
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def write_result(path: Path | None, figures: Mapping[str, object]) -> None:
    """Write one JSON object, if a file is given: where the figures come from, and the figures."""
    if path is not None:
        found = {"provenance": asdict(Provenance.here()), **figures}
        path.write_text(json.dumps(found, indent=2) + "\n")


def add_line(figures: Mapping[str, object], path: Path | None) -> None:
    """Print one JSON object, a line, and append it to a file if one is given."""
    line = json.dumps(figures)
    print(line, flush=True)
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def append_json(path: Path, result: DataclassInstance) -> None:
    """Append one JSON object, a line, to a file that may not be there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result)) + "\n")
