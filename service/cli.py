"""The `quire` command. Every flag can also be given as QUIRE_<NAME>."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.config import BLOCK_SIZES, EngineConfig, RegistryConfig
from service.demo import MODEL_FOLDER, MODEL_NAME

TRACED_STEPS = 32  # of each workload, with --profile

Parser = argparse.ArgumentParser


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 when it did what it was for, 1 when it could not, 2 for a usage error."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    commands = {"serve": _serve, "route": _route, "generate": _generate, "bench": _bench}
    try:
        sys.exit(commands[arguments.command](arguments))
    except ValueError as error:
        sys.exit(f"quire {arguments.command}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> Parser:
    parser = Parser(prog="quire", description="Serve large language models from a paged KV cache.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve the OpenAI API and a chat page")
    _add_engine_flags(serve)
    _add_service_flags(serve)
    route = commands.add_parser(
        "route", help="one address for several replicas, aware of their prefix caches"
    )
    _add_model(route)
    _add_address_flags(route)
    _flag(
        route, "--replica", action="append", help="a replica's URL (may repeat); the registry's if left out"
    )
    _flag(route, "--redis-url", help="where replicas tell which blocks they hold; rediss:// for TLS")
    _flag(
        route, "--cache-seed", default="", help="the secret that the replicas' block digests are seeded with"
    )
    generate = commands.add_parser("generate", help="continue one prompt, on this terminal")
    _add_engine_flags(generate)
    _add_sampling_flags(generate)
    bench = commands.add_parser("bench", help="measure offline throughput beside the hardware's bound")
    _add_engine_flags(bench)
    _flag(bench, "--workload", default="mixed", help="names, separated by commas (loadtest/workloads.py)")
    _flag(bench, "--runs", type=int, default=3, help="the median run is reported")
    _flag(bench, "--result-file", type=Path, help="append one JSON object a workload")
    _flag(bench, "--profile", type=Path, help="folder for traces of steps; prints where their time goes")
    return parser


def _flag(parser: Parser, name: str, *, default: object = None, **options: Any) -> None:
    """Add a flag whose default its environment variable overrides."""
    variable = f"QUIRE_{name.removeprefix('--').replace('-', '_').upper()}"
    options["help"] = f"{options.get('help', '')} [{variable}]"
    value = os.environ.get(variable)
    if options.get("action") in ("store_true", "store_false"):
        if value not in (None, "0", "1"):
            parser.error(f"{variable} must be 0 or 1, got {value!r}")
        given = options["action"] == "store_true"
        parser.add_argument(name, default=given if value == "1" else not given, **options)
    elif options.get("action") == "append":
        parser.add_argument(name, default=[value] if value else [], **options)
    else:
        choices = options.get("choices")
        if value is not None and isinstance(choices, tuple) and value not in map(str, choices):
            parser.error(f"{variable} must be one of {', '.join(map(str, choices))}, got {value!r}")
        parser.add_argument(name, default=default if value is None else value, **options)


def _add_model(parser: Parser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=os.environ.get("QUIRE_MODEL", MODEL_FOLDER),
        help="a folder that save_pretrained wrote, or a Hub id; else the bundled demo model [QUIRE_MODEL]",
    )


def _add_engine_flags(parser: Parser) -> None:
    _add_model(parser)
    _flag(parser, "--device", choices=("auto", "cuda", "cpu"), default="auto")
    _flag(
        parser,
        "--dtype",
        choices=("auto", "float32", "float16", "bfloat16"),
        default="auto",
        help="auto: the checkpoint's on a GPU, float32 on a CPU",
    )
    _flag(
        parser,
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights, only config.json and the tokenizer are read",
    )
    _flag(
        parser, "--max-model-len", type=int, help="most tokens of prompt and output; the model's if left out"
    )
    _flag(parser, "--max-num-seqs", type=int, default=256, help="most sequences that run at once")
    _flag(
        parser,
        "--max-num-batched-tokens",
        type=int,
        help="most tokens a step computes; 8192 on a GPU and 2048 on a CPU if left out",
    )
    _flag(parser, "--block-size", type=int, choices=BLOCK_SIZES, default=16, help="tokens in a KV block")
    _flag(
        parser,
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        help="share of the GPU's memory for weights, activations and KV blocks",
    )
    _flag(parser, "--num-gpu-blocks-override", type=int, help="KV blocks, on a CPU too; measured if left out")
    _flag(
        parser,
        "--swap-space",
        type=float,
        default=4.0,
        help="GiB of host memory for KV blocks of preempted requests and cached ones; 0: none",
    )
    _flag(
        parser,
        "--preemption-mode",
        choices=("auto", "swap", "recompute"),
        default="auto",
        help="auto: whichever costs less, as measured at start",
    )
    _flag(
        parser,
        "--no-enable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="compute every prompt anew",
    )
    _flag(
        parser,
        "--cache-seed",
        help="a secret that block digests are seeded with, the same for all replicas and their router; "
        "drawn at random without --redis-url, else empty",
    )
    _flag(parser, "--enforce-eager", action="store_true", help="no CUDA graphs")
    _flag(parser, "--seed", type=int, default=0, help="of dummy weights")


def _add_address_flags(parser: Parser) -> None:
    _flag(parser, "--host", default="127.0.0.1")
    _flag(parser, "--port", type=int, default=8000)
    _flag(parser, "--api-key", action="append", help="ask for one of these keys (may repeat)")
    _flag(parser, "--insecure", action="store_true", help="allow a host that others reach without a key")
    _flag(
        parser,
        "--shutdown-timeout",
        type=float,
        default=30.0,
        help="seconds that running streams may take to finish after SIGTERM",
    )


def _add_service_flags(parser: Parser) -> None:
    _add_address_flags(parser)
    _flag(
        parser,
        "--served-model-name",
        action="append",
        help="what requests call the model (may repeat); its folder's or Hub id's if left out",
    )
    _flag(parser, "--max-num-queued-reqs", type=int, default=1000, help="prompts that wait; more get 429")
    _flag(
        parser,
        "--stall-timeout",
        type=float,
        default=10.0,
        help="seconds without a step, with work to do, after which /health says 503",
    )
    _flag(
        parser,
        "--pin-prefix",
        action="append",
        help="a file whose lines prompts begin with, computed at start and never evicted: JSON strings, or "
        "lists of messages (may repeat)",
    )
    _flag(parser, "--redis-url", help="tell routers there which blocks this replica holds; rediss:// for TLS")
    _flag(parser, "--advertise-url", help="where routers reach this replica; http://host:port if left out")
    _flag(
        parser,
        "--registry-lease",
        type=float,
        default=15.0,
        help="seconds for which a replica that fell silent is believed to be there",
    )


def _add_sampling_flags(parser: Parser) -> None:
    _flag(parser, "--prompt", help="the text to continue; read from standard input if left out")
    _flag(parser, "--chat", action="store_true", help="the prompt is a user's message: use the chat template")
    _flag(parser, "--max-tokens", type=int, default=256)
    _flag(parser, "--temperature", type=float, default=0.0)
    _flag(parser, "--top-p", type=float, default=1.0)
    _flag(parser, "--top-k", type=int, default=0)
    _flag(parser, "--sampling-seed", type=int, default=0)


def _engine_settings(arguments: argparse.Namespace) -> dict[str, object]:
    return {name: getattr(arguments, name) for name in EngineConfig.__struct_fields__ if name != "model"}


def _engine_config(arguments: argparse.Namespace) -> EngineConfig:
    return msgspec.convert({"model": arguments.model, **_engine_settings(arguments)}, EngineConfig)


def _serve(arguments: argparse.Namespace) -> int:
    from service.config import ServiceConfig

    names = arguments.served_model_name or [_model_name(arguments.model)]
    service = ServiceConfig(
        served_model_names=tuple(names),
        host=arguments.host,
        port=arguments.port,
        api_keys=tuple(arguments.api_key),
        insecure=arguments.insecure,
        max_num_queued_reqs=arguments.max_num_queued_reqs,
        shutdown_timeout=arguments.shutdown_timeout,
        stall_timeout=arguments.stall_timeout,
    )
    config = _engine_config(arguments)
    registry = _registry_config(arguments)
    if registry is not None:
        if not config.enable_prefix_caching:
            raise ValueError("--redis-url tells of the prefix cache: leave out --no-enable-prefix-caching")
        if config.cache_seed is None:
            config = msgspec.structs.replace(config, cache_seed="")
    from service.launch import launch
    from service.pins import read_pins

    return launch(service, config, registry, read_pins(map(Path, arguments.pin_prefix)))


def _route(arguments: argparse.Namespace) -> int:
    from service.config import ServiceConfig
    from service.router.config import RouterConfig

    service = ServiceConfig(
        served_model_names=(_model_name(arguments.model),),
        host=arguments.host,
        port=arguments.port,
        api_keys=tuple(arguments.api_key),
        insecure=arguments.insecure,
        shutdown_timeout=arguments.shutdown_timeout,
        keep_alive=86400.0,  # the replicas' own comments pass through
    )
    router = RouterConfig(
        model=arguments.model,
        replicas=tuple(url.rstrip("/") for url in arguments.replica),
        redis_url=arguments.redis_url,
        cache_seed=arguments.cache_seed,
    )
    from service.router.server import route

    return route(service, router)


def _registry_config(arguments: argparse.Namespace) -> RegistryConfig | None:
    if arguments.redis_url is None:
        if arguments.advertise_url is not None:
            raise ValueError("--advertise-url is what the registry tells others: give --redis-url too")
        return None
    url = arguments.advertise_url
    if url is None:
        if arguments.host in ("0.0.0.0", "::"):
            raise ValueError(
                f"--advertise-url must say where routers reach this replica: {arguments.host} does not"
            )
        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        url = f"http://{host}:{arguments.port}"
    return RegistryConfig(
        redis_url=arguments.redis_url, advertise_url=url.rstrip("/"), lease=arguments.registry_lease
    )


def _model_name(model: str) -> str:
    """What requests call it: a folder's own name, or the Hub id as it was given."""
    if model == MODEL_FOLDER:
        return MODEL_NAME
    return Path(model).resolve().name if Path(model).is_dir() else model


