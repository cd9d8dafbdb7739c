"""What a quick reader gets is written in the same turn; what a slow one gets is merged, up to a limit."""

from __future__ import annotations

import asyncio

import pytest

from quire.service.answer.outbox import Outbox
from quire.service.http.connection import ClientGone

pytestmark = pytest.mark.anyio


class Letters:
    """A source whose messages that wait are merged into one."""

    def __init__(self) -> None:
        self.ended = False
        self.text = ""

    @property
    def backlog(self) -> int:
        return len(self.text)

    def take(self) -> list[bytes]:
        text, self.text = self.text, ""
        return [text.encode()]


class Reader:
    """Reads while `open` is set."""

    def __init__(self, limit: int = 100) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.got: list[bytes] = []
        self.failures: list[Exception] = []
        self.outbox = Outbox(self.write, self.failures.append, limit)

    async def write(self, source: Letters) -> None:
        messages = source.take()
        await self.open.wait()
        if messages == [b"?"]:
            raise ValueError("no such letter")
        self.got += messages

    def put(self, source: Letters, letter: str) -> None:
        source.text += letter
        self.outbox.put(source)


async def test_a_quick_reader_has_each_message_at_once() -> None:
    reader, source = Reader(), Letters()
    for letter in "abc":
        reader.put(source, letter)
        assert reader.got[-1] == letter.encode()


async def test_a_slow_reader_gets_the_rest_as_one_and_sources_take_turns() -> None:
    reader, one, other = Reader(), Letters(), Letters()
    reader.open.clear()
    for letter in "abc":
        reader.put(one, letter)
        reader.put(other, letter.upper())
    assert reader.got == []
    reader.open.set()
    await reader.outbox.flush()
    assert reader.got == [b"a", b"ABC", b"bc"]
    reader.put(one, "d")
    assert reader.got[-1] == b"d"


async def test_too_much_that_waits_is_refused() -> None:
    reader, source = Reader(limit=2), Letters()
    reader.open.clear()
    for letter in "abc":  # the first is being written
        reader.put(source, letter)
    with pytest.raises(ClientGone, match="more than 2 bytes"):
        reader.put(source, "d")
    reader.outbox.close()


@pytest.mark.parametrize("held_up", [False, True])
async def test_a_write_that_fails_is_told_of_once(held_up: bool) -> None:
    reader, source = Reader(), Letters()
    if held_up:
        reader.open.clear()
        reader.put(source, "?")
        reader.open.set()
        await reader.outbox.flush()
        assert [str(error) for error in reader.failures] == ["no such letter"]
    else:
        with pytest.raises(ValueError, match="no such letter"):
            reader.put(source, "?")
        assert not reader.failures
