"""/health, /ready, /startup, /metrics, /v1/models, /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.config import Progress, RegistryReport
from quire.engine.progress import Phase
from quire.service.errors import not_ready
from quire.service.text.tokenizer import Tokenizer
from tests.service.asgi import Exchange, exchange, get, post
from tests.service.conftest import Service

pytestmark = pytest.mark.anyio
API = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


async def test_while_loading(make_service: Callable[..., Service]) -> None:
    service = make_service(ready=False)
    assert (await get(service.app, "/health")).status == 200
    for path in API:
        reply = await post(service.app, path, {})
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "not_ready", "5")
    for path in ("/ready", "/v1/models"):
        assert (await get(service.app, path)).status == 503
    assert "quire_kv_blocks{state=free,tier=device}" not in await scrape(service)  # nobody knows yet how many
    service.engine.become_ready()
    assert (await get(service.app, "/ready")).status == 503  # no tokenizer yet


async def test_when_ready(service: Service) -> None:
    assert (await get(service.app, "/health")).status == 200
    ready = await get(service.app, "/ready")
    assert (ready.status, ready.json()) == (200, {"status": "ready", "graphs_left": 0})
    service.engine.step()
    assert service.state.metrics.stats is not None
    service.state.metrics.step(msgspec.structs.replace(service.state.metrics.stats, graphs_left=7))
    assert (await get(service.app, "/ready")).json() == {"status": "ready", "graphs_left": 7}


async def test_while_draining(service: Service) -> None:
    service.state.draining = True
    assert (await get(service.app, "/health")).status == 200
    assert (await get(service.app, "/ready")).status == 503
    reply = await post(service.app, "/v1/completions", {"prompt": "a"})
    assert reply.status == 503
    assert "shutting down" in reply.error["message"]
    assert int(reply.headers["retry-after"]) > 0


async def test_when_dead(service: Service) -> None:
    service.engine.die("segmentation fault")
    for path in ("/health", "/ready"):
        reply = await get(service.app, path)
        assert reply.status == 503
        assert "segmentation fault" in reply.error["message"]


def progress(phase: Phase, done: int) -> Progress:
    return Progress(phase=phase, done=done, total=10, unit="B", seconds=0.5)


async def test_startup_follows_the_phases(make_service: Callable[..., Service]) -> None:
    service = make_service(ready=False)
    service.engine.report(progress("weights", 1))
    service.engine.report(progress("weights", 2))
    running = Exchange(service.app, "GET", "/startup").start()
    await running.until(b"\n\n")
    service.engine.report(progress("memory", 3))
    service.engine.become_ready()
    reply = await running.finish()
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert [(event["phase"], event["done"]) for event in reply.events] == [
        ("weights", 2),
        ("memory", 3),
        ("ready", 1),
    ]
    assert set(reply.events[0]) == {"phase", "done", "total", "unit", "seconds"}
    late = await get(service.app, "/startup")
    assert [event["phase"] for event in late.events] == ["ready"]
    assert not service.state.streams


async def test_startup_ends_when_the_engine_dies(make_service: Callable[..., Service]) -> None:
    service = make_service(ready=False)
    service.engine.report(progress("weights", 1))
    running = Exchange(service.app, "GET", "/startup").start()
    await running.until(b"\n\n")
    service.engine.die("no such file")
    events = (await running.finish()).events
    assert "no such file" in events[-1]["error"]["message"]


async def test_startup_client_that_leaves(make_service: Callable[..., Service]) -> None:
    service = make_service(ready=False)
    running = Exchange(service.app, "GET", "/startup").start()
    await asyncio.sleep(0)
    running.leave()
    assert running.task is not None
    await running.task
    assert not service.state.streams


async def test_startup_on_the_wire(make_service: Callable[..., Service]) -> None:
    """The headers and the bytes that any stream of ours has; a comment where there is nothing to tell."""
    service = make_service(ready=False, keep_alive=0.05)
    running = Exchange(service.app, "GET", "/startup").start()
    await running.until(b": keep-alive\n\n")
    service.engine.report(progress("weights", 1))
    await running.until(b"data: ")
    service.engine.become_ready()
    reply = await running.finish()
    del reply.headers["x-request-id"]
    assert reply.headers == {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-store",
        "x-accel-buffering": "no",
    }
    first, *_ = reply.body.replace(b": keep-alive\n\n", b"").split(b"\n\n")
    assert first == b'data: {"phase":"weights","done":1,"total":10,"unit":"B","seconds":0.5}'


async def test_startup_that_fails_before_its_first_event_has_a_status(
    make_service: Callable[..., Service],
) -> None:
    service = make_service(ready=False)
    service.engine.die("no such file")
    reply = await get(service.app, "/startup")
    assert (reply.status, reply.error["code"]) == (503, "engine_dead")
    assert not service.state.streams


async def test_startup_is_told_that_the_server_ends(make_service: Callable[..., Service]) -> None:
    service = make_service(ready=False)
    service.engine.report(progress("weights", 1))
    running = Exchange(service.app, "GET", "/startup").start()
    await running.until(b"\n\n")
    (stream,) = service.state.streams
    stream.interrupt(not_ready("the server is shutting down"))
    events = (await running.finish()).events
    assert events[-1]["error"]["message"] == "the server is shutting down"
    assert not service.state.streams


async def test_startup_client_that_does_not_read_is_cut(make_service: Callable[..., Service]) -> None:
    service = make_service(ready=False, send_timeout=0.05)
    running = Exchange(service.app, "GET", "/startup").start()
    running.readable.clear()
    service.engine.report(progress("weights", 1))
    assert running.task is not None
    await running.task
    assert running.left and not running.body


async def scrape(service: Service) -> dict[str, float]:
    """Sample name with its labels, without the model's, to value."""
    text = (await get(service.app, "/metrics")).body.decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(
                f"{name}={value}" for name, value in sorted(sample.labels.items()) if name != "model_name"
            )
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


