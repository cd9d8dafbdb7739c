"""A prompt's vector is what transformers' hidden states give, however the prompt was computed."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import Gemma2Config

from quire.engine.errors import FieldError
from quire.engine.messages import POOLED, PoolingParams, Request, SamplingParams
from quire.engine.models.pooling import read_pooling
from quire.engine.schedule.plan import StepPlan
from quire.engine.schedule.pooled import finished
from tests.engine.pooling import as_sentence_model, run, save_model, start, vectors
from tests.models.tiny_models import MODELS

GEMMA: dict[str, Any] = {
    "vocab_size": 89,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
TOLERANCE = 2e-5  # of numbers around 1: sums are rounded in another order
NAMES = ["llama3-sharded", "mistral-window", "qwen2-late-window", "qwen3", "opt", "gpt2"]
MODES = {
    "last": "pooling_mode_lasttoken",
    "mean": "pooling_mode_mean_tokens",
    "first": "pooling_mode_cls_token",
}


def some_prompts(vocab_size: int, longest: int = 70) -> list[list[int]]:
    rng = random.Random(vocab_size)
    return [[rng.randrange(4, vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(9)]


def pooled(states: torch.Tensor, tokens: str) -> torch.Tensor:
    return {"last": states[-1], "mean": states.mean(0), "first": states[0]}[tokens]


@pytest.mark.parametrize("name", NAMES)
def test_the_last_tokens_hidden_state_is_transformers(name: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, name, "Model")
    prompts = some_prompts(MODELS[name][1]["vocab_size"])
    with torch.inference_mode():
        expected = torch.stack([model(torch.tensor([each])).last_hidden_state[0, -1] for each in prompts])
    got = vectors(run(start(tmp_path), prompts))  # a bare model pools: nothing else can be done with it
    torch.testing.assert_close(torch.tensor(got), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "opt"])
@pytest.mark.parametrize("labels", [1, 3])
def test_a_classification_heads_logits_are_transformers(name: str, labels: int, tmp_path: Path) -> None:
    model = save_model(tmp_path, name, "ForSequenceClassification", num_labels=labels)
    prompts = some_prompts(MODELS[name][1]["vocab_size"])
    with torch.inference_mode():
        expected = torch.cat([model(torch.tensor([each])).logits for each in prompts])
    got = vectors(run(start(tmp_path), prompts))
    torch.testing.assert_close(torch.tensor(got), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "opt"])
@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_a_head_looks_at_the_last_token_that_is_no_padding(
    name: str, model_impl: str, tmp_path: Path
) -> None:
    model = save_model(tmp_path, name, "ForSequenceClassification", num_labels=3)  # 0 is padding
    prompts = [[5, 6, 7, 0], [5, 6, 0, 7, 0, 0], [0, 0, 8], [0], [0, 0, 0], [9] * 20 + [0] * 20, [5, 6, 7]]
    with torch.inference_mode():
        expected = torch.cat([model(torch.tensor([each])).logits for each in prompts])
    got = vectors(run(start(tmp_path, model_impl=model_impl), prompts))
    torch.testing.assert_close(torch.tensor(got), expected, atol=1e-4, rtol=1e-4)


def test_an_embedding_is_of_the_last_token_whatever_that_is(tmp_path: Path) -> None:
    model = save_model(tmp_path, "qwen3", "Model")
    with torch.inference_mode():
        expected = model(torch.tensor([[5, 6, 0]])).last_hidden_state[0, -1:]
    got = vectors(run(start(tmp_path), [[5, 6, 0]]))
    torch.testing.assert_close(torch.tensor(got), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("labels", "problem_type"),
    [
        (1, None),
        (1, "regression"),
        (3, None),
        (3, "regression"),
        (3, "single_label_classification"),
        (3, "multi_label_classification"),
    ],
)
def test_probabilities_are_those_of_transformers_pipeline(
    labels: int, problem_type: str | None, tmp_path: Path
) -> None:
    model = save_model(
        tmp_path, "qwen3", "ForSequenceClassification", num_labels=labels, problem_type=problem_type
    )
    pooling = read_pooling(tmp_path)
    assert pooling is not None
    pipeline = transformers.TextClassificationPipeline(model=model, tokenizer=None, device="cpu")
    logits = torch.linspace(-2, 3, labels)
    expected = pipeline.postprocess({"logits": logits[None]}, top_k=None)
    got = finished(logits.numpy(), PoolingParams(activation=pooling.class_activation))
    assert got.tolist() == pytest.approx([each["score"] for each in expected])
    scored = finished(logits[:1].numpy(), PoolingParams(activation=pooling.activation))
    if labels == 1:  # which is asked for a score, too
        assert scored.tolist() == got.tolist()


CELLS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 12},
    "few blocks": {"num_gpu_blocks_override": 7, "max_num_batched_tokens": 24, "swap_space": 1},
}


@pytest.mark.parametrize("tokens", MODES)
def test_a_vector_does_not_depend_on_how_it_was_computed(tokens: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, "qwen3", "Model")
    as_sentence_model(tmp_path, MODES[tokens], normalize=False)
    prompts = some_prompts(MODELS["qwen3"][1]["vocab_size"])
    prompts += [[*prompts[0], 5], prompts[0]]  # which share blocks with another
    with torch.inference_mode():
        expected = torch.stack(
            [pooled(model(torch.tensor([each])).last_hidden_state[0], tokens) for each in prompts]
        )
    for cell, settings in CELLS.items():
        core = start(tmp_path, **settings)
        outputs = run(core, prompts)
        torch.testing.assert_close(
            torch.tensor(vectors(outputs)),
            expected,
            atol=TOLERANCE,
            rtol=TOLERANCE,
            msg=partial("{}: {}".format, cell),
        )
    core = start(tmp_path)
    alone = np.concatenate([vectors(run(core, [each])) for each in prompts])
    again = [run(core, [each])[0] for each in prompts]
    torch.testing.assert_close(
        torch.tensor(vectors(again)), torch.tensor(alone), atol=TOLERANCE, rtol=TOLERANCE
    )
    found = [min(len(each) // 16 * 16, len(each) - 1) for each in prompts]
    # What was cached has keys and values only, and a mean is of hidden states.
    assert [each.cached_tokens for each in again] == (found if tokens == "last" else [0] * len(prompts))


@pytest.mark.parametrize("tokens", MODES)
def test_after_a_step_that_raised_prompts_are_computed_from_their_beginning(
    tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, "qwen3", "Model")
    as_sentence_model(tmp_path, MODES[tokens])
    prompts = some_prompts(MODELS["qwen3"][1]["vocab_size"])
    expected = vectors(run(start(tmp_path), prompts))
    core = start(tmp_path, max_num_batched_tokens=24)
    execute, steps = core.runner._execute, []

    def fails_once(plan: StepPlan) -> Any:
        steps.append(plan)
        if len(steps) == 3:
            raise RuntimeError("once")
        return execute(plan)

    monkeypatch.setattr(core.runner, "_execute", fails_once)
    got = vectors(run(core, prompts))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), atol=TOLERANCE, rtol=TOLERANCE)
    assert core.scheduler.preemption.recomputes > 0


def test_a_prompt_may_fill_the_context(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", "Model")
    core = start(tmp_path, max_model_len=32)
    (output,) = run(core, [[5] * 32])
    assert output.finish_reason == "stop"
    with pytest.raises(FieldError, match="33 tokens, more than the 32"):
        core.add(Request(1, [5] * 33, POOLED, pooling=PoolingParams()))


def test_one_kind_of_request_is_refused_by_the_others_engine(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", "ForCausalLM")
    with pytest.raises(FieldError, match="gives text and does not pool"):
        start(tmp_path).add(Request(0, [5], POOLED, pooling=PoolingParams()))
    with pytest.raises(FieldError, match="pools prompts and gives no text"):
        start(tmp_path, runner="pooling").add(Request(0, [5], SamplingParams(max_tokens=1)))


def test_numbers_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", "Model")
    core = start(tmp_path)
    core.runner.model.final_norm.fill_(float("inf"))
    (output,) = run(core, [[5, 6]])
    assert (output.finish_reason, output.vector) == ("error", None)
    assert "not finite" in (output.error or "")


def test_a_vector_is_cut_then_normalised_then_activated() -> None:
    vector = np.array([3.0, 4.0, 12.0], np.float32)
    np.testing.assert_allclose(finished(vector, PoolingParams(normalize=True)), vector / 13, rtol=1e-6)
    np.testing.assert_allclose(finished(vector, PoolingParams(2, normalize=True)), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(
        finished(vector[:1], PoolingParams(activation="sigmoid")), [0.95257413], rtol=1e-6
    )
    softmax = finished(vector, PoolingParams(activation="softmax"))
    np.testing.assert_allclose(softmax, np.exp(vector) / np.exp(vector).sum(), rtol=1e-6)


@pytest.mark.parametrize("name", ["qwen3", "llama3-sharded"])  # whose head is the embedding, and is not
def test_a_score_is_the_difference_of_two_tokens_logits(name: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, name, "ForCausalLM")
    modules = [{"type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore", "path": "1"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "config.json").write_text(json.dumps({"true_token_id": 7, "false_token_id": 9}))
    prompts = some_prompts(MODELS[name][1]["vocab_size"])
    with torch.inference_mode():
        logits = torch.stack([model(torch.tensor([each])).logits[0, -1] for each in prompts])
    got = vectors(run(start(tmp_path), prompts))
    torch.testing.assert_close(torch.tensor(got), logits[:, 7:8] - logits[:, 9:10], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
def test_models_by_transformers_code_pool_too(head: str, tmp_path: Path) -> None:
    """Whose own forward is what they are compared with."""
    # eager: some releases of transformers take sdpa here, which leaves out what Gemma 2 caps scores with.
    config = Gemma2Config(**GEMMA, num_labels=1, attn_implementation="eager")
    torch.manual_seed(3)
    model = getattr(transformers, f"Gemma2{head}")(config).eval()
    model.save_pretrained(tmp_path)
    prompts = some_prompts(GEMMA["vocab_size"], longest=40)
    with torch.inference_mode():
        outputs = [model(torch.tensor([each])) for each in prompts]
    if head == "Model":
        expected = torch.stack([output.last_hidden_state[0, -1] for output in outputs])
    else:
        expected = torch.cat([output.logits for output in outputs])
    got = vectors(run(start(tmp_path, max_num_batched_tokens=16), prompts))
    torch.testing.assert_close(torch.tensor(got), expected, atol=1e-4, rtol=1e-4)


def test_ranks_give_the_vectors_that_one_gives(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", "ForSequenceClassification", num_labels=1)
    prompts = some_prompts(MODELS["qwen3"][1]["vocab_size"])
    alone, both = (
        vectors(run(start(tmp_path, device="cpu", tensor_parallel_size=size), prompts)) for size in (1, 2)
    )
    torch.testing.assert_close(torch.tensor(both), torch.tensor(alone), atol=1e-4, rtol=1e-4)
