"""embed, classify and score of LLM and AsyncLLM, as people who know vLLM's expect them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, AsyncLLM
from quire.pooling import text_pairs
from quire.service.demo import MODEL_FOLDER
from tests.engine.pooling import as_sentence_model

SMALL: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 64, "swap_space": 0.0, "max_num_seqs": 4}
TEXTS = ["A block table is", "Who preempts whom?", "A block table"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(runner="pooling", **SMALL) as made:
        yield made


def test_embeddings(llm: LLM) -> None:
    outputs = llm.embed([*TEXTS, [300, 301]], use_tqdm=False)
    vectors = np.array([output.outputs.embedding for output in outputs])
    assert vectors.shape == (4, llm.info.vector_size) and np.linalg.norm(vectors, axis=1) == pytest.approx(1)
    assert outputs[3].prompt_token_ids == [300, 301]
    (alone,) = llm.embed(TEXTS[1], normalize=False)
    assert alone.outputs.embedding / np.linalg.norm(alone.outputs.embedding) == pytest.approx(
        vectors[1], abs=1e-5
    )


def test_scores_of_a_model_that_embeds(llm: LLM) -> None:
    a, b, c = (np.array(output.outputs.embedding) for output in llm.embed(TEXTS))
    scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS[1:])]
    assert scores == pytest.approx([a @ b, a @ c], abs=1e-5)
    assert llm.score(TEXTS[0], TEXTS[0])[0].outputs.score == pytest.approx(1, abs=1e-5)


def test_what_a_model_cannot_do_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="pools prompts and gives no text"):
        llm.generate("A")
    with pytest.raises(ValueError, match="was not trained for that"):
        llm.embed("A", dimensions=4)
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.embed([[5], []])
    assert not llm.core.has_work
    with pytest.raises(ValueError, match="2 first texts and 3 second ones"):
        text_pairs(["a", "b"], ["c", "d", "e"])
    with LLM(**SMALL) as generates, pytest.raises(ValueError, match='make the LLM with runner="pooling"'):
        generates.embed("A")
    with pytest.raises(ValueError, match="tells no labels apart"):
        llm.classify("A")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_an_async_llm_gives_the_same(llm: LLM) -> None:
    async with AsyncLLM(runner="pooling", **SMALL) as other:
        for mine, theirs in (
            (llm.embed(TEXTS, normalize=False), await other.embed(TEXTS, normalize=False)),
            (llm.score(TEXTS[0], TEXTS[1:]), await other.score(TEXTS[0], TEXTS[1:])),
        ):
            assert [each.prompt_token_ids for each in mine] == [each.prompt_token_ids for each in theirs]
            numbers = [[vars(each.outputs).popitem()[1] for each in outputs] for outputs in (mine, theirs)]
            np.testing.assert_allclose(*numbers, atol=1e-5)
        with pytest.raises(ValueError, match="the prompt is empty"):
            await other.embed([[5], []])
        assert not other._engine._streams


def classifier(folder: Path, **fields: Any) -> str:
    """Write the demo model with a head for three labels instead of its head for text."""
    shutil.copytree(MODEL_FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], **fields}
    config["id2label"] = {"0": "how", "1": "who", "2": "what"}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    weights["score.weight"] = torch.randn(3, config["hidden_size"]).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def test_texts_are_embedded_as_sentence_transformers_reads_them(llm: LLM, tmp_path: Path) -> None:
    """In small letters, and behind the folder's prompt; tokens are taken as they are."""
    shutil.copytree(MODEL_FOLDER, tmp_path / "model")
    as_sentence_model(tmp_path / "model", "pooling_mode_lasttoken")
    (tmp_path / "model" / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    prompts = {"prompts": {"query": "Find: "}, "default_prompt_name": "query"}
    (tmp_path / "model" / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with LLM(str(tmp_path / "model"), **SMALL) as other:
        read = other.embed([TEXTS[1], [300, 301]], use_tqdm=False)
        same = llm.embed(["find: who preempts whom?", [300, 301]], use_tqdm=False)
        for mine, plain in zip(read, same, strict=True):
            assert mine.prompt_token_ids == plain.prompt_token_ids
            assert mine.outputs.embedding == pytest.approx(plain.outputs.embedding, abs=1e-5)
        (score,) = other.score(TEXTS[0], TEXTS[1])
        (plain_score,) = llm.score("find: " + TEXTS[0].lower(), "find: " + TEXTS[1].lower())
        assert score.outputs.score == pytest.approx(plain_score.outputs.score, abs=1e-5)
    with LLM(str(tmp_path / "model"), runner="generate", **SMALL) as text:
        assert text.tokenizer.encode("Who", add_special_tokens=False) == llm.tokenizer.encode(
            "Who", add_special_tokens=False
        )


@pytest.mark.anyio
async def test_the_tokens_of_a_prompt_may_be_no_part_of_the_vector(llm: LLM, tmp_path: Path) -> None:
    shutil.copytree(MODEL_FOLDER, tmp_path / "model")
    pooling = tmp_path / "model" / "1_Pooling" / "config.json"
    as_sentence_model(tmp_path / "model", "pooling_mode_mean_tokens")
    prompts = {"prompts": {"query": "Find: "}, "default_prompt_name": "query", "truncate_dim": 100}
    (tmp_path / "model" / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    whole = llm.tokenizer.encode("Find: Who preempts whom?", add_special_tokens=True)
    left_out = len(llm.tokenizer.encode("Find: ", add_special_tokens=True))

    with LLM(str(tmp_path / "model"), **SMALL) as made:
        sums = [
            len(tokens) * np.array(made.embed([tokens], normalize=False)[0].outputs.embedding)
            for tokens in (whole, whole[:left_out])
        ]
    expected = (sums[0] - sums[1]) / (len(whole) - left_out)
    pooling.write_text(json.dumps({"pooling_mode": "mean", "include_prompt": False}))
    with LLM(str(tmp_path / "model"), **SMALL) as made:
        text, tokens = made.embed([TEXTS[1], whole], normalize=False)
        assert len(text.outputs.embedding) == 100
        assert text.prompt_token_ids == tokens.prompt_token_ids == whole
        np.testing.assert_allclose(text.outputs.embedding, expected, atol=1e-3)
        np.testing.assert_allclose(tokens.outputs.embedding, sums[0] / len(whole), atol=1e-5)
        with pytest.raises(ValueError, match="no part of its vector"):
            made.embed("")
        assert made.score(TEXTS[1], TEXTS[1])[0].outputs.score == pytest.approx(1, abs=1e-5)
    async with AsyncLLM(str(tmp_path / "model"), **SMALL) as other:
        (output,) = await other.embed(TEXTS[1], normalize=False)
        np.testing.assert_allclose(output.outputs.embedding, text.outputs.embedding, atol=1e-5)


@pytest.mark.anyio
async def test_labels(tmp_path: Path) -> None:
    """Their probabilities; of what was learnt as a regression, the numbers."""
    with LLM(classifier(tmp_path / "labels"), **SMALL) as llm:
        outputs = [output.outputs for output in llm.classify(TEXTS)]
        assert [output.num_classes for output in outputs] == [3] * 3
        assert [sum(output.probs) for output in outputs] == pytest.approx([1] * 3)
        for refused in (llm.embed, lambda text: llm.score(text, text)):
            with pytest.raises(ValueError, match="use classify"):
                refused("A")
    async with AsyncLLM(classifier(tmp_path / "numbers", problem_type="regression"), **SMALL) as numbers:
        logits = np.array([output.outputs.probs for output in await numbers.classify(TEXTS)])
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(softmax, [output.probs for output in outputs], rtol=1e-3)