# what two streamed tokens, one whole answer of three, an aborted request and its three or more steps move
MOVED = {
    "vllm:prompt_tokens_total": 6.0,
    "vllm:generation_tokens_total": 5.0,
    "vllm:prefix_cache_queries_total": 6.0,
    "vllm:prefix_cache_hits_total": 4.0,
    "quire_http_requests_total{endpoint=/v1/completions,status=200}": 2.0,
    "quire_prefix_cache_tokens_total{source=device}": 2.0,
    "quire_prefix_cache_tokens_total{source=host}": 2.0,
    "quire_prefix_cache_tokens_total{source=miss}": 2.0,
    "vllm:request_success_total{finished_reason=length}": 2.0,
    "vllm:request_success_total{finished_reason=abort}": 1.0,
    "vllm:request_success_total{finished_reason=stop}": 0.0,
    "vllm:request_success_total{finished_reason=error}": 0.0,
    "vllm:time_to_first_token_seconds_count": 2.0,
    "vllm:inter_token_latency_seconds_count": 3.0,
    "vllm:request_queue_time_seconds_sum": 0.25,
    "vllm:e2e_request_latency_seconds_count": 2.0,
}
# from the engine's last step
STATED = {
    "quire_kv_blocks{state=free,tier=device}": 97.0,
    "quire_kv_blocks{state=active,tier=device}": 2.0,
    "quire_kv_blocks{state=cached,tier=device}": 1.0,
    "quire_kv_blocks{state=free,tier=host}": 20.0,
    "quire_kv_blocks{state=active,tier=host}": 21.0,
    "quire_kv_blocks{state=cached,tier=host}": 22.0,
    "quire_kv_capacity_blocks{tier=device}": 100.0,
    "quire_kv_capacity_blocks{tier=host}": 64.0,
    "quire_kv_pinned_blocks": 1.0,
    "quire_all_reduce_seconds": 0.0,
    "quire_requests_in_memory": 13.0,
    "quire_event_loop_tasks": 0.0,
    "quire_kv_swap_blocks_total{direction=out}": 23.0,
    "quire_kv_swap_blocks_total{direction=in}": 24.0,
    "quire_kv_swap_bytes_total{direction=out}": 23.0 * 1024,
    "quire_kv_swap_bytes_total{direction=in}": 24.0 * 1024,
    "quire_kv_block_references": 4.0,
    "quire_kv_tokens_filled": 24.0,
    "quire_kv_fragmentation_ratio": 0.25,
    "quire_kv_behind_window_blocks": 0.0,
    "quire_kv_copy_on_write_total": 10.0,
    "quire_kv_block_allocations_total": 8.0,
    "quire_kv_block_evictions_total": 9.0,
    "quire_preemptions_total{mode=recompute}": 6.0,
    "quire_preemptions_total{mode=swap}": 12.0,
    "quire_requests{state=running}": 1.0,
    "quire_requests{state=waiting}": 5.0,
    "quire_requests{state=swapped}": 7.0,
    "quire_registry_state{state=ok}": 0.0,
    "quire_registry_state{state=degraded}": 1.0,
    "quire_registry_state{state=off}": 0.0,
    "quire_registry_blocks": 25.0,
    "quire_registry_lag_seconds": 0.125,
    "quire_registry_dropped_total": 26.0,
    "quire_response_store_state{state=memory}": 1.0,
    "quire_response_store_failures_total": 0.0,
    "quire_responses_not_written_total": 0.0,
    "quire_rank_memory_bytes{rank=0}": float(1 << 30),
    "vllm:num_requests_running": 1.0,
    "vllm:num_requests_waiting": 5.0,
    "vllm:num_requests_swapped": 7.0,
    "vllm:kv_cache_usage_perc": 0.02,
    "vllm:gpu_cache_usage_perc": 0.02,
    "vllm:cpu_cache_usage_perc": 21 / 64,
    "vllm:num_preemptions_total": 18.0,
    "vllm:cache_config_info{block_size=16,cache_dtype=float32,num_cpu_blocks=64,num_gpu_blocks=100}": 1.0,
    "vllm:lora_requests_info{max_lora=0,running_lora_adapters=,waiting_lora_adapters=}": 1.0,
}


