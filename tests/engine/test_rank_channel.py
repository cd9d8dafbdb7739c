"""Frames to several ranks by shared memory: all of them, in order, whole, however slow a reader is."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.engine.parallel import channel
from quire.engine.parallel.channel import SLOT_BYTES, SLOTS, Reader, Writer
from quire.engine.parallel.futex import Futex

FRAMES = [bytes([i % 251]) * (1 + i * 7919 % 3000) for i in range(3 * SLOTS)]


def taken(fd: int, index: int, readers: int, spin_seconds: float, pause: float, frames: int) -> list[bytes]:
    """Take so many frames, with a pause after each."""
    reader, found = Reader(fd, index, readers, spin_seconds), []
    for _ in range(frames):
        found.append(bytes(reader.receive()))
        time.sleep(pause)
    return found


@pytest.mark.parametrize("spin_seconds", [0.0, 5e-4], ids=["sleeping", "looking"])
def test_every_reader_gets_every_frame(spin_seconds: float) -> None:
    """A slow one has the writer wait for room, which looks meanwhile whether somebody is lost."""
    writer, looks = Writer(3), []
    sent = [*FRAMES, b"x" * (2 * SLOT_BYTES + 5), b"last"]
    with ThreadPoolExecutor(3) as threads:
        pauses = (0.0, 0.0, 1e-3)
        found = [
            threads.submit(taken, writer.fd, i, 3, spin_seconds, pause, len(sent))
            for i, pause in enumerate(pauses)
        ]
        for frame in sent:
            writer.send(frame, lambda: looks.append(1))
        assert [each.result() for each in found] == [sent] * 3
    assert looks and all(writer.has_taken(i) for i in range(3))
    writer.close()


def test_readers_that_sleep_are_woken_by_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer wakes one; none would wake by itself for a long time."""
    monkeypatch.setattr(channel, "CHECK_SECONDS", 1000.0)
    writer, frames = Writer(7), [b"first", b"second", b"third"]
    with ThreadPoolExecutor(7) as threads:
        found = [threads.submit(taken, writer.fd, i, 7, 0.0, 0.0, len(frames)) for i in range(7)]
        for frame in frames:
            time.sleep(0.02)
            writer.send(frame, lambda: None)
        assert [each.result(60) for each in found] == [frames] * 7
    writer.close()


def test_a_reader_does_not_sleep_while_a_frame_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for longer than for as long as it would by itself."""
    writer, looks = Writer(1), 0
    reader = Reader(writer.fd, 0, 1, 1e-9)
    monkeypatch.setattr(Futex, "wait", lambda *_: pytest.fail("it has slept"))

    def is_near() -> bool:
        nonlocal looks
        looks += 1
        if looks == 50:
            writer.send(b"here", lambda: None)
        return True

    assert reader.receive(is_near) == b"here" and looks >= 50
    writer.close()


def test_what_a_lost_reader_leaves_no_room_for_raises_what_the_look_raises() -> None:
    writer = Writer(1)

    def look() -> None:
        raise RuntimeError("rank 1 is lost")

    for _ in range(SLOTS):
        writer.send(b"unread", look)
    with pytest.raises(RuntimeError, match="rank 1 is lost"):
        writer.send(b"one too many", look)
    assert not writer.has_taken(0)
    writer.close()


def test_a_reader_has_done_with_a_frame_when_it_asks_for_the_next() -> None:
    """However many parts a frame has."""
    writer = Writer(2)
    readers = [Reader(writer.fd, i, 2, 0.0) for i in range(2)]
    for frame in (b"x" * (SLOT_BYTES + 1), b"second"):
        writer.send(frame, lambda: None)
    assert writer.sent == 2 and writer.behind(0) == set()
    for _ in range(2):
        readers[1].receive()
    assert writer.behind(1) == {0} and writer.behind(2) == {0, 1}
    writer.close()


def test_readers_tell_a_word_back() -> None:
    writer = Writer(2)
    Reader(writer.fd, 1, 2, 0.0).tell(41)
    assert writer.told() == [0, 41]
    writer.close()
