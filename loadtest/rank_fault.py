"""Kill or stop a rank of a server in mid-stream: `python -m quire.loadtest.rank_fault --size 2`.

Every stream must end with one error event, `/health` must be 503 until the server ends, which must be with
another status than 0, and no process may be left.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from quire.loadtest.command import add_line, command_parser
from quire.loadtest.model_configs import write_model_folders
from quire.loadtest.servers.quire_process import QuireProcess
from quire.loadtest.servers.server_process import free_port

STREAMS = 8
TOKENS = 2000  # more than come before the rank is lost
SECONDS = 60  # for the server to end


def stream(url: str, begun: Barrier) -> tuple[int, str]:
    """Read a stream to its end; return how many events of tokens and which error it had."""
    body = {"prompt": [5, 6, 7], "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    events, errors = 0, []
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                errors.append(event["error"]["message"])
                continue
            events += 1
            if events == 1:
                begun.wait(SECONDS)
    if len(errors) != 1:
        raise RuntimeError(f"a stream ended with {len(errors)} errors after {events} events: {errors}")
    return events, errors[0]


def followers(pid: int) -> list[int]:
    """Return the process ids of ranks among a process's descendants."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            if b"parallel.follower" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
            found += followers(child)
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def health(url: str) -> int | None:
    """Return the status of `/health`, None where nobody answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def lose_one(server: QuireProcess, size: int, how: signal.Signals) -> dict[str, object]:
    """Send the last rank a signal while there are streams.

    Raises RuntimeError if anything is not as it must be.
    """
    begun = Barrier(STREAMS + 1)
    with ThreadPoolExecutor(STREAMS) as threads:
        streams = [threads.submit(stream, server.url, begun) for _ in range(STREAMS)]
        begun.wait(SECONDS)
        ranks = followers(server.pid)
        if len(ranks) != size - 1:
            raise RuntimeError(f"there are {len(ranks)} other ranks, not {size - 1}")
        begin = time.monotonic()
        os.kill(ranks[-1], how)
        ended = [each.result() for each in streams]
        streams_s = time.monotonic() - begin
        statuses = {health(server.url)}
        while server.exit_code is None and time.monotonic() < begin + SECONDS:
            statuses.add(health(server.url))
            time.sleep(0.02)
    if not statuses <= {503, None}:
        raise RuntimeError(f"/health answered {statuses}")
    if not server.exit_code:
        raise RuntimeError(f"the server ended with {server.exit_code}")
    if left := [pid for pid in ranks if is_alive(pid)]:
        raise RuntimeError(f"ranks are left: {left}")
    return {
        "ranks": size,
        "signal": how.name,
        "streams_s": round(streams_s, 3),
        "exit_s": round(time.monotonic() - begin, 3),
        "exit_code": server.exit_code,
        "health": sorted(str(status) for status in statuses),
        "events": sum(events for events, _ in ended),
        "error": ended[0][1],
    }


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--size", type=int, default=2, help="ranks; 2 if left out")
    parser.add_argument("--model", help="a folder; Qwen3-0.6B's shape with dummy weights if left out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--signal", choices=("KILL", "STOP"), default="KILL", help="KILL if left out: it ends; STOP: it hangs"
    )
    parser.add_argument("--json", type=Path, help="add a line with the figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model_folders(Path(folder))
        model = arguments.model or f"{folder}/qwen3-0.6b"
        flags = ["--tensor-parallel-size", str(arguments.size), "--device", arguments.device]
        flags += [] if arguments.model else ["--load-format", "dummy"]
        server = QuireProcess("serve", model, *flags, port=free_port())
        server.start()
        try:
            server.wait_until_ready()
            figures = lose_one(server, arguments.size, signal.Signals[f"SIG{arguments.signal}"])
        finally:
            server.stop()
    add_line(figures, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
