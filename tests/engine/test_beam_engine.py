"""Beam search through the whole engine equals transformers', in mixed batches and under memory pressure."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from quire.engine.config import EngineConfig
from quire.engine.messages import Output, Request, SamplingParams
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.startup import start_engine

EOS = 1


def beam_requests() -> list[Request]:
    rng = random.Random(5)
    requests = []
    for i in range(8):
        width = rng.randint(2, 5)
        params = SamplingParams(
            n=rng.randint(1, width),
            temperature=0.0,
            beam_width=width,
            max_tokens=rng.randint(2, 20),
            length_penalty=rng.choice([0.0, 1.0, 2.0, -1.0]),
            early_stopping=rng.choice([True, False, "never"]),
            ignore_eos=rng.random() < 0.5,
        )
        requests.append(Request(i, [rng.randrange(2, 199) for _ in range(rng.randint(1, 50))], params))
    return requests


@pytest.mark.parametrize("blocks", [None, 14])
def test_beams_equal_transformers(llama: tuple[Path, LlamaForCausalLM], blocks: int | None) -> None:
    folder, model = llama
    beams = beam_requests()
    rng = random.Random(6)
    others = [
        Request(
            100 + i,
            [rng.randrange(2, 199) for _ in range(rng.randint(1, 40))],
            SamplingParams(n=rng.choice([1, 3]), temperature=0.9, max_tokens=15, ignore_eos=True, seed=i),
        )
        for i in range(8)
    ]
    config = EngineConfig(
        model=str(folder), max_num_seqs=16, max_num_batched_tokens=64, num_gpu_blocks_override=blocks
    )
    core = start_engine(config)[0]
    got: dict[tuple[int, int], Output] = {}
    for pair in zip(beams, others, strict=True):
        for request in pair:
            core.add(request)
    while core.has_work:
        for output in core.step():
            if output.request_id < 100:
                assert (output.request_id, output.index) not in got, "a beam comes once, when the search ends"
                got[output.request_id, output.index] = output
        check_scheduler(core.scheduler.state)
    preempted = core.scheduler.preemption.recomputes + core.scheduler.preemption.swaps
    assert (preempted > 0) == (blocks is not None)
    assert core.scheduler.blocks.copies_on_write > 0
    for request in beams:
        params = request.params
        ids = torch.tensor([request.prompt])
        reference = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=params.max_tokens,
            num_beams=params.beam_width,
            num_return_sequences=params.n,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            do_sample=False,
            eos_token_id=None if params.ignore_eos else EOS,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        for index in range(params.n):
            output = got[request.id, index]
            expected = reference.sequences[index, len(request.prompt) :].tolist()
            assert output.tokens == expected[: len(output.tokens)]
            assert all(token == 0 for token in expected[len(output.tokens) :])
            assert output.cumulative_logprob is not None
            score = output.cumulative_logprob / len(output.tokens) ** params.length_penalty
            assert score == pytest.approx(reference.sequences_scores[index].item(), abs=1e-3)
