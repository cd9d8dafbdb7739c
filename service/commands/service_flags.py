"""The flags that a server is started with: of any, a router too, and of one with an engine."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from quire.engine.logs import LogLevel
from quire.service.commands.flags import add_chat_template, flag
from quire.service.commands.parser import Parser
from quire.service.config import UnknownFields
from quire.service.text.reasoning.formats import REASONING_PARSERS


def add_address_flags(parser: Parser) -> None:
    """Add what any server is started with."""
    group = parser.group("Address and access")
    flag(group, "--host", default="127.0.0.1", help="The address to listen on; 0.0.0.0: all of them.")
    flag(group, "--port", type=int, default=8000, help="The port to listen on; 0: any that is free.")
    flag(
        group,
        "--api-key",
        action="append",
        metavar="KEY",
        shown="none",
        help="Ask for one of these keys (may repeat); whoever may list processes sees them, so rather give "
        "them in the environment, one a line, or in a file.",
    )
    flag(
        group,
        "--api-key-file",
        type=Path,
        shown="none",
        help="A file of keys, one a line, as name:key (logs say the name) or only the key; SIGHUP has it "
        "read again, and streams go on.",
    )
    flag(
        group,
        "--cors-origin",
        action="append",
        metavar="SITE",
        shown="none",
        help="Let pages of this site, such as https://chat.example, use the server (may repeat); *: of "
        "every site.",
    )
    flag(group, "--insecure", action="store_true", help="Allow a host that others reach without a key.")
    group = parser.group("Logs and shutdown")
    flag(
        group,
        "--otlp-endpoint",
        metavar="URL",
        shown="none",
        help="Send requests as traces to the OpenTelemetry collector there, by OTLP/HTTP.",
    )
    flag(
        group, "--log-format", choices=("text", "json"), default="text", help="json: each line is one object."
    )
    flag(
        group,
        "--log-level",
        choices=get_args(LogLevel),
        default="info",
        help="The least that is logged. debug: probes and every preemption as well.",
    )
    flag(
        group,
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="How long running answers may take to finish after SIGTERM or Ctrl-C.",
    )


def add_service_flags(parser: Parser) -> None:
    """Add what a server of one engine is started with."""
    add_address_flags(parser)
    group = parser.group("Requests")
    add_chat_template(group)
    flag(
        group,
        "--served-model-name",
        action="append",
        metavar="NAME",
        shown="the model's folder or Hub id",
        help="What requests call the model (may repeat).",
    )
    flag(
        group,
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default="auto",
        help="How the model writes what it thinks before it answers, which answers then carry apart. auto: "
        "as its chat template tells; none: all is the answer.",
    )
    flag(
        group,
        "--unknown-fields",
        choices=get_args(UnknownFields),
        default="refuse",
        help="What becomes of fields of a request that no API has: 400 that names them, or ignore, with the "
        "names in the header X-Quire-Ignored.",
    )
    flag(group, "--max-num-queued-reqs", type=int, default=1000, help="Prompts that wait; more get 429.")
    flag(
        group,
        "--max-num-queued-tokens",
        type=int,
        default=2 << 20,
        help="Tokens of the prompts that wait; more get 429.",
    )
    flag(
        group,
        "--stall-timeout",
        type=float,
        metavar="SECONDS",
        shown="10, on a CPU 60",
        help="How long there may be work and no step before requests end and are refused with 503.",
    )
    flag(
        group,
        "--pin-prefix",
        action="append",
        metavar="FILE",
        shown="none",
        help="A file whose lines prompts begin with, computed at start and never evicted: JSON strings, or "
        "lists of messages (may repeat).",
    )
    group = parser.group("Several replicas", "what others are told of this one's KV cache")
    flag(
        group,
        "--redis-url",
        metavar="URL",
        shown="none",
        help="Tell routers there which blocks this replica holds; rediss:// for TLS.",
    )
    flag(
        group,
        "--response-store",
        choices=("memory", "redis"),
        default="memory",
        help="Where stored responses are kept; redis: in that of --redis-url, for all replicas, and beyond a "
        "restart.",
    )
    flag(
        group,
        "--response-ttl",
        type=float,
        default=30 * 86400.0,
        metavar="SECONDS",
        shown="2592000, 30 days",
        help="For how long Redis keeps a response.",
    )
    flag(
        group,
        "--advertise-url",
        metavar="URL",
        shown="http://host:port",
        help="Where routers reach this replica.",
    )
    flag(
        group,
        "--registry-lease",
        type=float,
        metavar="SECONDS",
        shown="15",
        help="How long a replica that fell silent is believed to be there.",
    )
    flag(
        group,
        "--kv-events-config",
        metavar="JSON",
        shown="none",
        help="Publish the prefix cache's changes by ZeroMQ, for llm-d, Dynamo and others: JSON with vLLM's "
        'keys, such as {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}.',
    )
