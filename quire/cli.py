"""The `quire` command: what each of its subcommands does."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

import quire
from quire.engine.config import EngineConfig, KVEventsConfig, RegistryConfig
from quire.engine.logs import configure_logging
from quire.service.commands.flags import (
    DEFAULT_MAX_TOKENS,
    Parser,
    add_address_flags,
    add_chat_template,
    add_client_flags,
    add_engine_flags,
    add_model,
    add_sampling_flags,
    add_service_flags,
    environment_lines,
    flag,
)
from quire.service.demo import MODEL_FOLDER, MODEL_NAME
from quire.service.text.named_templates import read_template

log = logging.getLogger("quire.service")

_API_KEY_VARIABLE = "QUIRE_API_KEY"
GPU_NAMES = ("A100", "A10", "L4", "H100", "B200", "RTX 5090")  # `kernels.gpu.KNOWN`, which takes torch
TRACED_STEPS = 32  # of each workload, with --profile


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 when it did what it was for, 1 when it could not, 2 for a usage error."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    configure_logging(getattr(arguments, "log_format", "text"), getattr(arguments, "log_level", "info"))
    commands = {
        "serve": _serve,
        "route": _route,
        "generate": _generate,
        "bench": _bench,
        "doctor": _doctor,
        "top": _top,
        "why": _why,
    }
    try:
        sys.exit(commands[arguments.command](arguments))
    except ValueError as error:
        sys.exit(f"quire {arguments.command}: {error}")
    except KeyboardInterrupt:
        print(f"\nquire {arguments.command}: interrupted", file=sys.stderr)
        sys.exit(130)


def _parser() -> Parser:
    parser = Parser(prog="quire", description="Serve large language models from a paged KV cache.")
    parser.add_argument("--version", action="version", version=f"quire {quire.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve the OpenAI API and a chat page")
    add_engine_flags(serve)
    add_service_flags(serve)
    route = commands.add_parser(
        "route", help="one address for several replicas, aware of their prefix caches"
    )
    add_model(route)
    add_address_flags(route)
    add_chat_template(route)
    flag(route, "--replica", action="append", help="a replica's URL (may repeat); the registry's if left out")
    flag(route, "--replica-dns", help="name:port whose addresses are the replicas', asked every few seconds")
    flag(route, "--redis-url", help="where replicas tell which blocks they hold; rediss:// for TLS")
    flag(
        route,
        "--allow-replica",
        action="append",
        help="whom to believe of those that the registry names: networks, host names, *.domain, separated by "
        "commas (may repeat); if left out loopback and private networks",
    )
    flag(
        route, "--cache-seed", default="", help="the secret that the replicas' block digests are seeded with"
    )
    generate = commands.add_parser("generate", help="continue one prompt, on this terminal")
    add_engine_flags(generate)
    add_sampling_flags(generate)
    bench = commands.add_parser("bench", help="measure offline throughput beside the hardware's bound")
    add_engine_flags(bench)
    flag(bench, "--workload", default="mixed", help="names, separated by commas (loadtest/workloads.py)")
    flag(bench, "--runs", type=int, default=3, help="the median run is reported")
    flag(
        bench,
        "--in-order",
        action="store_true",
        help="queue requests as a server gets them, not those with most tokens to come first",
    )
    flag(bench, "--result-file", type=Path, help="append one JSON object a workload")
    flag(bench, "--profile", type=Path, help="folder for traces of steps; prints where their time goes")
    doctor = commands.add_parser("doctor", help="tell what fits, and which flag to change where it does not")
    add_engine_flags(doctor)
    flag(doctor, "--plan", action="store_true", help="print which kernels compute a layer, and start nothing")
    flag(doctor, "--gpu", choices=GPU_NAMES, help="with --plan: of this GPU; this machine's if left out")
    top = commands.add_parser("top", help="show a server's requests and blocks in this terminal")
    add_client_flags(top)
    why = commands.add_parser("why", help="tell where the time of a request went, and why")
    why.add_argument("request_id", metavar="ID", help="the X-Request-Id that came with its answer")
    add_client_flags(why)
    return parser


def _engine_settings(arguments: argparse.Namespace) -> dict[str, object]:
    return {name: getattr(arguments, name) for name in EngineConfig.__struct_fields__ if name != "model"}


def _engine_config(arguments: argparse.Namespace) -> EngineConfig:
    return msgspec.convert({"model": arguments.model, **_engine_settings(arguments)}, EngineConfig)


def _serve(arguments: argparse.Namespace) -> int:
    from quire.service.config import ServiceConfig

    names = arguments.served_model_name or [_model_name(arguments.model)]
    service = ServiceConfig(
        served_model_names=tuple(names),
        host=arguments.host,
        port=arguments.port,
        api_keys=_api_keys(arguments),
        api_key_file=arguments.api_key_file,
        cors_origins=tuple(arguments.cors_origin),
        insecure=arguments.insecure,
        unknown_fields=arguments.unknown_fields,
        otlp_endpoint=arguments.otlp_endpoint,
        max_num_queued_reqs=arguments.max_num_queued_reqs,
        max_num_queued_tokens=arguments.max_num_queued_tokens,
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
    kv_events = _kv_events_config(arguments)
    if kv_events is not None and not config.enable_prefix_caching:
        raise ValueError("--kv-events-config tells of the prefix cache: leave out --no-enable-prefix-caching")
    from quire.service.commands.pinned_prefixes import read_pinned_prefixes
    from quire.service.commands.serve import launch

    pinned = read_pinned_prefixes(map(Path, arguments.pin_prefix))
    return launch(service, config, registry, pinned, kv_events, _chat_template(arguments))


def _route(arguments: argparse.Namespace) -> int:
    from quire.service.config import ServiceConfig
    from quire.service.router.config import RouterConfig

    service = ServiceConfig(
        served_model_names=(_model_name(arguments.model),),
        host=arguments.host,
        port=arguments.port,
        api_keys=_api_keys(arguments),
        api_key_file=arguments.api_key_file,
        cors_origins=tuple(arguments.cors_origin),
        insecure=arguments.insecure,
        otlp_endpoint=arguments.otlp_endpoint,
        shutdown_timeout=arguments.shutdown_timeout,
        keep_alive=86400.0,  # the replicas' own comments pass through
    )
    router = RouterConfig(
        model=arguments.model,
        replicas=tuple(url.rstrip("/") for url in arguments.replica),
        replica_dns=arguments.replica_dns,
        redis_url=arguments.redis_url,
        allow_replicas=_split(arguments.allow_replica),
        cache_seed=arguments.cache_seed,
        chat_template=_chat_template(arguments),
    )
    from quire.service.router.server import route

    return route(service, router)


def _api_keys(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return those that were given as flags or in the environment. Raises ValueError."""
    from_environment = environment_lines(_API_KEY_VARIABLE)
    if _API_KEY_VARIABLE in os.environ and not from_environment:
        raise ValueError(f"{_API_KEY_VARIABLE} is empty: unset it, or give it a key a line")
    if len(arguments.api_key) > len(from_environment):
        log.warning(
            "--api-key shows the key to whoever may list processes: rather use --api-key-file or %s",
            _API_KEY_VARIABLE,
        )
    return tuple(arguments.api_key)


