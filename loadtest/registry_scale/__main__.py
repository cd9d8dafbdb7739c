"""Simulate fleets of replicas that share one registry, up to a thousand with 50,000 blocks each.

`python -m quire.loadtest.registry_scale [--replicas 10 100 1000] [--json FILE]`

Measures what the registry's commands cost a real Redis on loopback, in CPU time. Then replicas publish what
their caches do and routers look up and place requests, all by their own code and through such a Redis, on
virtual time in which each command takes what it was measured to. Five minutes of CPU time and 7 GB.
"""

from __future__ import annotations

import gc
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from quire.loadtest.command import command_parser, write_json
from quire.loadtest.registry_scale.costs import measure
from quire.loadtest.registry_scale.scale import as_text, find_ends, measure_fleet
from quire.loadtest.servers.redis_server import RedisServer


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 125, 250, 1000])
    parser.add_argument("--blocks", type=int, default=50_000, help="that a replica has")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second and replica")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.getLogger("quire").setLevel(logging.ERROR)  # routers warn of what is meant to happen here
    gc.disable()  # millions of objects would be looked at again and again
    begin = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - begin:5.0f} s  {text}", file=sys.stderr, flush=True)

    tell("what a Redis takes for the registry's commands")
    with _new_redis() as server:
        costs = measure(server, arguments.blocks)
    fleets = []
    for count in arguments.replicas:
        with _new_redis() as server:
            fleets.append(measure_fleet(server, costs, count, arguments.blocks, arguments.rate, tell=tell))
        gc.collect()
    ends = find_ends(fleets[0], arguments.rate, costs)
    print(as_text(fleets, ends))
    if arguments.json is not None:
        figures = {
            "blocks": arguments.blocks,
            "rate": arguments.rate,
            "costs": asdict(costs),
            "fleets": [asdict(fleet) for fleet in fleets],
            "ends": asdict(ends),
        }
        write_json(arguments.json, "cpu", figures)


@contextmanager
def _new_redis() -> Iterator[RedisServer]:
    """Yield one that nobody has used: what was deleted from another may not be free yet."""
    with tempfile.TemporaryDirectory(prefix="quire-registry-") as folder:
        server = RedisServer(Path(folder))
        try:
            yield server
        finally:
            server.kill()


if __name__ == "__main__":
    main()
