"""The arguments of an application on Ray: those of `quire serve`, and how many replicas there are."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

from quire.commands import serve
from quire.commands.serve import Settings, read_settings
from quire.service.commands.flags import flag
from quire.service.commands.parser import FlagGroup, Parser
from quire.service.commands.usage_error import UsageError

_PROXY = "Ray's proxy listens for requests: set it in http_options of Ray Serve"
_OF_RAY = {
    "host": _PROXY,
    "port": _PROXY,
    "advertise_url": "each replica gets an address of its own: leave it out",
}


@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """What is asked of Ray, and the flags of each replica."""

    arguments: Namespace
    min_replicas: int
    max_replicas: int
    target_ongoing_requests: float
    upscale_delay_s: float
    downscale_delay_s: float
    look_back_period_s: float
    max_ongoing_requests: int
    num_routers: int
    num_cpus: float
    num_gpus: int  # of each replica, all in one machine

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError(
                f"min_replicas must be at least 1 and at most max_replicas, got {self.min_replicas} and "
                f"{self.max_replicas}"
            )
        if self.max_ongoing_requests < 1 or self.num_routers < 1:
            raise ValueError("max_ongoing_requests and num_routers must be at least 1")
        if not 0 < self.target_ongoing_requests <= self.max_ongoing_requests:
            raise ValueError(
                "target_ongoing_requests must be above 0 and at most max_ongoing_requests, got "
                f"{self.target_ongoing_requests:g} and {self.max_ongoing_requests}"
            )
        for name in ("num_cpus", "num_gpus", "upscale_delay_s", "downscale_delay_s"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} must be at least 0, got {value:g}")
        if self.look_back_period_s <= 0:
            raise ValueError(f"look_back_period_s must be above 0, got {self.look_back_period_s:g}")
        if self.arguments.device != "cpu" and self.num_gpus < self.arguments.tensor_parallel_size:
            raise ValueError(
                f"num_gpus must be at least tensor_parallel_size, {self.arguments.tensor_parallel_size}, got "
                f"{self.num_gpus}: a replica sees no others"
            )


def read_arguments(entries: Mapping[str, object]) -> RaySettings:
    """Return what they come to. Raises ValueError that names the one at fault."""
    parser = _parser()
    for key in entries:
        if (why := _OF_RAY.get(key.replace("-", "_"))) is not None:
            raise ValueError(f"{key}: {why}")
    switches = {flag.name.removeprefix("--").replace("-", "_") for flag in parser.flags if flag.switches}
    switches |= {flag.dest for flag in parser.flags if flag.switches}
    try:
        arguments = parser.parse_entries(
            {key: _switched(value) if key in switches else value for key, value in entries.items()}
        )
    except UsageError as error:
        raise ValueError(str(error)) from None
    arguments.host, arguments.port, arguments.advertise_url = "127.0.0.1", 8000, None
    read_settings(arguments)
    seqs: int = arguments.max_num_seqs
    most = arguments.max_ongoing_requests
    most = seqs if most is None else most
    target = arguments.target_ongoing_requests
    gpus = arguments.num_gpus
    if gpus is None:
        gpus = 0 if arguments.device == "cpu" else arguments.tensor_parallel_size
    return RaySettings(
        arguments=arguments,
        min_replicas=arguments.min_replicas,
        max_replicas=max(arguments.max_replicas or 0, arguments.min_replicas),
        target_ongoing_requests=max(1.0, most / 2) if target is None else target,
        upscale_delay_s=arguments.upscale_delay_s,
        downscale_delay_s=arguments.downscale_delay_s,
        look_back_period_s=arguments.look_back_period_s,
        max_ongoing_requests=most,
        num_routers=arguments.num_routers,
        num_cpus=arguments.num_cpus,
        num_gpus=gpus,
    )


def settings_at(arguments: Namespace, host: str, port: int) -> Settings:
    """Return the settings of a replica that listens there; only who has a lease gets in."""
    url = None if arguments.redis_url is None else f"http://{host}:{port}"
    own = {"host": host, "port": port, "advertise_url": url, "insecure": True}
    return read_settings(Namespace(**{**vars(arguments), **own}))


def _switched(value: object) -> object:
    """On a command line of Ray's all values are texts."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _parser() -> Parser:
    parser = Parser("serve")
    serve.add_flags(parser)
    parser.flags[:] = [flag for flag in parser.flags if flag.dest not in _OF_RAY]
    _add_flags(parser.group("Ray"))
    return parser


def _add_flags(group: FlagGroup) -> None:
    flag(group, "--min-replicas", type=int, default=1, help="Fewest replicas.")
    flag(group, "--max-replicas", type=int, shown="min_replicas", help="Most replicas.")
    flag(
        group,
        "--target-ongoing-requests",
        type=float,
        shown="half of max_ongoing_requests",
        help="Requests on a replica at which Ray neither adds nor ends any.",
    )
    flag(
        group,
        "--upscale-delay-s",
        type=float,
        default=30.0,
        help="Seconds of more load than that before Ray adds a replica.",
    )
    flag(
        group,
        "--downscale-delay-s",
        type=float,
        default=600.0,
        help="Seconds of less load than that before Ray ends a replica.",
    )
    flag(
        group,
        "--look-back-period-s",
        type=float,
        default=30.0,
        help="Seconds over which Ray averages the load.",
    )
    flag(
        group,
        "--max-ongoing-requests",
        type=int,
        shown="max_num_seqs",
        help="Most requests on a replica; more wait in the router, for whichever replica has room first.",
    )
    flag(group, "--num-routers", type=int, default=1, help="Processes that pass requests on to replicas.")
    flag(group, "--num-cpus", type=float, default=1.0, help="CPUs that Ray counts for a replica.")
    flag(
        group,
        "--num-gpus",
        type=int,
        shown="tensor_parallel_size, or 0 with device=cpu",
        help="GPUs that Ray counts for a replica, and shows it.",
    )
