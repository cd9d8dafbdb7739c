"""A rank's part of an engine: kernels, weights, KV memory, warm-up."""

from __future__ import annotations

import logging
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from quire.engine.allocation import refused_where_too_large
from quire.engine.config import BLOCK_SIZE, EngineConfig
from quire.engine.device.block_size import in_blocks
from quire.engine.device.choice import choose_dtype, default_batched_tokens, memory_of
from quire.engine.device.graph_recorder import Recorder
from quire.engine.device.kv_cache import (
    KVCache,
    bytes_per_block,
    dequantized_bytes_per_block,
    dequantized_dtype,
    named_format,
)
from quire.engine.device.limits import Limits, staging_words
from quire.engine.device.memory_profile import choose_blocks, refuse_too_large
from quire.engine.device.runner import ModelRunner
from quire.engine.device.streams import CudaQueue
from quire.engine.dummy_steps import rare_steps
from quire.engine.models.config import ModelConfig
from quire.engine.models.generation_config import SamplingDefaults, read_sampling_defaults
from quire.engine.models.hub import TOKENIZER_FILES, describes_itself
from quire.engine.models.kept_weights import Keep
from quire.engine.models.loader import Model, load_model
from quire.engine.models.model_folders import ModelFolders, resolve_folders
from quire.engine.models.pooling import Pooling
from quire.engine.models.projection_weights import ProjectionWeights, draw_projections, load_projections
from quire.engine.models.reading import read_model
from quire.engine.models.stored_weights import are_here, keep_by_flags
from quire.engine.models.weights_dtype import names_dtype
from quire.engine.parallel.group import RankGroup
from quire.engine.precompile import precompile, rehearse
from quire.engine.progress import Reporter
from quire.kernels.backend import Backend, torch_backend, triton_backend
from quire.kernels.compiling import compiling_beside
from quire.kernels.formats.kv_format import KVFormat
from quire.kernels.gpu import gpu_of

logger = logging.getLogger("quire.engine")

TIMED_SUMS = 5  # over the ranks


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank's part of an engine, ready to step. `model` is the whole one, `part` what the rank computes."""

    folders: ModelFolders
    model: ModelConfig
    part: ModelConfig
    runner: ModelRunner
    weight_bytes: int
    sampling_defaults: SamplingDefaults
    kv_format: KVFormat
    block_size: int
    num_blocks: int
    num_host_blocks: int
    device_bytes: int  # of a block, all told
    memory_bytes: tuple[int, ...]  # that each rank takes of its device
    all_reduce_seconds: float  # of one token's hidden states; 0 with one rank


