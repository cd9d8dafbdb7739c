"""Models by transformers' code on several ranks: equal to transformers' own, each with its shares only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.config import EngineConfig
from quire.engine.models.general.model import GeneralModel
from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.engine.parallel.group import OneOfRanks
from quire.engine.startup import start_engine
from quire.kernels.backend import torch_backend
from tests.models.any_model import save_tiny, tiny_model
from tests.models.divided_model import compare_divided


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("gemma2", 4),  # fewer KV heads than ranks, a scaled table that is the head, too, capped scores
        ("gpt_neox", 2),  # queries, keys and values in one product, biases behind sums
        ("phi3", 2),  # products that are gathered, and gate and up in one that is not
        ("olmo2", 4),  # norms over all heads
        ("gpt_oss", 2),  # sinks, and experts with biases whose gates and ups alternate
        ("llama4_text", 2),  # chunks, and queries scaled by position
        ("deepseek_v32", 2),  # tokens that an indexer chooses
        ("minimax_m3_vl", 2),  # blocks that each KV head chooses, in the text of a model that sees
        ("qwen3_vl_moe", 2),  # experts that files may have transposed
        ("deepseek_v2", 2),  # latent attention, and experts in files of their own
    ],
)
def test_logits_of_ranks_equal_transformers(kind: str, ranks: int, tmp_path: Path) -> None:
    verdict = compare_divided(tmp_path, tiny_model(kind, tmp_path), ranks)
    assert verdict.outcome == "equal", verdict.detail


@pytest.mark.parametrize(("kind", "ranks"), [("qwen3_moe", 2), ("gpt_oss", 4)])
def test_ranks_with_whole_experts_equal_transformers(kind: str, ranks: int, tmp_path: Path) -> None:
    verdict = compare_divided(tmp_path, tiny_model(kind, tmp_path), ranks, expert_parallel=True)
    assert verdict.outcome == "equal", verdict.detail


def test_attention_that_is_not_known_for_several_ranks_is_refused(tmp_path: Path) -> None:
    save_tiny("falcon", tmp_path)
    with pytest.raises(ValueError, match="how FalconAttention attends is not known for several ranks"):
        read_model(tmp_path).of_rank(2)


def test_whole_experts_are_refused_where_there_are_none(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        read_model(tmp_path).of_rank(2, expert_parallel=True)
    with pytest.raises(ValueError, match=r"--enable-expert-parallel .* there is one rank"):
        EngineConfig(model=str(tmp_path), enable_expert_parallel=True)


def load(folder: Path, rank: int | None, load_format: Any = "auto") -> tuple[GeneralModel, int]:
    """Load all of a model, or one of two ranks'."""
    config = read_model(folder, "transformers")
    model, num_bytes = load_model(
        folder, config if rank is None else config.of_rank(2), torch_backend(), device="cpu",
        dtype=torch.float32, max_model_len=64, load_format=load_format, seed=3,
        ranks=None if rank is None else OneOfRanks(rank, 2),
    )  # fmt: skip
    assert isinstance(model, GeneralModel)
    return model, num_bytes


def test_ranks_hold_their_share_only_and_draw_what_one_draws(tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path)
    whole, num_bytes = load(tmp_path, None, "dummy")
    expected = dict(whole._decoder.named_parameters())
    held = dict.fromkeys(expected, 0)
    for rank in range(2):
        _, share = load(tmp_path, rank)
        assert num_bytes / 2 < share < num_bytes * 0.7
        model, _ = load(tmp_path, rank, "dummy")
        for name, weight in model._decoder.named_parameters():
            if weight.shape == expected[name].shape:
                assert torch.equal(weight, expected[name]), name
            held[name] += weight.numel()
    mlp = "layers.0.mlp.experts.gate_up_proj"
    gate, up = expected[mlp].chunk(2, dim=1)
    assert torch.equal(
        dict(model._decoder.named_parameters())[mlp], torch.cat([gate[:, 16:], up[:, 16:]], dim=1)
    )
    twice = {name for name, count in held.items() if count == 2 * expected[name].numel()}
    assert {name.split(".")[-2] for name in twice} == {
        "norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "gate",
    }  # fmt: skip


def test_ranks_draw_the_vectors_that_one_draws_by_chance(tmp_path: Path) -> None:
    save_tiny("gpt_oss", tmp_path)
    torch.manual_seed(0)
    expected = dict(load(tmp_path, None, "dummy")[0]._decoder.named_parameters())
    sinks, router = "layers.0.self_attn.sinks", "layers.0.mlp.router.bias"
    assert expected[sinks].abs().sum() > 0 and expected[router].abs().sum() > 0
    half = len(expected[sinks]) // 2
    for rank in range(2):
        torch.manual_seed(rank + 1)  # as processes of their own have it
        found = dict(load(tmp_path, rank, "dummy")[0]._decoder.named_parameters())
        assert torch.equal(found[router], expected[router])
        assert torch.equal(found[sinks], expected[sinks][rank * half : (rank + 1) * half])


@pytest.mark.parametrize(
    ("kind", "ranks", "reason"),
    [
        ("bart", 2, "BartForCausalLM runs by transformers' code, and it has no plan"),
        ("phi", 3, "does not divide the 4 attention heads or the 2 KV heads evenly; give one of 1, 2, 4"),
        ("qwen3_moe", 8, "does not divide the 4 attention heads"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_ranks_start(
    kind: str, ranks: int, reason: str, tmp_path: Path
) -> None:
    save_tiny(kind, tmp_path)
    config = EngineConfig(
        model=str(tmp_path), device="cpu", model_impl="transformers", tensor_parallel_size=ranks
    )
    with pytest.raises(ValueError, match=f"--tensor-parallel-size {ranks}.*{reason}"):
        start_engine(config)
