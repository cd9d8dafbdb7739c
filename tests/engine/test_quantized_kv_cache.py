"""An engine whose KV cache is rounded: the same tokens in every cell, smaller blocks, refusals by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine import rank, startup
from quire.engine.config import EngineConfig, KVCacheDtype
from quire.engine.device.kv_cache import KVCache, bytes_per_block, dequantized_dtype, named_format
from quire.engine.device.runner import ModelRunner
from quire.engine.messages import Request, SamplingParams
from quire.engine.models.config import ModelConfig
from quire.engine.models.loader import load_model
from quire.engine.models.native_config import read_native
from quire.kernels.attention import attend
from quire.kernels.attention.batch import AttentionLayer
from quire.kernels.attention.prefill import prefill_reference
from quire.kernels.attention.write_kv import write_kv_reference
from quire.kernels.backend import torch_backend
from quire.kernels.formats.kv_format import BF16, FP8, FP12, FP32, SCALED, KVFormat
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.gpu import NO_GPU
from tests.engine.test_equality_matrix import CELLS, KINDS, ON_GPU, requests, run, start, tokens_of
from tests.kernels.gpus import GPUS
from tests.models.paged_driver import PagedDriver
from tests.models.tiny_models import MODELS

# Each format with a model that suits it: 2 layers, 1 or 2 kv heads of 96 or 64, the scale's two bytes.
FORMATS = [("fp8_e4m3", "qwen3"), ("fp12_e4m7", "llama3-sharded")]
VECTOR_BYTES = {"fp8_e4m3": 96 + 2, "fp12_e4m7": 64 * 3 // 2 + 2}
of_each_format = pytest.mark.parametrize(("cache", "name"), FORMATS)


def config_of(folder: Path) -> ModelConfig:
    return read_native(folder)


def test_flags_and_formats_are_named_alike() -> None:
    assert get_args(KVCacheDtype) == ("auto", "model", *SCALED)


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_twelve_bits_are_three_quarters_of_sixteen(
    head_dim: int, model_folder: Callable[[str], Path]
) -> None:
    config = replace(config_of(model_folder("qwen3")), head_dim=head_dim)
    own = bytes_per_block(config, 16, BF16)
    vectors = own // (2 * head_dim)
    assert bytes_per_block(config, 16, FP12) == own * 3 // 4 + vectors * 2


@pytest.mark.parametrize("name", ["llama3-sharded", "qwen2-late-window"])
def test_a_step_with_prompts_leaves_its_own_tokens_as_numbers(
    name: str, model_folder: Callable[[str], Path]
) -> None:
    """Where Hopper's prefill attention finds them, in the room of all layers without a window."""
    folder, dtype, device = model_folder(name), torch.float32, torch.device("cpu")
    config = config_of(folder)
    model, _ = load_model(folder, config, torch_backend(), device="cpu", dtype=dtype, max_model_len=64)
    driver = PagedDriver(model, config, rows=3, max_len=64)
    blocks, copy_blocks = len(driver.cache.blocks), model.backend.copy_blocks
    driver.cache = KVCache(config, blocks, 16, FP12, device, copy_blocks, dtype)
    last_whole = max(layer for layer, window in enumerate(config.windows) if not window)
    layer = driver.cache.layers[last_whole]
    dequantized = layer.dequantized
    assert dequantized is not None
    everything = torch.arange(blocks)[:, None, None], torch.arange(2)[:, None], torch.arange(layer.kv_heads)
    driver.step({}, {0: [5] * 20, 1: [6] * 3})
    for decodes, chunks in (({0: 7}, {1: [8] * 18, 2: [9] * 5}), ({0: 7, 1: 8}, {})):
        dequantized.fill_(torch.nan)
        before = list(driver.lengths)
        driver.step(decodes, chunks)
        own = torch.zeros(blocks, 16, dtype=torch.bool)
        for row, (begin, end) in enumerate(zip(before, driver.lengths, strict=True)):
            slots = torch.arange(begin, end)
            own[driver.block_tables[row].long()[slots // 16], slots % 16] = len(chunks) > 0
        held, numbers = (x.movedim(3, 1) for x in (layer.read(everything), dequantized))
        assert torch.equal(numbers[own], held[own]) and held[own].isfinite().all()
        assert numbers[~own].isnan().all()


@of_each_format
def test_a_block_takes_its_vectors_bytes(cache: str, name: str, model_folder: Callable[[str], Path]) -> None:
    config = config_of(model_folder(name))
    vectors = 2 * 2 * config.num_kv_heads * 16
    assert bytes_per_block(config, 16, BF16) == vectors * config.head_dim * 2
    assert bytes_per_block(config, 16, SCALED[cache]) == vectors * VECTOR_BYTES[cache]
    settings = {"model": str(model_folder(name)), "device": "cpu", "num_gpu_blocks_override": 20}
    own = "bfloat16", BF16
    for given, named, held in ((cache, cache, SCALED[cache]), ("auto", *own), ("model", *own)):
        _, info = startup.start_engine(
            EngineConfig(**settings, dtype="bfloat16", kv_cache_dtype=given, swap_space=1e-4)
        )
        assert (info.dtype, info.kv_cache_dtype) == ("bfloat16", named)
        assert info.bytes_per_block == bytes_per_block(config, 16, held)
        assert info.num_host_blocks == min(int(1e-4 * 2**30) // info.bytes_per_block, 20)


@pytest.mark.parametrize("format", [FP32, *SCALED.values()], ids=lambda format: format.name)
def test_copies_and_swaps_move_everything_a_block_holds(
    format: KVFormat, model_folder: Callable[[str], Path]
) -> None:
    config = config_of(model_folder("qwen3-bias"))  # kv heads of 64
    cache = KVCache(config, 6, 16, format, torch.device("cpu"), torch_backend().copy_blocks)
    cache.add_host_tier(2)
    shape = 6, 2, config.num_kv_heads, 16, config.head_dim

    def held() -> list[Tensor]:
        """What is read of each layer, of that shape."""
        index = torch.arange(6)[:, None, None], torch.arange(2)[:, None], torch.arange(config.num_kv_heads)
        return [layer.read(index) for layer in cache.layers]

    written = torch.randn(config.num_layers, *shape, generator=torch.Generator().manual_seed(0))
    for layer, values in zip(cache.layers, written, strict=True):
        if layer.scales is None:
            layer.kv.copy_(values)
        else:
            vectors, drawn = format.quantize(values)
            layer.kv.view(torch.uint8).copy_(vectors.view(torch.uint8))
            layer.scales.copy_(drawn.permute(0, 2, 3, 1))
    before = held()
    torch.testing.assert_close(torch.stack(before), written, atol=0.01, rtol=0.07)
    cache.copy(torch.tensor([[0, 3]], dtype=torch.int32))
    cache.swap(np.array([[1, 0]], np.int32), np.zeros((0, 2), np.int32))
    cache.swap(np.zeros((0, 2), np.int32), np.array([[0, 4]], np.int32))
    for now, old in zip(held(), before, strict=True):
        assert torch.equal(now, old[[0, 1, 2, 0, 1, 5]])


def share_alike(ours: list[int], theirs: list[int]) -> float:
    """How much of two answers is the same before they differ."""
    same = [one == other for one, other in zip(ours, theirs, strict=True)]
    return [*same, False].index(False) / len(same)


@pytest.mark.parametrize("kind", ["greedy"] if ON_GPU else ["greedy", "n"])
@pytest.mark.parametrize(
    ("cache", "name", "dtype"),
    [(*each, "float32") for each in FORMATS] + [(*FORMATS[1], "bfloat16")] * ON_GPU,  # for Hopper's kernels
)
def test_every_cell_gives_the_same_tokens(
    cache: str, name: str, dtype: str, kind: str, model_folder: Callable[[str], Path]
) -> None:
    """Alone, batched, chunked, found in the cache, recomputed, swapped, overlapped; `n` copies on write."""
    folder, rounded = model_folder(name), {"kv_cache_dtype": cache, "dtype": dtype}
    asked = requests(MODELS[name][1]["vocab_size"], KINDS[kind])
    alone_core = start(folder, rounded)
    alone = {}
    for request in asked:
        alone |= run(alone_core, [request])
    for cell, settings in CELLS.items():
        core = start(folder, settings | rounded)
        answers = run(core, asked, overlap=cell == "overlap")
        if cell == "prefix hit":
            answers = run(core, asked)
            assert any(outputs[0].cached_tokens for outputs in answers.values())
        preemption = core.scheduler.preemption
        assert (preemption.recomputes > 0, preemption.swaps > 0) == (cell == "recompute", cell == "swap")
        alike = [share_alike(tokens_of(answers[key]), tokens_of(alone[key])) for key in alone]
        # On a GPU last bits depend on the batch, and where they decide how a number rounds, so do tokens.
        assert sum(alike) >= len(alike) / 2 if ON_GPU else all(share == 1 for share in alike), cell


def write_rounded(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    layer: AttentionLayer,
    cache: LayerCache,
    **options: bool,
) -> None:
    """Have a cache in float32 hold of keys and values what bfloat16 does."""
    write_kv_reference(qkv, positions, slots, layer, cache, **options)
    cache.kv.copy_(cache.kv.bfloat16())


def prefilled(folder: Path, held: KVFormat) -> Tensor:
    """Logits [180, V] of three prompts of a model in float32."""
    config = config_of(folder)
    model, _ = load_model(
        folder, config, torch_backend(), device="cpu", dtype=torch.float32, max_model_len=100
    )
    prompts = [[(17 * i + j) % config.vocab_size for i in range(60)] for j in range(3)]
    return torch.cat(
        [
            PagedDriver(model, config, rows=1, max_len=64, held=held).step({}, {0: prompt})[0]
            for prompt in prompts
        ]
    )


def error(logits: Tensor, exact: Tensor) -> float:
    return ((logits - exact).square().mean().sqrt() / exact.std()).item()


# These models' weights make for sharp attention; a wrong scale, or one of another token, gives errors of 1.
@pytest.mark.parametrize("name", ["llama3-sharded", "mistral-window", "qwen3", "opt", "gpt2"])
def test_logits_are_close_to_those_of_a_full_precision_cache(
    name: str, model_folder: Callable[[str], Path]
) -> None:
    folder = model_folder(name)
    exact, rounded = (prefilled(folder, held) for held in (FP32, FP8))
    assert 1e-3 < error(rounded, exact) < 0.15


@pytest.mark.parametrize(
    "name", ["llama3-sharded", "qwen2-late-window", "qwen3-bias", "opt", "opt-post-norm"]
)
def test_logits_of_twelve_bits_are_those_of_a_bfloat16_cache(
    name: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what is below 2^-14 of a vector's largest, and the few numbers of later layers that it makes
    round the other way.
    """
    folder = model_folder(name)
    exact, fp8, fp12 = (prefilled(folder, held) for held in (FP32, FP8, FP12))
    monkeypatch.setattr(attend, "write_kv_reference", write_rounded)
    bf16 = prefilled(folder, FP32)
    assert error(fp12, bf16) < 1e-4
    assert error(fp12, exact) == pytest.approx(error(bf16, exact), rel=1e-2)
    assert error(fp12, exact) < error(fp8, exact) / 8


def test_hopper_expands_what_its_prefill_attention_takes(model_folder: Callable[[str], Path]) -> None:
    config, hopper = config_of(model_folder("llama3-sharded")), GPUS[90]
    bf16 = torch.bfloat16
    half_windowed, of_three = replace(config, windows=(0, 20)), replace(config, num_heads=3, num_kv_heads=1)
    for taken in (config, half_windowed, of_three):
        assert dequantized_dtype(taken, FP12, bf16, hopper) == bf16
    for held, dtype in ((FP8, bf16), (BF16, bf16), (FP12, torch.float16)):
        assert dequantized_dtype(config, held, dtype, hopper) is None
    for changes in ({"windows": (20, 20)}, {"head_dim": 256}, {"num_heads": 65, "num_kv_heads": 1}):
        assert dequantized_dtype(replace(config, **changes), FP12, bf16, hopper) is None
    for other in (NO_GPU, GPUS[80], GPUS[100]):
        assert dequantized_dtype(config, FP12, bf16, other) is None
    for block_size, expected in ((8, None), (16, bf16)):
        assert dequantized_dtype(config, FP12, bf16, hopper, block_size) == expected


def test_what_is_expanded_has_room_that_counts_and_reaches_every_layer(
    monkeypatch: pytest.MonkeyPatch, model_folder: Callable[[str], Path]
) -> None:
    folder, measured, given = model_folder("llama3-sharded"), [], []

    def spied_blocks(config: EngineConfig, runner: ModelRunner, block_bytes: int, ranks: None) -> int:
        measured.append(block_bytes)
        return 30

    def spied_prefill(*arguments: Any) -> None:
        given.append(arguments[-1].dequantized)
        prefill_reference(*arguments)

    monkeypatch.setattr(rank, "choose_blocks", spied_blocks)
    monkeypatch.setattr(rank, "dequantized_dtype", lambda *_: torch.bfloat16)
    monkeypatch.setattr(attend, "prefill_reference", spied_prefill)
    core, info = startup.start_engine(
        EngineConfig(model=str(folder), device="cpu", kv_cache_dtype="fp12_e4m7", swap_space=0)
    )
    config = config_of(folder)
    a_layer = 2 * config.num_kv_heads * 16 * config.head_dim * 2
    assert measured == [info.bytes_per_block + a_layer]
    assert info.expanded_bytes == 30 * a_layer
    given.clear()
    run(core, requests(config.vocab_size, KINDS["greedy"])[:1])
    (room,) = {tensor.data_ptr() for tensor in given}
    assert room == given[0].data_ptr() and given[0].nbytes == info.expanded_bytes
    assert all(layer.dequantized is given[0] for layer in core.runner.cache.layers)


@of_each_format
def test_a_nan_among_keys_and_values_becomes_one_in_later_logits(
    cache: str, name: str, model_folder: Callable[[str], Path]
) -> None:
    """`BlockManager.forget` relies on it."""
    folder, config = model_folder(name), config_of(model_folder(name))
    model, _ = load_model(
        folder, config, torch_backend(), device="cpu", dtype=torch.float32, max_model_len=100
    )
    bad = 5
    with torch.inference_mode():
        model.embedding[bad] = torch.nan
    driver = PagedDriver(model, config, rows=2, max_len=64, held=SCALED[cache])
    driver.step({}, {0: [7, bad, 8], 1: [7, 9, 8]})
    later = driver.step({0: 10}, {1: [10, 11]}) | driver.step({}, {0: [11, 12]})
    assert later[0].isnan().all()
    assert later[1][:, bad + 1 :].isfinite().all()  # where weights are tied, the bad token's logit is NaN


@pytest.mark.parametrize(("cache", "large"), [("fp12_e4m7", 70_000.0), ("fp8_e4m3", 3e7)])
def test_a_value_larger_than_its_format_ends_the_request_that_has_it_alone(
    cache: str, large: float, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """It was clipped, and the answer another than the model's."""
    folder, bad = shutil.copytree(model_folder("llama3-sharded"), tmp_path / "model"), 5
    for part in folder.glob("*.safetensors"):
        weights = load_file(part)
        for name, weight in weights.items():
            if name.endswith("embed_tokens.weight"):  # only the bad token has anything in its first place
                weight[:, 0], weight[bad] = 0.0, 0.0
                weight[bad, 0] = 1.0
            if name.endswith("layers.0.self_attn.v_proj.weight"):
                weight[:, 0] = large
            if name.endswith("layers.0.input_layernorm.weight"):
                weight.fill_(1.0)
        save_file(weights, part, {"format": "pt"})
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    asked = [Request(0, [7, bad, 8], params), Request(1, [7, 9, 8], params)]
    rounded, whole = (run(start(folder, {"kv_cache_dtype": held}), asked) for held in (cache, "model"))
    assert [outputs[-1].finish_reason for outputs in whole.values()] == ["length", "length"]
    assert rounded[0, 0][-1].finish_reason == "error" and not tokens_of(rounded[0, 0])
    assert "--kv-cache-dtype model" in (rounded[0, 0][-1].error or "")
    alone = run(start(folder, {"kv_cache_dtype": cache}), asked[1:])
    assert tokens_of(rounded[1, 0]) == tokens_of(alone[1, 0])


def test_scales_of_a_checkpoint_are_refused_by_name(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Ours are computed as they are written; those that a checkpoint brings would be ignored."""
    folder = shutil.copytree(model_folder("qwen3"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"self_attn\.k_scale is no weight of Qwen3ForCausalLM"):
        start(folder, {"kv_cache_dtype": "fp8_e4m3"})


def test_a_gpu_without_e4m3_is_refused_by_name(model_folder: Callable[[str], Path]) -> None:
    model, gpu = config_of(model_folder("opt")), GPUS[80]
    in_fp8, in_fp12 = (EngineConfig(model="any", kv_cache_dtype=cache) for cache in ("fp8_e4m3", "fp12_e4m7"))
    older = r"^--kv-cache-dtype: fp8_e4m3 needs .* 8\.9 .* A100 is older; "
    with pytest.raises(ValueError, match=older + "give fp12_e4m7, or leave it out$"):
        named_format(in_fp8.kv_cache_dtype, model, torch.bfloat16, gpu)
    model_of_96 = config_of(model_folder("qwen3"))
    for neither in (in_fp8, in_fp12):
        with pytest.raises(ValueError, match=r"; leave it out$"):
            named_format(neither.kv_cache_dtype, model_of_96, torch.bfloat16, gpu)
    assert named_format(in_fp12.kv_cache_dtype, model, torch.bfloat16, gpu) == FP12


@pytest.mark.parametrize("name", ["qwen3", "mistral-window", "llama-tied-linear"])  # of 96, 80 and 48
def test_a_head_dim_that_does_not_suit_is_refused_before_weights_load(
    name: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copy(model_folder(name) / "config.json", tmp_path)
    head_dim = config_of(tmp_path).head_dim
    with pytest.raises(
        ValueError,
        match=rf"^--kv-cache-dtype: fp12_e4m7 needs .* 32, 64, 128 or 256, .* has {head_dim}; give fp8_e4m3",
    ):
        start(tmp_path, {"kv_cache_dtype": "fp12_e4m7"})
