"""How a process of the engine begins: `python -m quire.engine.child MODULE ARGUMENT…` runs that module.

Ctrl-C and SIGTERM reach a whole group, and the parent decides, and drains. So they are ignored before the
module is imported: that takes a second, in which they would end it, with a traceback.
"""

from __future__ import annotations

import runpy
import signal
import sys


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module so."""
    return [sys.executable, "-m", "quire.engine.child", module, *arguments]


def main() -> None:
    for told in (signal.SIGINT, signal.SIGTERM):
        signal.signal(told, signal.SIG_IGN)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
