"""What GGUF files say of models is what config.json, generation_config.json and tokenizer.json say."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from quire.engine.models.generation_config import read_sampling_defaults
from quire.engine.models.hub import check_model, model_name, resolve_model
from quire.engine.models.reading import read_model
from quire.engine.models.rope_config import Llama3Scaling
from quire.service.text.tokenizer import Tokenizer as ServedTokenizer
from tests.models.any_model import LEAST_AGREEMENT, difference
from tests.models.gguf_file import byte_level, own_cache, save_gguf, sentence_pieces, write
from tests.models.test_float8 import generate, load

__all__ = ["own_cache"]
pytestmark = pytest.mark.usefixtures("own_cache")

TEXTS = ("the other thing", " two  spaces", "hello, 1234 a.b", "naïve ☃ \n\n end", "<s>the</s> x", "")
CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


def config_of(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((resolve_model(str(path)) / "config.json").read_text())
    return config


def llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray[Any, Any]:
    """Return what llama.cpp's converter writes of Llama 3.1's scaling, by its own formula."""
    found = []
    for frequency in 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192:
            found.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def test_factors_of_rotary_positions_are_llama_3s_scaling(tmp_path: Path) -> None:
    factors = llama3_factors(500_000.0, 16, 8.0)
    metadata = {"llama.rope.freq_base": 500_000.0}
    path, _ = save_gguf("llama", tmp_path, metadata=metadata, tensors={"rope_freqs.weight": factors})
    rope = read_model(resolve_model(str(path))).rope
    assert rope is not None
    assert (rope.theta, rope.llama3) == (500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    load(resolve_model(str(path)))  # they are no weight
    path, _ = save_gguf("llama", tmp_path / "other", tensors={"rope_freqs.weight": factors * 1.1})
    with pytest.raises(ValueError, match=r"rope_freqs\.weight\) that are not Llama 3\.1's"):
        resolve_model(str(path))


def test_factors_by_length_are_phi_3s(tmp_path: Path) -> None:
    factors = {f"rope_factors_{name}.weight": np.full(8, 2.5, np.float32) for name in ("long", "short")}
    metadata = {"phi3.rope.scaling.original_context_length": 64, "phi3.rope.scaling.attn_factor": 1.25}
    path, _ = save_gguf("phi3", tmp_path, metadata=metadata, tensors=factors)
    config = config_of(path)
    assert config["original_max_position_embeddings"] == 64
    assert config["rope_parameters"] == {
        "rope_type": "longrope", "rope_theta": 10_000.0, "long_factor": [2.5] * 8, "short_factor": [2.5] * 8,
        "attention_factor": 1.25, "original_max_position_embeddings": 64,
    }  # fmt: skip
    load(resolve_model(str(path)))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_beta_fast": 16.0},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16.0,
            },
        ),
        ({"type": "none"}, {"rope_type": "default"}),
    ],
    ids=["linear", "yarn", "none"],
)
def test_scalings_of_rotary_positions(said: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    path, _ = save_gguf("qwen2", tmp_path, metadata={f"qwen2.rope.scaling.{k}": v for k, v in said.items()})
    rope = config_of(path)["rope_parameters"]
    assert rope == {"rope_theta": rope["rope_theta"]} | expected
    load(resolve_model(str(path)))


def test_windows_of_gemma_3_have_rotary_positions_of_their_own(tmp_path: Path) -> None:
    metadata = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    path, _ = save_gguf("gemma3_text", tmp_path, metadata=metadata)
    rope = config_of(path)["rope_parameters"]
    assert rope["full_attention"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}


def test_part_of_a_head_may_have_rotary_positions(tmp_path: Path) -> None:
    path, _ = save_gguf("phi3", tmp_path, metadata={"phi3.rope.dimension_count": 12})
    assert config_of(path)["rope_parameters"]["partial_rotary_factor"] == 0.75


def test_ends_of_turns_and_ways_to_sample_are_generation_config(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.eot_token_id": 7,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
    }
    path, _ = save_gguf("llama", tmp_path, metadata=metadata)
    folder = resolve_model(str(path))
    config = read_model(folder)
    assert config.eos_token_ids == (1, 7, 2)  # and that whose name llama.cpp knows
    assert config.bos_token_id == 0
    defaults = read_sampling_defaults("auto", folder, config.vocab_size)
    assert defaults.said == {"temperature": 0.5, "top_k": 20}


def test_a_model_that_embeds_has_no_head_for_text(tmp_path: Path) -> None:
    path, reference = save_gguf("qwen3", tmp_path, metadata={"qwen3.pooling_type": 3})
    config = read_model(resolve_model(str(path)))
    assert config.pooling is not None and config.pooling.modes == ("last",)
    load(resolve_model(str(path)))
    assert difference(generate(load(tmp_path / "folder")[0]), reference) < LEAST_AGREEMENT


def test_what_is_not_applied_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, _ = save_gguf("llama", tmp_path, metadata={"llama.attention.value_scale": 2.0, "llama.other": 0})
    with caplog.at_level(logging.WARNING, "quire.engine"):
        resolve_model(str(path))
    assert "metadata is not applied: attention.value_scale" in caplog.text


def tokenizer_file(folder: Path, tokenizer: dict[str, Any]) -> Path:
    """Write a file with what a folder needs besides a tokenizer, and no layers."""
    architecture = "llama"
    sizes: dict[str, Any] = {
        "context_length": 64,
        "block_count": 1,
        "embedding_length": 8,
        "feed_forward_length": 8,
    }
    heads = {
        "attention.head_count": 1,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    metadata = {f"{architecture}.{name}": value for name, value in (sizes | heads).items()} | tokenizer
    embeddings = np.zeros((len(tokenizer["tokenizer.ggml.tokens"]), 8), np.float32)
    write(folder / "tiny.gguf", architecture, metadata, {"token_embd.weight": embeddings})
    return folder / "tiny.gguf"


TOKENIZERS: dict[str, dict[str, Any]] = {
    "bytes": byte_level(261),
    "bytes as Qwen": byte_level(261) | {"tokenizer.ggml.pre": "qwen2"},
    "bytes behind a first token": byte_level(261) | {"tokenizer.ggml.add_bos_token": True},
    "pieces": sentence_pieces(),
    "pieces behind no first token": sentence_pieces() | {"tokenizer.ggml.add_bos_token": False},
}


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_tokens_are_those_of_transformers(tokenizer: dict[str, Any], tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path, tokenizer)
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    served = ServedTokenizer.from_folder(resolve_model(str(path)))
    for text in TEXTS:
        for special in (False, True):
            tokens = served.encode(text, add_special_tokens=special)
            assert tokens == expected.encode(text, add_special_tokens=special), text
            assert served.decode(tokens, skip_special_tokens=True) == expected.decode(
                tokens, skip_special_tokens=True
            )


def pieces(path: Path, text: str) -> list[str]:
    tokenizer = Tokenizer.from_file(str(resolve_model(str(path)) / "tokenizer.json"))
    tokens: list[str] = tokenizer.encode(text).tokens
    return tokens


def test_digits_stand_alone_where_the_tokenizer_has_them_so(tmp_path: Path) -> None:
    tokenizer = byte_level(263)
    tokenizer["tokenizer.ggml.tokens"] += ["12", "Ġ1"]
    tokenizer["tokenizer.ggml.token_type"] += [1, 1]
    tokenizer["tokenizer.ggml.merges"] += ["1 2", "Ġ 1"]
    path = tokenizer_file(tmp_path, tokenizer | {"tokenizer.ggml.pre": "smollm"})
    assert pieces(path, "the 12") == ["the", "Ġ", "1", "2"]


def test_whole_words_are_tokens_where_the_tokenizer_has_them_so(tmp_path: Path) -> None:
    tokenizer = byte_level(261) | {"tokenizer.ggml.merges": ["t h"]}
    (tmp_path / "other").mkdir()
    assert pieces(tokenizer_file(tmp_path / "other", tokenizer), "the") == ["th", "e"]
    path = tokenizer_file(tmp_path, tokenizer | {"tokenizer.ggml.pre": "llama-bpe"})
    assert pieces(path, "the") == ["<s>", "the"]  # behind a first token, as Llama 3's


def test_no_space_stands_before_a_text_where_the_file_says_so(tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path, sentence_pieces() | {"tokenizer.ggml.add_space_prefix": False})
    assert pieces(path, "he the") == ["<s>", "he", "▁the"]
    served = ServedTokenizer.from_folder(resolve_model(str(path)))
    tokens = served.encode(" a", add_special_tokens=False)
    assert served.decode(tokens, skip_special_tokens=False) == " a"


def test_chat_templates_are_those_of_the_file(tmp_path: Path) -> None:
    named = {"tokenizer.chat_template": CHAT, "tokenizer.chat_template.tool_use": CHAT + "tools"}
    folder = resolve_model(str(tokenizer_file(tmp_path, byte_level(261) | named)))
    template = ServedTokenizer.from_folder(folder).chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "the"}], add_generation_prompt=True) == "the"
    other = ServedTokenizer.from_folder(folder, "tool_use").chat_template
    assert other is not None
    assert other.render([{"role": "user", "content": "the"}], add_generation_prompt=True) == "thetools"


def test_a_folder_is_made_once_and_anew_for_another_file(tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path, byte_level(261))
    folder = resolve_model(str(path))
    made = (folder / "config.json").stat().st_mtime_ns
    assert resolve_model(str(path)) == resolve_model(str(tmp_path)) == folder
    assert (folder / "config.json").stat().st_mtime_ns == made
    assert (folder / "model.gguf").resolve() == path
    tokenizer_file(tmp_path, byte_level(100))
    assert resolve_model(str(path)) != folder
    assert config_of(path)["vocab_size"] == 100


def test_a_model_goes_by_its_files_name(tmp_path: Path) -> None:
    path, _ = save_gguf("llama", tmp_path, parts=2)
    check_model(str(path))
    assert model_name(str(path)) == "tiny"
    assert model_name(str(tmp_path)) == tmp_path.name
    assert model_name("owner/name:Q4_K_M") == "owner/name:Q4_K_M"
