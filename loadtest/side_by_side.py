"""Run commands with a time for each, whatever becomes of the others: a hang of one loses nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

LOOK_SECONDS = 0.1  # between two looks at whether a command has ended
KEPT_LINES = 25  # of what a command that failed said last


@dataclass(frozen=True, slots=True)
class Command:
    """Words after `python`, and for how long they may run. gpu: the only one that the command sees."""

    words: list[str]
    seconds: float
    gpu: int | None = None

    def __str__(self) -> str:
        return f"python {' '.join(self.words)}"


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a command. reason: why it failed, None if it did not."""

    command: Command
    seconds: float
    reason: str | None
    last_lines: list[str]


def run(commands: list[Command], end: float) -> list[Ended]:
    """Run commands side by side, none beyond `end` of `time.monotonic()`; print what each one said."""
    begin = time.monotonic()
    for command in commands:
        print(f"\n$ {command}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{i}.log") for i in range(len(commands))]
        running = [_start(command, log) for command, log in zip(commands, logs, strict=True)]
        try:
            ended = [
                _ended(command, process, log, begin, end)
                for command, process, log in zip(commands, running, logs, strict=True)
            ]
        finally:
            for process in running:
                _kill(process)
    for each in ended:
        print(f"= {each.reason or 'done'} after {each.seconds:.1f} s: {each.command}", flush=True)
    return ended


def _start(command: Command, log: Path) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    if command.gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(command.gpu)
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-u", *command.words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # so that its ranks end with it
        )


def _ended(command: Command, process: subprocess.Popen[bytes], log: Path, begin: float, end: float) -> Ended:
    last = min(begin + command.seconds, end)
    while process.poll() is None and time.monotonic() < last:
        time.sleep(LOOK_SECONDS)
    seconds = time.monotonic() - begin
    reason = None
    if process.returncode is None:
        reason = "TIME IS UP"
    elif process.returncode != 0:
        reason = f"FAILED with exit code {process.returncode}"
    _kill(process)
    said = log.read_text(encoding="utf-8", errors="replace")
    print(said, end="" if said.endswith("\n") else "\n", flush=True)
    return Ended(command, round(seconds, 1), reason, said.splitlines()[-KEPT_LINES:])


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a command and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
