"""Streams are cut where events end, and nothing of them changes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.service.router.events import whole_events


class Broken(Exception):
    pass


async def chunks(parts: list[bytes], *, breaks: bool = False) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    if breaks:
        raise Broken


@given(st.lists(st.sampled_from([b"", b"\n", b"\n\n", b"a", b"data: b\n", b"c\n\nd"]), max_size=20))
@pytest.mark.anyio
async def test_the_same_bytes(parts: list[bytes]) -> None:
    got = [data async for data in whole_events(chunks(parts), b"\n\n")]
    assert b"".join(got) == b"".join(parts)
    assert all(data.endswith(b"\n\n") for data in got[:-1])


@given(st.lists(st.sampled_from([b"\n", b"a", b"data: b\n\n", b"c\n\nd"]), max_size=20))
@pytest.mark.anyio
async def test_a_stream_that_breaks_ends_after_an_event(parts: list[bytes]) -> None:
    sent = bytearray()

    async def take() -> None:
        async for data in whole_events(chunks(parts, breaks=True), b"\n\n"):
            sent.extend(data)

    with pytest.raises(Broken):
        await take()
    whole = b"".join(parts)
    assert whole.startswith(sent)
    assert not sent or sent.endswith(b"\n\n")
    assert b"\n\n" not in whole[len(sent) :]


@pytest.mark.anyio
async def test_lines_are_events_too() -> None:
    got = [data async for data in whole_events(chunks([b"{}", b"\n{", b"}\n{}\n"]), b"\n")]
    assert got == [b"{}\n", b"{}\n{}\n"]
