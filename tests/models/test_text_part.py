"""The text of models that see or hear besides: computed as the whole model does, of the whole's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.vipllava.modeling_vipllava import VipLlavaModel

from quire.engine.models.general.config import read_general
from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.kernels.backend import torch_backend
from tests.models.any_model import compare, save_tiny, tiny_config

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize(
    "kind",
    [
        "mistral3",  # its text is a causal model of transformers
        "qwen3_vl",  # of its text there is a decoder alone
        "aya_vision",  # its head does not scale logits, as that of Cohere 2 does
        "muse_glimmer",  # its logits are multiplied and capped by code that only the whole model has
        "minimax_m3_vl",  # what its files call weights is told of the whole model only
    ],
)
def test_text_is_what_the_whole_model_makes_of_it(kind: str, tmp_path: Path) -> None:
    verdict = compare(kind, tmp_path)
    assert (verdict.outcome, verdict.reads) == ("equal", ()), verdict.detail


def test_a_head_is_tied_as_the_whole_model_says(tmp_path: Path) -> None:
    verdict = compare("mistral3", tmp_path, tie_word_embeddings=True)
    assert verdict.outcome == "equal", verdict.detail
    assert read_model(tmp_path).tie_word_embeddings


def test_a_head_without_a_bias_is_none_with_one(tmp_path: Path) -> None:
    """As the causal model of Phi has."""
    text = tiny_config("phi").to_dict() | {"dtype": None}
    verdict = compare("llava", tmp_path, text_config=text, tie_word_embeddings=False)
    assert verdict.outcome == "equal", verdict.detail


def test_a_model_whose_text_is_not_causal_is_refused(tmp_path: Path) -> None:
    """PaliGemma's prompts see all of themselves."""
    save_tiny("paligemma", tmp_path)
    with pytest.raises(ValueError, match="a model of type 'paligemma' cannot run"):
        read_general(tmp_path)


def change_text(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"text_config": config["text_config"] | fields}))


def test_numbers_of_a_configuration_tell_what_computes_its_text(tmp_path: Path) -> None:
    """Without a scale a head of Cohere 2 would do, as with one it does not."""
    save_tiny("cohere2_vision", tmp_path / "one")
    change_text(tmp_path / "one", logit_scale=1.0)
    read_model(tmp_path / "one")
    verdict = compare("cohere2_vision", tmp_path / "other")
    assert verdict.outcome == "equal", verdict.detail


def test_what_was_made_for_one_text_computes_no_other(tmp_path: Path) -> None:
    save_tiny("video_llava", tmp_path)
    read_model(tmp_path)
    change_text(tmp_path, model_type="gpt2")
    with pytest.raises(ValueError, match="transformers has no causal language model of it"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    "changed", [{"position_ids": torch.arange(1, 4)[None]}, {"token_types": torch.ones(3)}]
)
def test_a_decoder_that_is_given_more_than_text_is_refused(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = VipLlavaModel.forward
    monkeypatch.setattr(VipLlavaModel, "forward", lambda self, **given: forward(self, **given | changed))
    save_tiny("vipllava", tmp_path)
    with pytest.raises(ValueError, match="transformers has no causal language model of it"):
        read_model(tmp_path)


def test_weights_beside_text_are_left_out_and_others_told(tmp_path: Path) -> None:
    save_tiny("mistral3", tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    seeing = next(name for name in weights if "vision_tower" in name)
    config = read_model(tmp_path)

    def load(**changed: torch.Tensor) -> None:
        save_file(weights | changed, tmp_path / WEIGHTS, {"format": "pt"})
        load_model(tmp_path, config, torch_backend(), device="cpu", dtype=torch.float32, max_model_len=64)

    del weights[seeing]  # which nobody misses
    load()
    with pytest.raises(ValueError, match=r"model\.elsewhere is no weight of the model"):
        load(**{"model.elsewhere": torch.zeros(2)})
    del weights[next(name for name in weights if "embed_tokens" in name)]
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is missing"):
        load()
