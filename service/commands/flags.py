"""The flags of the `quire` command. Each can also be given as QUIRE_<NAME>."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, get_args

from quire.engine.config import BLOCK_SIZES, KVCacheDtype, ModelImpl
from quire.engine.logs import LogLevel
from quire.service.config import UnknownFields
from quire.service.demo import MODEL_FOLDER
from quire.service.text.named_templates import template_names

Parser = argparse.ArgumentParser
OTHER_PARALLELISM = (
    "a server divides its model by --tensor-parallel-size only; for more requests run several servers "
    "behind quire route"
)
DEFAULT_MAX_TOKENS = 256  # of `quire generate`


def flag(parser: Parser, name: str, *, default: object = None, **options: Any) -> None:
    """Add a flag whose default its environment variable overrides. What may repeat is a line each there."""
    variable = f"QUIRE_{name.removeprefix('--').replace('-', '_').upper()}"
    options["help"] = f"{options.get('help', '')} [{variable}]"
    value = os.environ.get(variable)
    if options.get("action") in ("store_true", "store_false"):
        if value not in (None, "0", "1"):
            parser.error(f"{variable} must be 0 or 1, got {value!r}")
        given = options["action"] == "store_true"
        parser.add_argument(name, default=given if value == "1" else not given, **options)
    elif options.get("action") == "append":
        parser.add_argument(name, default=environment_lines(variable), **options)
    else:
        choices = options.get("choices")
        if value is not None and isinstance(choices, tuple) and value not in map(str, choices):
            parser.error(f"{variable} must be one of {', '.join(map(str, choices))}, got {value!r}")
        parser.add_argument(name, default=default if value is None else value, **options)


class _Refused(argparse.Action):
    """A flag of vLLM's that there is another way for."""

    def __call__(
        self, parser: Parser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        if str(values) != "1":
            parser.error(f"{option}: {OTHER_PARALLELISM}")


def environment_lines(variable: str) -> list[str]:
    """Return the lines of an environment variable that are not empty."""
    lines = os.environ.get(variable, "").split("\n")
    return [line.strip() for line in lines if line.strip()]


def add_model(parser: Parser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=os.environ.get("QUIRE_MODEL", MODEL_FOLDER),
        help="a folder that save_pretrained wrote, or a Hub id; else the bundled demo model [QUIRE_MODEL]",
    )


def add_chat_template(parser: Parser) -> None:
    flag(
        parser,
        "--chat-template",
        help="of chats, instead of the model's or where it has none: a file, or one of "
        f"{', '.join(template_names())}; a turn then ends where the template ends it",
    )


def add_engine_flags(parser: Parser) -> None:
    add_model(parser)
    flag(parser, "--device", choices=("auto", "cuda", "cpu"), default="auto")
    flag(
        parser,
        "--dtype",
        choices=("auto", "float32", "float16", "bfloat16"),
        default="auto",
        help="auto: the checkpoint's on a GPU, float32 on a CPU",
    )
    flag(
        parser,
        "--kv-cache-dtype",
        choices=get_args(KVCacheDtype),
        default="auto",
        help="of keys and values. fp8_e4m3: 8 bits, half of bfloat16's memory; fp12_e4m7: 12 bits, three "
        "quarters of it with bfloat16's precision; model: as --dtype; auto: fp12_e4m7 on a Hopper GPU for a "
        "bfloat16 model whose heads suit its kernels, else model",
    )
    flag(
        parser,
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights, only config.json and the tokenizer are read",
    )
    flag(
        parser,
        "--model-impl",
        choices=get_args(ModelImpl),
        default="auto",
        help="native: a decoder of Quire's own; transformers: that library's modelling code, without CUDA "
        "graphs; auto: native where there is one",
    )
    flag(
        parser, "--max-model-len", type=int, help="most tokens of prompt and output; the model's if left out"
    )
    flag(parser, "--max-num-seqs", type=int, default=256, help="most sequences that run at once")
    flag(
        parser,
        "--max-num-batched-tokens",
        type=int,
        help="most tokens a step computes; if left out 64 for each multiprocessor of a GPU (8448 on an H100) "
        "and 2048 on a CPU",
    )
    flag(parser, "--block-size", type=int, choices=BLOCK_SIZES, default=16, help="tokens in a KV block")
    flag(
        parser,
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        help="share of the GPU's memory for weights, activations and KV blocks",
    )
    flag(parser, "--num-gpu-blocks-override", type=int, help="KV blocks, on a CPU too; measured if left out")
    flag(
        parser,
        "--swap-space",
        type=float,
        default=4.0,
        help="GiB of host memory for KV blocks of preempted requests and cached ones; 0: none",
    )
    flag(
        parser,
        "--preemption-mode",
        choices=("auto", "swap", "recompute"),
        default="auto",
        help="auto: whichever costs less, as measured at start",
    )
    flag(
        parser,
        "--no-enable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="compute every prompt anew",
    )
    flag(
        parser,
        "--cache-seed",
        help="a secret that block digests are seeded with, the same for all replicas and their router; "
        "drawn at random without --redis-url, else empty",
    )
    flag(parser, "--enforce-eager", action="store_true", help="no CUDA graphs")
    flag(
        parser,
        "--tensor-parallel-size",
        type=int,
        default=1,
        help="GPUs, or processes on a CPU, that the model is divided among; it must divide the heads",
    )
    flag(
        parser,
        "--disable-custom-all-reduce",
        action="store_true",
        help="have NCCL alone sum over the GPUs, and not kernels that write into each other's memory",
    )
    parser.add_argument("--pipeline-parallel-size", action=_Refused, help="refused, but for 1")
    parser.add_argument("--data-parallel-size", action=_Refused, help="refused, but for 1")
    flag(parser, "--seed", type=int, help="of dummy weights; 0 if left out")


def add_address_flags(parser: Parser) -> None:
    flag(parser, "--host", default="127.0.0.1")
    flag(parser, "--port", type=int, default=8000)
    flag(
        parser,
        "--api-key",
        action="append",
        help="ask for one of these keys (may repeat); whoever may list processes sees them, so rather give "
        "them in the environment, one a line, or in a file",
    )
    flag(
        parser,
        "--api-key-file",
        type=Path,
        help="a file of keys, one a line, as name:key (logs say the name) or only the key; SIGHUP has it "
        "read again, and streams go on",
    )
    flag(
        parser,
        "--cors-origin",
        action="append",
        help="let pages of this site, such as https://chat.example, use the server (may repeat); *: those of "
        "every site; none if left out",
    )
    flag(parser, "--insecure", action="store_true", help="allow a host that others reach without a key")
    flag(
        parser,
        "--otlp-endpoint",
        help="send requests as traces to the OpenTelemetry collector at this URL, by OTLP/HTTP; to none if "
        "left out",
    )
    flag(parser, "--log-format", choices=("text", "json"), default="text", help="json: one object a line")
    flag(
        parser,
        "--log-level",
        choices=get_args(LogLevel),
        default="info",
        help="the least that is logged; debug: probes and every preemption as well",
    )
    flag(
        parser,
        "--shutdown-timeout",
        type=float,
        default=30.0,
        help="seconds that running streams may take to finish after SIGTERM",
    )


def add_client_flags(parser: Parser) -> None:
    """Add where a server is that is asked something, and as whom."""
    flag(parser, "--url", default="http://127.0.0.1:8000", help="the server's, or a router's")
    keys = environment_lines("QUIRE_API_KEY")
    parser.add_argument(
        "--api-key",
        default=keys[0] if keys else None,
        help="a key that the server knows; whoever may list processes sees it, so rather set [QUIRE_API_KEY]",
    )


def add_service_flags(parser: Parser) -> None:
    add_address_flags(parser)
    add_chat_template(parser)
    flag(
        parser,
        "--served-model-name",
        action="append",
        help="what requests call the model (may repeat); its folder's or Hub id's if left out",
    )
    flag(
        parser,
        "--unknown-fields",
        choices=get_args(UnknownFields),
        default="refuse",
        help="what becomes of fields of a request that no API has: 400 that names them, or ignore, with the "
        "names in the header X-Quire-Ignored",
    )
    flag(parser, "--max-num-queued-reqs", type=int, default=1000, help="prompts that wait; more get 429")
    flag(parser, "--max-num-queued-tokens", type=int, default=2 << 20, help="tokens of those; more get 429")
    flag(
        parser,
        "--stall-timeout",
        type=float,
        help="seconds without a step, with work to do, after which requests end and are refused with 503; if "
        "left out 10, and 60 on a CPU",
    )
    flag(
        parser,
        "--pin-prefix",
        action="append",
        help="a file whose lines prompts begin with, computed at start and never evicted: JSON strings, or "
        "lists of messages (may repeat)",
    )
    flag(parser, "--redis-url", help="tell routers there which blocks this replica holds; rediss:// for TLS")
    flag(parser, "--advertise-url", help="where routers reach this replica; http://host:port if left out")
    flag(
        parser,
        "--registry-lease",
        type=float,
        help="seconds for which a replica that fell silent is believed to be there; 15 if left out",
    )
    flag(
        parser,
        "--kv-events-config",
        help="publish the prefix cache's changes by ZeroMQ, for llm-d, Dynamo and others: JSON with vLLM's "
        'keys, such as {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}; nothing if left out',
    )


def add_sampling_flags(parser: Parser) -> None:
    flag(parser, "--prompt", help="the text to continue; read from standard input if left out")
    flag(parser, "--chat", action="store_true", help="the prompt is a user's message: use the chat template")
    add_chat_template(parser)
    flag(
        parser,
        "--max-tokens",
        type=int,
        help=f"most tokens to generate; {DEFAULT_MAX_TOKENS}, or as many as fit, if left out",
    )
    flag(parser, "--temperature", type=float, default=0.0)
    flag(parser, "--top-p", type=float, default=1.0)
    flag(parser, "--top-k", type=int, default=0)
    flag(parser, "--sampling-seed", type=int, help="of what is sampled; drawn if left out")
