"""How a folder says that its model pools, and what it may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from quire.engine.errors import FieldError
from quire.engine.models.pooling import Pooling, causal_name, read_pooling
from quire.engine.models.projection import Projection
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
    ("flag", "name", "mode"),
    [
        ("pooling_mode_lasttoken", "lasttoken", "last"),
        ("pooling_mode_mean_tokens", "mean", "mean"),
        ("pooling_mode_cls_token", "cls", "first"),
        ("pooling_mode_max_tokens", "max", "max"),
        ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens", "mean_sqrt"),
        ("pooling_mode_weightedmean_tokens", "weightedmean", "weighted"),
    ],
)
def test_sentence_transformers_files_say_how(tmp_path: Path, flag: str, name: str, mode: Any) -> None:
    folder(tmp_path, "LlamaModel", matryoshka_dimensions=[64, 32])
    as_sentence_model(tmp_path, flag, normalize=False)
    expected = Pooling(modes=(mode,), matryoshka=True, dimensions=(64, 32))
    assert read_pooling(tmp_path) == expected
    with_modules(tmp_path, "Pooling", pooling_mode=name)
    assert read_pooling(tmp_path) == expected


def test_vectors_of_several_modes_stand_one_after_the_other(tmp_path: Path) -> None:
    """Of older folders in an order that all have, of newer ones in that of their list."""
    folder(tmp_path, "LlamaModel")
    for says, modes in (
        ({"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": True}, ("max", "last")),
        ({"pooling_mode": ["lasttoken", "max"]}, ("last", "max")),
        ({"pooling_mode": ["mean"], "pooling_mode_max_tokens": True}, ("mean",)),
        ({"pooling_mode_lasttoken": False}, ("mean",)),
        ({}, ("mean",)),
    ):
        with_modules(tmp_path, "Pooling", **says)
        assert read_pooling(tmp_path) == Pooling(modes=modes)
    assert Pooling(modes=("last", "max")).vector_size(8) == 16


def test_dense_modules_are_read_in_their_order(tmp_path: Path) -> None:
    folder(tmp_path, "LlamaModel")
    layers = [
        nn.Sequential(nn.Linear(8, 6), nn.GELU()),
        nn.Sequential(nn.Linear(6, 4, bias=False), nn.Tanh()),
    ]
    as_sentence_model(tmp_path, "pooling_mode_mean_tokens", projections=layers)
    first = Projection(path="2_Dense", in_features=8, out_features=6, activation="gelu")
    second = Projection(path="3_Dense", in_features=6, out_features=4, bias=False)
    found = read_pooling(tmp_path)
    assert found == Pooling(modes=("mean",), projections=(first, second), normalize=True)
    assert found.vector_size(8) == 4
    with pytest.raises(ValueError, match=r"2_Dense/config\.json: in_features is 8, but the vector.* has 9"):
        found.vector_size(9)


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ({"use_residual": True}, "use_residual = true is not supported"),
        ({"module_input_name": "token_embeddings"}, 'module_input_name = "token_embeddings" is not supp'),
        (
            {"activation_function": "mine.Tanh"},
            r"activation_function is 'mine\.Tanh'; it must be one of torch",
        ),
        ({"in_features": 0}, "in_features is 0; it must be a positive integer"),
    ],
)
def test_dense_modules_that_are_not_computed_are_refused(
    tmp_path: Path, says: dict[str, Any], words: str
) -> None:
    folder(tmp_path, "LlamaModel")
    as_sentence_model(tmp_path, ["mean"], projections=[nn.Sequential(nn.Linear(8, 6), nn.Tanh())])
    dense = tmp_path / "2_Dense" / "config.json"
    dense.write_text(json.dumps(json.loads(dense.read_text()) | says))
    with pytest.raises(ValueError, match=rf"2_Dense/config\.json: {words}"):
        read_pooling(tmp_path)


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
    with_modules(folder(tmp_path, "Qwen3Model"), "Pooling", "LSTM", pooling_mode="mean")
    with pytest.raises(ValueError, match=r"LSTM' is not supported; it must be one of Transformer, Pooling"):
        read_pooling(tmp_path)
    for kinds in (("Normalize", "Pooling"), ("Pooling", "Normalize", "Dense"), ("Pooling", "Pooling")):
        with_modules(tmp_path, *kinds, pooling_mode="mean")
        with pytest.raises(ValueError, match=f"modules in the order {', '.join(kinds)} are not supported"):
            read_pooling(tmp_path)
    with_modules(tmp_path, "Dense")
    with pytest.raises(ValueError, match="Dense without Pooling before it is not supported"):
        read_pooling(tmp_path)
    with_modules(tmp_path, "Pooling", pooling_mode_median_tokens=True)
    with pytest.raises(ValueError, match=r"pools by pooling_mode_median_tokens"):
        read_pooling(tmp_path)
    with_modules(tmp_path, "Pooling", pooling_mode=["mean", "median"])
    with pytest.raises(ValueError, match=r"pooling_mode is \['mean', 'median'\]; it must be one of cls, max"):
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


def test_a_folder_may_say_how_long_vectors_are(tmp_path: Path) -> None:
    folder(tmp_path, "Qwen3Model")
    settings = tmp_path / "config_sentence_transformers.json"
    settings.write_text('{"truncate_dim": 4}')
    assert read_pooling(tmp_path) == Pooling(normalize=True), "which nobody reads without modules.json"
    as_sentence_model(tmp_path, "pooling_mode_lasttoken")
    found = read_pooling(tmp_path)
    assert found == Pooling(normalize=True, usual_dimensions=4)
    assert [found.checked_dimensions(asked, 8) for asked in (None, 4, 8)] == [4, 4, None]
    assert found.checked_dimensions(None, 3) is None
    with pytest.raises(FieldError, match="it was not trained for that"):
        found.checked_dimensions(5, 8)
    settings.write_text('{"truncate_dim": 0}')
    with pytest.raises(ValueError, match=r"transformers\.json: truncate_dim is 0; it must be a positive"):
        read_pooling(tmp_path)


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
