"""The load tester and the simulator: `python -m quire.loadtest run | sweep | compare | report | …`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quire.loadtest.client import commands
from quire.loadtest.client.lengths import parse_shape
from quire.loadtest.command import told_of
from quire.loadtest.evaluation.commands import add_figure_flags
from quire.loadtest.simulator.commands import add_record_flags, add_simulate_flags
from quire.loadtest.workloads import LAST_TOKEN, WORKLOADS


def main(argv: list[str] | None = None) -> int:
    """Return 0 when it did what it was for, 1 when it could not or a run is invalid, 2 for a usage error."""
    parser = argparse.ArgumentParser(
        prog="python -m quire.loadtest", description="Load any OpenAI-compatible server; simulate Quire."
    )
    add = parser.add_subparsers(dest="command", required=True).add_parser
    run = add("run", help="one run, open loop (--rate) or closed loop (--concurrency)")
    _add_run_flags(run)
    mode = run.add_mutually_exclusive_group()
    mode.add_argument("--rate", type=float, help="open loop: sessions a second, on average")
    mode.add_argument("--concurrency", type=int, help="closed loop: sessions at once")
    run.set_defaults(call=commands.run)

    sweep = add("sweep", help="open loops at rising rates, and the knee where latency goes up")
    _add_run_flags(sweep)
    sweep.add_argument("--rates", type=_rates, required=True, help="requests a second: 1,2,4,8")
    sweep.add_argument("--refine", type=int, default=2, help="more rates, around the knee")
    sweep.add_argument(
        "--latency-limit",
        type=float,
        help="ms per token, mean, that makes the knee; 3 × that at the lowest rate if left out",
    )
    sweep.set_defaults(call=commands.sweep)

    compare = add("compare", help="two results, with bootstrap confidence intervals")
    compare.add_argument("first", type=Path)
    compare.add_argument("second", type=Path)
    compare.set_defaults(call=commands.compare)

    report = add("report", help="one HTML page of one or more results")
    report.add_argument("results", type=Path, nargs="+")
    report.add_argument("--html", type=Path, required=True)
    report.set_defaults(call=commands.report)

    add_simulate_flags(add("simulate", help="one run of one system on the virtual clock"))
    add_record_flags(add("record", help="time the steps of a real engine, to fit the simulator's costs to"))
    add_figure_flags(
        add("figures", help="the PagedAttention paper's figures, simulated and from runs of a real engine")
    )

    arguments = parser.parse_args(argv)
    try:
        return int(arguments.call(arguments))
    except (ValueError, OSError) as error:
        print(f"python -m quire.loadtest {arguments.command}: {told_of(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument_group("server")
    target.add_argument("--url", default="http://127.0.0.1:8000", help="without /v1")
    target.add_argument("--model", help="the first that the server lists, if left out")
    target.add_argument("--api", choices=("completions", "chat"), default="completions")
    target.add_argument(
        "--transport",
        choices=("sse", "websocket"),
        default="sse",
        help="of answers; websocket: Quire's, with a socket for each request that is under way",
    )
    target.add_argument(
        "--api-key-env", metavar="NAME", help="the environment variable that holds the server's API key"
    )
    target.add_argument("--timeout", type=float, default=600.0, help="seconds that a request may take")
    target.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for exactly the output length (vLLM, SGLang, Quire)",
    )
    target.add_argument(
        "--openai-only",
        action="store_true",
        help="send no field that OpenAI does not know: no ignore_eos, no return_token_ids, by which tokens "
        "without text are timed, no cache_salt, by which no rate of a sweep finds an earlier one's prompts",
    )
    target.add_argument("--extra-body", default="{}", help='more fields of each request: {"cache_salt": "a"}')

    work = parser.add_argument_group("workload: one of --lengths, --workload and --trace")
    source = work.add_mutually_exclusive_group()
    source.add_argument(
        "--lengths",
        type=_shape,
        metavar="NAME",
        help="sharegpt (the default), sharegpt-recorded, alpaca, or PROMPTxOUTPUT",
    )
    source.add_argument("--workload", choices=tuple(WORKLOADS), help="a fixed one (loadtest/workloads.py)")
    source.add_argument("--trace", type=Path, help="JSON lines: at, prompt, output_len … or at, turns")
    work.add_argument("--requests", type=int, help="how many sessions; 200, or all of a workload or trace")
    work.add_argument("--seed", type=int, help="of prompts, lengths and arrivals; 0 if left out")
    work.add_argument(
        "--burstiness", type=float, help="of arrivals; 1: Poisson (the default); less: bursts; more: even"
    )
    work.add_argument("--text", action="store_true", help="prompts of words, not of token ids (chat: always)")
    work.add_argument(
        "--most-token", type=int, help=f"no token id of a prompt is higher; {LAST_TOKEN} if left out"
    )
    work.add_argument("--shared-prefix", type=int, default=0, metavar="TOKENS", help="before every prompt")
    work.add_argument("--turns", type=int, default=1, help="requests of a session, each with all before it")
    work.add_argument("--think", type=float, default=0.0, help="seconds between an answer and the next turn")
    work.add_argument("--n", type=int, default=1, help="samples of each request")
    work.add_argument("--beam-width", type=int, default=0, help="beam search (vLLM's old fields, Quire)")

    parser.add_argument("--slo-ttft", type=float, help="ms within which a good request has its first token")
    parser.add_argument("--slo-tpot", type=float, help="ms per further token of a good request")
    parser.add_argument("--slo-latency", type=float, help="ms that a good request takes in all")
    parser.add_argument("--processes", type=int, default=4, help="that send and read")
    parser.add_argument("--label", help="of the run in reports; told from the workload if left out")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--html", type=Path, help="write a report here (needs matplotlib)")


def _shape(text: str) -> str:
    try:
        parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _rates(text: str) -> list[float]:
    rates = [float(rate) for rate in text.split(",")]
    if not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError(f"rates must be more than 0, got {text}")
    return rates


if __name__ == "__main__":
    sys.exit(main())
