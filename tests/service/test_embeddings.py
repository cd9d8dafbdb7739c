"""/v1/embeddings and Ollama's two, as their own clients use them, and all that is refused."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import ollama
import openai
import pytest

from quire.engine.models.pooled_texts import PooledTexts
from quire.engine.models.pooling import Pooling
from quire.service.text.tokenizer import Tokenizer
from tests.service.asgi import Reply, exchange, post
from tests.service.conftest import Service
from tests.service.fake_engine import HIDDEN
from tests.service.live import Live

pytestmark = pytest.mark.anyio
EMBEDS = Pooling(normalize=True, matryoshka=True)
PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def embedding_server(tokenizer: Tokenizer) -> Iterator[Live]:
    server = Live(tokenizer, api_keys=("key",), pooling=EMBEDS)
    yield server
    server.end()


@pytest.fixture
def service(make_service: Callable[..., Service]) -> Service:
    return make_service(pooling=EMBEDS)


def expected(tokenizer: Tokenizer, text: str, size: int = HIDDEN, *, normalize: bool = True) -> Any:
    tokens = np.array(tokenizer.encode(text, add_special_tokens=True))
    counts = np.bincount(tokens % HIDDEN, minlength=HIDDEN)[:size]
    return pytest.approx(counts / (np.linalg.norm(counts) if normalize else 1), rel=1e-6)


async def ask(service: Service, path: str = PATH, **fields: Any) -> Reply:
    return await post(service.app, path, fields)


def test_openais_client(embedding_server: Live, tokenizer: Tokenizer) -> None:
    """Which asks for base64 by itself, and gives numbers."""
    with openai.OpenAI(base_url=f"{embedding_server.url}/v1", api_key="key", max_retries=0) as client:
        texts = ["hello", "the cat sat"]
        tokens = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
        for given in (texts, tokens):
            reply = client.embeddings.create(model="tiny", input=given, user="me")
            assert [each.index for each in reply.data] == [0, 1]
            for each, text in zip(reply.data, texts, strict=True):
                assert each.embedding == expected(tokenizer, text)
            assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, tokens))
        floats = client.embeddings.create(model="tiny", input="hello", encoding_format="float")
        assert floats.data[0].embedding == expected(tokenizer, "hello")
        few = client.embeddings.create(model="tiny", input=tokens[1], dimensions=5)
        assert few.data[0].embedding == expected(tokenizer, texts[1], 5)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").embeddings.create(model="tiny", input="hello")


def test_ollamas_client(embedding_server: Live, tokenizer: Tokenizer) -> None:
    client = ollama.Client(embedding_server.url, headers={"Authorization": "Bearer key"})
    reply = client.embed("tiny:latest", ["hello", "the cat"], options={"temperature": 0.5}, keep_alive=5)
    assert [list(vector) for vector in reply.embeddings] == [
        expected(tokenizer, "hello"),
        expected(tokenizer, "the cat"),
    ]
    assert reply.prompt_eval_count and reply.total_duration
    (few,) = client.embed("tiny", "the cat", dimensions=5).embeddings
    assert list(few) == expected(tokenizer, "the cat", 5)
    assert list(client.embeddings("tiny", "hello").embedding) == expected(tokenizer, "hello")
    assert client.embed("tiny", "").embeddings == []  # has the model loaded
    assert client.show("tiny").capabilities == ["embedding"]
    with pytest.raises(ollama.ResponseError, match="gives embeddings and no text"):
        client.generate("tiny", "hello")


async def test_formats_lengths_and_fields(service: Service, tokenizer: Tokenizer) -> None:
    reply = await ask(service, input="hello", encoding_format="base64", normalize=False)
    numbers = np.frombuffer(base64.b64decode(reply.json()["data"][0]["embedding"]), "<f4")
    assert list(numbers) == expected(tokenizer, "hello", normalize=False)
    cut = await ask(service, input=[5, 6, 7, 8], truncate_prompt_tokens=2)
    assert cut.json()["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    assert service.engine.streams[-1].prompt == [7, 8]
    whole = await ask(service, input=[5] * 400)  # no room is left for an answer, nor needed
    assert whole.status == 200
    await ask(service, input=[5] * 500, truncate_prompt_tokens=-1)
    assert len(service.engine.streams[-1].prompt) == 400
    salted = await ask(service, input="hello", cache_salt="a", user="me", request_id="x")
    assert sorted(salted.headers["x-quire-ignored"].split(", ")) == ["request_id", "user"]
    assert service.engine.streams[-1].cache_salt.endswith("a")
    await ask(service, "/api/embed", model="tiny", input="hello " * 900)
    assert len(service.engine.streams[-1].prompt) == 400
    whole = await ask(service, "/api/embed", model="tiny", input="hello " * 900, truncate=False)
    assert (whole.status, "more than the 400" in whole.json()["error"]) == (400, True)
    assert "truncate: false" in whole.json()["error"], "that is Ollama's own field"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "input", "missing"),
        ({"input": []}, "input", "length >= 1"),
        ({"input": ["a", 5]}, "input", "only strings"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": ["a"] * 1001}, "input", "input holds 1001 prompts, and the queue at most 1000"),
        ({"input": [5, -1]}, "input[1]", ">= 0"),
        ({"input": [9999]}, "input", "9999"),
        ({"input": [5], "add_special_tokens": True}, "add_special_tokens", "input is token ids"),
        ({"input": ""}, "input", "no tokens"),
        ({"input": ["a", ""]}, "input[1]", "no tokens"),
        ({"input": [5] * 401}, "input", "401 tokens, more than the 400"),
        ({"input": "a", "dimensions": 0}, "dimensions", ">= 1"),
        ({"input": "a", "dimensions": 9}, "dimensions", "1 to 8"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format", "base64"),
        ({"input": "a", "normalize": 1}, "normalize", "bool"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or at least 1"),
        ({"input": "a", "messages": [{"role": "user"}]}, "messages", "give input"),
        ({"input": "a", "temperature": 1}, "temperature", "unknown field"),
    ],
)
async def test_wrong_fields_are_refused_by_name(
    service: Service, fields: dict[str, Any], param: str, words: str
) -> None:
    reply = await ask(service, **fields)
    assert reply.status == 400
    assert reply.error["param"] == param
    assert words in reply.error["message"]
    assert service.engine.streams == []


async def test_the_tokens_of_a_prompt_may_be_no_part_of_the_vector(
    make_service: Callable[..., Service], tokenizer: Tokenizer
) -> None:
    texts = PooledTexts(prompt="the cat", pools_prompt=False)
    service = make_service(pooling=Pooling(normalize=True, texts=texts))
    whole = tokenizer.encode("the cat sat hello", add_special_tokens=True)
    left_out = len(tokenizer.encode("the cat", add_special_tokens=True))

    def counted(tokens: list[int]) -> Any:
        counts = np.bincount(np.array(tokens) % HIDDEN, minlength=HIDDEN)
        return pytest.approx(counts / np.linalg.norm(counts), rel=1e-6)

    async def vector(path: str = PATH, **fields: Any) -> Any:
        reply = (await ask(service, path, **fields)).json()
        assert service.engine.streams[-1].prompt == whole[-len(service.engine.streams[-1].prompt) :]
        return reply["embeddings"][0] if "embeddings" in reply else reply["data"][0]["embedding"]

    assert await vector(input=" sat hello") == counted(whole[left_out:])
    assert await vector(input=whole) == counted(whole), "token ids have no prompt"
    assert await vector("/api/embed", model="tiny", input=" sat hello") == counted(whole[left_out:])
    cut = len(whole) - left_out + 1  # one token of the prompt is left
    assert await vector(input=" sat hello", truncate_prompt_tokens=cut) == counted(whole[left_out:])
    assert await vector(input=" sat hello", truncate_prompt_tokens=cut - 2) == counted(whole[left_out + 1 :])
    reply = await ask(service, "/v1/score", text_1=" sat hello", text_2=" sat hello")
    assert reply.json()["data"][0]["score"] == pytest.approx(1)
    for path, fields in ((PATH, {}), ("/api/embed", {"model": "tiny"})):
        empty = await ask(service, path, input=[" sat hello", ""], **fields)
        assert (
            empty.status,
            "input[1] must not be empty: it has no tokens behind" in empty.body.decode(),
        ) == (
            400,
            True,
        )


async def test_vectors_are_as_long_as_the_folder_says(
    make_service: Callable[..., Service], tokenizer: Tokenizer
) -> None:
    service = make_service(pooling=Pooling(normalize=True, usual_dimensions=3))
    texts = ["the cat", "hello there"]
    reply = await ask(service, input=texts)
    vectors = [np.array(each["embedding"]) for each in reply.json()["data"]]
    assert [list(each) for each in vectors] == [expected(tokenizer, text, 3) for text in texts]
    score = await ask(service, "/v1/score", text_1=texts[0], text_2=texts[1])
    assert score.json()["data"][0]["score"] == pytest.approx(vectors[0] @ vectors[1])
    whole = await ask(service, input=texts[0], dimensions=HIDDEN)
    assert whole.json()["data"][0]["embedding"] == expected(tokenizer, texts[0])


async def test_dimensions_are_those_that_the_model_was_trained_for(
    make_service: Callable[..., Service],
) -> None:
    plain = await ask(make_service(pooling=Pooling()), input="a", dimensions=4)
    assert plain.error["param"] == "dimensions" and "is_matryoshka" in plain.error["message"]
    assert (await ask(make_service(pooling=Pooling()), input="a", dimensions=HIDDEN)).status == 200
    listed = make_service(pooling=Pooling(matryoshka=True, dimensions=(2, 4)))
    assert "one of 2, 4" in (await ask(listed, input="a", dimensions=3)).error["message"]
    assert (await ask(listed, input="a", dimensions=4)).status == 200


GENERATING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/responses", {"input": "a"}),
]


async def test_each_kind_of_model_says_what_it_can(make_service: Callable[..., Service]) -> None:
    embeds, generates, scores = (
        make_service(pooling=EMBEDS),
        make_service(),
        make_service(pooling=Pooling(labels=1, activation="sigmoid")),
    )
    for path, body in GENERATING:
        reply = await post(embeds.app, path, body)
        assert (reply.status, reply.error["code"]) == (400, "model_not_supported")
        assert "ask /v1/embeddings" in reply.error["message"]
    said = GENERATING[1][1]["messages"]
    messages = await post(scores.app, "/v1/messages", {"model": "tiny", "max_tokens": 2, "messages": said})
    assert messages.status == 400 and messages.json()["error"]["type"] == "invalid_request_error"
    for path in (PATH, "/v1/rerank", "/v1/score"):
        reply = await post(generates.app, path, {"input": "a"})
        assert (reply.status, reply.error["code"]) == (400, "model_not_supported")
        assert "--runner pooling" in reply.error["message"]
    assert "/v1/rerank" in (await ask(scores, input="a")).error["message"]
    missing = await ask(embeds, input="a", model="other")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")
    old = await post(embeds.app, "/api/embed", {"model": "other", "input": "a"})
    assert old.status == 404 and set(old.json()) == {"error", "code"}


async def test_a_client_that_leaves_gives_up_its_prompts(make_service: Callable[..., Service]) -> None:
    service = make_service(pooling=EMBEDS, auto=False)
    asked = exchange(service.app, PATH, {"input": ["a", "b"]})
    await service.engine.until_added(2)
    assert service.state.queue.prompts == 2
    asked.leave()
    assert asked.task is not None
    await asked.task
    assert all(stream.aborted for stream in service.engine.streams)
    assert service.state.queue.prompts == 0
    assert service.state.metrics.finished["abort"] == 2


async def test_an_engine_that_dies_or_fails_is_told(make_service: Callable[..., Service]) -> None:
    service = make_service(pooling=EMBEDS, auto=False)
    asked = exchange(service.app, PATH, {"input": "a"})
    await service.engine.until_added(1)
    service.engine.die("boom")
    reply = await asked.finish()
    assert (reply.status, reply.error["code"]) == (500, "engine_dead")
    assert "boom" in reply.error["message"]
    assert service.state.metrics.finished["error"] == 1


async def test_requests_are_counted_and_limited(make_service: Callable[..., Service]) -> None:
    service = make_service(pooling=EMBEDS, max_num_queued_reqs=3)
    service.engine.cached_tokens = 1
    reply = await ask(service, input=[[5, 6, 7], [5, 6]])
    metrics = service.state.metrics
    assert (metrics.prompt_tokens, metrics.cached_tokens, metrics.finished["stop"]) == (5, 2, 2)
    assert metrics.answers[PATH, 200] == 1
    assert "total;dur=" in reply.headers["server-timing"]
    assert "3" in (await ask(service, input=["a"] * 4)).error["message"]
    assert metrics.answers[PATH, 400] == 1


async def test_texts_are_put_behind_the_folders_prompt_and_tokens_are_not(
    make_service: Callable[..., Service], tokenizer: Tokenizer
) -> None:
    service = make_service(pooling=Pooling(texts=PooledTexts(prompt="the cat ")))
    whole, tokens = (
        expected(tokenizer, "the cat sat", normalize=False),
        tokenizer.encode("sat", add_special_tokens=True),
    )
    assert (await ask(service, input="sat")).json()["data"][0]["embedding"] == whole
    plain = (await ask(service, input=tokens)).json()["data"][0]["embedding"]
    assert plain == expected(tokenizer, "sat", normalize=False)
    for path, field in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
        reply = (await ask(service, path, model="tiny", **{field: "sat"})).json()
        vector = reply["embedding"] if "embedding" in reply else reply["embeddings"][0]
        assert vector == expected(tokenizer, "the cat sat", normalize=path == "/api/embed")
    await ask(service, "/v1/score", text_1="sat", text_2="hello")
    sent = [stream.prompt for stream in service.engine.streams[-2:]]
    assert sent == [tokenizer.encode(f"the cat {text}", add_special_tokens=True) for text in ("sat", "hello")]
