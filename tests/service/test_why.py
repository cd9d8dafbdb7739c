"""GET /v1/requests/{id}/why: where the time of a request went, with a real scheduler behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from quire.cli import main
from quire.engine.core import EngineCore
from quire.engine.records import Company, RequestRecord, Span
from quire.service.app import create_app
from quire.service.config import ServiceConfig
from quire.service.errors import ApiError
from quire.service.explain.past_requests import KEEP_SECONDS, MAX_SIZE, OWN_SIZE, PastRequests
from quire.service.explain.times import RequestTimes
from quire.service.explain.why import why
from quire.service.state import ServerState
from quire.service.text.tokenizer import Tokenizer
from tests.engine.simulation import make_core
from tests.service.asgi import Exchange, Reply, get, post
from tests.service.conftest import Service
from tests.service.core_engine import CoreEngine
from tests.service.fake_engine import make_info
from tests.service.live import Live

pytestmark = pytest.mark.anyio
BLOCK = 4
PROMPT = list(range(5, 17))


class Quire:
    """A service around a real scheduler of few blocks, whose clients have the keys `one` and `two`."""

    def __init__(self, tokenizer: Tokenizer, core: EngineCore) -> None:
        capacity = core.scheduler.state.capacity
        info = msgspec.structs.replace(
            make_info(tokenizer),
            num_blocks=capacity.num_blocks,
            num_pinned_blocks=0,
            block_size=BLOCK,
            max_num_seqs=capacity.max_num_seqs,
            vocab_size=capacity.vocab_size,
        )
        self.state = ServerState(ServiceConfig(served_model_names=("tiny",), api_keys=("one", "two")))
        self.state.tokenizer = tokenizer
        self.engine = CoreEngine(core, info)
        self.state.set_engine(self.engine)
        self.app = create_app(self.state)

    async def ask(self, name: str, prompt: object, tokens: int = 2, key: str = "one", **more: Any) -> Reply:
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, **more}
        headers = {"authorization": f"Bearer {key}", "x-request-id": name}
        reply = await post(self.app, "/v1/completions", body, **headers)
        assert reply.status == 200, reply.body
        await asyncio.sleep(0)
        return reply

    async def why(self, name: str, key: str = "one") -> Any:
        """Return what is told; spans add up, whatever it is."""
        reply = await get(self.app, f"/v1/requests/{name}/why", authorization=f"Bearer {key}")
        assert reply.status == 200, reply.body
        told = reply.json()
        assert told["request_id"] == name
        total = sum(span["ms"] for span in told["spans"])
        assert abs(total - told["total_ms"]) <= max(1.0, 0.01 * told["total_ms"]), told
        assert all(span["start_ms"] >= 0 for span in told["spans"])
        return told

    def tenant(self, key: str) -> str:
        found = self.state.keys.find(key.encode())
        assert found is not None
        return found.tenant


Make = Callable[..., Quire]


@pytest.fixture
def make(tokenizer: Tokenizer) -> Make:
    def quire(blocks: int = 64, sequences: int = 4, budget: int = 64, **more: Any) -> Quire:
        return Quire(tokenizer, make_core(blocks, BLOCK, sequences, budget, **more))

    return quire


def cause(told: Any, kind: str) -> Any:
    (found,) = [each for each in told["causes"] if each["kind"] == kind]
    return found


async def test_it_tells_of_each_part_of_a_request(make: Make) -> None:
    quire = make(budget=8)
    await quire.ask("a", PROMPT, 5)
    told = await quire.why("a")
    assert told["status"] == "finished"
    assert told["tokens"] == {"prompt": 12, "cached": 0, "computed": 12, "output": 5}
    names = [span["name"] for span in told["spans"]]
    assert [span["tokens"] for span in told["spans"] if span["name"] == "prefill"] == [8, 4]
    assert names.index("prefill") < names.index("decode") < names.index("detokenising")
    assert len([name for name in names if name != "prefill"]) == len(set(names) - {"prefill"})
    assert told["preemptions"] == []


async def test_another_keys_request_is_as_unknown_as_one_that_never_was(make: Make) -> None:
    quire = make()
    await quire.ask("a", PROMPT)
    replies = [
        await get(quire.app, f"/v1/requests/{name}/why", authorization="Bearer two") for name in ("a", "b")
    ]
    assert [reply.status for reply in replies] == [404, 404]
    assert replies[0].error["code"] == replies[1].error["code"] == "request_not_found"
    assert replies[0].body.replace(b"'a'", b"'b'") == replies[1].body
    assert (await get(quire.app, "/v1/requests/a/why")).status == 401


async def test_an_id_that_is_given_again_is_that_of_the_later_request(make: Make) -> None:
    quire = make()
    await quire.ask("a", PROMPT, 2)
    await quire.ask("a", PROMPT, 3, key="two")
    await quire.ask("a", PROMPT, 4)
    assert [(await quire.why("a", key))["tokens"]["output"] for key in ("one", "two")] == [4, 3]


async def test_waiting_for_blocks_that_others_hold(make: Make) -> None:
    quire = make(blocks=8, caching=False)
    quire.engine.paused = True
    first = asyncio.create_task(quire.ask("first", PROMPT, 16, key="two"))
    await quire.engine.until_queued(1)
    rest = [asyncio.create_task(quire.ask(name, PROMPT, 16)) for name in ("second", "third")]
    await quire.engine.until_queued(3)
    quire.engine.paused = False
    await asyncio.gather(first, *rest)
    found = cause(await quire.why("third"), "waiting_for_blocks")
    assert found["requests_ahead"] >= 1 and found["blocks_total"] == 8
    held = found["blocks_held"]
    assert f"ahead held {held} of 8 blocks" in found["text"] and found["ms"] > 0
    assert set(found["requests"]) <= {"second"}  # what another key sent has no name here


async def test_waiting_for_a_place_among_the_sequences(make: Make) -> None:
    quire = make(sequences=1)
    await asyncio.gather(quire.ask("a", PROMPT, 9), quire.ask("b", PROMPT, 2))
    found = cause(await quire.why("b"), "waiting_for_sequences")
    assert "1 request ahead ran 1 of the 1 sequences" in found["text"]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
async def test_preempted_for_an_older_request(make: Make, mode: str) -> None:
    quire = make(blocks=6, sequences=2, caching=False, num_host_blocks=6, mode=mode)
    await asyncio.gather(quire.ask("older", PROMPT[:4], 12), quire.ask("newer", PROMPT[:4], 12))
    told = await quire.why("newer")
    found = cause(told, "preemption")
    assert found["text"].startswith(f"preempted once ({mode}), for request older, 3 blocks")
    (preemption,) = told["preemptions"]
    assert (preemption["mode"], preemption["for_request"], preemption["blocks"]) == (mode, "older", 3)
    assert preemption["away_ms"] > 0 and found["back_ms"] > 0
    names = {span["name"] for span in told["spans"]}
    assert ({"swapped_out", "swap_in"} if mode == "swap" else {"preempted", "recompute"}) <= names


async def test_preempted_for_another_keys_request(make: Make) -> None:
    quire = make(blocks=6, sequences=2, caching=False)
    await asyncio.gather(quire.ask("older", PROMPT[:4], 12, key="two"), quire.ask("newer", PROMPT[:4], 12))
    found = cause(await quire.why("newer"), "preemption")
    assert found["for_request"] is None and "older" not in found["text"]


async def test_what_was_found_in_the_cache_and_why_not_more(make: Make) -> None:
    quire = make()

    async def text(name: str, prompt: list[int], key: str = "one", **more: Any) -> str:
        await quire.ask(name, prompt, 1, key, **more)
        told: str = cause(await quire.why(name, key), "prefix_cache")["text"]
        return told

    other = [*PROMPT[:6], 40, *PROMPT[7:]]
    begin = "0 of 12 prompt tokens found in the cache; missed from token 0: "
    assert await text("a", PROMPT) == f"{begin}never seen with this key"
    assert await text("b", PROMPT, "two") == f"{begin}never seen with this key"
    assert await text("c", PROMPT, cache_salt="own") == (
        f"{begin}salted otherwise: it is cached with another cache_salt of this key"
    )
    assert await text("d", other) == (
        "4 of 12 prompt tokens found in the cache; missed from token 4: first differing token 6"
    )
    assert await text("e", PROMPT) == "11 of 12 prompt tokens found in the cache"
    assert "what follows fills no block" in await text("f", [*PROMPT, 1, 2, 3])
    assert "prompt_logprobs has all" in await text("g", PROMPT, prompt_logprobs=1)
    found = cause(await quire.why("d"), "prefix_cache")
    assert (found["missed_from"], found["first_differing_token"], found["reason"]) == (4, 6, "differs")


async def test_evicted_blocks_are_told_with_their_time(make: Make) -> None:
    quire = make(blocks=8)
    await quire.ask("a", PROMPT)
    for at in (1, 2):
        await quire.ask(f"filler-{at}", [40 + at, *range(20, 43)])
    await quire.ask("b", PROMPT)
    found = cause(await quire.why("b"), "prefix_cache")
    assert found["reason"] == "evicted" and found["evicted_seconds_ago"] >= 0
    assert " s ago" in found["text"]


async def test_without_a_prefix_cache(make: Make) -> None:
    quire = make(caching=False)
    await quire.ask("a", PROMPT)
    assert "--no-enable-prefix-caching" in cause(await quire.why("a"), "prefix_cache")["text"]


async def test_a_list_of_prompts(make: Make) -> None:
    quire = make()
    await quire.ask("a", [PROMPT, PROMPT[:5]], 3)
    told = await quire.why("a")
    assert told["tokens"]["prompt"] == 17 and told["tokens"]["output"] == 6
    assert {each["prompt_index"] for each in told["causes"] if each["kind"] == "prefix_cache"} == {0, 1}


async def test_decoding_beside_prefills_of_others(make: Make) -> None:
    quire = make(budget=8)
    first = asyncio.create_task(quire.ask("a", PROMPT, 30))
    await quire.engine.until(lambda: quire.engine.core.stats.decode_tokens)
    await asyncio.gather(first, quire.ask("b", list(range(17, 45)), 1))
    found = cause(await quire.why("a"), "shared_steps")
    assert found["prefilled_tokens"] == 28 and found["steps_with_prefills"] == 4


async def test_one_that_runs_and_one_whose_client_left(make: Make) -> None:
    quire = make()
    quire.engine.paused = True
    headers = {"authorization": "Bearer one", "x-request-id": "a", "content-type": "application/json"}
    body = msgspec.json.encode({"prompt": PROMPT, "max_tokens": 9, "stream": True})
    exchange = Exchange(quire.app, "POST", "/v1/completions", body, headers).start()
    await quire.engine.until_queued(1)
    assert (await quire.why("a"))["status"] == "running"
    exchange.leave()
    assert exchange.task is not None
    await exchange.task
    quire.engine.paused = False
    await quire.engine.until(lambda: quire.state.past_requests.find(quire.tenant("one"), "a").records)
    assert (await quire.why("a"))["status"] == "aborted"


async def test_a_client_that_does_not_read(make: Make) -> None:
    quire = make()
    headers = {"authorization": "Bearer one", "x-request-id": "a", "content-type": "application/json"}
    body = msgspec.json.encode({"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True, "stream": True})
    exchange = Exchange(quire.app, "POST", "/v1/completions", body, headers)
    exchange.readable.clear()
    exchange.start()
    await quire.engine.until(lambda: quire.engine.core.records)
    times = quire.state.past_requests.find(quire.tenant("one"), "a")
    assert times.finished is not None
    exchange.readable.set()
    assert exchange.task is not None
    await exchange.task
    told = await quire.why("a")
    assert "client_not_reading" in [span["name"] for span in told["spans"]]
    assert times.unread_seconds > 0


def record(number: int = 0, spans: int = 1) -> RequestRecord:
    parts = [Span("decode", float(at), 1.0) for at in range(spans)]
    return RequestRecord(
        number, 0.0, float(spans), "length", parts, 0, [], 8, 0, 0, None, [], 0, Company(steps=spans)
    )


def ended(name: str, number: int, tenant: str = "t", at: float = 0.0) -> RequestTimes:
    times = RequestTimes(tenant, name, at, at, queued=at, engine_requests=[number])
    times.ended = times.finished = at
    return times


def test_what_takes_time_beside_the_steps() -> None:
    times = replace(ended("a", 0), ended=9.0, finished=8.0, text_ready=9.0)
    times.text_seconds, times.unread_seconds = 2.0, 1.0
    told = record()
    told.spans = [
        Span("grammar", 0.0, 1.0),
        Span("waiting_for_blocks", 1.0, 1.0),
        Span("loading", 2.0, 1.0),
        Span("prefill", 3.0, 1.0, 8),
        Span("waiting_for_blocks", 4.0, 1.0),
        Span("decode", 5.0, 2.0),
        Span("masks", 7.0, 1.0, 0, 4),
    ]
    told.ended = 8.0
    times.note(told)
    reply = why(times, 9.0, lambda number: None)
    assert sum(span.ms for span in reply.spans) == reply.total_ms == 9000.0
    found = {each.kind: each for each in reply.causes}
    assert [found[kind].ms for kind in ("grammar", "loading", "stalled", "masks")] == [1000.0] * 4
    assert (found["detokenising"].ms, found["client_not_reading"].ms) == (2000.0, 1000.0)


def test_old_requests_are_forgotten() -> None:
    now = 0.0
    past = PastRequests(lambda: now)
    past.add(ended("a", 0))
    assert past.find("t", "a").request_id == "a"
    now = KEEP_SECONDS + 1
    with pytest.raises(ApiError) as error:
        past.find("t", "a")
    assert error.value.status == 404
    assert len(past) == 0


def test_a_key_with_many_requests_loses_its_own_oldest() -> None:
    past = PastRequests(lambda: 0.0)
    past.add(ended("a", 0, "quiet"))
    many = MAX_SIZE // OWN_SIZE
    for number in range(1, many + 3):
        past.add(ended(str(number), number, "loud"))
    assert len(past) == many
    assert past.find("quiet", "a") and past.find("loud", str(many + 2))
    with pytest.raises(ApiError):
        past.find("loud", "1")


def test_the_command_shows_it(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    headers = {"Authorization": "Bearer key", "X-Request-Id": "mine"}
    body = {"prompt": "a b", "max_tokens": 2}
    assert httpx.post(f"{live.url}/v1/completions", json=body, headers=headers).status_code == 200
    server = ["--url", live.url, "--api-key", "key"]
    with pytest.raises(SystemExit) as end:
        main(["why", "mine", *server])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("mine finished after") and "tokenising" in shown
    with pytest.raises(SystemExit, match="answers 404: there is no request 'other'"):
        main(["why", "other", *server])
    with pytest.raises(SystemExit, match="give --url"):
        main(["why", "mine", "--url", "http://127.0.0.1:9"])


SAID = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": SAID, "max_tokens": 2}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
        ("/v1/messages", {"model": "tiny", "messages": SAID, "max_tokens": 2}),
        ("/api/generate", {"model": "tiny", "prompt": "a", "options": {"num_predict": 2}}),
    ],
)
async def test_whatever_generates_can_be_asked_about(
    service: Service, path: str, body: dict[str, Any]
) -> None:
    assert (await post(service.app, path, body, **{"x-request-id": "mine"})).status == 200
    told = (await get(service.app, "/v1/requests/mine/why")).json()
    assert (told["status"], told["tokens"]["output"]) == ("finished", 2)


async def test_an_engine_that_tells_nothing_is_one_span(service: Service) -> None:
    body = {"prompt": "a", "max_tokens": 2}
    request_id = (await post(service.app, "/v1/completions", body)).headers["x-request-id"]
    told = (await get(service.app, f"/v1/requests/{request_id}/why")).json()
    assert "engine" in [span["name"] for span in told["spans"]]
