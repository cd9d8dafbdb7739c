"""Measure the KV memory of a long sequence with windows: `python -m quire.loadtest.window_memory`.

Gemma 3 27B's and gpt-oss-20b's configurations, dummy weights, each in a process of its own: the bytes of the
blocks that one sequence holds, at most while its prompt comes in and while it decodes, beside those that it
would hold if all layers kept all tokens. Needs one CUDA device.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from quire.engine.config import EngineConfig
from quire.engine.messages import Request, SamplingParams
from quire.engine.startup import start_engine
from quire.loadtest.command import command_parser, parse_for_cuda, write_json
from quire.loadtest.model_configs import write_model_folder
from quire.loadtest.shape_configs import WINDOWED

TOKENS = 32768  # of the prompt
DECODED = 64


@dataclass(frozen=True, slots=True)
class WindowMemory:
    """Bytes of one sequence's blocks. all_full_bytes: if each layer kept as many tokens as there are."""

    model: str
    tokens: int
    step_tokens: int  # of a chunk of the prompt, at most
    kv_cache_dtype: str
    prefill_bytes: int
    decode_bytes: int
    all_full_bytes: int
    prefill_share: float
    decode_share: float


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--models", default=",".join(WINDOWED), help="some of them, by commas")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of the prompt ({TOKENS})")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="of a chunk (2048)")
    parser.add_argument("--json", type=Path, help="where one JSON object goes")
    arguments = parse_for_cuda(parser)
    found = []
    for name in arguments.models.split(","):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            given = (name, WINDOWED[name], arguments.tokens, arguments.max_num_batched_tokens)
            measured = process.submit(measure, *given).result()
        print(f"{name}, {measured.tokens} tokens in {measured.kv_cache_dtype}:", flush=True)
        for when, size, share in (
            ("while the prompt comes in", measured.prefill_bytes, measured.prefill_share),
            ("while it decodes", measured.decode_bytes, measured.decode_share),
        ):
            print(f"  {when} {size / 2**30:.2f} GiB, {share:.1%} of what all layers would keep", flush=True)
        found.append(asdict(measured))
    write_json(arguments.json, torch.cuda.get_device_name(), {"sequences": found})
    return 0


def measure(name: str, config: dict[str, Any], tokens: int, step_tokens: int) -> WindowMemory:
    """Have one sequence of `tokens` and some more decoded; return what it held."""
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(Path(folder), config)
        core, info = start_engine(
            EngineConfig(
                model=folder,
                load_format="dummy",
                max_model_len=tokens + DECODED,
                max_num_seqs=1,
                max_num_batched_tokens=step_tokens,
                gpu_memory_utilization=0.95,
                enable_prefix_caching=False,
            )
        )
    rng = random.Random(0)
    prompt = [rng.randrange(2, info.vocab_size) for _ in range(tokens)]
    params = SamplingParams(temperature=0.0, max_tokens=DECODED, ignore_eos=True)
    core.add(Request(0, prompt, params))
    held: dict[bool, int] = {True: 0, False: 0}  # blocks at most, by whether there are prompt tokens
    while core.has_work:
        core.step()
        if core.plan is not None and core.stats.active_blocks:
            fills = len(core.plan.prefill_tokens) > 0
            held[fills] = max(held[fills], core.stats.active_blocks)
    layer_bytes = info.bytes_per_block // max(info.group_layers)
    blocks = -(-(tokens + DECODED) // info.block_size)
    whole = blocks * layer_bytes * sum(info.group_layers)
    prefill, decode = (held[fills] * info.bytes_per_block for fills in (True, False))
    return WindowMemory(
        name,
        tokens,
        step_tokens,
        info.kv_cache_dtype,
        prefill,
        decode,
        whole,
        round(prefill / whole, 4),
        round(decode / whole, 4),
    )


if __name__ == "__main__":
    sys.exit(main())
