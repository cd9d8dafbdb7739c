"""`quire doctor`: what is here, what of a model fits, and which flag to change where that is too little.

It starts the engine as `quire serve` does, without CUDA graphs, so that what it says is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import torch

from quire.engine.config import EngineConfig, EngineInfo
from quire.engine.device.memory_profile import RESERVE_BYTES
from quire.engine.models.config import ModelConfig
from quire.engine.models.model_folders import resolve_folders
from quire.engine.models.reading import read_model
from quire.engine.models.stored_weights import keep_by_flags
from quire.engine.parallel.fit import fits
from quire.engine.startup import start_engine
from quire.kernels.backend import triton_backend
from quire.kernels.formats.kv_format import SCALED, UNSCALED
from quire.kernels.gpu import Gpu, gpu_of
from quire.machine import Finding
from quire.service.commands.advice import advise
from quire.service.commands.progress import PhaseBars


def doctor(config: EngineConfig, findings: Iterable[Finding], command: str) -> bool:
    """Print it, and last a verdict: whether `command` starts a server here, which is returned."""
    seen = []
    for finding in findings:
        print(f"{finding.name:<10} {finding.words}")
        seen.append(finding)
    advice = [finding.advice for finding in seen if finding.advice]
    fatal = [finding.advice for finding in seen if finding.fatal]
    if fatal:
        print(f"\nverdict    no server starts here: {'; '.join(fatal)}. Then type: {command}")
        return False
    bars = PhaseBars()
    try:
        _, info = start_engine(msgspec.structs.replace(config, enforce_eager=True), bars.show)
    except (ValueError, torch.OutOfMemoryError) as error:
        bars.stop()
        for sentence in advice:
            print(f"\n{sentence}")
        print(f"\nverdict    no server starts here: {_why(error)}")
        return False
    for name, words in [*describe(info), *_on_gpus(config, info)]:
        print(f"{name:<10} {words}")
    for sentence in [*advice, *advise(info, config)]:
        print(f"\n{sentence}")
    print(f"\nverdict    it runs here. Type: {command}")
    return True


def _why(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"too little memory on the device: {error}; try --dtype bfloat16, a smaller model, --device cpu"
        )
    return str(error)


def _on_gpus(config: EngineConfig, info: EngineInfo) -> list[tuple[str, str]]:
    """Return how the model would fit on other numbers of such GPUs, by its configuration alone."""
    if info.device == "cpu":
        return []
    folders = resolve_folders(config.model, config.lora)
    model = read_model(folders.base, config.model_impl, config.runner, folders.adapter, config.quantization)
    gpu = gpu_of(torch.device("cuda"))
    return on_gpus(folders.base, model, info, config, torch.cuda.mem_get_info()[1], gpu)


def on_gpus(
    folder: Path,
    model: ModelConfig,
    info: EngineInfo,
    config: EngineConfig,
    total: int,
    gpu: Gpu | None = None,
) -> list[tuple[str, str]]:
    """Return a line for each number of GPUs, of `total` bytes each, that divides the model.

    gpu: of which kind; None: one that kernels run on.
    """
    budget = int(total * config.gpu_memory_utilization) - RESERVE_BYTES
    dtype: torch.dtype = getattr(torch, info.dtype)
    held = SCALED.get(info.kv_cache_dtype, UNSCALED[dtype])
    whole_ones = config.enable_expert_parallel
    keep = keep_by_flags(config, folder, model, dtype, triton_backend(gpu))
    return [
        (
            f"on {fit.ranks} GPU{'s' if fit.ranks > 1 else ''}",
            f"weights {_size(fit.weight_bytes)} each, about {fit.tokens:,} tokens of KV cache"
            if fit.tokens
            else f"no: weights would take {_size(fit.weight_bytes)} each",
        )
        for fit in fits(folder, model, dtype.itemsize, held, budget, keep, expert_parallel=whole_ones)
    ]


def describe(info: EngineInfo) -> list[tuple[str, str]]:
    """Return what there is of each thing, by its name."""
    pages = info.capacity.pages
    tokens = info.num_blocks // pages * info.block_size
    at_once = min(info.max_num_seqs, info.num_blocks // info.blocks_for(info.max_request_tokens))
    sequences = min(info.max_num_seqs, info.num_blocks // pages)  # of whole blocks
    each = msgspec.structs.replace(info, num_blocks=info.num_blocks // sequences).max_request_tokens
    block, blocks = _size(info.bytes_per_block), _size(info.num_blocks * info.bytes_per_block)
    beside = f", and {_size(info.expanded_bytes)} to expand a layer" if info.expanded_bytes else ""
    more = " and more of long requests" if info.group_windows else ""
    host = _size(info.num_host_blocks * info.bytes_per_block)
    bits = " and ".join(map(str, info.kept_bits))
    kept_of = "experts" if info.keeps_experts else "layers' products"
    kept = f", and those of {kept_of} in {bits} bits" if bits else ""
    ranks = info.tensor_parallel_size
    beside_it = f", {ranks} of them; memory is what each takes" if ranks > 1 else ""
    return [
        ("model", f"{info.model} ({info.architecture})"),
        *_describe_merged(info),
        ("device", info.device + beside_it),
        ("weights", f"{_size(info.weight_bytes)} in {info.dtype}{kept}"),
        ("KV block", f"{info.block_size} tokens, {block} in {info.kv_cache_dtype}"),
        *_describe_latents(info),
        *_describe_indexer(info),
        ("KV cache", f"{info.num_blocks:,} blocks, {tokens:,} tokens{more}, {blocks}{beside}"),
        *_describe_groups(info),
        ("host", f"{info.num_host_blocks:,} blocks, {host}"),
        ("a request", f"at most {info.max_request_tokens:,} tokens, prompt and output"),
        ("at once", f"{at_once:,} of those, or {sequences:,} sequences of {each:,} tokens each"),
        ("a step", f"at most {info.max_num_batched_tokens:,} tokens"),
    ]


def _describe_merged(info: EngineInfo) -> Iterator[tuple[str, str]]:
    if info.merged is not None:
        adapter, base = info.merged
        yield "adapter", f"{adapter} is merged into the weights of {base}"


def _describe_latents(info: EngineInfo) -> Iterator[tuple[str, str]]:
    if info.latent_width:
        numbers = f"{info.latent_width} numbers a token and layer"
        yield "latents", f"{numbers}, in place of keys and values of each head"


def _describe_indexer(info: EngineInfo) -> Iterator[tuple[str, str]]:
    if info.chosen_tokens:
        numbers = f"by {info.index_width} numbers more a token and layer"
        yield "an indexer", f"chooses {info.chosen_tokens:,} tokens to attend to, {numbers}"


def _describe_groups(info: EngineInfo) -> Iterator[tuple[str, str]]:
    """Yield what layers of each kind take of the longest request, where they are kept apart."""
    tokens, whole = info.max_request_tokens, -(-info.max_request_tokens // info.block_size)
    layers: dict[tuple[int, bool], list[int]] = {}
    windows = (*[0] * info.keeps_all, *info.group_windows) if info.group_windows else ()
    with_states = [at >= len(windows) - info.state_groups for at in range(len(windows))]
    for window, states, count in zip(windows, with_states, info.group_layers, strict=bool(windows)):
        layers.setdefault((0 if window >= info.max_model_len else window, states), []).append(count)
    for (window, states), counts in layers.items():
        blocks = min(whole, -(-window // info.block_size) + 1) if window else whole
        kept = f"the last {window:,} tokens" if window else "all tokens"
        kept = "states" if states else kept
        total = blocks * len(counts)
        size = _size(total * info.bytes_per_block)
        yield (
            "KV group" + "s" * (len(counts) > 1),
            f"{sum(counts)} layers keep {kept}: {total:,} blocks, {size}, of {tokens:,} tokens",
        )


def _size(num_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes / 1024:.0f} KiB"
