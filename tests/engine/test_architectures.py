"""Every architecture through the whole engine: on a CPU with torch, on a GPU with Triton and CUDA graphs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from quire.engine.config import EngineConfig
from quire.engine.messages import Request, SamplingParams
from quire.engine.startup import start_engine
from tests.models.tiny_models import MODELS

STEPS = 12


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_transformers(name: str, model_folder: Callable[[str], Path]) -> None:
    folder = model_folder(name)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    vocab_size = reference.config.vocab_size
    rng = random.Random(name)
    prompts = [[rng.randrange(4, vocab_size) for _ in range(rng.randint(1, 70))] for _ in range(12)]
    core, _ = start_engine(
        EngineConfig(
            model=str(folder),
            dtype="float32",
            max_num_seqs=8,
            max_num_batched_tokens=48,
            num_gpu_blocks_override=24,
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, logprobs=0)
    for i, prompt in enumerate(prompts):
        core.add(Request(i, prompt, params))
    tokens: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    while core.has_work:
        for output in core.step():
            tokens[output.request_id] += output.tokens
            logprobs[output.request_id] += [entry.logprob for entry in output.logprobs or []]
    for prompt, got, scores in zip(prompts, tokens, logprobs, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1]
        assert got == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(got).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(scores), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["qwen3", "llama-tied-linear", "opt"])
def test_bytes_that_every_token_reads_do_not_depend_on_whose_code_runs(
    model_folder: Callable[[str], Path], name: str
) -> None:
    """But for learned positions, which transformers' code is not asked about: one row of them is read."""
    folder = model_folder(name)
    read = {}
    for by in ("native", "transformers"):
        _, info = start_engine(
            EngineConfig(
                model=str(folder), device="cpu", model_impl=by, max_model_len=32, num_gpu_blocks_override=8
            )
        )
        read[by] = info.body_weight_bytes
    positions = read["transformers"] - read["native"]
    assert positions > 0 if name == "opt" else positions == 0
