"""Settings of the router, concrete and checked once."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.urls import check_redis_url, check_replica_url, split_address
from quire.service.router.allowed import AllowedReplicas


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Times are seconds. Raises ValueError that names the flag and what it may be."""

    model: str  # the replicas' own; only its tokenizer is read, and only with a registry
    lora: str | None = None  # of an adapter that is merged into it, likewise
    replicas: tuple[str, ...] = ()  # their URLs
    replica_dns: str | None = (
        None  # or a name and port that they are found at; neither: as the registry knows
    )
    redis_url: str | None = None
    allow_replicas: tuple[str, ...] = ()  # of those that the registry knows; none: in private networks
    cache_seed: str = ""
    chat_template: str | None = None  # that of the replicas, as `Tokenizer.from_folder` has it
    poll_seconds: float = 0.5  # between two looks at who is registered
    scan_seconds: float = 5.0  # between two looks for deployments
    probe_seconds: float = 1.0  # between two looks whether a replica is ready
    probe_timeout: float = 5.0
    connect_timeout: float = 2.0
    resolve_seconds: float = 5.0  # between two looks at the addresses of a name; a headless Service's TTL
    max_held_bytes: int = 256 << 20  # of bodies that are not answered yet, and of answers that are not whole
    forget_seconds: float = 30.0  # a replica that the registry no longer has is asked no more after this

    def __post_init__(self) -> None:
        if not self.replicas and self.replica_dns is None and self.redis_url is None:
            raise ValueError(
                "give --replica (may repeat), --replica-dns, or --redis-url where replicas register"
            )
        if self.replicas and self.replica_dns is not None:
            raise ValueError("give either --replica or --replica-dns")
        if self.replica_dns is not None:
            split_address("--replica-dns", self.replica_dns)
        for url in self.replicas:
            check_replica_url("--replica", url)
        if len(set(self.replicas)) < len(self.replicas):
            raise ValueError("--replica names one URL twice")
        if self.allow_replicas and not self.registry_is_believed:
            raise ValueError(
                "--allow-replica is for replicas that the registry names: with --replica or --replica-dns "
                "there are no others"
            )
        AllowedReplicas(self.allow_replicas)
        if self.redis_url is not None:
            check_redis_url(self.redis_url)
        elif self.cache_seed:
            raise ValueError("--cache-seed is for digests in the registry: give --redis-url too")

    @property
    def registry_is_believed(self) -> bool:
        """Return whether replicas are those that the registry knows."""
        return not self.replicas and self.replica_dns is None
