"""Measurements as lines of JSON, each written as soon as it is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from quire.loadtest.provenance import Provenance
from quire.loadtest.simulator.step_costs import StepRecord

Data = TypeVar("Data")


class Measured(msgspec.Struct, Generic[Data], frozen=True, kw_only=True):
    """A line of a file NAME.jsonl."""

    data: Data
    device: str
    commit: str
    date: str
    command: str


class Results:
    """The files of one folder. What an earlier run left in a file goes when the first line is written."""

    def __init__(self, folder: Path, device: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._where = {"device": device, **asdict(Provenance.here())}
        self._begun: set[str] = set()

    def add(self, name: str, data: msgspec.Struct) -> None:
        self._write(name, [Measured(data=data, **self._where)])

    def add_steps(self, block_size: int, records: Sequence[StepRecord]) -> None:
        """Add steps to a file that `--costs` reads: steps-16.jsonl."""
        self._write(f"steps-{block_size}", records)

    def _write(self, name: str, lines: Sequence[msgspec.Struct]) -> None:
        mode = "ab" if name in self._begun else "wb"
        self._begun.add(name)
        with (self._folder / f"{name}.jsonl").open(mode) as file:
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
