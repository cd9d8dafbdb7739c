"""What a folder's tokenizer and chat template are, in all the files that models have them in."""

from __future__ import annotations

import base64
import json
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import sentencepiece
import tiktoken
from transformers import AutoTokenizer

from quire import LLM, llm
from quire.commands.settings import chat_template
from quire.engine.models.tokenizer_json import eos_of_tokenizer, tokenizer_json
from quire.engine.sequences.grammar import grammars_of
from quire.service.text.detokenizer import _ALPHABET
from quire.service.text.tokenizer import Tokenizer
from quire.service.text.tools.formats import format_of
from quire.service.text.turn_end import TurnEnd
from tests.service import tiny_tokenizers
from tests.service.conftest import CHAT_TEMPLATE
from tests.service.tool_templates import HERMES

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
TEXTS = ("hello there", "the cat\n 12", "Bär 你好 🙂")


def saved(folder: Path, config: dict[str, Any]) -> None:
    tiny_tokenizers.with_bos().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("where", ["jinja", "config", "named", "processor"])
def test_a_template_and_the_tokens_that_it_names(tmp_path: Path, where: str) -> None:
    config: dict[str, Any] = {"eos_token": {"content": "<|end|>"}}
    template = CHAT_TEMPLATE + "{{ eos_token }}"
    if where == "jinja":
        (tmp_path / "chat_template.jinja").write_text(template)
    elif where == "processor":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    else:
        named = [{"name": "rag", "template": "x"}, {"name": "default", "template": template}]
        config["chat_template"] = template if where == "config" else named
    saved(tmp_path, config)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.chat_template is not None
    text = tokenizer.chat_template.render(HELLO, add_generation_prompt=True)
    assert text == "<|user|>hello<|assistant|><|end|>"
    (end,) = tokenizer.encode("<|end|>", add_special_tokens=False)
    assert tokenizer.encode("hello", add_special_tokens=True)[0] == end
    assert tokenizer.encode("hello", add_special_tokens=False)[0] != end


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b'{"model": 5}', b"\xff\xfe"])
def test_a_broken_tokenizer_is_named_before_a_model_is_loaded(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    monkeypatch.setattr(llm, "start_with_graphs", Mock(side_effect=AssertionError("the engine was started")))
    for read in (Tokenizer.from_folder, eos_of_tokenizer, lambda folder: LLM(str(folder))):
        with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer: .*; mend it, or download it"):
            read(tmp_path)


@pytest.mark.parametrize("where", ["files", "config"])
def test_a_request_with_tools_has_the_template_for_tools(tmp_path: Path, where: str) -> None:
    """As transformers chooses among templates with names."""
    config: dict[str, Any] = {}
    if where == "config":
        named = {"default": CHAT_TEMPLATE + "\n", "tool_use": HERMES}
        config["chat_template"] = [{"name": name, "template": each} for name, each in named.items()]
    else:
        config["chat_template"] = "{{ 'files are chosen before it' }}"
        (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE + "\n")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates/tool_use.jinja").write_text(HERMES)
    saved(tmp_path, config)
    template, reference = (
        Tokenizer.from_folder(tmp_path).chat_template,
        AutoTokenizer.from_pretrained(tmp_path),
    )
    assert template is not None and template.tool_format is format_of(HERMES)
    for tools in (None, TOOLS):
        text = template.render(HELLO, add_generation_prompt=True, tools=tools)
        assert text == reference.apply_chat_template(
            HELLO, tools=tools, add_generation_prompt=True, tokenize=False
        )
        assert ("look_up" in text) == (tools is not None)


def test_a_template_that_is_none_is_refused_by_its_file(tmp_path: Path) -> None:
    saved(tmp_path, {"chat_template": [{"name": "default"}]})
    with pytest.raises(ValueError, match=r"chat_template in .*tokenizer_config\.json must be a string, or a"):
        Tokenizer.from_folder(tmp_path)


TOKEN = {"content": "<|new|>", "special": True}
TYPED = {"__type": "AddedToken", "content": "x y", "special": True, "normalized": False}
FURTHER: dict[str, dict[str, Any]] = {  # by file; of byte_level's 305 tokens 303 is plain
    "decoder": {"tokenizer_config.json": {"added_tokens_decoder": {"305": TOKEN, "306": {"content": "x y"}}}},
    "flags": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "303": {"content": "plain added", "special": True, "lstrip": True, "normalized": False}
            }
        }
    },
    "order": {"tokenizer_config.json": {"added_tokens_decoder": {"1000": {"content": "b"}, "305": TOKEN}}},
    "eos": {"tokenizer_config.json": {"eos_token": "<|new|>", "bos_token": TYPED}},
    "named": {"tokenizer_config.json": {"pad_token": "plain added", "image_token": "<|new|>"}},
    "in the vocabulary": {"tokenizer_config.json": {"eos_token": "hello"}},
    "list": {"tokenizer_config.json": {"additional_special_tokens": ["<|new|>", TYPED]}},
    "extra": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<|new|>"}}},
    "plain extra": {"tokenizer_config.json": {"extra_special_tokens": ["plain added"]}},
    "map": {"special_tokens_map.json": {"eos_token": "<|new|>", "additional_special_tokens": ["x y"]}},
    "older": {
        "added_tokens.json": {"x y": 306, "<|new|>": 305},
        "special_tokens_map.json": {"eos_token": "<|new|>"},
    },
    "map left out": {
        "tokenizer_config.json": {"added_tokens_decoder": {"305": TOKEN}},
        "special_tokens_map.json": {"eos_token": "plain added"},
        "added_tokens.json": {"x y": 306},
    },
}


