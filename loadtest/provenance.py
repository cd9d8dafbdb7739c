"""Tell where and when a figure was measured, as stands beside it in loadtest/results/."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Provenance:
    """Commit (a "+" means files differed from it), date (UTC) and command of a measurement."""

    commit: str
    date: str
    command: str

    @classmethod
    def here(cls) -> Provenance:
        """Return that of this process. QUIRE_COMMIT names the commit of a checkout that has no .git."""
        return cls(
            commit=os.environ.get("QUIRE_COMMIT") or _commit() or "unknown",
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            command=shlex.join(["python", "-m", module_name(), *sys.argv[1:]]),
        )


def device_name() -> str:
    """Return the name of the first CUDA device; cpu if there is none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def module_name() -> str:
    """Return the module that runs as a command, or the name of a script."""
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).name


def _commit() -> str:
    head = _git("rev-parse", "--short", "HEAD")
    return f"{head}+" if head and _git("status", "--porcelain", "-uno") else head


def _git(*words: str) -> str:
    out = subprocess.run(
        ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return out.stdout.strip() if out.returncode == 0 else ""
