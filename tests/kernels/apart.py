"""Scripts that compile outside Triton's interpreter, each in a process of its own.

One process has imported torch, Triton and the kernels, which takes two seconds of a core, and forks for each
of them. As a script it is that process.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_apart(script: str | Path, *arguments: str) -> str:
    """Return what a script prints; it runs as its file does, at the root of the repository.

    Raise AssertionError with all that it has printed, if it ends with anything but 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        forker = _forker()
        assert forker.stdin is not None and forker.stdout is not None
        forker.stdin.write(json.dumps([str(script), *arguments, str(out), str(err)]) + "\n")
        forker.stdin.flush()
        code = forker.stdout.readline().strip()
        assert code, f"the process that forks for {script} has ended"
        assert code == "0", f"{script} ended with {code}:\n{out.read_text()}{err.read_text()}"
        return out.read_text()


@cache
def _forker() -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    forker = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        text=True,
    )
    atexit.register(forker.communicate)  # it ends with what it reads
    return forker


def _serve() -> None:
    """Fork for each script that is asked for, one after the other, and tell how it ended."""
    import pytest  # noqa: F401

    import quire.kernels.backend  # noqa: F401

    for line in sys.stdin:
        script, *arguments, out, err = json.loads(line)
        child = os.fork()
        if not child:
            _become(script, arguments, out, err)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(script: str, arguments: list[str], out: str, err: str) -> None:
    """Run a script in this process, which ends with it."""
    for path, descriptor in ((os.devnull, 0), (out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
    sys.argv = [script, *arguments]
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
