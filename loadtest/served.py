"""What clients see of a served model: `python -m loadtest.served MODEL [--result-file FILE]`.

Starts `quire serve MODEL` with dummy weights on loopback, streams workloads to it from processes of their own
and prints throughput, TTFT and ITL. Closed loop: `concurrency` requests are under way at any time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from loadtest.provenance import Provenance
from loadtest.workloads import WORKLOADS, Work

CASES = (("single", 1), ("mixed", 256), ("sharegpt", 256))
CLIENTS = 4  # processes, so that the measuring side is not what is measured
START_SECONDS = 180.0


@dataclass(slots=True)
class Stream:
    """One request as its client saw it; seconds since it was sent."""

    tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ServedResult:
    """One line of loadtest/results/served.jsonl. Times are milliseconds."""

    engine: str
    model: str
    workload: str
    mode: str
    concurrency: int
    out_tok_s: float
    in_tok_s: float
    req_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    normalized_latency_ms: float  # mean of end-to-end time ÷ output tokens
    device: str
    commit: str
    date: str
    command: str


async def _stream(host: str, port: int, model: str, salt: str, work: Work) -> Stream:
    body = json.dumps(
        {
            "model": model,
            "prompt": work.prompt,
            "max_tokens": work.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": salt,  # no run finds what an earlier one left in the prefix cache
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(
            f"the server answered {(status + await reader.read(500)).decode(errors='replace')}"
        )
    seen = Stream()
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(f"the stream failed: {event['error']}")
        now = time.perf_counter() - begin
        if event.get("usage"):
            seen.tokens = event["usage"]["completion_tokens"]
        elif event["choices"]:
            if seen.last:
                seen.gaps.append(now - seen.last)
            else:
                seen.first = now
            seen.last = now
    writer.close()
    if seen.tokens != work.output_len:
        raise RuntimeError(f"{work.output_len} tokens were asked for, {seen.tokens} came")
    return seen


async def _client(
    host: str, port: int, model: str, salt: str, work: list[Work], concurrency: int
) -> list[Stream]:
    gate = asyncio.Semaphore(concurrency)

    async def one(each: Work) -> Stream:
        async with gate:
            return await _stream(host, port, model, salt, each)

    return await asyncio.gather(*(one(each) for each in work))


def _client_process(
    host: str,
    port: int,
    model: str,
    salt: str,
    work: list[Work],
    concurrency: int,
    queue: multiprocessing.Queue[list[Stream]],
) -> None:
    queue.put(asyncio.run(_client(host, port, model, salt, work, concurrency)))


def measure(
    host: str, port: int, model: str, name: str, concurrency: int, device: str, salt: str = "measured"
) -> ServedResult:
    """Stream a whole workload, `concurrency` requests at a time."""
    work = WORKLOADS[name]()
    clients = min(CLIENTS, concurrency)
    queue: multiprocessing.Queue[list[Stream]] = multiprocessing.Queue()
    processes = [
        multiprocessing.Process(
            target=_client_process,
            args=(host, port, model, salt, work[i::clients], concurrency // clients, queue),
            daemon=True,
        )
        for i in range(clients)
    ]
    begin = time.perf_counter()
    for process in processes:
        process.start()
    streams = [stream for _ in processes for stream in queue.get(timeout=600)]
    seconds = time.perf_counter() - begin
    for process in processes:
        process.join()
    first = sorted(stream.first for stream in streams)
    gaps = sorted(gap for stream in streams for gap in stream.gaps)
    return ServedResult(
        engine="quire",
        model=model,
        workload=name,
        mode="served",
        concurrency=concurrency,
        out_tok_s=round(sum(stream.tokens for stream in streams) / seconds, 1),
        in_tok_s=round(sum(len(each.prompt) for each in work) / seconds, 1),
        req_s=round(len(work) / seconds, 2),
        ttft_p50_ms=_percentile(first, 0.5),
        ttft_p99_ms=_percentile(first, 0.99),
        itl_p50_ms=_percentile(gaps, 0.5),
        itl_p99_ms=_percentile(gaps, 0.99),
        normalized_latency_ms=round(1000 * statistics.mean(s.last / s.tokens for s in streams), 2),
        device=device,
        **asdict(Provenance.here()),
    )


def _percentile(ordered: list[float], share: float) -> float:
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


@contextlib.contextmanager
def running_server(model: str) -> Iterator[tuple[str, int]]:
    """`quire serve` with dummy weights on a free port, ready."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "service.cli", "serve", model, "--load-format", "dummy"]
    with subprocess.Popen([*command, "--port", str(port)], env=os.environ) as server:
        try:
            until = time.monotonic() + START_SECONDS
            while not _is_ready(port):
                if server.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the server is not ready (exit code {server.poll()})")
                time.sleep(0.2)
            yield "127.0.0.1", port
        finally:
            server.terminate()
            server.wait(60)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a model folder; its weights are not read")
    parser.add_argument("--result-file", type=Path, help="append one JSON object a workload")
    arguments = parser.parse_args()
    name = Path(arguments.model).resolve().name
    with running_server(arguments.model) as (host, port):
        device = _device_name()
        measure(host, port, name, "single", 1, device, salt="warm-up")
        for workload, concurrency in CASES:
            result = measure(host, port, name, workload, concurrency, device)
            print(json.dumps(asdict(result)), flush=True)
            if arguments.result_file is not None:
                with arguments.result_file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(result)) + "\n")


if __name__ == "__main__":
    main()
