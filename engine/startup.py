"""From an EngineConfig to an engine that can step: kernels, weights, KV memory, warm-up.

A server captures CUDA graphs between its first steps; who has work for all of them at once, before.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch

from quire.engine.config import EngineConfig, EngineInfo, Progress
from quire.engine.core import EngineCore
from quire.engine.device.graph_recorder import Recorder
from quire.engine.device.kv_cache import (
    KVCache,
    bytes_per_block,
    dequantized_bytes_per_block,
    dequantized_dtype,
    named_format,
)
from quire.engine.device.runner import Limits, ModelRunner
from quire.engine.device.streams import CudaQueue
from quire.engine.dummy_steps import largest_step, rare_step
from quire.engine.hashing import BlockHasher
from quire.engine.models.config import ModelConfig
from quire.engine.models.generation_config import SamplingDefaults, read_sampling_defaults
from quire.engine.models.hub import resolve_model
from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.engine.parallel.fit import fits, smallest, weight_bytes
from quire.engine.parallel.group import RankGroup
from quire.engine.parallel.leader import Leader, LeadingRunner
from quire.engine.precompile import precompile
from quire.engine.registry.deployment import hash_seed
from quire.engine.schedule.plan import Runner, StepPlan
from quire.engine.schedule.preemption import PreemptionPolicy
from quire.engine.schedule.scheduler import Scheduler
from quire.engine.sequences.grammar import grammars_of
from quire.kernels.attention.kv_tile import LARGEST_KEY_TILE
from quire.kernels.backend import torch_backend, triton_backend
from quire.kernels.compiling import compiling_beside
from quire.kernels.formats.kv_format import UNSCALED, KVFormat
from quire.kernels.gpu import FIRST_CAPABILITY, Gpu, gpu_of

logger = logging.getLogger("quire.engine")

CPU_CACHE_BYTES = 2 << 30  # most that the KV cache takes of a CPU's memory unless told otherwise
CPU_BATCHED_TOKENS = 2048
# Tokens of a step for each multiprocessor of a GPU: tiles of 128 or 192 tokens then come out even, and no
# matrix product of a full step ends with most of the device idle.
BATCHED_TOKENS_PER_MULTIPROCESSOR = 64
TIMED_BLOCKS = 64  # moved to time the link to host memory
# Prefilled, without a graph, to time a recompute. On a GPU so many that launching them takes no longer than
# computing them, but for small models: there it is the launches that are timed. On a CPU more only while
# fewer are quick: it may take 20 ms for each token of a small model in bfloat16.
TIMED_TOKENS = {"cuda": (2048,), "cpu": (8, 64, 512)}
QUICK_SECONDS = 0.1
# Times as many tokens stand before the chunk that is timed once more, for what its attention takes: a prefill
# of 100,000 tokens takes several times as long a token as one of 2,048.
LONGER_CONTEXT = 8
UNFUSED_TOKENS = (
    304  # whose products `quire.kernels.linear.hopper_matmul` does not take but for the smallest models
)
TIMED_SUMS = 5  # over the ranks
RESERVE_BYTES = 1 << 30  # CUDA graphs, and allocations between the profiled step and the largest

Phase = Literal["download", "weights", "kernels", "memory", "warm-up", "graphs", "ready"]


class _Reporter:
    """Turns counts into Progress events that carry the seconds since the start."""

    def __init__(self, on_progress: Callable[[Progress], None], begin: float) -> None:
        self._on_progress = on_progress
        self._begin = begin

    def phase(self, phase: Phase, unit: str) -> Callable[[int, int], None]:
        """Return what takes (done, total) of this phase; the same counts again are no news."""
        told: tuple[int, int] | None = None

        def report(done: int, total: int) -> None:
            nonlocal told
            if (done, total) == told:
                return
            told = (done, total)
            self._on_progress(
                Progress(
                    phase=phase, done=done, total=total, unit=unit, seconds=time.monotonic() - self._begin
                )
            )

        return report


def start_engine(
    config: EngineConfig,
    on_progress: Callable[[Progress], None] = lambda _: None,
    asked_at: float | None = None,
    on_lost: Callable[[str], None] | None = None,
) -> tuple[EngineCore, EngineInfo]:
    """Load, measure and warm up. Raises ValueError that says what does not fit and which flag to change.

    asked_at: `time.monotonic()` of any process here, from which progress counts its seconds; None: now.
    on_lost: told, by a thread of its own, why the engine cannot go on when another rank is lost.
    """
    report = _Reporter(on_progress, time.monotonic() if asked_at is None else asked_at)
    core, info = _start(config, report, on_lost)
    report.phase("ready", "s")(1, 1)
    return core, info


def start_with_graphs(
    config: EngineConfig, on_progress: Callable[[Progress], None] = lambda _: None
) -> tuple[EngineCore, EngineInfo]:
    """As `start_engine`, and capture all CUDA graphs, so that no step is slower than later ones."""
    report = _Reporter(on_progress, time.monotonic())
    core, info = _start(config, report)
    capture_all(core, report.phase("graphs", "graphs"))
    report.phase("ready", "s")(1, 1)
    return core, info


def capture_all(core: EngineCore, report: Callable[[int, int], None] = lambda *_: None) -> None:
    """Capture the CUDA graphs that are left. `report` is told how many of how many are done."""
    total = core.runner.graphs_left
    while left := core.runner.graphs_left:
        report(total - left, total)
        core.capture()
    if total:
        report(total, total)


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank's part of an engine, ready to step. `model` is the whole one, `part` what the rank computes."""

    folder: Path
    model: ModelConfig
    part: ModelConfig
    runner: ModelRunner
    weight_bytes: int
    sampling_defaults: SamplingDefaults
    kv_format: KVFormat
    num_blocks: int
    num_host_blocks: int
    device_bytes: int  # of a block, all told
    memory_bytes: tuple[int, ...]  # that each rank takes of its device
    all_reduce_seconds: float  # of one token's hidden states; 0 with one rank


