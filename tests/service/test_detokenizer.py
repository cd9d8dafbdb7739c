"""Pieces of text, put together, are what decoding all ids at once gives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from quire.service.text.tokenizer import Tokenizer
from tests.service import tiny_tokenizers

KINDS = ["byte_level", "llama", "gemma", "metaspace", "wordpiece"]
BACKENDS: dict[str, Backend] = {kind: getattr(tiny_tokenizers, kind)() for kind in KINDS}
TOKENIZERS = {kind: Tokenizer(BACKENDS[kind]) for kind in KINDS}


def ids(kind: str, max_size: int = 24) -> st.SearchStrategy[list[int]]:
    size = BACKENDS[kind].get_vocab_size()
    anything = st.lists(st.integers(0, size + 3), max_size=max_size)  # ids past the vocabulary, too
    text = st.text(alphabet="abc the hello 你🙂é\n", max_size=max_size)
    return anything | text.map(lambda text: BACKENDS[kind].encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_make_up_the_whole(kind: str, skip: bool, data: st.DataObject) -> None:
    tokens = data.draw(ids(kind))
    detokenizer = TOKENIZERS[kind].detokenizer([], skip_special_tokens=skip)
    pieces = []
    rest = tokens
    while rest:  # as many at a time as come
        count = data.draw(st.integers(1, 4))
        pieces.append(detokenizer.push(rest[:count]))
        rest = rest[count:]
    text = "".join(pieces) + detokenizer.finish()
    assert text == BACKENDS[kind].decode(tokens, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_continuation_keeps_the_space_after_a_prompt(kind: str, data: st.DataObject) -> None:
    backend = BACKENDS[kind]
    prompt = [backend.token_to_id("a")]
    tokens = data.draw(ids(kind))
    detokenizer = TOKENIZERS[kind].detokenizer(prompt, skip_special_tokens=True)
    text = "".join(detokenizer.push([token]) for token in tokens) + detokenizer.finish()
    whole = backend.decode(prompt + tokens, skip_special_tokens=True)
    assert backend.decode(prompt) + text == whole


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
def test_no_character_is_split(kind: str) -> None:
    text = "a🙂é你b"
    tokens = BACKENDS[kind].encode(text, add_special_tokens=False).ids
    assert len(tokens) > len(text)
    detokenizer = TOKENIZERS[kind].detokenizer([], skip_special_tokens=True)
    pieces = [detokenizer.push([token]) for token in tokens]
    assert "�" not in "".join(pieces)
    assert "".join(pieces) + detokenizer.finish() == text


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_half_a_character_at_the_end_is_shown_as_such(kind: str) -> None:
    tokens = BACKENDS[kind].encode("a🙂", add_special_tokens=False).ids[:-1]
    detokenizer = TOKENIZERS[kind].detokenizer([], skip_special_tokens=True)
    assert detokenizer.push(tokens) == "a"
    assert detokenizer.finish().startswith("�")


def test_held_bytes_do_not_grow() -> None:
    """A model that repeats an impossible byte is shown at once, not held for ever."""
    backend = BACKENDS["byte_level"]
    byte = backend.token_to_id("ÿ")  # stands for 0xFF
    detokenizer = TOKENIZERS["byte_level"].detokenizer([], skip_special_tokens=True)
    assert detokenizer.push([byte] * 50) == "�" * 50


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_tokens_make_up_the_text(kind: str) -> None:
    tokenizer, backend = TOKENIZERS[kind], BACKENDS[kind]
    tokens = backend.encode("the cat a", add_special_tokens=False).ids
    after_a = backend.decode([backend.token_to_id("a"), *tokens])
    assert b"".join(map(tokenizer.token_bytes, tokens)).decode() == after_a[1:]
