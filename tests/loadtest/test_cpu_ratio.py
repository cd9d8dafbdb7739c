"""What is timed beside transformers gives the same tokens as transformers does."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from quire.engine.config import EngineConfig
from quire.engine.startup import start_engine
from quire.loadtest.cpu_ratio import by_quire, draw_prompts, in_one_batch, one_by_one, time_in_turn

MODEL = "service/demo/model"


def test_all_ways_give_the_same_tokens() -> None:
    core, info = start_engine(EngineConfig(model=MODEL, device="cpu", dtype="float32", swap_space=0))
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    prompts = draw_prompts(4, info.vocab_size)
    ways = {
        "Quire": lambda number: by_quire(core, prompts, 6, str(number)),
        "one by one": lambda _: one_by_one(model, prompts, 6),
        "one batch": lambda _: in_one_batch(model, prompts, 6),
    }
    seconds, outputs = time_in_turn(ways, rounds=1)
    assert seconds.keys() == ways.keys() and min(seconds.values()) > 0
    assert [len(tokens) for tokens in outputs[0]] == [6] * 4
    assert outputs[1] == outputs[0] and outputs[2] == outputs[0]