async def test_metrics_move(service: Service) -> None:
    before = await scrape(service)
    assert before["vllm:prompt_tokens_total"] == 0
    assert before["quire_registry_state{state=off}"] == 1
    assert service.engine.on_registry is not None
    service.engine.on_registry(RegistryReport("degraded", 25, 0.125, 26, [0.002, 0.004]))
    service.engine.cached_tokens, service.engine.cached_host_tokens = 2, 1
    await post(service.app, "/v1/completions", {"prompt": "abc", "max_tokens": 2, "stream": True})
    await post(service.app, "/v1/completions", {"prompt": "abc", "max_tokens": 3})
    service.engine.auto = False
    left = exchange(service.app, "/v1/completions", {"prompt": "abc", "max_tokens": 3})
    await service.engine.until_added(3)
    left.leave()
    assert left.task is not None
    await left.task
    after = await scrape(service)
    for name, value in (MOVED | STATED).items():
        assert after[name] == pytest.approx(value), name
    for phase, seconds in {"schedule": 0.001, "launch": 0.002, "wait": 0.003, "commit": 0.004}.items():
        assert after[f"quire_step_seconds_count{{phase={phase}}}"] == 5
        assert after[f"quire_step_seconds_sum{{phase={phase}}}"] == pytest.approx(5 * seconds)
    assert after["quire_step_tokens_sum{kind=prefill}"] == 55
    assert after["quire_step_tokens_sum{kind=decode}"] == 5
    assert after["quire_step_tokens_bucket{kind=decode,le=1.0}"] == 5
    assert after["quire_step_tokens_bucket{kind=prefill,le=+Inf}"] == 5
    assert after["quire_registry_publish_seconds_sum"] == pytest.approx(0.006)
    assert after["quire_registry_publish_seconds_bucket{le=0.0025}"] == 1
    exported = {name.split("{")[0].removesuffix("_created") for name in after}
    tested = {name.split("{")[0] for name in MOVED | STATED}
    histograms = {name.rsplit("_", 1)[0] for name in exported if name.endswith("_bucket")}
    tested |= {f"{name}_{part}" for name in histograms for part in ("bucket", "count", "sum")}
    assert exported <= tested  # a new metric has to come with a value here


