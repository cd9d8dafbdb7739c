"""The steps whose layers are timed: rows in blocks of their own, and the bytes they have to read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.engine.device.kv_cache import KVCache
from quire.engine.models.loader import load_model
from quire.engine.models.native_config import read_native
from quire.kernels.attention.gather import DecodeGather
from quire.kernels.backend import torch_backend
from quire.kernels.formats.kv_format import FP32
from quire.loadtest.gpu_layer import BLOCK_SIZE, LONG_TAILED, LONGEST, contexts_of, decode_batch, layer_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize("contexts", [[1] * 3, [BLOCK_SIZE] * 3, [2 * BLOCK_SIZE + 3, BLOCK_SIZE + 1, 2]])
def test_each_row_writes_its_newest_token_where_nobody_else_does(
    model_folder: Callable[[str], Path], contexts: list[int]
) -> None:
    folder, backend = model_folder("qwen3"), torch_backend()
    config = read_native(folder)
    model, _ = load_model(folder, config, backend, device=CPU, dtype=torch.float32, max_model_len=64)
    batch = decode_batch(contexts, BLOCK_SIZE, DecodeGather(), CPU)
    named = [
        block
        for table, context in zip(batch.decode.block_tables.tolist(), contexts, strict=True)
        for block in table[: -(-context // BLOCK_SIZE)]
    ]
    blocks = len(named)
    cache = KVCache(config, blocks, BLOCK_SIZE, FP32, CPU, backend.copy_blocks)
    cache.blocks.zero_()
    with torch.inference_mode():
        hidden = model.forward(batch, cache.layers)
    assert hidden.shape == (len(contexts), config.hidden_size) and hidden.isfinite().all()
    assert sorted(named) == list(range(blocks))
    assert batch.decode.block_tables.shape[1] * BLOCK_SIZE == LONGEST  # as a server's tables, so as it plans
    for layer in cache.layers:
        written = layer.kv.abs().sum((1, 2, 4)).flatten().nonzero().flatten()
        assert sorted(batch.slots.tolist()) == written.tolist()


@pytest.mark.parametrize("name", ["qwen3", "llama-tied-linear"])
def test_a_layers_bytes_are_its_weights_and_its_rows_cache(
    model_folder: Callable[[str], Path], name: str
) -> None:
    folder = model_folder(name)
    config = read_native(folder)
    _, total = load_model(folder, config, torch_backend(), device=CPU, dtype=torch.float32, max_model_len=64)
    matrices = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size
    layers = total // 4 - matrices
    vectors = 2 * config.hidden_size + (2 * config.head_dim if config.qk_norm else 0)  # norms
    vectors += (config.num_heads + 2 * config.num_kv_heads) * config.head_dim if config.qkv_bias else 0
    own = layer_bytes(config, 0, 4) // 4
    assert layers == config.num_layers * (own + vectors) + config.hidden_size
    token = 2 * config.num_kv_heads * config.head_dim
    assert layer_bytes(config, 35, 2) == (own + 35 * token) * 2


def test_long_tailed_contexts_fall_and_have_their_mean() -> None:
    for rows, mean in LONG_TAILED:
        contexts = contexts_of(rows, mean, "long-tailed")
        assert contexts == sorted(contexts, reverse=True) and len(contexts) == rows
        assert sum(contexts) == pytest.approx(rows * mean, rel=0.05)
        assert 3 * mean < contexts[0] <= LONGEST and 1 <= contexts[-1] < mean / 4
        assert contexts_of(rows, mean, "equal") == [mean] * rows
