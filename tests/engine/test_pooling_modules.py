"""Vectors by sentence-transformers' modules are what plain torch makes of transformers' hidden states."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire.engine.errors import FieldError
from quire.engine.messages import POOLED, PoolingParams, Request
from tests.engine.pooling import as_sentence_model, run, save_model, start, vectors
from tests.models.tiny_models import MODELS

CELLS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 12},
    "few blocks": {"num_gpu_blocks_override": 7, "max_num_batched_tokens": 24, "swap_space": 1},
}
MODES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
HIDDEN = MODELS["qwen3"][1]["hidden_size"]


def some_prompts(shortest: int = 1) -> list[list[int]]:
    rng = random.Random(5)
    vocab_size = MODELS["qwen3"][1]["vocab_size"]
    prompts = [[rng.randrange(4, vocab_size) for _ in range(rng.randint(shortest, 70))] for _ in range(9)]
    return [*prompts, [*prompts[0], 5], prompts[0]]  # which share blocks with another


def pooled(states: Tensor, mode: str, unpooled: int = 0) -> Tensor:
    """Pool states [N, H] as sentence-transformers does where the first `unpooled` tokens are a prompt's."""
    places, states = torch.arange(len(states))[unpooled:, None] + 1, states[unpooled:]
    return {
        "cls": lambda: states[0],
        "max": lambda: states.amax(0),
        "mean": lambda: states.mean(0),
        "mean_sqrt_len_tokens": lambda: states.sum(0) / len(states) ** 0.5,
        "weightedmean": lambda: (states * places).sum(0) / places.sum(),
        "lasttoken": lambda: states[-1],
    }[mode]()


def hidden_states(model: Any, prompts: list[list[int]]) -> list[Tensor]:
    with torch.inference_mode():
        return [model(torch.tensor([each])).last_hidden_state[0] for each in prompts]


def close(got: Any, expected: Tensor, cell: str) -> None:
    torch.testing.assert_close(
        torch.tensor(got), expected, atol=2e-5, rtol=2e-5, msg=partial("{}: {}".format, cell)
    )


# Each mode has its own sums, so tokens may be left out of all at once. Only the last token's reads the cache.
@pytest.mark.parametrize(
    ("modes", "unpooled"),
    [
        *(([mode], 0) for mode in MODES),
        *((MODES, unpooled) for unpooled in (0, 5, 20)),
        *((["lasttoken"], unpooled) for unpooled in (5, 20)),
        (["lasttoken", "lasttoken"], 5),
    ],
)
def test_each_mode_is_as_torch_has_it_however_it_was_computed(
    modes: list[str], unpooled: int, tmp_path: Path
) -> None:
    model = save_model(tmp_path, "qwen3", "Model")
    as_sentence_model(tmp_path, modes, normalize=False)
    prompts = some_prompts(shortest=unpooled + 1)
    expected = torch.stack(
        [
            torch.cat([pooled(states, mode, unpooled) for mode in modes])
            for states in hidden_states(model, prompts)
        ]
    )
    params = PoolingParams(unpooled=unpooled)
    for cell, settings in CELLS.items():
        core = start(tmp_path, **settings)
        close(vectors(run(core, prompts, params)), expected, cell)
        again = run(core, prompts, params)
        close(vectors(again), expected, f"{cell}, again")
        # What was cached has keys and values only.
        assert modes == ["lasttoken"] or not any(each.cached_tokens for each in again)


def test_requests_beside_each_other_leave_out_each_its_own(tmp_path: Path) -> None:
    model = save_model(tmp_path, "qwen3", "Model")
    as_sentence_model(tmp_path, MODES, normalize=False)
    prompts = some_prompts(shortest=9)
    core = start(tmp_path, max_num_batched_tokens=20)
    for i, prompt in enumerate(prompts):
        core.add(Request(i, prompt, POOLED, pooling=PoolingParams(unpooled=i % 9)))
    outputs = {
        output.request_id: output for _ in iter(lambda: core.has_work, False) for output in core.step()
    }
    states = hidden_states(model, prompts)
    expected = torch.stack(
        [torch.cat([pooled(each, mode, i % 9) for mode in MODES]) for i, each in enumerate(states)]
    )
    close(vectors([outputs[i] for i in range(len(prompts))]), expected, "beside each other")


