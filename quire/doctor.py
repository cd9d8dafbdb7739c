"""`quire doctor`: what is here, what of a model fits, and which flag to change where that is too little.

It starts the engine as `quire serve` does, without CUDA graphs, so that what it says is measured.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import torch

from quire.engine.config import EngineConfig, EngineInfo
from quire.engine.startup import start_engine
from quire.machine import Finding
from quire.service.commands.advice import advise
from quire.service.commands.progress import PhaseBars


def doctor(config: EngineConfig, findings: Iterable[Finding], command: str) -> bool:
    """Print it, and last a verdict: whether `command` starts a server here, which is returned.

    Raises ValueError, with the numbers and the flag to change, when the model does not fit.
    """
    seen = []
    for finding in findings:
        print(f"{finding.name:<10} {finding.words}")
        seen.append(finding)
    advice = [finding.advice for finding in seen if finding.advice]
    fatal = [finding.advice for finding in seen if finding.fatal]
    if fatal:
        print(f"\nverdict    no server starts here: {'; '.join(fatal)}. Then type: {command}")
        return False
    try:
        _, info = start_engine(msgspec.structs.replace(config, enforce_eager=True), PhaseBars().show)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"too little memory on the device: {error}; try --dtype bfloat16, a smaller model, --device cpu"
        ) from None
    for name, words in describe(info):
        print(f"{name:<10} {words}")
    for sentence in [*advice, *advise(info, config)]:
        print(f"\n{sentence}")
    print(f"\nverdict    it runs here. Type: {command}")
    return True


def describe(info: EngineInfo) -> list[tuple[str, str]]:
    """Return what there is of each thing, by its name."""
    tokens = info.num_blocks * info.block_size
    longest = -(-info.max_request_tokens // info.block_size)
    at_once = min(info.max_num_seqs, info.num_blocks // longest)
    sequences = min(info.max_num_seqs, info.num_blocks)  # of whole blocks
    each = min(info.num_blocks // sequences * info.block_size, info.max_request_tokens)
    block, blocks = _size(info.bytes_per_block), _size(info.num_blocks * info.bytes_per_block)
    beside = f", and {_size(info.expanded_bytes)} to expand a layer" if info.expanded_bytes else ""
    host = _size(info.num_host_blocks * info.bytes_per_block)
    return [
        ("model", f"{info.model} ({info.architecture})"),
        ("device", info.device),
        ("weights", f"{_size(info.weight_bytes)} in {info.dtype}"),
        ("KV block", f"{info.block_size} tokens, {block} in {info.kv_cache_dtype}"),
        ("KV cache", f"{info.num_blocks:,} blocks, {tokens:,} tokens, {blocks}{beside}"),
        ("host", f"{info.num_host_blocks:,} blocks, {host}"),
        ("a request", f"at most {info.max_request_tokens:,} tokens, prompt and output"),
        ("at once", f"{at_once:,} of those, or {sequences:,} sequences of {each:,} tokens each"),
        ("a step", f"at most {info.max_num_batched_tokens:,} tokens"),
    ]


def _size(num_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes / 1024:.0f} KiB"
