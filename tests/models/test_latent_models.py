"""Multi-head latent attention keeps a latent a token, and gives what transformers' expanded heads give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quire.doctor import describe
from quire.engine.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.device.kv_cache import bytes_per_block, named_format
from quire.engine.device.runner import ModelRunner
from quire.engine.messages import Request, SamplingParams
from quire.engine.models.general import latent, paged_attention
from quire.engine.models.reading import read_model
from quire.engine.startup import start_engine
from quire.kernels.attention.index.operations import REFERENCE
from quire.kernels.formats.cache_spec import CacheSpec
from quire.kernels.formats.kv_format import FP32
from quire.kernels.gpu import NO_GPU
from tests.models.any_model import compare, save_tiny, tiny_model
from tests.models.divided_model import compare_divided

LATENT = CacheSpec(1, 24, latent=16)  # of 16 numbers, and 8 that are rotated
# Beside deepseek_v3 in test_general_models.py: rotated by complex numbers, as halves, and with sinks.
KINDS = ("deepseek_v2", "minicpm3", "hy_v4")
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    verdict = compare(kind, tmp_path)
    assert verdict.outcome == "equal", verdict.detail
    assert {replace(each, index=0) for each in read_model(tmp_path).cache_specs} == {LATENT}


@pytest.mark.parametrize(
    "changes",
    [
        {"q_lora_rank": None},
        {"rope_interleave": False},
        {"rope_parameters": YARN},
        {"num_local_experts": 16, "n_group": 4, "topk_group": 2},
    ],
)
def test_other_deepseeks(changes: dict[str, Any], tmp_path: Path) -> None:
    """Queries of one product, halves that are rotated, scores scaled by the length of contexts, and experts
    of groups that are chosen first."""
    verdict = compare("deepseek_v3", tmp_path, **changes)
    assert verdict.outcome == "equal", verdict.detail


def test_each_rank_has_all_latents_and_its_heads(tmp_path: Path) -> None:
    """By a plan that divides queries; and by one that does not, as DeepSeek-V3's."""
    for kind in ("minicpm3", "deepseek_v3"):
        folder = tmp_path / kind
        verdict = compare_divided(folder, tiny_model(kind, folder), 2)
        assert verdict.outcome == "equal", verdict.detail
        part = read_model(folder).of_rank(2)
        assert set(part.cache_specs) == {LATENT} and {each.heads for each in part.attention} == {2}


def test_ranks_keep_a_latent_that_is_more_than_their_own_heads_would(tmp_path: Path) -> None:
    """72 numbers, where keys and values would be 128 of four heads, and 64 of two."""
    verdict = compare_divided(tmp_path, tiny_model("minicpm3", tmp_path, kv_lora_rank=64), 2)
    assert verdict.outcome == "equal", verdict.detail
    assert set(read_model(tmp_path).of_rank(2).cache_specs) == {CacheSpec(1, 72, latent=64)}


