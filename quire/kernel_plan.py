"""`quire doctor --plan`: the kernels that compute a model's layers on a GPU, which need not be there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from enum import Enum
from typing import Any

import torch

from quire.engine.config import BLOCK_SIZE, EngineConfig
from quire.engine.device.kv_cache import named_format
from quire.engine.models.config import ModelConfig
from quire.engine.models.hub import TOKENIZER_FILES
from quire.engine.models.kept_weights import Kept
from quire.engine.models.layers import layer_shapes
from quire.engine.models.model_folders import resolve_folders
from quire.engine.models.reading import read_model
from quire.engine.models.stored_weights import keep_by_flags
from quire.kernels.backend import torch_backend, triton_backend
from quire.kernels.formats.kv_format import KVFormat
from quire.kernels.gpu import KNOWN, Gpu, gpu_of
from quire.kernels.linear.hopper_stream import Tiling
from quire.kernels.plan import plan_attention, plan_layer
from quire.kernels.quantised.stream import Tiling as QuantisedTiling
from quire.kernels.recipes import Chosen
from quire.kernels.shapes import LayerShape, StepShape

ROWS = (1, 2, 8, 16, 32, 64, 256)  # of steps of decodes
CHUNKS = ((1, 16), (1, 512), (4, 2048), (16, 8192))  # and tokens in all, of steps with chunks of prompts


def print_plan(config: EngineConfig, gpu_name: str | None) -> None:
    """Print what each operation is computed by, a step after the other; of this machine without a name."""
    device = torch.device("cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu")
    gpu = gpu_of(device) if gpu_name is None else KNOWN[gpu_name]
    folders = resolve_folders(config.model, config.lora, lambda done, total: None, TOKENIZER_FILES)
    model = read_model(folders.base, "native", config.runner, folders.adapter, config.quantization)
    model.refuse_longer(config.max_model_len or 0)
    name = config.dtype
    if name == "auto":
        name = model.dtype if gpu.has_kernels else "float32"
    dtype: torch.dtype = getattr(torch, name)
    held = named_format(config.kv_cache_dtype, model, dtype, gpu)
    print(f"{config.model} on {gpu.name}, in {name}, KV cache in {held.name}")
    backend = triton_backend(gpu) if gpu.has_kernels else torch_backend()
    keep = keep_by_flags(config, folders.base, model, dtype, backend)
    for line in plan_lines(model, dtype, held, gpu, config, keep(model)):
        print(line)


def plan_lines(
    model: ModelConfig, dtype: torch.dtype, held: KVFormat, gpu: Gpu, config: EngineConfig, kept: Kept
) -> Iterator[str]:
    """Yield a header for each step, and a line for each operation of each kind of layer."""
    shapes = layer_shapes(model, dtype, kept.formats)
    kinds = list(dict.fromkeys(shapes))
    for title, step in steps(config, config.max_model_len or model.longest):
        yield f"\n{title}"
        for layer in kinds:
            if len(kinds) > 1:
                yield f" layers of {layer.cache.window or 'all'} keys{_kept(layer)}"
            for operation, name in operations(gpu, layer, held, step):
                yield f"  {operation:<12} {name}"
        if step.chunks is not None:
            last = replace(step, newest=step.decodes + step.chunks)
            yield " the last layer, past its keys and values of newest tokens only"
            for operation, name in operations(gpu, shapes[-1], held, last):
                yield f"  {operation:<12} {name}"


def _kept(layer: LayerShape) -> str:
    """Say which products of a layer are by weights in few bits."""
    matrices = {"qkv": layer.qkv, "output": layer.output, "up": layer.up, "down": layer.down}
    kept = [name for name, matrix in matrices.items() if matrix is not None and matrix.format != "dense"]
    return f", in few bits: {', '.join(kept)}" if kept else ""


def steps(config: EngineConfig, longest: int) -> Iterator[tuple[str, StepShape]]:
    """Yield steps of decodes, of rows that share prefixes, and with chunks of prompts."""
    size = config.block_size or BLOCK_SIZE
    room = -(-longest // size) * size

    def decodes(rows: int, *, shared: bool = False) -> StepShape:
        return StepShape(rows, rows, None, 0, None, shared, size, room)

    rows = [count for count in ROWS if count <= config.max_num_seqs]
    for count in rows:
        yield f"{count} decodes" if count > 1 else "1 decode", decodes(count)
    yield f"{rows[-1]} decodes that share prefixes", decodes(rows[-1], shared=True)
    for chunks, tokens in CHUNKS:
        yield (
            f"{tokens} prompt tokens, {chunks} rows",
            StepShape(tokens, 0, chunks, tokens // chunks, None, False, size, room),
        )
    chunks, tokens = CHUNKS[1]
    yield (
        f"{rows[-1]} decodes and {tokens} prompt tokens",
        StepShape(rows[-1] + tokens, rows[-1], chunks, tokens, None, False, size, room),
    )


def operations(gpu: Gpu, layer: LayerShape, held: KVFormat, step: StepShape) -> list[tuple[str, str]]:
    """Return each operation's name, and its recipe's with what that was made with."""
    if not layer.gated:
        return [
            ("attend", described(plan_attention(gpu, layer, held, step))),
            ("the others", "torch, a product, a norm and an activation at a time"),
        ]
    ops = plan_layer(gpu, layer, held, step)
    assert ops.gate is not None and ops.down is not None
    return [
        ("project in", described(ops.project_in)),
        ("attend", described(ops.attend)),
        ("project out", described(ops.project_out)),
        ("gate", described(ops.gate)),
        ("down", described(ops.down)),
    ]


def described(chosen: Chosen[Any]) -> str:
    """Return a recipe's name, and the kernels, splits or tiles that it was made with."""
    made: dict[str, Any] = getattr(chosen.run, "keywords", {})
    words = []
    for name, value in made.items():
        if isinstance(value, Enum):
            words.append(f"{name.removesuffix('_by')}: {value.value}")
        elif isinstance(value, (Tiling, QuantisedTiling)):
            words.append(", ".join(f"{key} {count}" for key, count in asdict(value).items()))
        elif isinstance(value, int):
            words.append(f"{name}: {value}")
    return f"{chosen.name} ({'; '.join(words)})" if words else chosen.name
