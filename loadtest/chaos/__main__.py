"""Everything at once, by default for a minute in all.

`python -m quire.loadtest.chaos [--seconds S] [--json FILE]`

Two replicas with little memory, a router and a Redis on loopback. Clients of one seed ask for streams,
samples, beams, grammars, WebSockets and streams that break off, and some leave. Redis is killed every five
seconds, and lies; a replica is killed and restarted, and so are the processes that try out grammars; hostile
clients do what they can. Afterwards nothing may be left of it: see the table. Exits with 1 if a check fails.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from quire.loadtest.chaos.checks import Limits
from quire.loadtest.chaos.fleet import start_fleet
from quire.loadtest.chaos.hostile import NAMES
from quire.loadtest.chaos.report import as_json, judge, table
from quire.loadtest.chaos.run import Plan, run
from quire.loadtest.command import command_parser

LONG = 600.0  # seconds from which on a run is judged by the strict limits
# A process still warms up in a minute: its memory grows until every kind of request has run with every other.
# It shares its cores with other tests: threads that hold the interpreter's lock wait for one too, and the
# loop for them, which no count of the loop's own waits tells.
SHORT_LIMITS = Limits(health_p99=1.0, stalls=10, growth=0.1, left=0.005, end=5.0)


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of traffic; 30 if left out")
    parser.add_argument("--seed", type=int, default=0, help="of the traffic and the order of attacks")
    parser.add_argument("--concurrency", type=int, default=10, help="clients at once")
    parser.add_argument(
        "--restart-every", type=float, help="seconds that a replica is up; 240, in short runs a fifth of them"
    )
    parser.add_argument("--attacks", nargs="*", choices=NAMES, default=NAMES, help="all, if left out")
    parser.add_argument("--honest-redis", action="store_true", help="Redis is killed, but does not lie")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    is_long = arguments.seconds >= LONG
    plan = Plan(
        seconds=arguments.seconds,
        seed=arguments.seed,
        concurrency=arguments.concurrency,
        restart_every=arguments.restart_every or (240.0 if is_long else arguments.seconds / 5),
        attacks=tuple(arguments.attacks),
        lying=not arguments.honest_redis,
    )
    limits = Limits() if is_long else SHORT_LIMITS
    console = Console(soft_wrap=True)
    begin = time.monotonic()
    console.print(f"{replace(plan, attacks=len(plan.attacks))}", highlight=False)  # type: ignore[arg-type]

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - begin:6.0f} s: {text}", highlight=False)

    say("starting Redis, two replicas and a router ...")
    with start_fleet() as fleet:
        seen = asyncio.run(run(fleet, plan, say))
    found = judge(seen, limits)
    console.print(table(found, f"{plan.seconds:g} s of traffic, {time.monotonic() - begin:.0f} s in all"))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(seen, plan, limits, found), indent=1) + "\n")
    return 0 if all(check.passed for check in found) else 1


if __name__ == "__main__":
    sys.exit(main())
