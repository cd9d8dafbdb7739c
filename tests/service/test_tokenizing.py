"""Tokenising holds up nobody: it goes on beside the loop and without the interpreter's lock, if at all."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from quire.service.text.longest_token import longest_token
from quire.service.text.sizes import utf8_size
from quire.service.text.tokenizer import Tokenizer
from tests.service import tiny_tokenizers
from tests.service.asgi import post
from tests.service.conftest import Service

KINDS = ["byte_level", "with_bos", "llama", "gemma"]


def normalized(kind: str, *names: str) -> Any:
    backend = getattr(tiny_tokenizers, kind)()
    backend.normalizer = normalizers.Sequence([getattr(normalizers, name)() for name in names])
    return backend


BACKENDS = {kind: getattr(tiny_tokenizers, kind)() for kind in KINDS} | {
    "nfc": normalized("byte_level", "NFC")
}
TOKENIZERS = {kind: Tokenizer(backend) for kind, backend in BACKENDS.items()}
texts = st.text(max_size=60) | st.text(
    "ab <|end>\n\u1fbe\u0308\u0301\u212a한\u1112\u1161\u11ab", max_size=200
)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=texts, special=st.booleans())
def test_no_text_has_fewer_tokens_than_is_certain(kind: str, text: str, special: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer.encode(text, add_special_tokens=special)
    assert tokens == BACKENDS[kind].encode(text, add_special_tokens=special).ids
    assert len(tokens) >= tokenizer.least_tokens(utf8_size(text))
    assert tokenizer.decode(tokens, skip_special_tokens=special) == BACKENDS[kind].decode(
        tokens, skip_special_tokens=special
    )


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_something_is_certain_of_most(kind: str) -> None:
    assert 1000 <= TOKENIZERS[kind].least_tokens(100_000) <= 100_000


def test_what_may_lose_text_says_nothing() -> None:
    for backend in (
        tiny_tokenizers.wordpiece(),
        tiny_tokenizers.metaspace(),
        normalized("byte_level", "NFKC"),
        normalized("byte_level", "NFC", "Strip"),
    ):
        assert longest_token(json.loads(backend.to_str())) is None
    for change in ("lstrip", "rstrip"):
        described = json.loads(tiny_tokenizers.byte_level().to_str())
        described["added_tokens"][0][change] = True
        assert longest_token(described) is None
    described = json.loads(tiny_tokenizers.byte_level().to_str())
    del described["model"]["vocab"]["a"]  # a byte that no token has is dropped
    assert longest_token(described) is None
    described["pre_tokenizer"] = {"type": "Split", "behavior": "Removed"}
    assert longest_token(described) is None


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_go_on(work: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    text = "hello world, " * 60_000
    tokens = tokenizer.encode(text, add_special_tokens=False) * 3
    beats, ended = itertools.count(), threading.Event()

    def beat() -> None:
        while not ended.wait(0.001):
            next(beats)

    beating = threading.Thread(target=beat)
    beating.start()
    before = next(beats)
    if work == "encode":
        tokenizer.encode(text, add_special_tokens=False)
    else:
        tokenizer.decode(tokens, skip_special_tokens=True)
    beaten = next(beats) - before - 1
    ended.set()
    beating.join()
    assert beaten > 2  # one or two may fall into what Python does before and after


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In which encode and decode run."""
    seen: list[str] = []
    for name in ("encode", "decode"):
        own: Callable[..., Any] = getattr(Tokenizer, name)

        def watched(*given: Any, own: Callable[..., Any] = own, **more: Any) -> Any:
            seen.append(threading.current_thread().name)
            return own(*given, **more)

        monkeypatch.setattr(Tokenizer, name, watched)
    return seen


@pytest.mark.anyio
async def test_what_cannot_fit_is_not_tokenised(service: Service, threads: list[str]) -> None:
    long = "hello " * 20_000
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("/v1/completions", "prompt", {"prompt": long}),
        ("/v1/completions", "prompt", {"prompt": ["a", long]}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/responses", "input", {"input": long}),
    ]
    for path, param, body in asked:
        reply = await post(service.app, path, body)
        assert (reply.status, reply.error["param"]) == (400, param)
        assert reply.error["code"] == "context_length_exceeded"
        assert "at least" in reply.error["message"] and "400 tokens" in reply.error["message"]
    assert threads == []
    assert (await post(service.app, "/tokenize", {"prompt": long})).json()["count"] > 20_000


@pytest.mark.anyio
async def test_much_text_and_many_tokens_go_beside_the_loop(service: Service, threads: list[str]) -> None:
    text = "hello " * 3000
    reply = await post(service.app, "/tokenize", {"prompt": text, "return_token_strs": True})
    tokens = reply.json()["tokens"]
    assert (await post(service.app, "/detokenize", {"tokens": tokens})).json() == {"prompt": text}
    assert len(threads) == 2 and all("tokenizer" in name for name in threads)
    many = [[token] * 30 for token in tokens[:100]]
    body = {"prompt": many, "max_tokens": 1, "echo": True}
    assert (await post(service.app, "/v1/completions", body)).status == 200
    assert len(threads) == 102 and all("tokenizer" in name for name in threads)


@pytest.mark.anyio
async def test_between_many_prompts_others_have_their_turn(service: Service, threads: list[str]) -> None:
    """1,000 prompts, each of which alone would be tokenised at once."""
    many = asyncio.create_task(
        post(service.app, "/v1/completions", {"prompt": ["hello " * 340] * 1000, "max_tokens": 1})
    )
    turns = set[int]()  # how many were tokenised when the loop went round
    while not many.done():
        turns.add(len(threads))
        await asyncio.sleep(0)
    assert (await many).status == 200
    assert len(threads) == 1000 and set(threads) <= {"tokenizer_0", "tokenizer_1"}
    assert len(turns) > 10
