"""Time decode steps of transformers' models with kernels in place of their modules, and without.

`python -m quire.loadtest.gpu_fusion [--models …] [--rows …] [--json FILE]`

Of each model, with random weights in bf16, a step's forward pass in a CUDA graph: with what is fused of it,
whole layers or modules of each, and by transformers' own modules, whose attention is over the paged cache all
the same. By default models with layer norms and MLPs without a gate. Prints milliseconds, and how far the
last hidden states are apart, relative to their size. Needs one CUDA device.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from quire.engine.device.kv_cache import KVCache
from quire.engine.models.config import ModelConfig
from quire.engine.models.general.model import GeneralModel
from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.kernels.attention.splits import DecodeWorkspace
from quire.kernels.backend import Backend, triton_backend
from quire.kernels.formats.kv_format import UNSCALED
from quire.loadtest.command import command_parser, parse_for_cuda, write_json
from quire.loadtest.gpu_layer import decode_batch, graph_seconds
from quire.loadtest.model_configs import write_model_folder
from quire.loadtest.shape_configs import DENSE, UNGATED

CONFIGS = {**DENSE, **UNGATED}
ROWS = "1,8,64,256"
CONTEXT = 512  # tokens of each row
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Timing:
    """A step by both. fused: whole `layers`, or `modules` one by one; apart: of the last hidden states."""

    model: str
    fused: str
    rows: int
    modules_ms: float
    fused_ms: float
    apart: float


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--models", default=",".join(UNGATED), help=f"of {', '.join(CONFIGS)}")
    parser.add_argument("--rows", default=ROWS, help=f"sequences that decode at once ({ROWS})")
    parser.add_argument("--json", type=Path, help="where one JSON object goes, anew after each model")
    arguments = parse_for_cuda(parser)
    rows = [int(number) for number in arguments.rows.split(",")]
    timings: list[Timing] = []
    for name in arguments.models.split(","):
        found = compare(name, CONFIGS[name], rows, triton_backend(), torch.device("cuda"), torch.bfloat16)
        for each in found:
            print(
                f"{name:20} {each.rows:4} rows {each.modules_ms:8.3f} ms by its own modules, "
                f"{each.fused_ms:8.3f} with {each.fused} fused, {each.apart:.4f} apart",
                flush=True,
            )
        timings += found
        figures = {"timings": [asdict(each) for each in timings]}
        write_json(arguments.json, torch.cuda.get_device_name(), figures)
        gc.collect()
        torch.cuda.empty_cache()
    return 0


def compare(
    name: str,
    config: dict[str, Any],
    rows: Sequence[int],
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Timing]:
    """Time steps of so many rows each, with what is fused of the model and then without."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        write_model_folder(Path(folder), config)
        shape = read_model(Path(folder), "transformers")
        model, _ = load_model(
            folder, shape, backend, device=device, dtype=dtype, max_model_len=CONTEXT, load_format="dummy"
        )
        assert isinstance(model, GeneralModel)
        fused = "layers" if model.fusion.decoder is not None else "modules"
        quick = [_step(model, shape, backend, count, device, dtype) for count in rows]
        model.fusion.undo()
        own = [_step(model, shape, backend, count, device, dtype) for count in rows]
    return [
        Timing(
            name,
            fused,
            count,
            round(1e3 * own_seconds, 3),
            round(1e3 * seconds, 3),
            round(((hidden - own_hidden).norm() / own_hidden.norm()).item(), 5),
        )
        for count, (seconds, hidden), (own_seconds, own_hidden) in zip(rows, quick, own, strict=True)
    ]


def _step(
    model: GeneralModel,
    shape: ModelConfig,
    backend: Backend,
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[float, torch.Tensor]:
    """Return a step's seconds, and its hidden states over a cache that is the same for as many rows."""
    torch.manual_seed(0)
    workspace = DecodeWorkspace.allocate(rows, shape.num_heads, shape.attended_dim, device)
    batch = decode_batch([CONTEXT] * rows, BLOCK_SIZE, workspace, device)
    blocks = int(batch.decode.block_tables.max()) + 1
    cache = KVCache(shape, blocks, BLOCK_SIZE, UNSCALED[dtype], device, backend.copy_blocks)
    for layer in cache.layers:
        layer.kv.normal_(std=0.1)
    hidden = model.forward(batch, cache.layers).float()
    return graph_seconds(lambda: model.forward(batch, cache.layers)), hidden


if __name__ == "__main__":
    sys.exit(main())
