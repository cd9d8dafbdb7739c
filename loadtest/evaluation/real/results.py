"""Measurements as lines of JSON, written as soon as they are there: a run goes on where one stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from quire.loadtest.provenance import Provenance
from quire.loadtest.simulator.step_costs import StepRecord

Data = TypeVar("Data")


class Measured(msgspec.Struct, Generic[Data], frozen=True, kw_only=True):
    """A line of a file NAME.jsonl."""

    data: Data
    model: str
    device: str
    commit: str
    date: str
    command: str


class Results:
    """The files of one folder: of one model, on one kind of device."""

    def __init__(self, folder: Path, model: str, device: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.model = model
        self._folder = folder
        self._where = {"model": model, "device": device, **asdict(Provenance.here())}

    def read(self, name: str, kind: type[Data]) -> list[Data]:
        """Return what a file holds. Raise ValueError if that is of another model or device."""
        lines: list[Measured[Any]] = read_measured(self._path(name), Measured[kind])  # type: ignore[valid-type]
        for line in lines:
            for what in ("model", "device"):
                if (there := getattr(line, what)) != self._where[what]:
                    raise ValueError(
                        f"{self._path(name)} was measured with the {what} {there}, and this is "
                        f"{self._where[what]}; give another --output, or --afresh"
                    )
        return [line.data for line in lines]

    def add(self, name: str, data: msgspec.Struct) -> None:
        self._write(name, [Measured(data=data, **self._where)])

    def has_steps(self, block_size: int) -> bool:
        return self._path(f"steps-{block_size}").exists()

    def add_steps(self, block_size: int, records: Sequence[StepRecord]) -> None:
        """Add steps to a file that `--costs` reads: steps-16.jsonl."""
        self._write(f"steps-{block_size}", records)

    def clear(self, names: Sequence[str]) -> None:
        """Remove files, and all those of steps with `steps`."""
        for name in names:
            for path in self._folder.glob("steps-*.jsonl" if name == "steps" else f"{name}.jsonl"):
                path.unlink()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.jsonl"

    def _write(self, name: str, lines: Sequence[msgspec.Struct]) -> None:
        with self._path(name).open("ab") as file:
            file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def read_measured(path: Path, kind: type[Measured[Data]]) -> list[Measured[Data]]:
    """Read a file; nothing where there is none. Raise ValueError that names the file."""
    if not path.exists():
        return []
    decoder = msgspec.json.Decoder(kind)
    try:
        return [decoder.decode(line) for line in path.read_bytes().splitlines()]
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} holds no measurements: {error}") from error
