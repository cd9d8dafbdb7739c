"""Times a decode step's layers on a CUDA device.

`python -m quire.loadtest.gpu_layer [MODEL …] [--json PATH]`

The model's own forward pass, from the embedding to the last norm, in a CUDA graph: each layer has weights and
cache of its own, as in a step, so that what a kernel does for the next one shows. MODEL is a folder with a
config.json of a Llama or Qwen; its weights are random. The bound is the time in which a layer's weights and
context can be read once. Contexts are equal, or `long-tailed`: of a mean, but the longest several times it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Literal

import torch

from quire.engine.device.kv_cache import KVCache
from quire.engine.models.config import ModelConfig
from quire.engine.models.loader import Model, load_model
from quire.engine.models.native_config import read_native
from quire.kernels.attention.batch import DecodeBatch, ForwardBatch
from quire.kernels.attention.gather import DecodeGather
from quire.kernels.attention.splits import DecodeWorkspace
from quire.kernels.backend import Backend, triton_backend
from quire.kernels.formats.kv_format import BF16, KVFormat
from quire.loadtest.command import command_parser, parse_for_cuda, write_json
from quire.loadtest.device_time import capture, replay_seconds
from quire.loadtest.gpu_kernels import COPY_BANDWIDTH
from quire.loadtest.model_configs import write_model_folders

BLOCK_SIZE = 16
MODELS = ("qwen3-0.6b", "llama-8b")
# (rows, tokens of context each)
FEW_ROWS = ((1, 400), (1, 2000), (2, 400), (4, 400), (8, 400), (16, 400))
MANY_ROWS = ((32, 600), (64, 600), (128, 600), (256, 600), (256, 1100))
LONG_TAILED = ((24, 450), (32, 450), (48, 450), (64, 450), (128, 450), (256, 450))
TAIL = 0.9  # deviation of a context's logarithm
LONGEST = 2048  # context
REPLAYS, ROUNDS = 5, 4


Spread = Literal["equal", "long-tailed"]


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds are a layer's, `context` is the rows' mean, but for what LONGEST cuts of some."""

    model: str
    rows: int
    context: int
    spread: Spread
    microseconds: float
    bound_microseconds: float


def contexts_of(rows: int, mean: int, spread: Spread) -> list[int]:
    """Return falling context lengths; long-tailed ones are log-normal, at equal steps of probability, cut."""
    if spread == "equal":
        return [mean] * rows
    normal = NormalDist(sigma=TAIL)
    drawn = [math.exp(normal.inv_cdf((rank + 0.5) / rows)) for rank in reversed(range(rows))]
    return [max(min(round(length * mean * rows / sum(drawn)), LONGEST), 1) for length in drawn]


def decode_batch(
    contexts: Sequence[int],
    block_size: int,
    workspace: DecodeWorkspace | DecodeGather,
    device: torch.device,
) -> ForwardBatch:
    """Return rows that decode the last token of each of `contexts`, in blocks of their own that lie anywhere.

    `contexts` fall. Block tables have room for LONGEST, as a server's have for the longest sequence: into how
    many splits decode attention divides a row is planned by that.
    """
    rows = len(contexts)
    counts = [-(-context // block_size) for context in contexts]
    blocks = torch.randperm(sum(counts), device=device).int().split(counts)
    tables = torch.zeros(rows, max(counts[0], LONGEST // block_size), dtype=torch.int32, device=device)
    for table, own in zip(tables, blocks, strict=True):
        table[: len(own)] = own
    numbers = torch.arange(rows, dtype=torch.int32, device=device)
    context_lens = torch.tensor(contexts, dtype=torch.int32, device=device)
    last = context_lens - 1
    written = tables[numbers.long(), (last // block_size).long()]
    return ForwardBatch(
        tokens=numbers,
        positions=last,
        slots=written.long() * block_size + last % block_size,
        decode=DecodeBatch(tables, numbers, context_lens, numbers, workspace),
    )


def layer_bytes(config: ModelConfig, cached_tokens: int, itemsize: int) -> int:
    """Return the bytes of a layer's weights and of what it reads of the cache."""
    return (config.layer_weights + cached_tokens * 2 * config.num_kv_heads * config.head_dim) * itemsize


def measure(
    name: str,
    model: Model,
    config: ModelConfig,
    backend: Backend,
    rows: int,
    context: int,
    spread: Spread,
    held: KVFormat = BF16,
) -> Timing:
    """Time one step's layers with `rows` that decode, and a cache of what is random in the format `held`."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    workspace = DecodeWorkspace.allocate(rows, config.num_heads, config.head_dim, device)
    contexts = contexts_of(rows, context, spread)
    batch = decode_batch(contexts, BLOCK_SIZE, workspace, device)
    blocks = int(batch.decode.block_tables.max()) + 1
    cache = KVCache(config, blocks, BLOCK_SIZE, held, device, backend.copy_blocks)
    cache.blocks.random_(0, 64)  # bytes of small numbers and scales, of any format
    seconds = graph_seconds(lambda: model.forward(batch, cache.layers))
    bound = layer_bytes(config, sum(contexts), dtype.itemsize) / COPY_BANDWIDTH
    return Timing(name, rows, context, spread, seconds / config.num_layers * 1e6, bound * 1e6)


def graph_seconds(run: Callable[[], object]) -> float:
    """Return what one run takes in a CUDA graph, the least of a few rounds."""
    return min(replay_seconds(capture([run]), ROUNDS, REPLAYS))


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL", help="default: " + ", ".join(MODELS))
    parser.add_argument("--json", type=Path, help="also write the timings to this file")
    arguments = parse_for_cuda(parser)
    backend = triton_backend()
    timings = []
    cases: list[tuple[int, int, Spread]] = [(*case, "equal") for case in FEW_ROWS + MANY_ROWS]
    cases += [(*case, "long-tailed") for case in LONG_TAILED]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
    print(f"{'model':16}{'rows':>6}{'context':>9}  {'spread':12}{'µs a layer':>12}{'bound':>9}{'reached':>9}")
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        write_model_folders(Path(folder))
        for path in arguments.models or [Path(folder, name) for name in MODELS]:
            config = read_native(path)
            model, _ = load_model(
                path,
                config,
                backend,
                device="cuda",
                dtype=torch.bfloat16,
                max_model_len=LONGEST,
                load_format="dummy",
            )
            for case in cases:
                timing = measure(path.name, model, config, backend, *case)
                timings.append(timing)
                print(
                    f"{timing.model:16}{timing.rows:6}{timing.context:9}  {timing.spread:12}"
                    f"{timing.microseconds:12.2f}"
                    f"{timing.bound_microseconds:9.2f}{timing.bound_microseconds / timing.microseconds:9.0%}",
                    flush=True,
                )
            del model
    timed = {"timings": [asdict(timing) for timing in timings]}
    write_json(arguments.json, torch.cuda.get_device_name(), timed)


if __name__ == "__main__":
    main()
