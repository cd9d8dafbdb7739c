"""Measure how soon a server serves.

`python -m quire.loadtest.startup_time MODEL [--load-format dummy] [--runs N]`

Starts `quire serve MODEL` twice a run, with an empty cache of compiled kernels and then with what the first
start left there, and asks for a completion as soon as it is ready. Prints when each phase ended, in seconds
since the command, and the times between tokens while CUDA graphs may still be missing and when all are there:
of the run whose first token was neither the earliest nor the latest.
"""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from quire.loadtest.command import append_json, check_model_argument, command_parser
from quire.loadtest.provenance import Provenance
from quire.loadtest.servers.measured_server import serving

START_SECONDS = 300.0
LOOK_SECONDS = 0.005
TOKENS = 256  # of each completion


@dataclass(frozen=True, slots=True)
class StartupTime:
    """One line of the results: moments in seconds since the command, times between tokens in ms."""

    model: str
    kernels: str  # cold: compiled anew; warm: found
    port_s: float
    phases_s: dict[str, float]  # when each ended, since the engine process was asked for
    ready_s: float
    first_token_s: float
    graphs_s: float
    itl_p50_ms: float  # of the first completion
    itl_max_ms: float
    later_itl_p50_ms: float  # of one when all graphs are there
    later_itl_max_ms: float
    runs: int  # of which this is the middle one
    device: str
    commit: str
    date: str
    command: str


def measure(model: str, options: list[str], kernels: str, cache: Path) -> StartupTime:
    """Start a server that keeps compiled kernels in `cache`. Raises RuntimeError if it does not come up."""
    begin = time.monotonic()
    until = begin + START_SECONDS
    with serving(model, *options, environment={"TRITON_CACHE_DIR": str(cache)}) as server:
        answered = server.wait_for(lambda: _accepts(server.port), until, LOOK_SECONDS)
        phases = dict(_phases(server.url))
        ready = server.wait_for(lambda: server.graphs_left() is not None, until, LOOK_SECONDS)
        first = list(_token_times(server.url))
        graphs = server.wait_for(lambda: server.graphs_left() == 0, until, LOOK_SECONDS)
        later = list(_token_times(server.url))
    gaps, later_gaps = _gaps(first), _gaps(later)
    return StartupTime(
        model=Path(model).name,
        kernels=kernels,
        port_s=round(answered - begin, 2),
        phases_s={phase: round(seconds, 2) for phase, seconds in phases.items()},
        ready_s=round(ready - begin, 2),
        first_token_s=round(first[0] - begin, 2),
        graphs_s=round(graphs - begin, 2),
        itl_p50_ms=statistics.median(gaps),
        itl_max_ms=max(gaps),
        later_itl_p50_ms=statistics.median(later_gaps),
        later_itl_max_ms=max(later_gaps),
        runs=1,
        device=_device_name(),
        **asdict(Provenance.here()),
    )


def middle(starts: Sequence[StartupTime]) -> StartupTime:
    """Return the start with the median first token; of an even number the earlier one of two."""
    return replace(
        sorted(starts, key=lambda start: start.first_token_s)[(len(starts) - 1) // 2], runs=len(starts)
    )


@functools.cache
def _device_name() -> str:
    """Ask another process: this one must hold nothing of a device on which servers start."""
    code = "from quire.loadtest.provenance import device_name; print(device_name())"
    return subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def _phases(url: str) -> Iterator[tuple[str, float]]:
    """Yield each start-up phase and when it ended."""
    for event in _events(urllib.request.Request(f"{url}/startup")):
        if event["done"] == event["total"]:
            yield event["phase"], event["seconds"]


def _token_times(url: str) -> Iterator[float]:
    """Yield when each token of a completion came."""
    body = {
        "prompt": [5] * 32,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    for event in _events(request):
        yield from [time.monotonic()] * len(event["choices"][0]["token_ids"])


def _events(request: urllib.request.Request) -> Iterator[dict]:
    with urllib.request.urlopen(request, timeout=START_SECONDS) as response:
        for line in response:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: "))


def _gaps(times: list[float]) -> list[float]:
    return [round(1000 * (after - before), 2) for before, after in pairwise(times)]


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("model", help="a model folder")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument("--runs", type=int, default=3, help="the middle one counts")
    parser.add_argument("--result-file", type=Path, help="append one JSON object, cold and warm")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error(f"--runs must be at least 1, got {arguments.runs}")
    check_model_argument(parser, arguments.model)
    starts: dict[str, list[StartupTime]] = {"cold": [], "warm": []}
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory() as cache:
            for kernels, found in starts.items():
                options = ["--load-format", arguments.load_format]
                found.append(measure(arguments.model, options, kernels, Path(cache)))
                print(json.dumps(asdict(found[-1])), flush=True)
    for found in starts.values():
        result = middle(found)
        print(json.dumps(asdict(result)), flush=True)
        if arguments.result_file is not None:
            append_json(arguments.result_file, result)


if __name__ == "__main__":
    main()