async def test_metrics_of_a_server_that_is_idle_since_its_start(service: Service) -> None:
    """The first scrape has every family, though nobody has asked for `/ready` or anything else."""
    idle = await scrape(service)
    assert {name.split("{")[0] for name in MOVED | STATED} <= {name.split("{")[0] for name in idle}
    for tier, capacity in (("device", 100), ("host", 64)):
        assert idle[f"quire_kv_blocks{{state=free,tier={tier}}}"] == capacity
        assert idle[f"quire_kv_blocks{{state=active,tier={tier}}}"] == 0
        assert idle[f"quire_kv_blocks{{state=cached,tier={tier}}}"] == 0
    assert idle["vllm:num_requests_waiting"] == idle["vllm:kv_cache_usage_perc"] == 0


async def test_metrics_without_a_host_tier(service: Service) -> None:
    assert service.engine.info is not None
    service.engine.info = msgspec.structs.replace(service.engine.info, num_host_blocks=0)
    await post(service.app, "/v1/completions", {"prompt": "a", "max_tokens": 1})
    after = await scrape(service)
    assert after["quire_kv_capacity_blocks{tier=host}"] == 0
    assert after["quire_kv_blocks{state=active,tier=host}"] == 0
    assert after["vllm:cpu_cache_usage_perc"] == 0


async def test_models(service: Service) -> None:
    reply = await get(service.app, "/v1/models")
    models = reply.json()["data"]
    assert [model["id"] for model in models] == ["tiny", "alias"]
    assert (models[0]["root"], models[0]["max_model_len"]) == ("/models/tiny", 400)
    assert (await get(service.app, "/v1/models/alias")).json() == models[1]
    missing = await get(service.app, "/v1/models/a/b")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


async def test_tokenize(service: Service, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("hello the", add_special_tokens=True)
    reply = await post(service.app, "/tokenize", {"prompt": "hello the", "return_token_strs": True})
    assert reply.json() == {
        "count": len(tokens),
        "max_model_len": 400,
        "tokens": tokens,
        "token_strs": [tokenizer.token_name(token) for token in tokens],
    }
    back = await post(service.app, "/detokenize", {"tokens": tokens, "model": "tiny"})
    assert back.json() == {"prompt": "hello the"}


async def test_tokenize_messages(service: Service, tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "add_generation_prompt": False}
    reply = await post(service.app, "/tokenize", body)
    assert reply.json()["tokens"] == tokenizer.encode("<|user|>hello", add_special_tokens=False)


async def test_long_texts_are_tokenised_elsewhere(service: Service, tokenizer: Tokenizer) -> None:
    text = "hello the cat " * 1000
    reply = await post(service.app, "/tokenize", {"prompt": text})
    assert reply.json()["tokens"] == tokenizer.encode(text, add_special_tokens=True)


async def test_a_request_ends_once_however_many_choices_it_has(service: Service) -> None:
    ended = "vllm:request_success_total{finished_reason=%s}"
    await post(service.app, "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "n": 3, "best_of": 4})
    service.engine.auto = False
    left = exchange(service.app, "/v1/completions", {"prompt": "abc", "max_tokens": 3, "n": 5})
    await service.engine.until_added(3)
    left.leave()
    assert left.task is not None
    await left.task
    after = await scrape(service)
    assert after[ended % "length"] == after["vllm:e2e_request_latency_seconds_count"] == 2
    assert after[ended % "abort"] == 1
