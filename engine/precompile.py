"""All kinds of steps gone through without computing, so that their kernels are compiled side by side.

Of a native decoder that is done without weights, while those are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from quire.engine.device.kv_cache import KVCache, dequantized_dtype
from quire.engine.device.limits import Limits
from quire.engine.device.runner import ModelRunner
from quire.engine.dummy_steps import rare_steps
from quire.engine.models.config import ModelConfig
from quire.engine.models.kept_weights import of_layers
from quire.engine.models.layers import NONE_KEPT, layer_shapes
from quire.engine.models.loader import build_model
from quire.engine.models.weights import Weights
from quire.kernels.backend import Backend
from quire.kernels.compiling import ZerosForNothing, only_compiled
from quire.kernels.formats.kv_format import KVFormat
from quire.kernels.gpu import gpu_of
from quire.kernels.linear.hopper_matmul import launch_each
from quire.kernels.parallel.ranks import Ranks
from quire.kernels.quantised.weight import WeightFormat


def precompile(
    config: ModelConfig,
    backend: Backend,
    limits: Limits,
    block_size: int,
    kv_format: KVFormat,
    device: torch.device,
    dtype: torch.dtype,
    ranks: Ranks | None = None,
    kept: Mapping[str, WeightFormat] = NONE_KEPT,
) -> None:
    """Ask for the kernels of all steps that a start runs; within `compiling_beside` other threads compile.

    By a layer of each kind, and the last one: it takes a second, and memory that is free again afterwards.
    `config` is that of one of the `ranks`. kept: weights that stay in few bits.
    """
    kinds = {shape: layer for layer, shape in enumerate(layer_shapes(config, dtype, kept))}
    layers = [*kinds.values(), config.num_layers - 1]
    windows = tuple(config.windows[layer] for layer in layers)
    config = replace(config, num_layers=len(layers), windows=windows)
    weights = Weights(device, dtype, ranks, of_layers(kept, layers))
    model = build_model(config, backend, weights, limits.max_model_len)
    dequantized = dequantized_dtype(config, kv_format, dtype, gpu_of(device), block_size)
    cache = KVCache(config, 1, block_size, kv_format, device, backend.copy_blocks, dequantized)
    runner = ModelRunner(model, backend, cache, limits, device)
    with only_compiled():
        runner.warm_up()
        for step in rare_steps(1, config.vocab_size):
            runner.launch(step).wait()
        launch_each(device, dtype)
    del runner, cache, model
    if device.type == "cuda":
        torch.cuda.empty_cache()


def rehearse(runner: ModelRunner) -> None:
    """Ask for the kernels of a loaded model's steps; within `compiling_beside` other threads compile.

    It is for a model by transformers' code, of which nothing can be built without its weights. Torch's own
    kernels run, and find zeros where those that are only asked for would have written.
    """
    with only_compiled(), ZerosForNothing():
        for step in rare_steps(1, runner.model.config.vocab_size):
            runner.launch(step).wait()
        runner.warm_up()
        launch_each(runner.device, runner.model.embedding.dtype)
