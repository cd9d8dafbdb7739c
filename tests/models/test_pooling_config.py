"""How a folder says that its model pools, and what it may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.engine.errors import FieldError
from quire.engine.models.pooling import Pooling, causal_name, read_pooling
from tests.engine.pooling import as_sentence_model

BASE = "sentence_transformers.base.modules"


def folder(path: Path, architecture: str, **fields: Any) -> Path:
    (path / "config.json").write_text(json.dumps({"architectures": [architecture], **fields}))
    return path


def with_modules(path: Path, *kinds: str, **config: Any) -> Path:
    modules = [{"type": f"{BASE}.{kind}", "path": kind} for kind in kinds]
    (path / "modules.json").write_text(json.dumps(modules))
    for kind in kinds:
        (path / kind).mkdir(exist_ok=True)
        (path / kind / "config.json").write_text(json.dumps(config))
    return path


def test_a_model_generates_unless_its_folder_says_otherwise(tmp_path: Path) -> None:
    folder(tmp_path, "Qwen3ForCausalLM")
    assert read_pooling(tmp_path) is None
    assert read_pooling(tmp_path, "pooling") == Pooling(normalize=True)
    as_sentence_model(tmp_path, "pooling_mode_lasttoken")
    assert read_pooling(tmp_path) == Pooling(normalize=True)
    assert read_pooling(tmp_path, "generate") is None
    folder(tmp_path, "Qwen3Model")
    with pytest.raises(ValueError, match="Qwen3Model has no head for text"):
        read_pooling(tmp_path, "generate")


@pytest.mark.parametrize(
    ("mode", "tokens"),
    [
        ("pooling_mode_lasttoken", "last"),
        ("pooling_mode_mean_tokens", "mean"),
        ("pooling_mode_cls_token", "first"),
    ],
)
def test_sentence_transformers_files_say_how(tmp_path: Path, mode: str, tokens: Any) -> None:
    folder(tmp_path, "LlamaModel", matryoshka_dimensions=[64, 32])
    as_sentence_model(tmp_path, mode, normalize=False)
    expected = Pooling(tokens=tokens, matryoshka=True, dimensions=(64, 32))
    assert read_pooling(tmp_path) == expected
    with_modules(tmp_path, "Pooling", pooling_mode=mode.split("_")[2])
    assert read_pooling(tmp_path) == expected


def test_heads_and_their_activations(tmp_path: Path) -> None:
    one = folder(tmp_path, "Qwen3ForSequenceClassification", id2label={"0": "fits"})
    assert read_pooling(one) == Pooling(labels=1, names=("fits",), activation="sigmoid")
    two = folder(tmp_path, "Qwen3ForSequenceClassification")
    assert read_pooling(two) == Pooling(labels=2, names=("LABEL_0", "LABEL_1"))
    own = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    raw = folder(tmp_path, "Qwen3ForSequenceClassification", num_labels=1, **own)
    assert read_pooling(raw) == Pooling(labels=1, names=("LABEL_0",))
    learnt = {"num_labels": 1, "problem_type": "regression"}
    plain = Pooling(labels=1, names=("LABEL_0",), problem_type="regression")
    assert read_pooling(folder(tmp_path, "Qwen3ForSequenceClassification", **learnt)) == plain
    named = {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid", **learnt}
    found = read_pooling(folder(tmp_path, "Qwen3ForSequenceClassification", **named))
    assert found is not None and (found.activation, found.class_activation) == ("sigmoid", "none")
    with_modules(folder(tmp_path, "Qwen3ForCausalLM"), "LogitScore", true_token_id=9, false_token_id=5)
    assert read_pooling(tmp_path) == Pooling(labels=1, label_tokens=(9, 5), activation="sigmoid")
    with_modules(tmp_path, "LogitScore", true_token_id=9, false_token_id=None)
    (tmp_path / "config_sentence_transformers.json").write_text('{"activation_fn": "torch.nn.Identity"}')
    assert read_pooling(tmp_path) == Pooling(labels=1, label_tokens=(9,))


@pytest.mark.parametrize(
    ("architecture", "fields", "words"),
    [
        ("BertModel", {}, "BertModel is an encoder"),
        ("XLMRobertaForSequenceClassification", {}, "is an encoder.*Qwen3-Embedding"),
        ("Qwen2ForCausalLM", {"is_causal": False}, "is_causal is false, so it is an encoder"),
        ("Gemma3TextModel", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ("Qwen3Model", {"matryoshka_dimensions": [0]}, "matryoshka_dimensions"),
        (
            "Qwen3ForSequenceClassification",
            {"sbert_ce_default_activation_function": "torch.nn.Tanh"},
            "'torch.nn.Tanh' is not supported",
        ),
    ],
)
def test_what_cannot_be_pooled_is_refused_by_name(
    tmp_path: Path, architecture: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        read_pooling(folder(tmp_path, architecture, **fields), "pooling")


def test_a_decoder_may_have_the_name_of_an_encoder(tmp_path: Path) -> None:
    name = "ModernBertDecoderForSequenceClassification"
    assert read_pooling(folder(tmp_path, name)) == Pooling(labels=2, names=("LABEL_0", "LABEL_1"))


def test_modules_that_are_not_computed_are_refused(tmp_path: Path) -> None:
    with_modules(folder(tmp_path, "Qwen3Model"), "Pooling", "Dense", pooling_mode="mean")
    with pytest.raises(ValueError, match=r"Dense' is not supported; it must be one of Transformer, Pooling"):
        read_pooling(tmp_path)
    with_modules(tmp_path, "Pooling", pooling_mode_max_tokens=True)
    with pytest.raises(ValueError, match=r"pools by .*pooling_mode_max_tokens"):
        read_pooling(tmp_path)
    with_modules(tmp_path, "Pooling", "Normalize", pooling_mode="mean", module_input_name="token_embeddings")
    with pytest.raises(ValueError, match='module_input_name = "token_embeddings" is not supported'):
        read_pooling(tmp_path)
    with_modules(tmp_path, "LogitScore")
    with pytest.raises(ValueError, match="true_token_id is None; it must be a token id"):
        read_pooling(tmp_path)


def test_architectures_of_the_same_layers() -> None:
    assert causal_name("Qwen3Model") == causal_name("Qwen3ForSequenceClassification") == "Qwen3ForCausalLM"
    assert causal_name("GPT2Model") == causal_name("GPT2LMHeadModel") == "GPT2LMHeadModel"
    assert causal_name("Qwen3ForCausalLM") == "Qwen3ForCausalLM"


def test_dimensions() -> None:
    assert Pooling().checked_dimensions(8, 8) is None
    assert Pooling(matryoshka=True).checked_dimensions(5, 8) == 5
    for pooling, asked in (
        (Pooling(), 4),
        (Pooling(matryoshka=True), 9),
        (Pooling(matryoshka=True, dimensions=(4,)), 5),
    ):
        with pytest.raises(FieldError):
            pooling.checked_dimensions(asked, 8)