def build_rank(
    config: EngineConfig,
    device: torch.device,
    ranks: RankGroup | None = None,
    report: Reporter | None = None,
) -> Rank:
    """Load what a rank holds, measure and warm up; all ranks do so at the same time. ranks: None, one alone.

    Raises ValueError that says what does not fit and which flag to change.
    """
    report = report or Reporter(lambda _: None, time.monotonic())
    chosen = _choose(config, described_folders(config, device, report), device)
    if not chosen.part.cache_specs and config.max_model_len is None:
        logger.info(
            "all layers keep states, so that nothing tells how long a text may be: up to %d tokens, unless "
            "--max-model-len says less",
            chosen.limits.max_model_len,
        )
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # One core is the API process's.
        torch.set_num_threads(max(1, ((os.cpu_count() or 1) - 1) // config.tensor_parallel_size))
    # The weights, once nothing is refused that config.json alone tells.
    folders = resolve_folders(config.model, config.lora, report.phase("download", "B"))
    model, weight_bytes = _load(config, folders.base, chosen, device, ranks, report)
    pooling = chosen.whole.pooling
    projections = [] if pooling is None else _projections(config, folders.base, pooling, device)
    weight_bytes += sum(each.num_bytes for each in projections)
    block_size = chosen.block_size
    dequantized = dequantized_dtype(chosen.part, chosen.kv_format, chosen.dtype, gpu_of(device), block_size)
    held = (block_size, chosen.kv_format, device, chosen.backend.copy_blocks, dequantized)
    cache = KVCache(chosen.part, 1, *held)
    runner = _runner(chosen, model, projections, cache, device)
    if chosen.with_graphs and chosen.part.implementation != "native" and ranks is None:
        kernels = report.phase("kernels", "kernels")
        kernels(0, 1)
        with compiling_beside(kernels):
            rehearse(runner)

    memory = report.phase("memory", "blocks")
    memory(0, 1)
    block_bytes = bytes_per_block(chosen.part, block_size, chosen.kv_format)
    device_bytes = block_bytes + dequantized_bytes_per_block(chosen.part, block_size, dequantized)
    num_blocks = choose_blocks(config, runner, device_bytes, ranks)
    runner.cache = KVCache(chosen.part, num_blocks, *held)
    num_host_blocks = min(_host_blocks(config, chosen.part, block_bytes), num_blocks)
    if num_host_blocks:
        runner.cache.add_host_tier(num_host_blocks)
    memory(num_blocks, num_blocks)

    warm_up = report.phase("warm-up", "steps")
    warm_up(0, 1)
    _warm_up(runner, num_blocks, with_graphs=chosen.with_graphs)
    warm_up(1, 1)
    taken = weight_bytes + num_blocks * device_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        taken = total - free
    return Rank(
        folders=folders,
        model=chosen.whole,
        part=chosen.part,
        runner=runner,
        weight_bytes=weight_bytes,
        sampling_defaults=chosen.sampling_defaults,
        kv_format=chosen.kv_format,
        block_size=block_size,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        device_bytes=device_bytes,
        memory_bytes=(taken,) if ranks is None else ranks.gather(taken),
        all_reduce_seconds=0.0 if ranks is None else _all_reduce_seconds(ranks, chosen.part, chosen.dtype),
    )


def described_folders(config: EngineConfig, device: torch.device, report: Reporter) -> ModelFolders:
    """Return folders that have all that describes the model: of one on the Hub its weights may come later."""
    if describes_itself(config.model):
        return resolve_folders(config.model, config.lora, report.phase("download", "B"))
    folders = resolve_folders(config.model, config.lora, lambda done, total: None, TOKENIZER_FILES)
    # Where config.json names none, weights tell the dtype.
    if config.dtype == "auto" and device.type == "cuda" and not names_dtype(folders.base):
        return resolve_folders(config.model, config.lora, report.phase("download", "B"))
    return folders


@dataclass(frozen=True, slots=True)
class _Chosen:
    """All that flags and the model's configuration decide, before a weight is read.

    keep: None, if files are to tell which weights stay in few bits, and are not here yet.
    """

    whole: ModelConfig
    part: ModelConfig
    sampling_defaults: SamplingDefaults
    dtype: torch.dtype
    kv_format: KVFormat
    block_size: int
    limits: Limits
    backend: Backend
    with_graphs: bool
    keep: Keep | None


def _choose(config: EngineConfig, folders: ModelFolders, device: torch.device) -> _Chosen:
    """Raises ValueError for what does not go together, or can never fit on the device."""
    gpu = gpu_of(device)
    whole = read_model(folders.base, config.model_impl, config.runner, folders.adapter, config.quantization)
    sampling_defaults = read_sampling_defaults(config.generation_config, folders.base, whole.vocab_size)
    part = whole.of_rank(config.tensor_parallel_size, expert_parallel=config.enable_expert_parallel)
    dtype = choose_dtype(config, part, device)
    # Which formats kernels take, whatever the size of blocks from 16 on; how much those hold it depends on.
    kv_format = named_format(config.kv_cache_dtype, part, dtype, gpu, config.block_size or BLOCK_SIZE)
    max_model_len = config.max_model_len or part.longest
    part, block_size = in_blocks(part.within(max_model_len), config.block_size, kv_format, dtype)
    max_num_batched_tokens = config.max_num_batched_tokens or max(
        default_batched_tokens(device, gpu), config.max_num_seqs
    )
    backend = triton_backend(gpu) if device.type == "cuda" else torch_backend()
    keep = keep_by_flags(config, folders.base, whole, dtype, backend)
    _refuse_too_large(config, folders.base, whole, dtype, kv_format, device, keep)
    return _Chosen(
        whole=whole,
        part=part,
        sampling_defaults=sampling_defaults,
        dtype=dtype,
        kv_format=kv_format,
        block_size=block_size,
        limits=Limits(config.max_num_seqs, max_num_batched_tokens, max_model_len),
        backend=backend,
        with_graphs=device.type == "cuda" and not config.enforce_eager,
        keep=keep if config.load_format == "dummy" or are_here(folders.base) else None,
    )


def _refuse_too_large(
    config: EngineConfig,
    folder: Path,
    whole: ModelConfig,
    dtype: torch.dtype,
    kv_format: KVFormat,
    device: torch.device,
    keep: Keep,
) -> None:
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        refuse_too_large(config, folder, whole, dtype.itemsize, kv_format, total, keep)


def _load(
    config: EngineConfig,
    folder: Path,
    chosen: _Chosen,
    device: torch.device,
    ranks: RankGroup | None,
    report: Reporter,
) -> tuple[Model, int]:
    """Return the model and its weights' bytes; have the kernels that its graphs need compiled meanwhile."""
    keep = chosen.keep
    if keep is None:  # config.json alone told what can be kept
        keep = keep_by_flags(config, folder, chosen.whole, chosen.dtype, chosen.backend)
        _refuse_too_large(config, folder, chosen.whole, chosen.dtype, chosen.kv_format, device, keep)
    kept = keep(chosen.part)
    compiles = chosen.with_graphs and chosen.part.implementation == "native"
    kernels = report.phase("kernels", "kernels")
    with compiling_beside(kernels) if compiles else nullcontext():
        if compiles:
            kernels(0, 1)
            alone = None if ranks is None else ranks.alone()
            held = chosen.block_size, chosen.kv_format
            precompile(
                chosen.part, chosen.backend, chosen.limits, *held, device, chosen.dtype, alone, kept.formats
            )
        return load_model(
            folder,
            chosen.part,
            chosen.backend,
            device=device,
            dtype=chosen.dtype,
            max_model_len=chosen.limits.max_model_len,
            load_format=config.load_format,
            kept=kept,
            seed=config.seed or 0,
            ranks=ranks,
            on_progress=report.phase("weights", "B"),
        )


def _projections(
    config: EngineConfig, folder: Path, pooling: Pooling, device: torch.device
) -> list[ProjectionWeights]:
    """Return what vectors go through, which every rank has."""
    if config.load_format == "dummy":
        return draw_projections(pooling.projections, device, config.seed or 0)
    return load_projections(folder, pooling.projections, device)


def _runner(
    chosen: _Chosen,
    model: Model,
    projections: list[ProjectionWeights],
    cache: KVCache,
    device: torch.device,
) -> ModelRunner:
    """Raises ValueError with the numbers where its buffers do not fit."""
    limits = chosen.limits
    blocks_of_row = len(chosen.part.cache_groups) * -(-limits.max_model_len // cache.block_size)
    with refused_where_too_large(
        f"{limits.max_num_seqs:,} sequences, and steps of {limits.max_num_batched_tokens:,} tokens, do not "
        "fit",
        "--max-num-seqs, --max-num-batched-tokens or --max-model-len",
        partial(memory_of, device),
        host_bytes=staging_words(limits, blocks_of_row) * np.dtype(np.int32).itemsize,
    ):
        return ModelRunner(model, chosen.backend, cache, limits, device, projections)


def _host_blocks(config: EngineConfig, part: ModelConfig, block_bytes: int) -> int:
    """Return how many blocks there is host memory for, of each rank."""
    if part.gathers:  # what was gathered of a prompt is in its row, which a swap gives up
        return 0
    return int(config.swap_space * 2**30) // (block_bytes * config.tensor_parallel_size)


def _warm_up(runner: ModelRunner, num_blocks: int, *, with_graphs: bool) -> None:
    """Run steps that are rare, or need compiling; with graphs, have them captured later."""
    config = runner.model.config
    for step in rare_steps(num_blocks, config.vocab_size):
        runner.launch(step).wait()
    if with_graphs and config.implementation != "native":
        with_graphs = _warm_up_general(runner)
    if with_graphs and isinstance(runner.queue, CudaQueue):
        runner.add_graphs(Recorder(runner.queue.stream).record)


def _warm_up_general(runner: ModelRunner) -> bool:
    """Run steps of a model by transformers' code; return whether CUDA graphs may hold them."""
    from quire.engine.models.general.host_reads import host_reads  # only such a model needs it

    reads: list[str] = []
    idle = runner.run_idle_decode if runner.keeps_states else partial(runner.run_idle, 8)
    runner.queue.run(lambda: reads.extend(host_reads(idle)))
    if reads:
        logger.warning(
            "no CUDA graphs, and slower steps: the model's code looks at what is computed (%s)",
            ", ".join(reads),
        )
        return False
    chosen = runner.model.config.chosen_tokens
    if chosen and not runner.graphs_may_choose:
        logger.info("steps with more than %d tokens of a row run without CUDA graphs, and slower", chosen)
    runner.warm_up()
    return True


def _all_reduce_seconds(ranks: RankGroup, part: ModelConfig, dtype: torch.dtype) -> float:
    """Time the sum over the ranks that a layer of a step of one token takes twice, launch and all."""
    x = torch.zeros(1, part.hidden_size, dtype=dtype, device=ranks.device)
    seconds = []
    for _ in range(TIMED_SUMS):
        ranks.barrier()
        begin = time.perf_counter()
        ranks.all_reduce(x)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
