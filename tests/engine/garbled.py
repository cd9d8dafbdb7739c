"""An engine process whose second frame is none: `python -m tests.engine.garbled SOCKET`."""

from __future__ import annotations

import contextlib
import socket
import sys

from quire.engine.config import Progress
from quire.engine.frames import LENGTH, FrameReader, ProgressFrame, encode_frame

GARBLED = b"\xc1" * 8  # which MessagePack never has


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        reader = FrameReader(connection)
        reader.read(wait=True)
        progress = Progress(phase="weights", done=0, total=1, unit="B", seconds=0.0)
        connection.sendall(encode_frame(ProgressFrame(progress)))
        connection.sendall(LENGTH.pack(len(GARBLED)) + GARBLED)
        with contextlib.suppress(EOFError):  # once the parent has closed it
            while True:
                reader.read(wait=True)


if __name__ == "__main__":
    main()