def _chat_template(arguments: argparse.Namespace) -> str | None:
    """Return the source of the one that is given. Raises ValueError."""
    return None if arguments.chat_template is None else read_template(arguments.chat_template)


def _split(lists: list[str]) -> tuple[str, ...]:
    """Return what flags give that may repeat, or hold several with commas between."""
    return tuple(entry.strip() for each in lists for entry in each.split(",") if entry.strip())


def _registry_config(arguments: argparse.Namespace) -> RegistryConfig | None:
    if arguments.redis_url is None:
        if arguments.advertise_url is not None:
            raise ValueError("--advertise-url is what the registry tells others: give --redis-url too")
        if arguments.registry_lease is not None:
            raise ValueError("--registry-lease is of what the registry tells others: give --redis-url too")
        return None
    url = arguments.advertise_url
    if url is None:
        if arguments.host in ("0.0.0.0", "::"):
            raise ValueError(
                f"--advertise-url must say where routers reach this replica: {arguments.host} does not"
            )
        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        url = f"http://{host}:{arguments.port}"
    lease = {} if arguments.registry_lease is None else {"lease": float(arguments.registry_lease)}
    return RegistryConfig(redis_url=arguments.redis_url, advertise_url=url.rstrip("/"), **lease)


def _kv_events_config(arguments: argparse.Namespace) -> KVEventsConfig | None:
    """Return where KV events go, None for nowhere. Raises ValueError."""
    if arguments.kv_events_config is None:
        return None
    try:
        config = msgspec.json.decode(arguments.kv_events_config, type=KVEventsConfig)
    except msgspec.DecodeError as error:
        raise ValueError(f"--kv-events-config must be JSON with vLLM's keys: {error}") from error
    return config if config.enabled else None


def _model_name(model: str) -> str:
    """Return what requests call it: a folder's own name, or the Hub id as it was given."""
    if model == MODEL_FOLDER:
        return MODEL_NAME
    return Path(model).resolve().name if Path(model).is_dir() else model


