"""Settings of the HTTP service, concrete and checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.engine.urls import check_http_url
from quire.service.keys import clean_key
from quire.service.origins import ANY, clean_origin

UnknownFields = Literal["refuse", "ignore"]
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def check_host_and_port(host: str, port: int) -> None:
    """Raise ValueError for what no server can listen at, on any machine."""
    if not host:
        raise ValueError("--host must be an address or a name, got ''; try 127.0.0.1")
    if not 0 <= port <= 65535:
        raise ValueError(f"--port must be between 0 and 65535, got {port}")


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """Times are seconds, sizes bytes. Raises ValueError that names the flag and what it may be."""

    served_model_names: tuple[str, ...]  # the first is the one we answer with
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None  # of more of them, which a SIGHUP has read again
    cors_origins: tuple[str, ...] = ()  # of other sites whose pages may use this server; "*": of all
    insecure: bool = False
    unknown_fields: UnknownFields = "refuse"  # of requests, that no API has; ignore: and name them
    otlp_endpoint: str | None = None  # of a collector that gets requests as traces
    reasoning_parser: str = "auto"  # how models write their thinking; auto: by the template
    max_num_queued_reqs: int = 1000  # prompts accepted whose first token has not come
    max_num_queued_tokens: int = 2 << 20  # of those; a request that comes alone may have more
    max_untokenised_bytes: int = 64 << 20  # of prompts that wait to be tokenised
    max_connections: int = 8192  # and no more than file descriptors allow
    max_receiving_bytes: int = 256 << 20  # of all bodies that are not whole yet
    shutdown_timeout: float = 30.0
    # Seconds without a step, after which requests end and new ones are refused; None: by the device.
    stall_timeout: float | None = None
    max_body_bytes: int = 8 << 20
    max_frame_bytes: int = 1 << 20  # of one WebSocket message
    max_prompt_bytes: int = 4 << 20  # of one prompt, UTF-8
    max_header_bytes: int = 64 << 10
    receive_timeout: float = 30.0  # for the headers, and again for the body
    keep_alive: float = 15.0  # an idle stream gets a comment this often
    send_timeout: float = 30.0  # a client that reads nothing for so long is cut
    max_backlog_bytes: int = 256 << 10  # what may wait for a client that does not read
    max_conversation_bytes: int = 2 << 20  # what a WebSocket remembers of its responses
    max_conversations_bytes: int = 256 << 20  # what all WebSockets remember together
    max_stored_bytes: int = 256 << 20  # of responses that are kept
    response_store: Literal["memory", "redis"] = "memory"
    response_ttl: float = 30 * 86400.0  # seconds for which Redis keeps them
    redis_url: str | None = None
    resume_timeout: float = 60.0  # for which a stream with an X-Stream-Id waits for a reader to come back
    max_stream_bytes: int = 1 << 20  # of its events that are kept
    max_recorded_streams: int = 256  # that run
    max_recorded_bytes: int = 128 << 20  # of those that run and those that have ended
    terminal_timeout: float = 1.0  # for the last event of a stream that we end ourselves

    def __post_init__(self) -> None:
        if not self.served_model_names:
            raise ValueError("--served-model-name must name at least one model")
        if not all(name.strip() for name in self.served_model_names):
            raise ValueError("--served-model-name must have at least one character other than spaces")
        check_host_and_port(self.host, self.port)
        if self.max_num_queued_reqs < 1:
            raise ValueError(f"--max-num-queued-reqs must be at least 1, got {self.max_num_queued_reqs}")
        if self.max_num_queued_tokens < 1:
            raise ValueError(f"--max-num-queued-tokens must be at least 1, got {self.max_num_queued_tokens}")
        if not 0 <= self.shutdown_timeout <= 86400:
            raise ValueError(
                f"--shutdown-timeout must be between 0 and 86400 seconds, got {self.shutdown_timeout}"
            )
        if self.stall_timeout is not None and not 0 < self.stall_timeout <= 86400:
            raise ValueError(
                f"--stall-timeout must be above 0 and at most 86400 seconds, got {self.stall_timeout}"
            )
        if self.response_store == "redis" and self.redis_url is None:
            raise ValueError("--response-store redis needs a Redis: give --redis-url, or leave it out")
        if not 1 <= self.response_ttl <= 366 * 86400:
            raise ValueError(
                f"--response-ttl must be between 1 and {366 * 86400} seconds, got {self.response_ttl:g}"
            )
        if self.otlp_endpoint is not None:
            check_http_url("--otlp-endpoint", self.otlp_endpoint)
        keys = [clean_key(key, f"--api-key number {at}") for at, key in enumerate(self.api_keys, 1)]
        object.__setattr__(self, "api_keys", tuple(keys))
        origins = tuple(map(clean_origin, self.cors_origins))
        if ANY in origins and len(origins) > 1:
            raise ValueError(f"--cors-origin {ANY} allows every site: leave out the others")
        object.__setattr__(self, "cors_origins", origins)
        if self.host not in LOOPBACK and not self.asks_for_keys and not self.insecure:
            raise ValueError(
                f"--host {self.host} can be reached from other machines: set --api-key or --api-key-file, or "
                "--insecure to serve anyone who can connect"
            )

    @property
    def asks_for_keys(self) -> bool:
        return bool(self.api_keys) or self.api_key_file is not None

    @property
    def allowed_hosts(self) -> frozenset[str] | None:
        """Return the host names that a browser may have used; None: any.

        Guards a keyless server from DNS rebinding.
        """
        if self.asks_for_keys or self.host in ("0.0.0.0", "::"):
            return None
        return LOOPBACK | {self.host.lower()}
