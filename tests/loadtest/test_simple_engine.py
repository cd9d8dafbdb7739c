"""Every way of the tutorials, as a whole engine, gives the tokens of contiguous generation; so does Quire."""

from __future__ import annotations

import torch

from quire.loadtest.evaluation.real.ways import CONTIGUOUS
from quire.loadtest.evaluation.real.whole_models import WAYS, Work, measure_all

TINY = {
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
}


def test_all_ways_give_the_same_tokens() -> None:
    work = Work(requests=5, shortest=14, output=8)  # prompts of one block and of two
    outcomes = list(measure_all(TINY, work, torch.device("cpu")))
    assert [each.way for each in outcomes] == [CONTIGUOUS, *WAYS, "Quire"]
    assert all(each.equal == each.requests == 5 for each in outcomes)