def _generate(arguments: argparse.Namespace) -> int:
    from quire.engine.messages import SamplingParams
    from quire.llm import LLM
    from quire.service.commands.progress import PhaseBars

    if arguments.max_tokens is not None and arguments.max_tokens < 1:
        raise ValueError(f"--max-tokens must be at least 1, got {arguments.max_tokens}")
    text = arguments.prompt if arguments.prompt is not None else sys.stdin.read()
    if arguments.chat_template is not None and not arguments.chat:
        raise ValueError("--chat-template is of chats: give --chat too")
    llm = LLM(
        arguments.model,
        chat_template=arguments.chat_template,
        on_progress=PhaseBars().show,
        **_engine_settings(arguments),
    )
    prompt = (
        llm.chat_prompt([{"role": "user", "content": text}])
        if arguments.chat
        else llm.tokenizer.encode(text, add_special_tokens=True)
    )
    params = SamplingParams(
        max_tokens=_token_budget(arguments.max_tokens, len(prompt), llm.info.max_request_tokens),
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.sampling_seed,
    )
    for piece in llm.stream(prompt, params):
        print(piece, end="", flush=True)
    print()
    return 0


def _token_budget(asked: int | None, prompt: int, limit: int) -> int:
    """Return how many tokens may be generated. Raise ValueError, with the numbers, where they do not fit."""
    room = limit - prompt
    if room < 1:
        raise ValueError(f"the prompt has {prompt} tokens, which leaves no room for more in {limit} tokens")
    if asked is None:
        return min(DEFAULT_MAX_TOKENS, room)
    if asked > room:
        raise ValueError(
            f"the prompt has {prompt} tokens and --max-tokens is {asked}: together more than the {limit} "
            "tokens that fit"
        )
    return asked


def _bench(arguments: argparse.Namespace) -> int:
    import torch

    from quire.engine.models.hub import resolve_model
    from quire.engine.startup import capture_all, start_engine
    from quire.loadtest.command import append_json
    from quire.loadtest.offline import bench, roofline
    from quire.loadtest.offline.profiling import profile_steps, show_profile
    from quire.loadtest.workloads import WORKLOADS
    from quire.offline_engine import OfflineEngine
    from quire.service.commands.progress import PhaseBars
    from quire.service.text.tokenizer import Tokenizer

    names = arguments.workload.split(",")
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise ValueError(f"--workload {unknown[0]}: there is {', '.join(WORKLOADS)}")
    if arguments.runs < 1:
        raise ValueError(f"--runs must be at least 1, got {arguments.runs}")
    config = _engine_config(arguments)
    core, info = start_engine(config, PhaseBars().show)
    workloads = [(name, bench.fit(name, WORKLOADS[name](), info)) for name in names]
    engine = OfflineEngine(core, Tokenizer.from_folder(resolve_model(arguments.model)))
    capture_all(core)
    device = torch.device("cpu" if info.device == "cpu" else "cuda")
    ceilings = roofline.measure_ceilings(device, getattr(torch, info.dtype))
    results = []
    for name, work in workloads:
        try:
            result = bench.bench(
                engine, info, name, work, arguments.runs, ceilings, in_order=arguments.in_order
            )
        except bench.WorkloadFailed as failure:
            print(f"quire bench: {name}: {failure}", file=sys.stderr)
            return 1
        results.append(result)
        bench.show(results, ceilings, info)
        bench.show_step(result, ceilings)
        try:
            if arguments.profile is not None:
                requests = bench.requests(work, seed=1 << 41)
                bench.queue(core, requests, in_order=arguments.in_order)
                skip = result.steps // 3
                profile = profile_steps(core, name, requests, skip, TRACED_STEPS, arguments.profile)
                show_profile(profile)
                result = replace(result, traced=profile.summary())
        finally:  # what was measured is not lost with a trace
            if arguments.result_file is not None:
                append_json(arguments.result_file, result)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.plan:
        from quire.kernel_plan import print_plan

        print_plan(_engine_config(arguments), arguments.gpu)
        return 0
    if arguments.gpu is not None:
        raise ValueError("--gpu goes with --plan: without it, what is here is measured")
    from quire.doctor import doctor

    doctor(_engine_config(arguments))
    return 0


def _top(arguments: argparse.Namespace) -> int:
    from quire.service.commands.top import top

    return top(arguments.url, arguments.api_key)
def _why(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from quire.why import ask, show

    show(ask(arguments.url, arguments.api_key, arguments.request_id), Console())
    return 0


if __name__ == "__main__":
    main()
