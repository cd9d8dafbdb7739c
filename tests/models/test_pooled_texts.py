"""What a folder of sentence-transformers says of texts, before its model sees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config import EngineConfig
from quire.engine.models.pooling import Pooling, read_pooling
from quire.engine.models.reading import read_model
from quire.engine.startup import start_engine
from tests.engine.pooling import as_sentence_model, save_model

PROMPTS = "config_sentence_transformers.json"
BERT, TOKENIZER = "sentence_bert_config.json", "tokenizer_config.json"


def write(path: Path, name: str, **fields: Any) -> None:
    path.joinpath(name).write_text(json.dumps(fields))


def read(path: Path) -> Pooling:
    found = read_pooling(path)
    assert found is not None
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "config.json", architectures=["Qwen3Model"])
    as_sentence_model(tmp_path, "pooling_mode_lasttoken")
    return tmp_path


@pytest.mark.parametrize(
    ("files", "longest"),
    [
        ({}, 0),
        ({BERT: {"max_seq_length": 20, "do_lower_case": False}}, 20),
        ({BERT: {"max_seq_length": None}, TOKENIZER: {"model_max_length": 30}}, 30),
        ({BERT: {"max_seq_length": 20}, TOKENIZER: {"model_max_length": 30}}, 20),
        ({"sentence_roberta_config.json": {"max_seq_length": 20}}, 20),
        ({BERT: {}, "sentence_roberta_config.json": {"max_seq_length": 20}}, 20),
        ({TOKENIZER: {"model_max_length": 1e30}}, 0),
        ({TOKENIZER: {"max_len": 30}}, 30),
        ({BERT: {"max_seq_length": 20, "tokenizer_args": {"model_max_length": 40}}}, 40),
        ({BERT: {"max_seq_length": 20, "processor_kwargs": {"model_max_length": 40}}}, 40),
        ({BERT: {"max_seq_length": 20, "processing_kwargs": {"text": {"max_length": 9}}}}, 9),
    ],
)
def test_how_long_a_text_is_at_most(folder: Path, files: dict[str, Any], longest: int) -> None:
    for name, fields in files.items():
        write(folder, name, **fields)
    assert read(folder).texts.max_tokens == longest


def test_a_folder_without_modules_has_its_tokenizers_limit_if_it_pools(tmp_path: Path) -> None:
    write(tmp_path, "config.json", architectures=["Qwen3ForSequenceClassification"])
    write(tmp_path, BERT, max_seq_length=20)  # which nobody reads without modules.json
    write(tmp_path, TOKENIZER, model_max_length=30)
    assert read(tmp_path).texts.max_tokens == 30


def test_a_limit_that_is_none_is_refused_by_file_and_field(folder: Path) -> None:
    write(folder, BERT, max_seq_length=-1)
    with pytest.raises(ValueError, match=r"sentence_bert_config\.json: max_seq_length is -1; it must be"):
        read(folder)
    write(folder, BERT, processing_kwargs=[1])
    with pytest.raises(ValueError, match=r"sentence_bert_config\.json: processing_kwargs is \[1\]"):
        read(folder)


def test_each_text_is_behind_the_default_prompt(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts = {"query": "Find: ", "document": ""}
    for name, prompt in ((None, ""), ("document", ""), ("query", "Find: ")):
        write(folder, PROMPTS, prompts=prompts, default_prompt_name=name)
        assert read(folder).texts.prompt == prompt
    assert not caplog.text


def test_a_prompt_may_be_no_part_of_the_vector(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder, PROMPTS, prompts={"query": "Find: "}, default_prompt_name="query")
    for pools_prompt in (True, False):
        write(folder, "1_Pooling/config.json", pooling_mode="mean", include_prompt=pools_prompt)
        texts = read(folder).texts
        assert (texts.prompt, texts.pools_prompt) == ("Find: ", pools_prompt)
    assert not caplog.text


def test_prompts_whose_tokens_requests_cannot_leave_out_are_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a text begins with by itself is text, as it is for sentence-transformers."""
    write(folder, "1_Pooling/config.json", pooling_mode="mean", include_prompt=False)
    write(folder, PROMPTS, prompts={"query": "", "document": ""}, default_prompt_name=None)
    assert read(folder).texts.prompt == "" and not caplog.text
    write(folder, PROMPTS, prompts={"query": "Find: ", "document": ""}, default_prompt_name=None)
    assert read(folder).texts.prompt == ""
    assert "include_prompt is false, but only the tokens of a default prompt are left out" in caplog.text


def test_a_prompt_of_pairs_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder, PROMPTS, prompts={"query": "Find: "}, default_prompt_name="query")
    write(folder, "config.json", architectures=["Qwen3ForSequenceClassification"])
    assert read(folder).texts.prompt == ""
    told = "default_prompt_name is 'query', but no text gets a prompt here: requests have to say 'Find: '"
    assert caplog.text.count(told) == 1


def test_texts_that_are_put_into_a_template_elsewhere_are_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the prompt is a message of its own, and no beginning."""
    write(folder, PROMPTS, prompts={"query": "Find: "}, default_prompt_name="query")
    write(folder, BERT, modality_config={"text": {}})
    assert read(folder).texts.prompt == "Find: " and not caplog.text
    write(folder, BERT, modality_config={"text": {}, "message": {}})
    assert read(folder).texts.prompt == ""
    assert "modality_config has message, so sentence-transformers puts each text into" in caplog.text
    assert "no text gets a prompt here" in caplog.text


def test_letters_may_become_small_ones_first(folder: Path) -> None:
    for fields, lower_case in (
        ({}, False),
        ({"do_lower_case": False}, False),
        ({"do_lower_case": True}, True),
    ):
        write(folder, BERT, **fields)
        assert read(folder).texts.lower_case == lower_case
    write(folder, BERT, do_lower_case="yes")
    with pytest.raises(ValueError, match=r"sentence_bert_config\.json: do_lower_case is 'yes'"):
        read(folder)


def test_a_model_pools_texts_up_to_the_folders_limit(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", "Model")
    as_sentence_model(tmp_path, "pooling_mode_lasttoken")
    assert read_model(tmp_path).longest == read_model(tmp_path).max_position_embeddings
    write(tmp_path, BERT, max_seq_length=24)
    few = {"num_gpu_blocks_override": 8, "swap_space": 0.0, "max_num_seqs": 2}
    _, info = start_engine(EngineConfig(model=str(tmp_path), device="cpu", **few))
    assert info.max_model_len == 24
    _, info = start_engine(EngineConfig(model=str(tmp_path), device="cpu", max_model_len=20, **few))
    assert info.max_model_len == 20
    with pytest.raises(ValueError, match=r"--max-model-len \(25\) is more than the 24 tokens of a text"):
        start_engine(EngineConfig(model=str(tmp_path), device="cpu", max_model_len=25, **few))
    write(tmp_path, BERT, max_seq_length=10**6)
    assert read_model(tmp_path).longest == read_model(tmp_path).max_position_embeddings


def test_a_model_of_text_knows_no_such_limit(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", "ForCausalLM")
    write(tmp_path, TOKENIZER, model_max_length=16)
    model = read_model(tmp_path)
    assert model.longest == model.max_position_embeddings > 16
