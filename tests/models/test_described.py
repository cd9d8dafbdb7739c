"""Fields of a configuration that transformers' code is run by, whatever they are called or say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MarianConfig, MarianForCausalLM

from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.kernels.backend import torch_backend
from tests.models.any_model import STEPS, difference, prompts, save_tiny, tiny_model
from tests.models.paged_driver import PagedDriver

MAX_LEN = 64


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def differs(folder: Path, reference: Any) -> float:
    """Return by how much its logits differ from transformers' own, in standard deviations."""
    config = read_model(folder, "transformers")
    model, _ = load_model(
        folder, config, torch_backend(), device="cpu", dtype=torch.float32, max_model_len=MAX_LEN
    )
    driver = PagedDriver(model, config, len(prompts()) + 1, MAX_LEN)
    return difference(driver.generate(prompts(), STEPS), reference)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": "half"}, "float16"),
        ({"dtype": "auto"}, "float32"),
    ],
)
def test_a_dtype_may_have_torchs_name_or_be_left_to_the_reader(
    fields: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    save_tiny("qwen3", tmp_path)
    change(tmp_path, **fields)
    native, general = read_model(tmp_path, "native"), read_model(tmp_path, "transformers")
    assert native.dtype == general.dtype == dtype
    assert native.cache_specs == general.cache_specs


def test_a_dtype_of_the_part_for_text_may_have_torchs_name(tmp_path: Path) -> None:
    save_tiny("gemma3", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    change(tmp_path, dtype="auto", text_config=raw["text_config"] | {"dtype": "torch.bfloat16"})
    assert read_model(tmp_path).dtype == "bfloat16"


def test_a_configuration_may_ask_for_tuples_and_name_its_dtype_by_module(tmp_path: Path) -> None:
    reference = tiny_model("phi", tmp_path)
    change(tmp_path, return_dict=False, dtype="torch.float32")
    assert differs(tmp_path, reference) < 1e-3


def marian(folder: Path, **fields: Any) -> Any:
    """Save a decoder whose vocabulary need not be that of its encoder."""
    torch.manual_seed(1)
    config = MarianConfig(
        vocab_size=131, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=32,
        max_position_embeddings=MAX_LEN, pad_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        is_decoder=True, is_encoder_decoder=False, architectures=["MarianForCausalLM"], **fields,
    )  # fmt: skip
    model = MarianForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.1)
    model.save_pretrained(folder)
    return model


def test_the_vocabulary_is_that_of_the_logits(tmp_path: Path) -> None:
    reference = marian(tmp_path, decoder_vocab_size=101)  # tied to the decoder's
    assert read_model(tmp_path).vocab_size == 101
    assert differs(tmp_path, reference) < 1e-3
    marian(tmp_path, decoder_vocab_size=150, tie_word_embeddings=False)
    assert read_model(tmp_path).vocab_size == 131


def test_logits_of_tokens_that_have_no_embedding_are_refused(tmp_path: Path) -> None:
    marian(tmp_path, decoder_vocab_size=101, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="logits of 131 tokens, and has embeddings of 101"):
        read_model(tmp_path)
