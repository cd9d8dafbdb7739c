"""Simulate fleets of replicas that share one registry, up to a thousand with 50,000 blocks each.

`python -m quire.loadtest.registry_scale [--replicas 10 100 1000] [--json FILE]`

Measures what the registry's commands cost a real Redis on loopback. Then replicas publish what their caches
do and routers look up and place requests, all by their own code and through that Redis, on virtual time in
which each command takes what it was measured to. Five minutes and 6 GB.
"""

from __future__ import annotations

import gc
import tempfile
from dataclasses import asdict
from pathlib import Path

from quire.loadtest.command import command_parser, write_json
from quire.loadtest.registry_scale.costs import measure
from quire.loadtest.registry_scale.scale import as_text, find_ends, measure_fleet
from quire.loadtest.servers.redis_server import RedisServer


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 250, 1000])
    parser.add_argument("--blocks", type=int, default=50_000, help="that a replica has")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second and replica")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    gc.disable()  # millions of blocks would be looked at again and again
    fleets = []
    with tempfile.TemporaryDirectory(prefix="quire-registry-") as folder:
        server = RedisServer(Path(folder))
        try:
            costs = measure(server, arguments.blocks)
            for count in arguments.replicas:
                fleets.append(measure_fleet(server, costs, count, arguments.blocks, arguments.rate))
                gc.collect()
        finally:
            server.kill()
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


if __name__ == "__main__":
    main()