@pytest.mark.parametrize("which", FURTHER)
def test_tokens_that_other_files_name_are_added(tmp_path: Path, which: str) -> None:
    saved(tmp_path, {})
    for name, content in FURTHER[which].items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer, reference = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "hello <|new|> there x y , plain added b"
    tokens = tokenizer.encode(text, add_special_tokens=True)
    assert tokens == reference(text)["input_ids"]
    for skip in (True, False):
        expected = reference.decode(tokens, skip_special_tokens=skip)
        assert tokenizer.decode(tokens, skip_special_tokens=skip) == expected
    added = json.loads(tokenizer_json(tmp_path))["added_tokens"]  # as grammars have them
    assert {each["id"] for each in added if each["special"]} == tokenizer.special
    if reference.eos_token is not None:
        assert eos_of_tokenizer(tmp_path) == (reference.eos_token_id,) == (tokenizer.eos,)


@pytest.mark.parametrize("decoder", [[], {"x": TOKEN}, {"305": "<|new|>"}, {"305": {}}])
def test_added_tokens_that_are_none_are_refused_by_name(tmp_path: Path, decoder: object) -> None:
    saved(tmp_path, {"added_tokens_decoder": decoder})
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: added_tokens_decoder is .* it must be an"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_folder_of_sentencepiece_alone(tmp_path: Path, kind: str) -> None:
    text = "\n".join(tiny_tokenizers.TEXTS)
    (tmp_path / "text").write_text(text)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"), model_type=kind,
        vocab_size=310, byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
        normalization_rule_name="identity",
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    name = "LlamaTokenizer" if kind == "bpe" else "PreTrainedTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    tokenizer, reference = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        tokens = tokenizer.encode(text, add_special_tokens=True)
        assert tokens == reference(text)["input_ids"]
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text
    grammars = grammars_of(tmp_path, len(reference), (reference.eos_token_id,))
    assert grammars is not None and grammars_of(tmp_path / "nothing", 9, (0,)) is None
    told = grammars.compile(json.dumps({"grammars": [{"lark_grammar": 'start: "cat"'}]}))
    allowed = [token for token in range(len(reference)) if told.mask[token // 32] >> token % 32 & 1]
    assert {tokenizer.token_text(token)[:1] for token in allowed} == {"c"}


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer.model"])
def test_a_folder_of_tiktoken_ranks(tmp_path: Path, name: str) -> None:
    """As Llama 3's first ones: a line for each token in base64, and the special ones in the configuration."""
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    pieces = sorted(
        tiny_tokenizers.byte_level().get_vocab(with_added_tokens=False).items(), key=lambda each: each[1]
    )
    ranks = {bytes(_ALPHABET[each] for each in piece): rank for piece, rank in pieces}
    lines = [f"{base64.b64encode(piece).decode()} {rank}" for piece, rank in ranks.items()]
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    begin = {"content": "<|begin|>", "special": True}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {len(ranks): begin}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    reference = tiktoken.Encoding("r", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert tokens == reference.encode(text)
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text
    assert tokenizer.encode("<|begin|>", add_special_tokens=False) == [len(ranks)]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])  # of the latter transformers makes an empty one
def test_a_folder_without_a_tokenizer(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(
        ValueError, match=r"has no tokenizer, neither tokenizer\.json nor \*\.model, .*: save the"
    ):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "vocab.json").write_text("not JSON")
    with pytest.raises(ValueError, match=r"has no tokenizer\.json, and transformers could not make one"):
        Tokenizer.from_folder(tmp_path)


def test_one_of_a_models_own_templates_is_chosen_by_its_name(tmp_path: Path) -> None:
    named = {"default": CHAT_TEMPLATE, "tool_use": HERMES, "rag": "{{ documents }}", "plain": "mine"}
    pairs = [{"name": name, "template": source} for name, source in named.items()]
    saved(tmp_path, {"chat_template": pairs})
    for name, source in named.items():
        tokenizer = Tokenizer.from_folder(tmp_path, name)
        assert tokenizer.chat_template is not None and tokenizer.chat_template.source == source
        assert tokenizer.turn_end == TurnEnd(), "the model ends its turns itself"
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages }}")
    for given in ("chatml", str(other)):
        tokenizer = Tokenizer.from_folder(tmp_path, given)
        assert tokenizer.chat_template is not None and tokenizer.chat_template.source not in named.values()
    with pytest.raises(ValueError, match=r"vicuna, default, tool_use, rag, plain: law cannot be read"):
        Tokenizer.from_folder(tmp_path, "law")


@pytest.mark.parametrize("broken", ["config", "file"])
def test_another_template_takes_the_place_of_one_that_is_none(tmp_path: Path, broken: str) -> None:
    saved(tmp_path, {"chat_template": {"default": "x"}} if broken == "config" else {})
    if broken == "file":
        (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="chat_template"):
        Tokenizer.from_folder(tmp_path)
    assert Tokenizer.from_folder(tmp_path, "chatml").chat_template is not None
    given = Namespace(model=str(tmp_path), lora=None, chat_template="chatml")
    assert chat_template(given) == "chatml"


def test_a_template_that_is_not_there_is_told_before_anything_starts(tmp_path: Path) -> None:
    saved(tmp_path, {"chat_template": [{"name": "rag", "template": "x"}]})
    for model, given in ((str(tmp_path), "rag"), ("owner/model", "rag-v2"), (str(tmp_path), "chatml")):
        assert chat_template(Namespace(model=model, lora=None, chat_template=given)) == given
    for model, given in ((str(tmp_path), "law"), ("owner/model", "law.jinja"), ("owner/model", "a/b")):
        with pytest.raises(ValueError, match=f"--chat-template must be a file.*: {given} cannot be read"):
            chat_template(Namespace(model=model, lora=None, chat_template=given))
