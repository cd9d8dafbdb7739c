"""The corpus is reproducible and well formed; the bundled model loads, ends its turns and answers."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire.loadtest.demo_model.corpus import Document, documents, held_out
from quire.loadtest.demo_model.evaluate import Answer, Chat
from quire.loadtest.demo_model.tokenizer import CONTEXT_LENGTH, MODEL_FOLDER

COUNT = 400


@pytest.fixture(scope="module")
def sample() -> list[Document]:
    return list(islice(documents(3), COUNT))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_FOLDER)


@pytest.fixture(scope="module")
def chat() -> Chat:
    torch.set_num_threads(1)
    return Chat()


def test_same_seed_same_documents(sample: list[Document]) -> None:
    assert list(islice(documents(3), COUNT)) == sample
    assert list(islice(documents(4), COUNT)) != sample


def test_documents_are_conversations_or_text(sample: list[Document]) -> None:
    for document in sample:
        assert bool(document.messages) != bool(document.text)
        roles = [m["role"] for m in document.messages if m["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        for text in [m["content"] for m in document.messages] or [document.text]:
            assert text == text.strip() != ""
            assert "{" not in text.replace("{user", "").replace('{"', "")  # no slot left unfilled
            assert "<|" not in text


def test_held_out_messages_are_never_trained_on(sample: list[Document]) -> None:
    asked = [m["content"] for d in sample for m in d.messages if m["role"] == "user"]
    assert not [text for text in asked if held_out(text)]
    assert any(held_out(f"What is {n} plus {n}, please?") for n in range(200))


def test_every_conversation_renders_and_comes_back(sample: list[Document], tokenizer: Any) -> None:
    for document in (d for d in sample if d.messages):
        text = tokenizer.apply_chat_template(list(document.messages), tokenize=False)
        assert text.count("<|end|>") == len(document.messages)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) <= CONTEXT_LENGTH
        assert tokenizer.decode(ids) == text


def test_template_refuses_an_unknown_role(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="got wizard"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "x"}], tokenize=False)


def test_template_writes_tools_and_calls(tokenizer: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": "ü"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|bos|><|system|>Be brief.\n\nYou may call functions:\n<tools>\n{")
    assert text.endswith(
        '<|user|>hello<|end|><|assistant|>I look.\n<tool_call>\n{"name": "f", "arguments": {"x": "ü"}}\n'
        "</tool_call><|end|><|user|><tool_response>\nsunny\n</tool_response><|end|><|assistant|>"
    )
    plain = tokenizer.apply_chat_template(messages[:2], tokenize=False)
    assert plain == "<|bos|><|system|>Be brief.<|end|><|user|>hello<|end|>"


def test_any_text_survives_the_tokenizer(tokenizer: Any) -> None:
    text = "naïve Ω 日本語 🙂 \t--max-num-seqs=256\n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id


def test_files(tokenizer: Any) -> None:
    weights = MODEL_FOLDER / "model.safetensors"
    assert weights.stat().st_size <= 15_000_000
    model = AutoModelForCausalLM.from_pretrained(MODEL_FOLDER)
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", "<|eos|>")]
    assert model.config.eos_token_id == model.generation_config.eos_token_id == ends


PROMPTS = {
    "How do I launch the server on port 9123?": "9123",
    "I want to see how many blocks are in use, where do I look?": "quire_kv_blocks",
    "What is copy on write and why should I care?": "cop",
    "how much is 8 plus 6?": "14",
    "count down from 5": "5, 4, 3, 2, 1.",
    "Repeat after me: the quick brown fox jumps over the lazy dog": "fox jumps over the lazy dog",
    "Tell me a story about a toaster called Bob": "Bob",
    "What do you think about quantum physics?": "tiny",
}


def test_greedy_answers(chat: Chat) -> None:
    answers: list[Answer] = chat.answer([[{"role": "user", "content": text}] for text in PROMPTS])
    for answer, word in zip(answers, PROMPTS.values(), strict=True):
        assert answer.ended, answer.text
        assert word in answer.text


def test_it_remembers_a_name_over_other_turns(chat: Chat) -> None:
    assert "Ada" in chat.talk(("My name is Ada.", "What is 3 + 4?", "What is my name?")).text
