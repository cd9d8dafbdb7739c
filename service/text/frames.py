"""Messages between a process and its workers: JSON, with its length before it."""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec

LENGTH = struct.Struct("<I")


def encode_frame(message: object) -> bytes:
    data = msgspec.json.encode(message)
    return LENGTH.pack(len(data)) + data


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the next message, still as JSON; None at the stream's end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return stream.read(LENGTH.unpack(head)[0])
