"""Measure what streaming costs the API process.

`python -m quire.loadtest.streaming_cost [--streams N] [--json FILE]`

The real API process, streaming from an engine without a model (quire.loadtest.servers.modelless): one that
sends as many tokens as are read, so that what piles up is merged; and one at a pace that leaves each token
an event. Both over event streams and over WebSockets, whose frames are events here, too. The measure is the
process's own CPU time per token, which means something on a busy machine too; a core's second over it is the
rate that one core sustains. Beside it, with the same client and server software, a plain Starlette loop that
sends an event for each token (quire.loadtest.servers.plain_stream), ready-made or as JSON.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from quire.loadtest.command import command_parser, write_result
from quire.loadtest.servers.server_process import TICK_SECONDS, cpu_seconds, free_port, running

ASK = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
OPEN = (
    b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


@dataclass(frozen=True)
class Cost:
    """The cost of one server. `events` carry the tokens; fewer than tokens if some were merged."""

    server: str
    streams: int
    tokens: int
    events: int
    seconds: float
    cpu_seconds: float

    @property
    def cpu_us_per_token(self) -> float:
        return 1e6 * self.cpu_seconds / self.tokens

    def row(self) -> dict[str, object]:
        per_token = self.cpu_us_per_token
        return {
            **asdict(self),
            "cpu_us_per_token": round(per_token, 2),
            "tokens_per_core_second": round(1e6 / per_token),
            "tokens_per_second": round(self.tokens / self.seconds),
        }


@dataclass(frozen=True)
class Wire:
    """How an answer is asked for, and what stands once in each of its events, and once at its end."""

    handshake: bytes  # to which the server answers before it is asked; empty: there is none
    ask: Callable[[bytes], bytes]
    event: bytes
    end: bytes


def _post(body: bytes) -> bytes:
    return ASK + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _frame(body: bytes) -> bytes:
    """Return a text frame of less than 126 bytes, under a mask of zeros."""
    return bytes((0x81, 0x80 | len(body))) + bytes(4) + body


SSE = Wire(b"", _post, b"data: {", b"data: [DONE]")
WEBSOCKET = Wire(OPEN, _frame, b'{"object":', b'{"done":true}')


class Reader(asyncio.Protocol):
    """Counts the events of one answer."""

    def __init__(self, wire: Wire) -> None:
        self.events = 0
        self.begun = asyncio.Event()  # the server has said something
        self.done = asyncio.get_running_loop().create_future()
        self._wire = wire
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        self.begun.set()
        wire = self._wire
        data = self._rest + data
        self.events += data.count(wire.event)
        self._rest = data[-len(wire.end) :]
        if wire.end in data and not self.done.done():
            self.done.set_result(None)
        # what may be the beginning of a marker is looked at again, a whole one is not counted twice
        self.events -= self._rest.count(wire.event)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed before the end"))


async def read_streams(port: int, streams: int, tokens: int, wire: Wire) -> int:
    """Ask for `streams` answers at once; how many events came."""
    loop = asyncio.get_running_loop()
    body = json.dumps({"prompt": "a", "max_tokens": tokens, "stream": True}).encode()
    readers = []
    for _ in range(streams):
        transport, reader = await loop.create_connection(lambda: Reader(wire), "127.0.0.1", port)
        readers.append((transport, reader))
    for transport, reader in readers:
        if wire.handshake:
            transport.write(wire.handshake)
            await reader.begun.wait()
    for transport, _ in readers:
        transport.write(wire.ask(body))
    for transport, reader in readers:
        await reader.done
        transport.close()
    return sum(reader.events for _, reader in readers)


def measure(server: str, pid: int, port: int, streams: int, tokens: int, wire: Wire = SSE) -> Cost:
    """Measure the process `pid`, which serves on `port` and may have been measured before."""
    uvloop.run(read_streams(port, streams, max(tokens // 10, 8), wire))  # warms it up
    cpu, begin = cpu_seconds(pid), time.monotonic()
    events = uvloop.run(read_streams(port, streams, tokens, wire))
    seconds = time.monotonic() - begin
    spent = max(cpu_seconds(pid) - cpu, TICK_SECONDS)
    return Cost(server, streams, streams * tokens, events, seconds, spent)


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream")
    parser.add_argument(
        "--pace-ms", default="12", help="between two tokens of a stream, where each is an event"
    )
    parser.add_argument("--json", type=Path, help="where to write the result, too")
    arguments = parser.parse_args()
    streams, tokens = arguments.streams, arguments.tokens
    costs = []
    for name, pace in (("quire", "0"), ("quire, paced", arguments.pace_ms)):
        port = free_port()
        flags = ("--port", str(port), "--sequences", str(streams), "--step-ms", pace)
        with running("quire.loadtest.servers.modelless", *flags, port=port) as pid:
            costs += [
                measure(name + way, pid, port, streams, tokens, wire)
                for way, wire in (("", SSE), (", socket", WEBSOCKET))
            ]
    for form in ("bytes", "json"):
        port = free_port()
        plain = (str(port), str(tokens), form)
        with running("quire.loadtest.servers.plain_stream", *plain, port=port) as pid:
            costs.append(measure(f"starlette, {form}", pid, port, streams, tokens))
    rows = [cost.row() for cost in costs]
    print(f"{streams} streams of {tokens} tokens")
    print(f"{'':>20}{'CPU µs/token':>14}{'tokens/s a core':>17}{'events/token':>14}")
    for cost, row in zip(costs, rows, strict=True):
        merged = cost.events / cost.tokens
        print(
            f"{cost.server:>20}{row['cpu_us_per_token']:>14}{row['tokens_per_core_second']:>17,}{merged:>14.2f}"
        )
    write_result(arguments.json, {"servers": rows})


if __name__ == "__main__":
    main()
