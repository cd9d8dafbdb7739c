"""Two replicas, a router and a Redis, as processes: where requests go, and what happens when one fails."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from quire.loadtest.servers.redis_server import RedisServer
from tests.cluster.processes import Process, make_model
from tests.waiting import until

PREFIX_TOKENS = 2000
BLOCK_SIZE = 16  # that servers have unless told
KEYS = ("key-of-alice", "key-of-bob")
PINNED = "Every prompt that begins like this finds it cached, whoever asks. " * 20


@dataclass
class Cluster:
    redis: RedisServer
    replicas: list[Process]
    router: Process

    def metrics(self, process: Process | None = None) -> dict[str, float]:
        text = httpx.get(f"{(process or self.router).url}/metrics").text
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def holds(self, state: str) -> bool:
        """Whether router and replicas find the registry in this state."""
        name = f'registry_state{{state="{state}"}}'
        found = [self.metrics(replica)[f"quire_{name}"] for replica in self.replicas]
        return all([*found, self.metrics()[f"quire_route_{name}"]])

    def wait_settled(self) -> None:
        until(lambda: self.holds("ok"), "the registry is fine")
        until(lambda: self.metrics()['quire_route_replicas{state="ready"}'] == 2, "both replicas are known")


@pytest.fixture(scope="module")
def cluster(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = str(make_model(tmp_path_factory.mktemp("cluster") / "tiny"))
    keys = [flag for key in KEYS for flag in ("--api-key", key)]
    registry = ["--redis-url", redis_server.url, "--cache-seed", "a secret", *keys]
    engine = ["--load-format", "dummy", "--num-gpu-blocks-override", "4000", "--swap-space", "0"]
    engine += ["--max-num-seqs", "16", "--registry-lease", "1.5", "--shutdown-timeout", "30"]
    pins = tmp_path_factory.mktemp("pins") / "pins.jsonl"
    pins.write_text(json.dumps(PINNED))
    engine += ["--pin-prefix", str(pins)]
    replicas = [Process("serve", model, *registry, *engine) for _ in range(2)]
    router = Process("route", model, *registry)
    cluster = Cluster(redis_server, replicas, router)
    try:
        router.wait_ready()
        cluster.wait_settled()
        yield cluster
    finally:
        for process in (router, *replicas):
            process.kill()


def words(rng: random.Random, count: int) -> str:
    """A text of about so many tokens that no other one begins like."""
    return " ".join(str(rng.randrange(100, 1000)) for _ in range(count // 4))


def ask(cluster: Cluster, prompt: str, *, key: str = KEYS[0], max_tokens: int = 2) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{cluster.router.url}/v1/completions", json=body, headers=headers, timeout=60)


def stream(
    cluster: Cluster, prompt: str, max_tokens: int, on_first: Callable[[str], object] = lambda _: None
) -> list[str]:
    """The events' data, from whichever replica; `on_first` is told which one with the first event."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    events: list[str] = []
    with httpx.stream(
        "POST", f"{cluster.router.url}/v1/completions", json=body, headers=headers, timeout=60
    ) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
                if len(events) == 1:
                    on_first(answer.headers["x-quire-route"])
    return events


def routed_by_prefix(ask_for: Callable[[], list[httpx.Response]]) -> list[httpx.Response]:
    """What it gives, which is asked for until the registry was in time: a router waits for it 15 ms only."""
    answers: list[httpx.Response] = []

    def in_time() -> bool:
        answers[:] = ask_for()
        return all("reason=prefix" in answer.headers["x-quire-route"] for answer in answers)

    until(in_time, "the registry knows a prompt and is in time")
    return answers


def cached_tokens(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_shared_prefixes_are_found_again(cluster: Cluster) -> None:
    """Eight tenants with a prefix each, over and over: all but the first of each find it where they go."""
    rng = random.Random(1)
    prefixes = [words(rng, PREFIX_TOKENS) for _ in range(8)]
    before = cluster.metrics()
    first = [ask(cluster, prefix) for prefix in prefixes]
    assert [cached_tokens(answer) for answer in first] == [0] * 8
    rounds = [(tenant, words(rng, 40)) for _ in range(10) for tenant in rng.sample(range(8), 8)]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda each: ask(cluster, f"{prefixes[each[0]]} {each[1]}"), rounds))
    lengths = [first[tenant].json()["usage"]["prompt_tokens"] for tenant, _ in rounds]
    assert min(lengths) > 1500
    shares = [cached_tokens(answer) / length for answer, length in zip(answers, lengths, strict=True)]
    assert sum(share >= 0.95 for share in shares) >= 0.95 * len(rounds)
    used = {re.findall('replica="(.*?)"', answer.headers["x-quire-route"])[0] for answer in answers}
    assert len(used) == 2, "one replica got everything"
    after = cluster.metrics()
    moved = {name: after[name] - before[name] for name in after}
    actual = moved['quire_route_cached_tokens_total{source="actual"}']
    assert actual == sum(map(cached_tokens, [*first, *answers]))
    assert moved['quire_route_cached_tokens_total{source="predicted"}'] == pytest.approx(actual, rel=0.1)


