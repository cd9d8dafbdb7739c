"""Compare what a stream costs by its response: starlette's own, sse-starlette's, and ours.

`python -m quire.loadtest.stream_transports [--streams N] [--tokens N] [--rounds N] [--json FILE]`

Each answers with the same ready-made events from the same bare route (`servers.plain_stream`): what
differs is the response alone. Measured are the CPU time per token, the memory of a stream that waits,
and how long after its client has closed the connection a stream ends. Runs take turns; figures are medians.
"""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from quire.loadtest.chaos.processes import resident_bytes
from quire.loadtest.command import command_parser, write_result
from quire.loadtest.servers.server_process import free_port, running
from quire.loadtest.streaming_cost import ASK, measure

RESPONSES = ("starlette", "sse-starlette", "connection")
PLAIN = "quire.loadtest.servers.plain_stream"
WARM_STREAMS = 16


@dataclass(frozen=True)
class Cost:
    """The cost of one run."""

    response: str
    cpu_us_per_token: float
    kib_per_stream: float
    leave_ms: float


def open_stream(port: int) -> socket.socket:
    """Open a stream; return its socket once its first event has come."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(ASK + b"Content-Length: 2\r\n\r\n{}")
    data = b""
    while b"data: {" not in data:
        data += connection.recv(4096)
    return connection


def when_ended(port: int, count: int) -> list[float]:
    """Return the last `count` times at which a stream ended, once there are so many."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ended", timeout=30) as reply:
            times: list[float] = json.load(reply)
        if len(times) >= count:
            return times[-count:]
        time.sleep(0.05)
    raise TimeoutError("streams did not end")


def measure_waiting(response: str, streams: int) -> tuple[float, float]:
    """Return KiB of a stream that waits, and ms from its client's leaving to its end."""
    port = free_port()
    with running(PLAIN, str(port), "0", response, port=port) as pid, ExitStack() as all_streams:
        for _ in range(WARM_STREAMS):
            all_streams.enter_context(open_stream(port))
        before = resident_bytes(pid)
        for _ in range(streams):
            all_streams.enter_context(open_stream(port))
        size = (resident_bytes(pid) - before) / streams / 1024
        delays = []
        for at in range(1, WARM_STREAMS + 1):
            leaving = open_stream(port)
            time.sleep(0.02)
            left = time.monotonic()
            leaving.close()
            delays.append(1000 * (when_ended(port, at)[-1] - left))
        return size, median(delays)


def measure_once(response: str, streams: int, tokens: int, waiting: int) -> Cost:
    port = free_port()
    with running(PLAIN, str(port), str(tokens), response, port=port) as pid:
        cost = measure(response, pid, port, streams, tokens)
    return Cost(response, cost.cpu_us_per_token, *measure_waiting(response, waiting))


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--waiting", type=int, default=500, help="streams whose memory is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to write the result, too")
    arguments = parser.parse_args()
    costs = [
        measure_once(response, arguments.streams, arguments.tokens, arguments.waiting)
        for _ in range(arguments.rounds)
        for response in RESPONSES
    ]
    print(f"{'':>14}{'CPU µs/token':>14}{'KiB/stream':>12}{'ms to see a leave':>19}")
    rows = []
    for response in RESPONSES:
        runs = [cost for cost in costs if cost.response == response]
        row = Cost(
            response,
            round(median(run.cpu_us_per_token for run in runs), 2),
            round(median(run.kib_per_stream for run in runs), 1),
            round(median(run.leave_ms for run in runs), 2),
        )
        rows.append(asdict(row))
        print(f"{response:>14}{row.cpu_us_per_token:>14}{row.kib_per_stream:>12}{row.leave_ms:>19}")
    write_result(arguments.json, {"responses": rows, "runs": [asdict(cost) for cost in costs]})


if __name__ == "__main__":
    main()
