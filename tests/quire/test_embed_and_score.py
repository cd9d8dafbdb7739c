"""LLM.embed and LLM.score, as people who know vLLM's expect them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire import LLM
from quire.pooling import text_pairs

SMALL: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 64, "swap_space": 0.0, "max_num_seqs": 4}
TEXTS = ["A block table is", "Who preempts whom?", "A block table"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(runner="pooling", **SMALL) as made:
        yield made


def test_embeddings(llm: LLM) -> None:
    outputs = llm.embed([*TEXTS, [300, 301]], use_tqdm=False)
    vectors = np.array([output.outputs.embedding for output in outputs])
    assert vectors.shape == (4, llm.info.hidden_size) and np.linalg.norm(vectors, axis=1) == pytest.approx(1)
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
