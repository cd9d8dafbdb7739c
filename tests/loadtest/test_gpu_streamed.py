"""Which products few tokens' steps are timed with, and that a step of them can be computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.engine.config import EngineConfig
from quire.engine.startup import start_engine
from quire.kernels.gpu import KNOWN
from quire.kernels.linear import alone
from quire.kernels.linear.linear import Matrix
from quire.loadtest.gpu_streamed import CONFIGS, KERNEL, MODELS, SUBSETS, step_of, streamed
from quire.loadtest.model_configs import write_model_folder

HOPPER = KNOWN["H100"]
PRODUCTS = {
    "in": (alone.plan_linear, Matrix(6144, 2048)),
    "gate": (alone.plan_gated_linear, Matrix(16384, 2048)),
    "out": (alone.plan_add_normed_linear, Matrix(2048, 2048)),
    "down": (alone.plan_add_normed_linear, Matrix(2048, 8192)),
}


def by_stream(tokens: int = 1) -> tuple[str, ...]:
    """Return which products of so many tokens are asked for ahead."""
    names = {
        role: plan(HOPPER, torch.bfloat16, tokens, weight).name for role, (plan, weight) in PRODUCTS.items()
    }
    return tuple(role for role, name in names.items() if KERNEL in name)


def test_each_subset_is_asked_for_ahead_and_nothing_else() -> None:
    assert len(SUBSETS) == len(set(SUBSETS)) == 16
    for roles in SUBSETS:
        with streamed(roles, 1, 2048):
            assert by_stream() == roles
        assert by_stream() == ()  # as before


def test_models_are_known() -> None:
    assert set(MODELS.split(",")) <= set(CONFIGS)


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_step_is_computed_of_rows_without_tables(tokens: int, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
    write_model_folder(tmp_path, {**CONFIGS["llama-3.2-1b"], **sizes})
    core, _ = start_engine(
        EngineConfig(
            model=str(tmp_path), load_format="dummy", device="cpu", max_num_seqs=4, max_model_len=1024,
            num_gpu_blocks_override=96,
        )
    )  # fmt: skip
    logits, sampled = step_of(core, tokens)()
    assert logits.shape == (tokens, 512) and sampled.shape == (tokens,)
