"""Fig. 19a: a sequence out to host memory and in again, by block size, against prefilling it once more."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from quire.engine.device.kv_cache import KVCache
from quire.engine.device.runner import ModelRunner
from quire.loadtest.device_time import host_seconds
from quire.loadtest.evaluation.real.steps import step_plan, table_plan

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = 1024
ROUNDS = 2


class TransferTime(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds for `tokens` tokens: out and in again with one copy a block, with one copy for each
    layer's keys and one for its values, as in the paper, and a prefill."""

    tokens: int
    block_size: int
    whole_blocks: float
    layer_by_layer: float
    recompute: float


def measure_transfers(runner: ModelRunner) -> list[TransferTime]:
    recompute = _prefill_seconds(runner, TOKENS)
    times = []
    for size in SIZES:
        whole, pieces = _swap_seconds(runner, size, TOKENS)
        times.append(
            TransferTime(
                tokens=TOKENS,
                block_size=size,
                whole_blocks=1e3 * whole,
                layer_by_layer=1e3 * pieces,
                recompute=1e3 * recompute,
            )
        )
    return times


def _swap_seconds(runner: ModelRunner, size: int, tokens: int) -> tuple[float, float]:
    """Time a swap through the engine's own cache, and one piece by piece."""
    config, device = runner.model.config, runner.device
    count = -(-tokens // size)
    held = runner.cache.layers[0].format
    cache = KVCache(config, count, size, held, device, runner.backend.copy_blocks)
    cache.add_host_tier(count)
    assert cache.host is not None
    # Keys and values of each layer by themselves are so many pieces, one after the other.
    host, blocks = (tensor.view(count * config.num_layers * 2, -1) for tensor in (cache.host, cache.blocks))
    order = np.random.default_rng(0).permutation(count).astype(np.int32)
    pairs = np.stack([order, np.arange(count, dtype=np.int32)], axis=1)
    nothing = pairs[:0]

    def whole() -> None:
        cache.swap(pairs, nothing)
        cache.swap(nothing, pairs[:, ::-1])

    def pieces() -> None:
        for there, here in ((host, blocks), (blocks, host)):
            for into, source in zip(there, here, strict=True):
                into.copy_(source, non_blocking=True)

    return host_seconds(whole, device, ROUNDS), host_seconds(pieces, device, ROUNDS)


def _prefill_seconds(runner: ModelRunner, tokens: int) -> float:
    runner.launch(table_plan(1, -(-tokens // runner.cache.block_size))).wait()
    plan = step_plan([(tokens, tokens)])
    return host_seconds(lambda: runner.launch(plan).wait(), torch.device("cpu"))