def test_a_token_takes_its_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("deepseek_v2", tmp_path)
    assert bytes_per_block(read_model(tmp_path), 16, FP32) == 4 * 16 * 24 * 4
    _, info = start_engine(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32"))
    assert info.latent_width == 24 and info.bytes_per_block == 4 * 16 * 24 * 4
    assert (
        dict(describe(info))["latents"]
        == "24 numbers a token and layer, in place of keys and values of each head"
    )
    monkeypatch.setattr(latent, "MOST_LATENT", 8)  # what kernels do not take is expanded
    assert bytes_per_block(read_model(tmp_path), 16, FP32) == 4 * 16 * 2 * 4 * 16 * 4


def test_latents_are_kept_as_they_are(tmp_path: Path) -> None:
    save_tiny("deepseek_v2", tmp_path)
    with pytest.raises(ValueError, match=r"fp8_e4m3 is not for a model that keeps latents.*leave it out"):
        named_format("fp8_e4m3", read_model(tmp_path), torch.float32, NO_GPU)


class Expanding(nn.Module):
    """Attention that makes more of its latents than their product with a matrix."""

    kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim = 16, 8, 8, 16

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(16, 4 * 24, bias=False)
        self.factor = factor

    def expand_kv(self, kept: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = self.kv_b_proj(kept * self.factor).view(1, kept.shape[2], -1, 24).transpose(1, 2)
        keys, values = both.split([8, 16], dim=-1)
        return torch.cat((keys, rotated.expand(-1, keys.shape[1], -1, -1)), dim=-1), values


def test_only_what_is_proved_is_taken() -> None:
    usual, other = Expanding(1.0), Expanding(1.01)
    latent.give_latents(nn.ModuleList([usual]))
    latent.give_latents(nn.ModuleList([other]))
    assert latent.latent_of(usual) is not None and latent.latent_of(other) is None


def started(folder: Path, **settings: Any) -> EngineCore:
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", block_size=4, max_num_seqs=6,
        max_num_batched_tokens=32, **({"swap_space": 0} | settings),
    )  # fmt: skip
    return start_engine(config)[0]


def answers(folder: Path, **settings: Any) -> list[list[int]]:
    return answered(started(folder, **settings), settings.get("preemption_mode"))


def answered(core: EngineCore, mode: str | None = None) -> list[list[int]]:
    """Greedy, sampled and beam answers of prompts of which the second round is in the cache."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"n": 2, "seed": 5, "temperature": 1.0},
        {"temperature": 0.0, "beam_width": 2, "n": 2},
    ]
    tokens: dict[tuple[int, int], list[int]] = {}
    for first in (0, len(kinds)):
        for at, params in enumerate(kinds):
            core.add(Request(first + at, prompt(at), SamplingParams(max_tokens=9, ignore_eos=True, **params)))
        while core.has_work:
            for output in core.step():
                assert output.error is None
                tokens.setdefault((output.request_id, output.index), []).extend(output.tokens)
    preempted = {"swap": core.stats.preemptions_swap, "recompute": core.stats.preemptions_recompute}
    assert preempted[mode] > 0 if mode else not any(preempted.values())
    return [tokens[key] for key in sorted(tokens)]


def prompt(at: int) -> list[int]:
    return [3 + (7 * place + at) % 90 for place in range(25)]


@pytest.mark.parametrize(
    "kind",
    [
        "deepseek_v3",
        "glm_moe_dsa",  # whose indexer chooses a third or fewer
        "minimax_m3_vl_text",  # as do those of each KV head, in blocks
    ],
)
def test_all_that_an_engine_does_with_blocks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, prefix hits, forks and beams, and blocks that are swapped out: as with keys of each head."""
    reference = tiny_model(kind, tmp_path)
    kept = answers(tmp_path)
    with torch.inference_mode():
        whole = reference(torch.tensor([prompt(0) + kept[0]]), use_cache=False).logits[0]
    assert kept[0] == whole[len(prompt(0)) - 1 : -1].argmax(-1).tolist()
    for mode in ("swap", "recompute"):
        assert answers(tmp_path, num_gpu_blocks_override=16, swap_space=1, preemption_mode=mode) == kept
    monkeypatch.setattr(latent, "MOST_LATENT", 8)
    assert answers(tmp_path) == kept


def test_graphs_hold_steps_with_more_tokens_than_an_indexer_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where what scores is known; rows that pad a step are scored with the others."""
    save_tiny("deepseek_v32", tmp_path, index_topk=26)  # of prompts of 25, and answers of 9
    kept = answers(tmp_path)
    monkeypatch.setattr(paged_attention, "index_by", lambda gpu: REFERENCE)
    core = started(tmp_path)
    runner = core.runner
    assert isinstance(runner, ModelRunner) and runner.graphs_may_choose
    runner.add_graphs(lambda run: run)
    assert answered(core) == kept
    assert runner.graphs is not None
    assert all(any(size.misses for size in graphs.sizes) for graphs in runner.graphs.families)