def build_rank(
    config: EngineConfig,
    device: torch.device,
    ranks: RankGroup | None = None,
    report: _Reporter | None = None,
) -> Rank:
    """Load what a rank holds, measure and warm up; all ranks do so at the same time. ranks: None, one alone.

    Raises ValueError that says what does not fit and which flag to change.
    """
    report = report or _Reporter(lambda _: None, time.monotonic())
    gpu = gpu_of(device)
    folder = resolve_model(config.model, report.phase("download", "B"))
    whole = read_model(folder, config.model_impl)
    sampling_defaults = read_sampling_defaults(config.generation_config, folder)
    model_config = whole.of_rank(config.tensor_parallel_size)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # One core is the API process's.
        torch.set_num_threads(max(1, ((os.cpu_count() or 1) - 1) // config.tensor_parallel_size))
    dtype = _dtype(config, model_config, device)
    kv_format = named_format(config.kv_cache_dtype, model_config, dtype, gpu, config.block_size)
    max_model_len = config.max_model_len or model_config.max_position_embeddings
    model_config = model_config.within(max_model_len)
    backend = triton_backend() if device.type == "cuda" else torch_backend()
    max_num_batched_tokens = config.max_num_batched_tokens or max(
        _default_batched_tokens(device, gpu), config.max_num_seqs
    )
    limits = Limits(config.max_num_seqs, max_num_batched_tokens, max_model_len)
    native = model_config.implementation == "native"
    if device.type == "cuda" and native:  # else the bytes are not known before
        total = torch.cuda.mem_get_info(device)[1]
        _refuse_too_large(config, whole, dtype.itemsize, kv_format, total)
    with_graphs = device.type == "cuda" and not config.enforce_eager
    kernels = report.phase("kernels", "kernels")
    with compiling_beside(kernels) if with_graphs and native else nullcontext():
        if with_graphs and native:
            kernels(0, 1)
            alone = None if ranks is None else ranks.alone()
            precompile(model_config, backend, limits, config.block_size, kv_format, device, dtype, alone)
        model, num_bytes = load_model(
            folder,
            model_config,
            backend,
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
            load_format=config.load_format,
            seed=config.seed or 0,
            ranks=ranks,
            on_progress=report.phase("weights", "B"),
        )
    dequantized = dequantized_dtype(model_config, kv_format, dtype, gpu, config.block_size)
    held = (config.block_size, kv_format, device, backend.copy_blocks, dequantized)
    runner = ModelRunner(model, backend, KVCache(model_config, 1, *held), limits, device)

    memory = report.phase("memory", "blocks")
    memory(0, 1)
    block_bytes = bytes_per_block(model_config, config.block_size, kv_format)
    device_bytes = block_bytes + dequantized_bytes_per_block(model_config, config.block_size, dequantized)
    num_blocks = config.num_gpu_blocks_override or _measure_blocks(config, runner, device_bytes, ranks)
    runner.cache = KVCache(model_config, num_blocks, *held)
    num_host_blocks = int(config.swap_space * 2**30) // (block_bytes * config.tensor_parallel_size)
    num_host_blocks = min(num_host_blocks, num_blocks)
    if num_host_blocks:
        runner.cache.add_host_tier(num_host_blocks)
    memory(num_blocks, num_blocks)

    warm_up = report.phase("warm-up", "steps")
    warm_up(0, 1)
    runner.launch(rare_step(num_blocks, model_config.vocab_size)).wait()
    if with_graphs and not native:
        with_graphs = _warm_up_general(runner)
    if with_graphs and isinstance(runner.queue, CudaQueue):
        runner.add_graphs(Recorder(runner.queue.stream).record)
    warm_up(1, 1)
    taken = num_bytes + num_blocks * device_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        taken = total - free
    return Rank(
        folder=folder,
        model=whole,
        part=model_config,
        runner=runner,
        weight_bytes=num_bytes,
        sampling_defaults=sampling_defaults,
        kv_format=kv_format,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        device_bytes=device_bytes,
        memory_bytes=(taken,) if ranks is None else ranks.gather(taken),
        all_reduce_seconds=0.0 if ranks is None else _all_reduce_seconds(ranks, model_config, dtype),
    )


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


def _start(
    config: EngineConfig, report: _Reporter, on_lost: Callable[[str], None] | None = None
) -> tuple[EngineCore, EngineInfo]:
    device = choose_device(config)
    if config.tensor_parallel_size == 1:
        rank = build_rank(config, device, report=report)
        return _engine(config, device, rank, rank.runner)
    folder = resolve_model(config.model, report.phase("download", "B"))
    # What cannot be divided is refused before processes start.
    read_model(folder, config.model_impl).of_rank(config.tensor_parallel_size)
    leader = Leader(config, on_lost)
    try:
        rank = build_rank(config, device, leader.join(device), report)
        return _engine(config, device, rank, LeadingRunner(rank.runner, leader))
    except BaseException:
        leader.close()
        raise


def _engine(
    config: EngineConfig, device: torch.device, rank: Rank, runner: ModelRunner | LeadingRunner
) -> tuple[EngineCore, EngineInfo]:
    """Return the engine whose runner executes steps on all ranks, of which `rank` is the first."""
    folder, model_config, limits = rank.folder, rank.part, rank.runner.limits
    num_blocks, num_host_blocks = rank.num_blocks, rank.num_host_blocks
    dtype = _dtype(config, model_config, device)
    grammars = grammars_of(folder, model_config.vocab_size, model_config.eos_token_ids)
    matrix_bytes = model_config.vocab_rows * model_config.embedding_size * dtype.itemsize
    block_bytes = bytes_per_block(model_config, config.block_size, rank.kv_format)
    learned_positions = 0 if model_config.rope else model_config.max_position_embeddings
    info = EngineInfo(
        model=config.model,
        architecture=model_config.architecture,
        dtype=UNSCALED[dtype].name,
        kv_cache_dtype=rank.kv_format.name,
        device=gpu_of(device).name,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        max_model_len=limits.max_model_len,
        block_size=config.block_size,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        bytes_per_block=block_bytes,
        expanded_bytes=(rank.device_bytes - block_bytes) * num_blocks,
        weight_bytes=rank.weight_bytes,
        layer_weights=model_config.layer_weights,
        query_width=model_config.num_heads * model_config.head_dim,
        windows=model_config.windows,
        group_layers=tuple(len(group.layers) for group in model_config.cache_groups),
        group_windows=group_windows(model_config, limits.max_model_len, device),
        body_weight_bytes=rank.weight_bytes
        - matrix_bytes * (1 if model_config.tie_word_embeddings else 2)
        - learned_positions * model_config.hidden_size * dtype.itemsize,
        head_weight_bytes=matrix_bytes,
        sampling_defaults=rank.sampling_defaults,
        has_grammars=grammars is not None,
        tensor_parallel_size=config.tensor_parallel_size,
        rank_memory_bytes=rank.memory_bytes,
        all_reduce_seconds=rank.all_reduce_seconds,
    )
    cache_seed = secrets.randbits(64) if config.cache_seed is None else hash_seed(config.cache_seed)
    hasher = BlockHasher(config.block_size, cache_seed) if config.enable_prefix_caching else None
    policy = PreemptionPolicy(mode=config.preemption_mode)
    if config.preemption_mode == "auto" and num_host_blocks:
        policy = measure_costs(rank.runner, num_blocks, runner)
    scheduler = Scheduler(
        info.capacity,
        limits.max_num_batched_tokens,
        model_config.eos_token_ids,
        hasher=hasher,
        num_host_blocks=num_host_blocks,
        policy=policy,
    )
    return EngineCore(scheduler, runner, grammars=grammars), info


def _warm_up_general(runner: ModelRunner) -> bool:
    """Run steps of a model by transformers' code; return whether CUDA graphs may hold them."""
    from quire.engine.models.general.host_reads import host_reads  # only such a model needs it

    reads: list[str] = []
    runner.queue.run(lambda: reads.extend(host_reads(lambda: runner.run_idle(8))))
    if reads:
        logger.warning(
            "no CUDA graphs, and slower steps: the model's code looks at what is computed (%s)",
            ", ".join(reads),
        )
        return False
    runner.warm_up()
    return True


def group_windows(model: ModelConfig, max_model_len: int, device: torch.device) -> tuple[int, ...]:
    """Return how many of the last tokens each cache group after the first keeps.

    On a GPU kernels read whole tiles of keys, of which those before the window are masked, but not unread.
    """
    beside = LARGEST_KEY_TILE - 1 if device.type == "cuda" else 0
    return tuple(group.window + beside if group.window else max_model_len for group in model.cache_groups[1:])


def choose_device(config: EngineConfig, rank: int = 0) -> torch.device:
    """Return a rank's device, of the kind that the flag names.

    Raises ValueError if it is not there, or too old for the kernels, or if there are fewer than ranks.
    """
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: this torch sees no CUDA device; use --device cpu or auto")
    ranks = config.tensor_parallel_size
    if ranks > 1 and torch.cuda.device_count() < ranks:
        raise ValueError(
            f"--tensor-parallel-size {ranks} needs {ranks} GPUs, and this process sees "
            f"{torch.cuda.device_count()}; give a smaller size, or see nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    device = torch.device("cuda", rank) if ranks > 1 else torch.device("cuda")
    gpu = gpu_of(device)
    if gpu.capability < FIRST_CAPABILITY:
        raise ValueError(
            f"{gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]}) is too old: Quire needs compute "
            "capability 8.0 (Ampere) or later; use --device cpu"
        )
    return device


def _refuse_too_large(
    config: EngineConfig, model: ModelConfig, itemsize: int, held: KVFormat, total: int
) -> None:
    """Raise ValueError if a GPU of `total` bytes does not hold its weights; name how many GPUs do."""
    ranks = config.tensor_parallel_size
    budget = int(total * config.gpu_memory_utilization) - RESERVE_BYTES
    weights = weight_bytes(model.of_rank(ranks), itemsize)
    if weights < budget:
        return
    enough = smallest(fits(model, itemsize, held, budget))
    hint = "take a smaller model" if enough is None else f"give --tensor-parallel-size {enough}"
    raise ValueError(
        f"on each of {ranks} GPUs the weights take {weights / 2**30:.1f} GiB, and {budget / 2**30:.1f} GiB "
        f"of its {total / 2**30:.1f} may be used; {hint}, or raise --gpu-memory-utilization"
    )


def _dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's own on a GPU, and float32 on a CPU, where it is quickest and exact."""
    name = config.dtype
    if name == "auto":
        name = model.dtype if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _default_batched_tokens(device: torch.device, gpu: Gpu) -> int:
    if device.type == "cpu":
        return CPU_BATCHED_TOKENS
    return BATCHED_TOKENS_PER_MULTIPROCESSOR * gpu.multiprocessors


def _measure_blocks(
    config: EngineConfig, runner: ModelRunner, block_bytes: int, ranks: RankGroup | None = None
) -> int:
    """Return how many KV blocks fit on every rank beside the weights and the largest step's activations."""
    if runner.device.type == "cuda":
        activations = _activation_bytes(runner)
        if not config.enforce_eager:  # a graph's are its own, which all share
            activations += activations * runner.mixed_sizes[-1] // runner.limits.max_num_batched_tokens
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(runner.device)
        budget = int(total * config.gpu_memory_utilization) - (total - free)
        spare = budget - activations - RESERVE_BYTES
        hint = (
            "raise --gpu-memory-utilization, lower --max-num-batched-tokens or --max-num-seqs, or divide the "
            f"model among more GPUs than {config.tensor_parallel_size} by --tensor-parallel-size"
        )
    else:
        spare = min(CPU_CACHE_BYTES, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
        spare //= config.tensor_parallel_size
        hint = "free some memory, or give --num-gpu-blocks-override"
    if ranks is not None:
        spare = ranks.least(spare)
    if spare < block_bytes:
        raise ValueError(
            f"no memory is left for the KV cache: {spare / 2**20:.0f} MiB beside the weights, and one block "
            f"takes {block_bytes / 2**20:.1f} MiB; {hint}"
        )
    most = config.max_num_seqs * -(-runner.limits.max_model_len // config.block_size)
    most *= len(runner.model.config.cache_groups)
    return min(spare // block_bytes, most)


def _activation_bytes(runner: ModelRunner) -> int:
    """Return the most bytes that a step allocates on a CUDA device."""

    def of(step: StepPlan) -> int:
        torch.cuda.reset_peak_memory_stats(runner.device)
        before = torch.cuda.memory_allocated(runner.device)
        runner.launch(step).wait()
        return torch.cuda.max_memory_allocated(runner.device) - before

    limits = runner.limits
    few_tokens = min(UNFUSED_TOKENS, limits.max_num_batched_tokens)
    few = largest_step(dataclasses.replace(limits, max_num_batched_tokens=few_tokens), sampled=1)
    largest = largest_step(limits, limits.max_num_seqs)
    runner.launch(few).wait()  # cuBLAS takes its workspace now, and keeps it
    # A smaller step than the largest may take more: where products are not fused, what is between them is in
    # memory, as much a token as in a small step.
    unfused = of(few) * len(largest.prefill_tokens) // len(few.prefill_tokens)
    return max(of(largest), unfused)


def measure_costs(runner: ModelRunner, num_blocks: int, all_ranks: Runner | None = None) -> PreemptionPolicy:
    """Time a transfer of a few blocks and two prefills: what a preemption costs either way.

    all_ranks: what launches on every rank, if `runner` is one of several.
    """
    assert runner.cache.host is not None
    count = min(TIMED_BLOCKS, num_blocks, len(runner.cache.host))
    blocks = np.arange(count, dtype=np.int32)
    pairs = np.stack([blocks, blocks], axis=1)
    nothing = largest_step(Limits(1, 1, 1), sampled=1)
    transfer = msgspec.structs.replace(nothing, swap_out=pairs)
    launching = all_ranks or runner
    seconds = [_best_seconds(launching, plan) for plan in (transfer, nothing)]
    per_token, per_pair = _prefill_costs(runner, launching)
    return PreemptionPolicy(
        seconds_per_block=max(seconds[0] - seconds[1], 0.0) / count,
        seconds_per_token=per_token,
        seconds_per_pair=per_pair,
    )


def _prefill_costs(runner: ModelRunner, launching: Runner) -> tuple[float, float]:
    """Seconds a token, and for each one before it: of the longest prefill that is timed.

    As a prompt's beginning, and far behind one: what comes between costs the same a token, but for attention.
    """
    most = min(runner.limits.max_num_batched_tokens, runner.limits.max_model_len)
    for count in TIMED_TOKENS[runner.device.type]:
        tokens = min(count, most)
        chunk = largest_step(Limits(1, tokens, tokens), sampled=1)
        seconds = _best_seconds(launching, chunk)
        if tokens == most or seconds > QUICK_SECONDS:
            break
    before = min(LONGER_CONTEXT * tokens, runner.limits.max_model_len - tokens)
    per_pair = 0.0
    if before > 0:
        farther = msgspec.structs.replace(chunk, context_lens=chunk.context_lens + np.int32(before))
        per_pair = max(_best_seconds(launching, farther, times=2) - seconds, 0.0) / (tokens * before)
    return max(seconds / tokens - per_pair * tokens / 2, 0.0), per_pair


def _best_seconds(runner: Runner, plan: StepPlan, times: int = 3) -> float:
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        handle = runner.launch(plan)
        handle.wait()
        handle.has_moved(wait=True)
        taken.append(time.perf_counter() - begin)
    return min(taken)
