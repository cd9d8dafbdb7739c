"""The flags of the `quire` command. Each can also be given as QUIRE_<NAME>, or in the file of --config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

from quire.engine.config import BLOCK_SIZES, KVCacheDtype, ModelImpl
from quire.engine.logs import LogLevel
from quire.engine.models.pooling import Runner
from quire.service.commands.parser import Action, Flag, FlagGroup, Parser, metavar_of
from quire.service.config import UnknownFields
from quire.service.demo import MODEL_FOLDER
from quire.service.text.named_templates import template_names
from quire.service.text.reasoning.formats import REASONING_PARSERS

OTHER_PARALLELISM = (
    "a server divides its model by --tensor-parallel-size only; for more requests run several servers "
    "behind quire route"
)

_FOLDERS = "as --generation-config or the server has it, else {}"


def flag(
    group: FlagGroup,
    name: str,
    *,
    help: str,
    default: object = None,
    shown: str = "",
    action: Action = "store",
    type: Callable[[str], object] = str,
    choices: tuple[object, ...] = (),
    dest: str = "",
    metavar: str = "",
) -> None:
    """Add a flag. `help` is a sentence or more; `shown` says the default where None stands for another."""
    variable = f"QUIRE_{name.removeprefix('--').replace('-', '_').upper()}"
    told = shown or ("" if default is None or default == "" else str(default))
    words = f"{help} Default: {told}. [{variable}]" if told else f"{help} [{variable}]"
    group.add(
        Flag(
            name=name,
            dest=dest or name.removeprefix("--").replace("-", "_"),
            help=words,
            default=default,
            action=action,
            type=type,
            choices=choices,
            variable=variable,
            metavar=metavar or metavar_of(type, choices),
        )
    )


def add_model(parser: Parser) -> None:
    flag(
        parser,
        "model",
        default=MODEL_FOLDER,
        shown="the bundled demo model",
        metavar="MODEL",
        help="A folder that save_pretrained wrote, or a Hub id (owner/name).",
    )


def add_chat_template(group: FlagGroup) -> None:
    flag(
        group,
        "--chat-template",
        metavar="NAME|FILE",
        shown="the model's own",
        help="Of chats, also where the model has none: a file, or one of "
        f"{', '.join(template_names())}. A turn then ends where the template ends it.",
    )


def add_engine_flags(parser: Parser) -> None:
    """Add what an engine is started with."""
    add_model(parser)
    add_model_flags(parser.group("Model"))
    add_batch_flags(parser.group("Batch", "how much runs at once"))
    add_cache_flags(parser.group("KV cache"))


def add_model_flags(group: FlagGroup) -> None:
    flag(
        group,
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="Where the model runs. auto: on a GPU where there is one.",
    )
    flag(
        group,
        "--dtype",
        choices=("auto", "float32", "float16", "bfloat16"),
        default="auto",
        help="Of weights and activations. auto: the checkpoint's on a GPU, float32 on a CPU.",
    )
    flag(
        group,
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights, only config.json and the tokenizer are read.",
    )
    flag(
        group,
        "--runner",
        choices=get_args(Runner),
        default="auto",
        help="generate: text; pooling: embeddings of texts, or scores of a model with a head for them; auto: "
        "text, unless the model's folder says that it was made to embed or to score.",
    )
    flag(
        group,
        "--model-impl",
        choices=get_args(ModelImpl),
        default="auto",
        help="native: a decoder of Quire's own; transformers: that library's modelling code, in CUDA graphs "
        "where it allows that; auto: native where there is one.",
    )
    flag(
        group,
        "--generation-config",
        default="auto",
        help="How tokens are chosen where a request does not say. auto: as generation_config.json in the "
        "model's folder has it; vllm: temperature 1 and no more; else a folder with such a file.",
    )
    flag(
        group,
        "--tensor-parallel-size",
        type=int,
        default=1,
        help="GPUs, or processes on a CPU, that the model is divided among. It must divide the heads.",
    )
    flag(
        group,
        "--disable-custom-all-reduce",
        action="store_true",
        help="Have NCCL alone sum over the GPUs, and not kernels that write into each other's memory.",
    )
    for name in ("--pipeline-parallel-size", "--data-parallel-size"):
        group.add(
            Flag(
                name=name,
                dest=name.removeprefix("--").replace("-", "_"),
                help="There is no other than 1. Default: 1.",
                default=1,
                type=_only_one,
                metavar="1",
            )
        )
    flag(group, "--enforce-eager", action="store_true", help="No CUDA graphs: a quicker start, slower steps.")
    flag(group, "--seed", type=int, shown="0", help="Of dummy weights.")


def _only_one(text: str) -> int:
    if text != "1":
        raise ValueError(OTHER_PARALLELISM)
    return 1


def add_batch_flags(group: FlagGroup) -> None:
    flag(
        group,
        "--max-model-len",
        type=int,
        shown="the model's own limit",
        help="Most tokens of a prompt and its output together.",
    )
    flag(group, "--max-num-seqs", type=int, default=256, help="Most sequences that run at once.")
    flag(
        group,
        "--max-num-batched-tokens",
        type=int,
        shown="64 for each multiprocessor of a GPU (8448 on an H100), 2048 on a CPU",
        help="Most tokens that a step computes.",
    )
    flag(
        group,
        "--preemption-mode",
        choices=("auto", "swap", "recompute"),
        default="auto",
        help="How a request yields when there is no room. auto: whichever costs less, as measured at start.",
    )


def add_cache_flags(group: FlagGroup) -> None:
    flag(
        group,
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="Share of the GPU's memory for weights, activations and KV blocks.",
    )
    flag(
        group,
        "--num-gpu-blocks-override",
        type=int,
        shown="measured",
        help="How many KV blocks there are, on a CPU too.",
    )
    flag(
        group,
        "--swap-space",
        type=float,
        default=4.0,
        metavar="GIB",
        help="GiB of host memory for KV blocks of preempted requests and cached ones; 0: none.",
    )
    flag(group, "--block-size", type=int, choices=BLOCK_SIZES, default=16, help="Tokens in a KV block.")
    flag(
        group,
        "--kv-cache-dtype",
        choices=get_args(KVCacheDtype),
        default="auto",
        help="Of keys and values. fp8_e4m3: 8 bits, half of bfloat16's memory; fp12_e4m7: 12 bits, three "
        "quarters of it with bfloat16's precision; model: as --dtype; auto: fp12_e4m7 on a Hopper GPU for a "
        "bfloat16 model whose heads suit its kernels, else model.",
    )
    flag(
        group,
        "--no-enable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="Compute every prompt anew, instead of reusing what it begins with.",
    )
    flag(
        group,
        "--cache-seed",
        shown="drawn at random; empty with --redis-url",
        help="A secret that block digests are seeded with, the same for all replicas and their router.",
    )


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


def add_client_flags(parser: Parser) -> None:
    """Add where a server is that is asked something, and as whom."""
    group = parser.group("Server")
    flag(group, "--url", default="http://127.0.0.1:8000", help="The server's, or a router's.")
    flag(
        group,
        "--api-key",
        type=first_line,
        metavar="KEY",
        shown="none",
        help="A key that the server knows; whoever may list processes sees it, so rather set QUIRE_API_KEY.",
    )


def first_line(text: str) -> str | None:
    """Return the first key of those that the environment may hold for a server, a line each."""
    return text.strip().split("\n")[0].strip() or None


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


def add_sampling_flags(group: FlagGroup) -> None:
    """Add how tokens are drawn, with the defaults that requests to a server have."""
    flag(group, "--temperature", type=float, shown=_FOLDERS.format(1), help="0: always the likeliest token.")
    flag(
        group,
        "--top-p",
        type=float,
        shown=_FOLDERS.format(1),
        help="Draw from the likeliest tokens of this probability.",
    )
    flag(
        group,
        "--top-k",
        type=int,
        shown=_FOLDERS.format(0),
        help="Draw from so many of the likeliest tokens; 0: all.",
    )
    flag(group, "--sampling-seed", type=int, shown="drawn", help="The same seed gives the same answer.")