def test_a_vector_is_of_one_token_at_least(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", "Model")
    core = start(tmp_path)
    with pytest.raises(FieldError, match="the prompt has 2 tokens, of which 2 are no part of its vector"):
        core.add(Request(0, [5, 6], POOLED, pooling=PoolingParams(unpooled=2)))


@pytest.mark.parametrize(
    "activation", [nn.Identity(), nn.Tanh(), nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Sigmoid()]
)
def test_dense_modules_come_one_after_the_other(activation: nn.Module, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = save_model(tmp_path, "qwen3", "Model")
    layers = [
        nn.Sequential(nn.Linear(2 * HIDDEN, 24), activation),
        nn.Sequential(nn.Linear(24, 10, bias=False), activation),
    ]
    as_sentence_model(tmp_path, ["mean", "max"], projections=layers)
    prompts = some_prompts()
    with torch.inference_mode():
        expected = torch.stack(
            [
                layers[1](layers[0](torch.cat([pooled(states, "mean"), pooled(states, "max")])))
                for states in hidden_states(model, prompts)
            ]
        )
    core = start(tmp_path, max_num_batched_tokens=16)
    close(vectors(run(core, prompts)), expected, "as it is")
    normalized = vectors(run(core, prompts, PoolingParams(normalize=True)))
    close(normalized, nn.functional.normalize(expected), "normalized")


def test_dense_modules_of_a_newest_token_have_its_cached_prefix(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = save_model(tmp_path, "qwen3", "Model")
    layers = [nn.Sequential(nn.Linear(HIDDEN, 8), nn.Tanh())]
    as_sentence_model(tmp_path, ["lasttoken"], projections=layers)
    prompts = some_prompts(shortest=20)
    with torch.inference_mode():
        expected = torch.stack([layers[0](states[-1]) for states in hidden_states(model, prompts)])
    core = start(tmp_path)
    close(vectors(run(core, prompts)), expected, "first")
    again = run(core, prompts)
    assert all(each.cached_tokens for each in again)
    close(vectors(again), expected, "behind a cached prefix")


def test_every_rank_has_the_dense_modules(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", "Model")
    as_sentence_model(
        tmp_path, ["weightedmean"], projections=[nn.Sequential(nn.Linear(HIDDEN, 8), nn.Tanh())]
    )
    prompts = some_prompts()
    params = PoolingParams(unpooled=0)
    alone, both = (
        vectors(run(start(tmp_path, device="cpu", tensor_parallel_size=size), prompts, params))
        for size in (1, 2)
    )
    torch.testing.assert_close(torch.tensor(both), torch.tensor(alone), atol=1e-4, rtol=1e-4)


def test_dense_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", "Model")
    as_sentence_model(tmp_path, ["mean"], projections=[nn.Sequential(nn.Linear(HIDDEN, 8), nn.Tanh())])
    file = tmp_path / "2_Dense" / "model.safetensors"
    weights = load_file(file)
    for found, words in (
        ({"linear.weight": weights["linear.weight"]}, r"linear\.bias is missing"),
        (weights | {"residual.weight": torch.ones(8)}, r"residual\.weight is no weight of it"),
        (weights | {"linear.bias": torch.ones(7)}, r"linear\.bias has shape \[7\].* asks for \[8\]"),
        (weights | {"linear.bias": torch.ones(8, dtype=torch.int8)}, r"linear\.bias holds I8; only F64"),
    ):
        save_file(found, file)
        with pytest.raises(ValueError, match=rf"2_Dense/model\.safetensors does not fit.*{words}"):
            start(tmp_path)
    file.rename(file.with_name("pytorch_model.bin"))
    with pytest.raises(ValueError, match=r"2_Dense has no model\.safetensors \(it has pytorch_model\.bin\)"):
        start(tmp_path)


def test_weights_of_dense_modules_may_be_drawn(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", "Model")
    as_sentence_model(tmp_path, ["mean"], projections=[nn.Sequential(nn.Linear(HIDDEN, 8), nn.Tanh())])
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    first, again = (vectors(run(start(tmp_path, load_format="dummy"), [[5, 6]])) for _ in range(2))
    assert first.shape == (1, 8) and (first == again).all()
