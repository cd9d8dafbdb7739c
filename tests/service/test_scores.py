"""Rerank and score: by a head for that, or by the angle between embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quire.engine.models.pooling import Pooling
from quire.service.text.template import ChatTemplate
from quire.service.text.tokenizer import Tokenizer
from tests.service import tiny_tokenizers
from tests.service.asgi import Reply, post
from tests.service.conftest import Service
from tests.service.fake_engine import HIDDEN

pytestmark = pytest.mark.anyio
QUERY = "the cat"
DOCUMENTS = ["hello world", "the cat sat", "a b c"]
HEAD = Pooling(labels=1, activation="sigmoid")


@pytest.fixture
def embeds(make_service: Callable[..., Service]) -> Service:
    return make_service(pooling=Pooling())


@pytest.fixture
def scores(make_service: Callable[..., Service]) -> Service:
    return make_service(pooling=HEAD)


def counts(tokenizer: Tokenizer, *texts: str) -> Any:
    tokens = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
    return np.bincount(np.array(tokens) % HIDDEN, minlength=HIDDEN)


def cosine(tokenizer: Tokenizer, first: str, second: str) -> float:
    a, b = counts(tokenizer, first), counts(tokenizer, second)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


async def rerank(service: Service, path: str = "/v1/rerank", **fields: Any) -> Reply:
    return await post(service.app, path, {"query": QUERY, "documents": DOCUMENTS, **fields})


async def test_a_head_scores_both_texts_together(scores: Service, tokenizer: Tokenizer) -> None:
    reply = (await rerank(scores)).json()
    wanted = [sigmoid(counts(tokenizer, QUERY, document)[0]) for document in DOCUMENTS]
    results = reply["results"]
    assert [each["relevance_score"] for each in results] == pytest.approx(sorted(wanted, reverse=True))
    for each in results:
        assert each["relevance_score"] == pytest.approx(wanted[each["index"]])
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
    raw = (await rerank(scores, use_activation=False, top_n=1)).json()["results"]
    best = max(counts(tokenizer, QUERY, document)[0] for document in DOCUMENTS)
    assert [each["relevance_score"] for each in raw] == [best]
    assert len(scores.engine.streams) == 6
    assert reply["usage"]["total_tokens"] == sum(len(s.prompt) for s in scores.engine.streams[:3])


async def test_a_model_that_embeds_scores_by_the_angle(embeds: Service, tokenizer: Tokenizer) -> None:
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        results = (await rerank(embeds, path, return_documents=False)).json()["results"]
        wanted = [cosine(tokenizer, QUERY, document) for document in DOCUMENTS]
        assert [each["index"] for each in results] == sorted(range(3), key=lambda i: -wanted[i])
        assert [each["relevance_score"] for each in results] == pytest.approx(sorted(wanted, reverse=True))
        assert not any("document" in each for each in results)
    objects = await rerank(embeds, documents=[{"text": text} for text in DOCUMENTS], top_n=0)
    assert len(objects.json()["results"]) == 3
    assert len(embeds.engine.streams) == 4 * 4  # each text once


async def test_pairs(scores: Service, embeds: Service, tokenizer: Tokenizer) -> None:
    for path in ("/v1/score", "/score"):
        one = (await post(embeds.app, path, {"text_1": QUERY, "text_2": DOCUMENTS})).json()
        assert [each["score"] for each in one["data"]] == pytest.approx(
            [cosine(tokenizer, QUERY, document) for document in DOCUMENTS]
        )
    pairs = {"text_1": DOCUMENTS[:2], "text_2": DOCUMENTS[1:]}
    both = (await post(scores.app, "/score", pairs)).json()
    assert [each["index"] for each in both["data"]] == [0, 1]
    assert [each["score"] for each in both["data"]] == pytest.approx(
        [sigmoid(counts(tokenizer, *pair)[0]) for pair in zip(*pairs.values(), strict=True)]
    )


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query", "missing"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "length >= 1"),
        ("/v1/rerank", {"query": "a", "documents": [5]}, "documents[0]", "str"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", ">= 0"),
        ("/v1/rerank", {"query": "a", "documents": [{"text": "b", "id": 1}]}, "documents[0].id", "unknown"),
        ("/v1/rerank", {"query": "a", "documents": ["b", "x" * 900]}, "documents[1]", "more than the 400"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "max_tokens": 5}, "max_tokens", "unknown"),
        ("/v1/score", {"text_1": "a"}, "text_2", "missing"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2", "2 texts and text_2 1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2", "length >= 1"),
    ],
)
async def test_wrong_fields_are_refused_by_name(
    scores: Service, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    reply = await post(scores.app, path, fields)
    assert reply.status == 400
    assert reply.error["param"] == param
    assert words in reply.error["message"]
    assert scores.engine.streams == []


LONG = "x" * 900
TOO_LONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/rerank", {"query": "a", "documents": ["x", LONG]}, "documents[1]", "query"),
    ("/v1/rerank", {"query": "a", "documents": [{"text": LONG}, "x"]}, "documents[0]", "query"),
    ("/v1/rerank", {"query": LONG, "documents": ["x", "y"]}, "query", "documents[0]"),
    ("/v1/score", {"text_1": "a", "text_2": ["x", LONG]}, "text_2[1]", "text_1"),
    ("/v1/score", {"text_1": LONG, "text_2": "x"}, "text_1", "text_2"),
    ("/v1/score", {"text_1": ["a", LONG], "text_2": ["x", "y"]}, "text_1[1]", "text_2[1]"),
    ("/v1/score", {"text_1": ["a", "a"], "text_2": ["a", LONG]}, "text_2[1]", "text_1[1]"),
]


@pytest.mark.parametrize(("path", "fields", "param", "beside"), TOO_LONG)
async def test_the_text_that_is_too_long_is_named(
    scores: Service, embeds: Service, path: str, fields: dict[str, Any], param: str, beside: str
) -> None:
    """Where both make one prompt, with the other."""
    for service, starts in ((embeds, f"{param} has"), (scores, f"{param} and {beside} have together")):
        reply = await post(service.app, path, fields)
        assert (reply.status, reply.error["param"]) == (400, param)
        assert reply.error["message"].startswith(starts)
        assert service.engine.streams == []


async def test_a_score_needs_one_label_or_none(make_service: Callable[..., Service], embeds: Service) -> None:
    several = await rerank(make_service(pooling=Pooling(labels=3)))
    assert (several.status, several.error["code"]) == (400, "model_not_supported")
    assert "3 labels" in several.error["message"]
    assert (await rerank(embeds, use_activation=True)).error["param"] == "use_activation"


PAIRS = (
    "{% for m in messages %}{% if m.role == 'query' %}Q:{% elif m.role == 'document' %}D:{% endif %}"
    "{{ m.content }};{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}={{ m.content }}|{% endfor %}"


async def test_a_template_of_query_and_document_puts_them_together(
    make_service: Callable[..., Service], tokenizer: Tokenizer
) -> None:
    service = make_service(pooling=HEAD)
    backend = tiny_tokenizers.byte_level()
    for own, source in ((True, PAIRS), (False, PLAIN)):
        service.state.tokenizer = Tokenizer(backend, ChatTemplate(source, {}), is_own=own)
        assert (await rerank(service, documents=["sat"])).status == 200
        text = tokenizer.decode(service.engine.streams[-1].prompt, skip_special_tokens=False)
        assert text == ("Q:the cat;D:sat;" if own else "query=the cat|document=sat|")
    service.state.tokenizer = Tokenizer(backend, ChatTemplate("{{ messages }}", {}))  # of chats only
    await rerank(service, documents=["sat"])
    assert tokenizer.decode(service.engine.streams[-1].prompt, skip_special_tokens=False) == "the catsat"


async def test_labels(make_service: Callable[..., Service], embeds: Service, tokenizer: Tokenizer) -> None:
    names = ("good", "bad", "odd")
    service = make_service(pooling=Pooling(labels=3, names=names))
    reply = (await post(service.app, "/classify", {"input": DOCUMENTS})).json()
    for each, text in zip(reply["data"], DOCUMENTS, strict=True):
        logits = counts(tokenizer, text)[:3]
        assert each["probs"] == pytest.approx(np.exp(logits) / np.exp(logits).sum())
        assert (each["label"], each["num_classes"]) == (names[int(logits.argmax())], 3)
    raw = (await post(service.app, "/classify", {"input": "a", "use_activation": False})).json()["data"]
    assert raw[0]["probs"] == list(counts(tokenizer, "a")[:3])
    single = make_service(pooling=Pooling(labels=1, names=("fits",)))
    (one,) = (await post(single.app, "/classify", {"input": QUERY})).json()["data"]
    assert one["probs"] == pytest.approx([sigmoid(counts(tokenizer, QUERY)[0])])
    learnt = make_service(pooling=Pooling(labels=1, names=("stars",), problem_type="regression"))
    (stars,) = (await post(learnt.app, "/classify", {"input": QUERY})).json()["data"]
    assert stars["probs"] == [counts(tokenizer, QUERY)[0]], "which is no probability"
    refused = await post(embeds.app, "/classify", {"input": "a"})
    assert (refused.status, refused.error["code"]) == (400, "model_not_supported")
    assert (await post(service.app, "/classify", {"input": []})).error["param"] == "input"


@pytest.mark.parametrize(
    "template", [None, ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})]
)
async def test_a_text_that_all_pairs_have_counts_in_each(
    make_service: Callable[..., Service], template: ChatTemplate | None
) -> None:
    """A short body would make gigabytes of text and tokens."""
    service = make_service(pooling=HEAD, max_untokenised_bytes=10_000)
    service.state.tokenizer = Tokenizer(tiny_tokenizers.byte_level(), template, is_own=False)
    reply = await rerank(service, query="a" * 100, documents=["b"] * 100)
    assert (reply.status, reply.json()["error"]["param"]) == (413, "documents")
    assert (
        "the pairs have 10100 bytes together, more than 10000: send fewer" in reply.json()["error"]["message"]
    )
    assert not service.engine.streams
    assert (await rerank(service, query="a" * 99, documents=["b"] * 100)).status == 200
