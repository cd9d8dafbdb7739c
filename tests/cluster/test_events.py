"""Streams are cut where events end, and nothing of them changes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.service.errors import ApiError
from quire.service.router.endings import is_last, outcome_of_end, split_at_last, tells_of_death
from quire.service.router.events import whole_events
from quire.service.router.held import HeldBytes, Share


class Broken(Exception):
    pass


def share(limit: int = 1 << 20) -> Share:
    return Share(HeldBytes(limit))


async def chunks(parts: list[bytes], *, breaks: bool = False) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    if breaks:
        raise Broken


@given(st.lists(st.sampled_from([b"", b"\n", b"\n\n", b"a", b"data: b\n", b"c\n\nd"]), max_size=20))
@pytest.mark.anyio
async def test_the_same_bytes(parts: list[bytes]) -> None:
    got = [data async for data in whole_events(chunks(parts), b"\n\n", share())]
    assert b"".join(got) == b"".join(parts)
    assert all(data.endswith(b"\n\n") for data in got[:-1])


@given(st.lists(st.sampled_from([b"\n", b"a", b"data: b\n\n", b"c\n\nd"]), max_size=20))
@pytest.mark.anyio
async def test_a_stream_that_breaks_ends_after_an_event(parts: list[bytes]) -> None:
    sent = bytearray()

    async def take() -> None:
        async for data in whole_events(chunks(parts, breaks=True), b"\n\n", share()):
            sent.extend(data)

    with pytest.raises(Broken):
        await take()
    whole = b"".join(parts)
    assert whole.startswith(sent)
    assert not sent or sent.endswith(b"\n\n")
    assert b"\n\n" not in whole[len(sent) :]


@pytest.mark.anyio
async def test_lines_are_events_too() -> None:
    got = [data async for data in whole_events(chunks([b"{}", b"\n{", b"}\n{}\n"]), b"\n", share())]
    assert got == [b"{}\n", b"{}\n{}\n"]


@pytest.mark.anyio
async def test_what_waits_for_its_events_end_is_held_and_bounded() -> None:
    held = HeldBytes(100)
    with Share(held) as own:
        sizes = [
            held.size
            async for _ in whole_events(chunks([b"a" * 60, b"\n\n", b"b" * 70, b"\n\n"]), b"\n\n", own)
        ]
        assert sizes == [60, 70]
        assert held.size == 0
        with pytest.raises(ApiError, match="router holds"):
            async for _ in whole_events(chunks([b"a" * 60] * 2), b"\n\n", own):
                pass
    assert held.size == 0


SSE, LINES = b"\n\n", b"\n"
LAST = [
    (b"data: [DONE]\n\n", SSE),
    (b"id: 7\ndata: [DONE]\n\n", SSE),
    (b'data: {"error":{"message":"m","code":"engine_error"}}\n\n', SSE),
    (b'event: response.incomplete\ndata: {"type":"response.incomplete"}\n\n', SSE),
    (b'event: message_stop\ndata: {"type":"message_stop"}\n\n', SSE),
    (b'event: error\ndata: {"type":"error"}\n\n', SSE),
    (b'{"model":"m","done":true}\n', LINES),
    (b'{"error":"no"}\n', LINES),
]
OTHERS = [
    (b": keep-alive\n\n", SSE),
    (b'data: {"choices":[{"text":"data: [DONE]"}]}\n\n', SSE),
    (b'data: {"choices":[{"text":"{\\"error\\":1}"}],"error":null}\n\n', SSE),
    (b'event: response.created\ndata: {"type":"response.created"}\n\n', SSE),
    (b'event: message_delta\ndata: {"type":"message_delta"}\n\n', SSE),
    (b'{"message":{"tool_calls":[{"function":{"arguments":{"done":true}}}]},"done":false}\n', LINES),
    (b'{"message":{"content":"\\"done\\":true"},"done":false}\n', LINES),
]


def test_the_last_event_is_known() -> None:
    """Wherever it is in what is read at once; nothing that follows counts."""
    for event, mark in LAST:
        assert is_last(event, mark), event
        others = [other for other, its in OTHERS if its == mark]
        for before in [b"", *others, b"".join(others)]:
            for after in [b"", *others, *(last for last, its in LAST if its == mark)]:
                assert split_at_last(before + event + after, mark) == (before, event)
    for event, mark in OTHERS:
        assert not is_last(event, mark), event
        assert split_at_last(event, mark) == (event, b"")
        assert split_at_last(event * 2, mark) == (event * 2, b"")


@pytest.mark.parametrize(
    ("message", "died"),
    [
        (b'data: {"error":{"code":"engine_dead"}}\n\n', True),
        (b'id: 3\nevent: response.failed\ndata: {"response":{"error":{"cause":"engine_dead"}}}\n\n', True),
        (b'{"tag":"a","error":{"code":"engine_dead","param":null}}', True),
        (b'event: error\ndata: {"type":"error","error":{"type":"api_error","code":"engine_dead"}}\n\n', True),
        (b'{"error":"the engine died","code":"engine_dead"}\n', True),
        (b'{"response":{"error":null,"metadata":{"code":"engine_dead"}}}', False),
        (b'{"error":{"code":"engine_error","message":"\\"engine_dead\\""}}', False),
        (b'{"error":"the code is \\"engine_dead\\""}\n', False),
        (b'"engine_dead"', False),
    ],
)
def test_only_an_error_tells_of_death(message: bytes, died: bool) -> None:
    """What clients may have put into an answer does not."""
    assert tells_of_death(message) == died


@pytest.mark.parametrize(
    ("last", "outcome"),
    [
        (b"data: [DONE]\n\n", "answered"),
        (b'{"done":true,"message":{"content":"\\"error\\":"}}\n', "answered"),
        (b'event: message_stop\ndata: {"type":"message_stop"}\n\n', "answered"),
        (
            b'event: response.completed\ndata: {"response":{"error":null,"tools":[{"error":1}]}}\n\n',
            "answered",
        ),
        (b'{"tag":"a","done":true}', "answered"),
        (b'data: {"error":{"type":"server_error","code":"engine_error"}}\n\n', "failed"),
        (
            b'id: 3\ndata: {"error":{"type":"service_unavailable_error","code":"engine_stalled"}}\n\n',
            "failed",
        ),
        (b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"m"}}\n\n', "failed"),
        (b'{"error":"the engine died"}\n', "failed"),
        (b'event: response.failed\ndata: {"response":{"error":{"code":"server_error"}}}\n\n', "failed"),
        (
            b"event: response.failed\n"
            b'data: {"response":{"error":{"code":"server_error","cause":"engine_stalled"}}}\n\n',
            "failed",
        ),
        (b'{"tag":"a","error":{"type":"server_error","code":"internal_error","param":null}}', "failed"),
        (b'{"type":"error","status":500,"error":{"type":"server_error","code":null}}', "failed"),
        (b'data: {"error":{"type":"conflict_error","code":"stream_stopped"}}\n\n', "refused"),
        (b'data: {"error":{"type":"service_unavailable_error","code":"not_ready"}}\n\n', "refused"),
        (b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n', "failed"),
        (b'event: error\ndata: {"type":"error","error":{"type":"invalid_request_error"}}\n\n', "refused"),
        (
            b"event: error\n"
            b'data: {"type":"error","error":{"type":"overloaded_error","code":"not_ready"}}\n\n',
            "refused",
        ),
        (
            b"event: error\n"
            b'data: {"type":"error","error":{"type":"overloaded_error","code":"engine_stalled"}}\n\n',
            "failed",
        ),
        (b'{"error":"the server is shutting down","code":"not_ready"}\n', "refused"),
        (b'{"error":"the engine failed on this request","code":"engine_error"}\n', "failed"),
        (
            b"event: response.failed\n"
            b'data: {"response":{"error":{"code":"server_error","cause":"stream_stopped"}}}\n\n',
            "refused",
        ),
        (b'{"tag":"a","error":{"type":"invalid_request_error","code":"context_length_exceeded"}}', "refused"),
        (b'data: {"error":\n\n', "refused"),
    ],
)
def test_an_end_tells_how_its_request_fared(last: bytes, outcome: str) -> None:
    """A failure is the replica's; what is its client's, or only for now, is none."""
    assert outcome_of_end(last) == outcome