def _generate(arguments: argparse.Namespace) -> int:
    from engine.request import SamplingParams
    from service.llm import LLM
    from service.progress import PhaseBars

    text = arguments.prompt if arguments.prompt is not None else sys.stdin.read()
    llm = LLM(arguments.model, on_progress=PhaseBars().show, **_engine_settings(arguments))
    prompt = (
        llm.chat_prompt([{"role": "user", "content": text}])
        if arguments.chat
        else llm.tokenizer.encode(text, add_special_tokens=True)
    )
    room = llm.info.max_request_tokens - len(prompt)
    params = SamplingParams(
        max_tokens=max(1, min(arguments.max_tokens, room)),
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.sampling_seed,
    )
    for piece in llm.stream(prompt, params):
        print(piece, end="", flush=True)
    print()
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    import torch

    from engine.startup import start_engine
    from loadtest.workloads import WORKLOADS
    from service import bench
    from service.profiling import profile_steps, show_profile
    from service.progress import PhaseBars

    names = arguments.workload.split(",")
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise ValueError(f"--workload {unknown[0]}: there is {', '.join(WORKLOADS)}")
    if arguments.runs < 1:
        raise ValueError(f"--runs must be at least 1, got {arguments.runs}")
    config = _engine_config(arguments)
    core, info = start_engine(config, PhaseBars().show)
    device = torch.device("cpu" if info.device == "cpu" else "cuda")
    ceilings = bench.measure_ceilings(device, getattr(torch, info.dtype))
    results = []
    for name in names:
        results.append(bench.bench(core, info, name, WORKLOADS[name](), arguments.runs, ceilings))
        bench.show(results, ceilings, info)
        if arguments.profile is not None:
            work = bench.requests(bench.fold(WORKLOADS[name](), info.vocab_size), seed=1 << 41)
            skip = results[-1].steps // 3
            show_profile(profile_steps(core, name, work, skip, TRACED_STEPS, arguments.profile))
    if arguments.result_file is not None:
        bench.append_results(results, arguments.result_file)
    return 0


if __name__ == "__main__":
    main()
