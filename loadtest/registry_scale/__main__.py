"""Simulate fleets of replicas that share one registry, up to a thousand with 50,000 blocks each.

`python -m quire.loadtest.registry_scale [--replicas 10 100 1000] [--json FILE]`

Measures what the registry's commands cost a real Redis on loopback. Then the publisher's code publishes what
one replica's cache does, and the router's code places requests among all of them, on virtual clocks. Four
minutes.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

from quire.loadtest.command import command_parser, write_json
from quire.loadtest.registry_scale.costs import measure
from quire.loadtest.registry_scale.publishing import simulate
from quire.loadtest.registry_scale.scale import as_text, find_ends, measure_fleet
from quire.loadtest.servers.redis_server import RedisServer


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 250, 1000])
    parser.add_argument("--blocks", type=int, default=50_000, help="that a replica has")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second and replica")
    parser.add_argument("--rounds", type=int, default=1, help="in which each prefix is asked for again")
    parser.add_argument("--seconds", type=float, default=60.0, help="of publishing that are simulated")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-registry-") as folder:
        server = RedisServer(Path(folder))
        try:
            costs = measure(server.client, f"{server.url}?socket_timeout=60", arguments.blocks)
        finally:
            server.kill()
    publishing = simulate(arguments.blocks, arguments.rate, arguments.seconds)
    fleets = [
        measure_fleet(count, arguments.blocks, arguments.rate, arguments.rounds, publishing, costs)
        for count in arguments.replicas
    ]
    ends = find_ends(arguments.rate, publishing, costs)
    print(as_text(fleets, ends))
    if arguments.json is not None:
        figures = {
            "blocks": arguments.blocks,
            "rate": arguments.rate,
            "costs": asdict(costs),
            "publishing": asdict(publishing),
            "fleets": [asdict(fleet) for fleet in fleets],
            "ends": asdict(ends),
        }
        write_json(arguments.json, "cpu", figures)


if __name__ == "__main__":
    main()