def test_tenants_do_not_share(cluster: Cluster) -> None:
    """The router's digests are salted by the API key as the engine's are."""
    prompt = words(random.Random(2), 400)
    assert cached_tokens(ask(cluster, prompt)) == 0
    other = ask(cluster, prompt, key=KEYS[1])
    assert "predicted=0," in other.headers["x-quire-route"]
    assert cached_tokens(other) == 0
    (again,) = routed_by_prefix(lambda: [ask(cluster, prompt, key=KEYS[1])])
    assert cached_tokens(again) > 300
    assert ask(cluster, prompt, key="nobody's").status_code == 401


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_conversations_are_hashed_as_the_replica_renders_them(cluster: Cluster, path: str) -> None:
    """The second question of one, with the first and an answer to it."""
    chat = "chat" in path
    rng = random.Random(path)

    def post(said: list[dict[str, str]]) -> httpx.Response:
        body = {"messages": said, "max_tokens": 2} if chat else {"input": said, "max_output_tokens": 2}
        headers = {"authorization": f"Bearer {KEYS[0]}"}
        return httpx.post(f"{cluster.router.url}{path}", json=body, headers=headers, timeout=60)

    def second_question() -> list[httpx.Response]:
        said = [{"role": "system", "content": words(rng, 300)}, {"role": "user", "content": "first"}]
        assert post(said).status_code == 200
        answered = {"role": "assistant", "content": "an answer"}
        return [post([*said, answered, {"role": "user", "content": "second"}])]

    (answer,) = routed_by_prefix(second_question)
    usage = answer.json()["usage"]
    details = usage["prompt_tokens_details" if chat else "input_tokens_details"]
    assert details["cached_tokens"] > 250
    assert f"predicted={details['cached_tokens']}," in answer.headers["x-quire-route"]


def test_what_follows_a_pinned_prefix_is_the_tenants_own(cluster: Cluster) -> None:
    rng = random.Random(5)

    def ask_twice_each() -> list[httpx.Response]:
        prompt = PINNED + words(rng, 200)
        return [ask(cluster, prompt, key=key) for key in KEYS for _ in range(2)]

    answers = routed_by_prefix(ask_twice_each)
    for first, again in zip(answers[::2], answers[1::2], strict=True):
        assert 100 < cached_tokens(first) < cached_tokens(again) - 100
        for answer in (first, again):
            # The pinned prefix's last block is partly filled: the engine finds it, the registry does not.
            in_full_blocks = cached_tokens(answer) // BLOCK_SIZE * BLOCK_SIZE
            assert f"predicted={in_full_blocks}," in answer.headers["x-quire-route"]


@dataclass
class Traffic:
    """Requests from several threads until it is stopped; nothing of it may fail."""

    cluster: Cluster
    failures: list[str] = field(default_factory=list)
    answered: int = 0
    _stopped: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Traffic:
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(3)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        prefix = words(rng, 200)
        while not self._stopped.wait(0.02):
            try:
                if number:
                    answer = ask(self.cluster, f"{prefix} {words(rng, 20)}")
                    if answer.status_code != 200:
                        self.failures.append(answer.text)
                elif stream(self.cluster, prefix, 4)[-1] != "[DONE]":
                    self.failures.append("a stream did not end in order")
                self.answered += 1
            except httpx.HTTPError as error:
                self.failures.append(repr(error))

    def until_more(self, count: int) -> None:
        """Wait for so many more answers."""
        goal = self.answered + count
        until(lambda: self.answered >= goal or bool(self.failures), "requests are answered")


@contextmanager
def stopped(server: RedisServer) -> Iterator[None]:
    """It takes commands and answers none."""
    server.pause()
    try:
        yield
    finally:
        server.resume()


@contextmanager
def killed(server: RedisServer) -> Iterator[None]:
    """It comes back empty."""
    server.kill()
    yield
    server.start()


@contextmanager
def slow(server: RedisServer) -> Iterator[None]:
    """It answers, mostly when nobody waits any more."""
    ended = threading.Event()

    def stutter() -> None:
        while not ended.wait(0.01):
            with stopped(server):
                time.sleep(2.0)

    thread = threading.Thread(target=stutter)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("fault", [stopped, killed, slow], ids=lambda fault: fault.__name__)
