"""Measure how long a folder takes to load, beside reading its files: `python -m quire.loadtest.loading_time`.

The weights are random and saved as a download would be, in shards; the files are read before, so that they
are in the page cache. Prints of each model the seconds of a read into memory, those of a load by the native
decoder and by transformers' code, and their ratio to the read. On a CUDA device if there is one.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from quire.engine.config import ModelImpl
from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.kernels.backend import torch_backend, triton_backend
from quire.kernels.gpu import gpu_of
from quire.loadtest.command import command_parser, write_json
from quire.loadtest.model_configs import write_model_folders

MODELS = "llama-8b"
PATHS: tuple[ModelImpl, ...] = ("native", "transformers")
SHARD = "5GB"
PIECE = 16 << 20  # bytes of a read
MAX_LEN = 512


def save_random(folder: Path) -> None:
    """Save weights for the folder's config.json, drawn once and repeated."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    drawn = torch.randn(1 << 20).mul_(0.02).bfloat16()

    def filled(weight: Tensor) -> Tensor:
        return drawn.repeat(-(-weight.numel() // len(drawn)))[: weight.numel()].view(weight.shape)

    model.save_pretrained(
        folder,
        state_dict={name: filled(each) for name, each in model.state_dict().items()},
        max_shard_size=SHARD,
    )


def read_seconds(folder: Path) -> float:
    """Read all weight files into one piece of memory after the other; return how long that takes."""
    memory = bytearray(PIECE)
    begin = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(memory):
                pass
    return time.perf_counter() - begin


def load_seconds(folder: Path, path: ModelImpl, device: torch.device) -> float:
    config = read_model(folder, path)
    backend = triton_backend() if device.type == "cuda" else torch_backend()
    begin = time.perf_counter()
    load_model(folder, config, backend, device=device, dtype=torch.bfloat16, max_model_len=MAX_LEN)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--models", default=MODELS, help=f"of quire.loadtest.model_configs ({MODELS})")
    parser.add_argument("--runs", type=int, default=3, help="the median run counts (3)")
    parser.add_argument("--json", type=Path, help="where one JSON object goes")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures: dict[str, object] = {}
    for model in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as name:
            write_model_folders(Path(name))
            folder = Path(name) / model
            save_random(folder)
            read_seconds(folder)
            runs = range(arguments.runs)
            seconds = {"read": statistics.median(read_seconds(folder) for _ in runs)}
            for path in PATHS:
                seconds[path] = statistics.median(load_seconds(folder, path, device) for _ in runs)
            size = sum(each.stat().st_size for each in folder.glob("*.safetensors"))
        ratios = {path: round(seconds[path] / seconds["read"], 2) for path in PATHS}
        figures[model] = {
            "bytes": size,
            "seconds": {path: round(each, 3) for path, each in seconds.items()},
            "of_the_read": ratios,
        }
        print(model, json.dumps(figures[model]), flush=True)
    write_json(arguments.json, gpu_of(device).name, {"models": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
