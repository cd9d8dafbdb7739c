"""An engine whose KV cache is in fp8: the same tokens in every cell, smaller blocks, refusals by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import startup
from engine.config import EngineConfig
from engine.kv_cache import FP8, KVCache, bytes_per_block
from engine.models.config import ModelConfig
from engine.models.loader import load_model
from kernels.backend import torch_backend
from kernels.fp8 import quantize
from tests.engine.test_equality_matrix import CELLS, KINDS, ON_GPU, requests, run, start, tokens_of
from tests.models.paged_driver import PagedDriver
from tests.models.tiny_models import MODELS

IN_FP8 = {"kv_cache_dtype": "fp8_e4m3"}


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig.from_folder(folder)


def test_a_block_takes_a_byte_an_element_and_two_a_scale(model_folder: Callable[[str], Path]) -> None:
    config = config_of(model_folder("qwen3"))  # 2 layers, 2 kv heads of 96
    assert bytes_per_block(config, 16, torch.bfloat16) == 2 * 2 * 2 * 16 * 96 * 2
    assert bytes_per_block(config, 16, FP8) == 2 * 2 * 2 * 16 * (96 + 2)
    settings = {"model": str(model_folder("qwen3")), "device": "cpu", "num_gpu_blocks_override": 20}
    for given, named, dtype in (("fp8_e4m3", "fp8_e4m3", FP8), ("auto", "bfloat16", torch.bfloat16)):
        _, info = startup.start_engine(
            EngineConfig(**settings, dtype="bfloat16", kv_cache_dtype=given, swap_space=1e-4)
        )
        assert (info.dtype, info.kv_cache_dtype) == ("bfloat16", named)
        assert info.bytes_per_block == bytes_per_block(config, 16, dtype)
        assert info.num_host_blocks == int(1e-4 * 2**30) // info.bytes_per_block


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_copies_and_swaps_move_everything_a_block_holds(
    dtype: torch.dtype, model_folder: Callable[[str], Path]
) -> None:
    config = config_of(model_folder("qwen3"))
    cache = KVCache(config, 6, 16, dtype, torch.device("cpu"), torch_backend().copy_blocks)
    cache.add_host_tier(2)
    torch.manual_seed(0)
    for kv, scales in cache.layers:
        values, drawn = quantize(torch.randn(kv.shape))
        kv.copy_(values)
        if scales is not None:
            scales.copy_(drawn.permute(0, 2, 3, 1))
    before = [(kv.float().clone(), None if s is None else s.clone()) for kv, s in cache.layers]
    cache.copy(torch.tensor([[0, 3]], dtype=torch.int32))
    cache.swap(np.array([[1, 0]], np.int32), np.zeros((0, 2), np.int32))
    cache.swap(np.zeros((0, 2), np.int32), np.array([[0, 4]], np.int32))
    for (kv, scales), (old_kv, old_scales) in zip(cache.layers, before, strict=True):
        for block, source in enumerate([0, 1, 2, 0, 1, 5]):
            assert torch.equal(kv[block].float(), old_kv[source])
            if scales is not None and old_scales is not None:
                assert torch.equal(scales[block], old_scales[source])


@pytest.mark.parametrize("kind", ["greedy"] if ON_GPU else ["greedy", "n"])
def test_every_cell_gives_the_same_tokens(kind: str, model_folder: Callable[[str], Path]) -> None:
    """Alone, batched, chunked, found in the cache, recomputed, swapped, overlapped; `n` copies on write."""
    folder = model_folder("qwen3")
    asked = requests(MODELS["qwen3"][1]["vocab_size"], KINDS[kind])
    alone_core = start(folder, IN_FP8)
    alone = {}
    for request in asked:
        alone |= run(alone_core, [request])
    for cell, settings in CELLS.items():
        core = start(folder, settings | IN_FP8)
        answers = run(core, asked, overlap=cell == "overlap")
        if cell == "prefix hit":
            answers = run(core, asked)
            assert any(outputs[0].cached_tokens for outputs in answers.values())
        yielding = core.scheduler.yielding
        assert (yielding.recomputes > 0, yielding.swaps > 0) == (cell == "recompute", cell == "swap")
        equal = [tokens_of(answers[key]) == tokens_of(alone[key]) for key in alone]
        # On a GPU last bits depend on the batch, and where they decide how 8 bits round, so do tokens.
        assert sum(equal) >= len(equal) / 2 if ON_GPU else all(equal), cell


# These models' weights make for sharp attention; a wrong scale, or one of another token, gives errors of 1.
@pytest.mark.parametrize("name", ["llama3-sharded", "mistral-window", "qwen3", "opt", "gpt2"])
def test_logits_are_close_to_those_of_a_full_precision_cache(
    name: str, model_folder: Callable[[str], Path]
) -> None:
    folder = model_folder(name)
    config = config_of(folder)
    model, _ = load_model(
        folder, config, torch_backend(), device="cpu", dtype=torch.float32, max_model_len=100
    )
    prompts = [[(17 * i + j) % config.vocab_size for i in range(60)] for j in range(3)]
    exact, rounded = (
        torch.cat(
            [
                PagedDriver(model, config, rows=1, max_len=64, kv_dtype=dtype).step({}, {0: prompt})[0]
                for prompt in prompts
            ]
        )
        for dtype in (None, FP8)
    )
    error = (rounded - exact).square().mean().sqrt() / exact.std()
    assert 1e-3 < error < 0.15


def test_scales_of_a_checkpoint_are_refused_by_name(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Ours are computed as they are written; those that a checkpoint brings would be ignored."""
    folder = shutil.copytree(model_folder("qwen3"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"self_attn\.k_scale is no weight of Qwen3ForCausalLM"):
        start(folder, IN_FP8)


def test_a_gpu_without_e4m3_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A100")
    config = EngineConfig(model="any", **IN_FP8)
    with pytest.raises(ValueError, match=r"--kv-cache-dtype fp8_e4m3 needs .* 8\.9 .* an A100 is older"):
        startup._kv_dtype(config, torch.bfloat16, torch.device("cuda"))
