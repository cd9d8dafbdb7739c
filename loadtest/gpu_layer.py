"""Times a decode step's layers on a CUDA device: `python -m loadtest.gpu_layer [MODEL …] [--json PATH]`.

The model's own forward pass, from the embedding to the last norm, in a CUDA graph: each layer has weights and
cache of its own, as in a step, so that what a kernel does for the next one shows. MODEL is a folder with a
config.json of a Llama or Qwen; its weights are random. The bound is the time in which a layer's weights and
context can be read once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from engine.kv_cache import KVCache
from engine.models.batch import ForwardBatch
from engine.models.config import ModelConfig
from engine.models.loader import Model, load_model
from kernels.backend import Backend, triton_backend
from kernels.decode_reference import DecodeGather
from kernels.decode_splits import DecodeWorkspace
from loadtest.gpu_kernels import COPY_BANDWIDTH
from loadtest.model_configs import write_model_folders
from loadtest.provenance import Provenance

BLOCK_SIZE = 16
MODELS = ("qwen3-0.6b", "llama-8b")
# (rows, tokens of context each)
FEW_ROWS = ((1, 400), (1, 2000), (2, 400), (4, 400), (8, 400), (16, 400))
MANY_ROWS = ((32, 600), (64, 600), (128, 600), (256, 600))
REPLAYS, ROUNDS = 5, 4


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds are a layer's."""

    model: str
    rows: int
    context: int
    microseconds: float
    bound_microseconds: float


def decode_batch(
    rows: int, context: int, block_size: int, workspace: DecodeWorkspace | DecodeGather, device: torch.device
) -> ForwardBatch:
    """`rows` that each decode their `context`-th token, in blocks of their own that lie anywhere."""
    blocks = -(-context // block_size)
    tables = torch.randperm(rows * blocks, device=device).int().view(rows, blocks)
    numbers = torch.arange(rows, dtype=torch.int32, device=device)
    last = context - 1
    return ForwardBatch(
        tokens=numbers,
        positions=torch.full_like(numbers, last),
        slots=tables[:, last // block_size].long() * block_size + last % block_size,
        block_tables=tables,
        decode_rows=numbers,
        decode_context_lens=torch.full_like(numbers, context),
        decode_order=numbers,
        prefill=None,
        workspace=workspace,
    )


def layer_bytes(config: ModelConfig, rows: int, context: int, itemsize: int) -> int:
    """Weights of a layer and what it reads of the rows' cache."""
    return (config.layer_weights + rows * context * 2 * config.num_kv_heads * config.head_dim) * itemsize


def measure(
    name: str, model: Model, config: ModelConfig, backend: Backend, rows: int, context: int
) -> Timing:
    device, dtype = torch.device("cuda"), torch.bfloat16
    workspace = DecodeWorkspace.allocate(rows, config.num_heads, config.head_dim, device)
    batch = decode_batch(rows, context, BLOCK_SIZE, workspace, device)
    cache = KVCache(config, batch.block_tables.numel(), BLOCK_SIZE, dtype, device, backend.copy_blocks)
    for layer in cache.layers:
        layer.kv.normal_(std=0.1)
    seconds = _graph_seconds(lambda: model.forward(batch, cache.layers))
    bound = layer_bytes(config, rows, context, dtype.itemsize) / COPY_BANDWIDTH
    return Timing(name, rows, context, seconds / config.num_layers * 1e6, bound * 1e6)


def _graph_seconds(run: Callable[[], object]) -> float:
    """Of one run, the least of a few rounds."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    rounds = []
    for _ in range(ROUNDS):
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        rounds.append(start.elapsed_time(end) / 1e3 / REPLAYS)
    return min(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL", help="default: " + ", ".join(MODELS))
    parser.add_argument("--json", help="also write the timings to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures GPU kernels, and torch sees no CUDA device")
    backend = triton_backend()
    timings = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
    print(f"{'model':16}{'rows':>6}{'context':>9}{'µs a layer':>12}{'bound':>9}{'reached':>9}")
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        write_model_folders(Path(folder))
        for path in arguments.models or [Path(folder, name) for name in MODELS]:
            config = ModelConfig.from_folder(path)
            longest = max(context for _, context in FEW_ROWS + MANY_ROWS)
            model, _ = load_model(
                path,
                config,
                backend,
                device="cuda",
                dtype=torch.bfloat16,
                max_model_len=longest,
                load_format="dummy",
            )
            for rows, context in FEW_ROWS + MANY_ROWS:
                timing = measure(path.name, model, config, backend, rows, context)
                timings.append(timing)
                print(
                    f"{timing.model:16}{rows:6}{context:9}{timing.microseconds:12.2f}"
                    f"{timing.bound_microseconds:9.2f}{timing.bound_microseconds / timing.microseconds:9.0%}",
                    flush=True,
                )
            del model
    if arguments.json:
        head = {"device": torch.cuda.get_device_name(), **asdict(Provenance.here())}
        Path(arguments.json).write_text(
            json.dumps({**head, "timings": [asdict(timing) for timing in timings]}, indent=1),
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
