"""The `quire` command, which is `python -m quire`, too: Ctrl-C ends it without a traceback at any time."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command and exit, with 130 if it is interrupted.

    While it is imported, and once it has run, nothing can be said or lost: Ctrl-C ends the process at once.
    """
    handler = signal.getsignal(signal.SIGINT)
    outside = handler if handler is signal.SIG_IGN else _end_at_once  # ignored behind a shell's `&`
    signal.signal(signal.SIGINT, outside)
    from quire.cli import main as run

    try:
        signal.signal(signal.SIGINT, handler)
        run()
    finally:
        signal.signal(signal.SIGINT, outside)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    main()