def test_no_request_fails_while_the_registry_does(
    cluster: Cluster, fault: Callable[[RedisServer], AbstractContextManager[None]]
) -> None:
    with _published_again(cluster, fault.__name__) as traffic, fault(cluster.redis):
        until(lambda: cluster.holds("degraded"), "the failure is noticed")
        traffic.until_more(6)


def test_no_request_fails_when_the_registry_is_emptied(cluster: Cluster) -> None:
    with _published_again(cluster, "emptied"):
        cluster.redis.client.flushall()


def test_no_request_fails_when_the_registry_lies(cluster: Cluster) -> None:
    """It says that each replica holds what the other one does."""
    with _published_again(cluster, "lies"):
        client = cluster.redis.client
        one, other = client.keys("quire:*:blocks:*")
        for source, target in ((one, "kept"), (other, one), ("kept", other)):
            client.rename(source, target)


@contextmanager
def _published_again(cluster: Cluster, name: str) -> Iterator[Traffic]:
    """Harm is done to Redis while there is traffic; after that, everything must be found again."""
    prompt = words(random.Random(name), 400)
    assert cached_tokens(ask(cluster, prompt)) == 0
    with Traffic(cluster) as traffic:
        traffic.until_more(6)
        yield traffic
        traffic.until_more(6)
        cluster.wait_settled()
    assert traffic.failures == []
    until(lambda: _is_published(cluster), "every replica's blocks are back")
    (again,) = routed_by_prefix(lambda: [ask(cluster, prompt)])
    assert cached_tokens(again) > 300


def _is_published(cluster: Cluster) -> bool:
    """As many blocks in Redis as the replicas say that they hold, but for the pinned prefix's last.

    That is partly filled, and is found through the pinned prefix alone.
    """
    client = cluster.redis.client
    sets = {key: client.scard(key) for key in client.keys("quire:*:blocks:*")}
    for replica in cluster.replicas:
        cached = cluster.metrics(replica)['quire_kv_blocks{state="cached",tier="device"}']
        if cached - 1 not in [size for key, size in sets.items() if replica.url.encode() in key]:
            return False
    return True


def test_a_rolling_restart_fails_no_request(cluster: Cluster) -> None:
    with Traffic(cluster) as traffic:
        for replica in cluster.replicas:
            traffic.until_more(5)
            assert replica.terminate() == 0
            traffic.until_more(5)
            replica.start()
            replica.wait_ready()
            cluster.wait_settled()
        traffic.until_more(5)
    assert traffic.failures == []


def test_a_replica_that_is_killed(cluster: Cluster) -> None:
    """Its stream ends with an error event, the others' go on, and nothing is sent there any more."""
    rng = random.Random(4)
    prompts = [words(rng, 200) for _ in range(6)]
    killed = threading.Event()
    running = threading.Barrier(len(prompts) + 1)
    victim, survivor = cluster.replicas
    routes: dict[str, str] = {}

    def run(prompt: str) -> list[str]:
        def note(route: str) -> None:
            routes[prompt] = route
            running.wait(60)
            assert killed.wait(60)

        return stream(cluster, prompt, 1500, note)

    with ThreadPoolExecutor(len(prompts)) as threads:
        streams = [threads.submit(run, prompt) for prompt in prompts]
        running.wait(60)
        victim.kill()
        killed.set()
        ends = {prompt: stream.result(60)[-1] for prompt, stream in zip(prompts, streams, strict=True)}
    on_victim = {prompt for prompt, route in routes.items() if str(victim.port) in route}
    assert 0 < len(on_victim) < len(prompts)
    for prompt, end in ends.items():
        if prompt in on_victim:
            assert json.loads(end)["error"]["code"] == "replica_lost"
        else:
            assert end == "[DONE]"
    answers = [ask(cluster, prompt) for prompt in prompts]
    assert all(answer.status_code == 200 for answer in answers)
    assert all(str(survivor.port) in answer.headers["x-quire-route"] for answer in answers)
    until(lambda: not cluster.redis.client.keys(f"*{victim.url}*"), "its lease ends")
    for prompt in on_victim:  # and nothing is left there by which a request could be sent there
        (again,) = routed_by_prefix(lambda prompt=prompt: [ask(cluster, prompt)])
        assert cached_tokens(again) > 100
        assert f'replica="127.0.0.1:{survivor.port}",' in again.headers["x-quire-route"]
        assert again.headers["x-quire-route"].endswith("attempt=1")
