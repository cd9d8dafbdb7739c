"""From an EngineConfig to an engine that can step: kernels, weights, KV memory, warm-up.

A server captures CUDA graphs between its first steps; who has work for all of them at once, before.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import torch

from quire.engine.config import EngineConfig, EngineInfo, Progress
from quire.engine.core import EngineCore
from quire.engine.device.choice import choose_device, choose_dtype
from quire.engine.device.kv_cache import bytes_per_block
from quire.engine.device.runner import ModelRunner
from quire.engine.hashing import BlockHasher
from quire.engine.models.config import ModelConfig
from quire.engine.models.kept_weights import bits_of, of_experts_alone
from quire.engine.models.model_folders import merged_names
from quire.engine.models.reading import read_model
from quire.engine.parallel.leader import Leader, LeadingRunner
from quire.engine.preemption_costs import measure_costs
from quire.engine.progress import Reporter
from quire.engine.rank import Rank, build_rank, described_folders
from quire.engine.registry.deployment import hash_seed
from quire.engine.schedule.preemption import PreemptionPolicy
from quire.engine.schedule.scheduler import Scheduler
from quire.engine.sequences.grammar import grammars_of
from quire.kernels.attention.kv_tile import LARGEST_KEY_TILE
from quire.kernels.formats.kv_format import UNSCALED
from quire.kernels.gpu import gpu_of


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
    report = Reporter(on_progress, time.monotonic() if asked_at is None else asked_at)
    core, info = _start(config, report, on_lost)
    report.phase("ready", "s")(1, 1)
    return core, info


def start_with_graphs(
    config: EngineConfig, on_progress: Callable[[Progress], None] = lambda _: None
) -> tuple[EngineCore, EngineInfo]:
    """Start as `start_engine` does, and capture all CUDA graphs: no step is slower than later ones."""
    report = Reporter(on_progress, time.monotonic())
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


def _start(
    config: EngineConfig, report: Reporter, on_lost: Callable[[str], None] | None = None
) -> tuple[EngineCore, EngineInfo]:
    device = choose_device(config)
    if config.tensor_parallel_size == 1:
        rank = build_rank(config, device, report=report)
        return _engine(config, device, rank, rank.runner)
    # What cannot be is refused before processes start, and before weights are downloaded.
    folders = described_folders(config, device, report)
    whole = read_model(folders.base, config.model_impl, config.runner, folders.adapter, config.quantization)
    part = whole.of_rank(config.tensor_parallel_size, expert_parallel=config.enable_expert_parallel)
    part = part.within(config.max_model_len or part.longest)
    if part.implementation == "transformers":
        from quire.engine.models.general.division.divide import refuse_undividable  # which takes seconds

        refuse_undividable(folders.base, part)
    leader = Leader(config, on_lost)
    try:
        rank = build_rank(config, device, leader.join(device), report)
        return _engine(config, device, rank, LeadingRunner(rank.runner, leader))
    except BaseException:
        leader.close()
        raise


def group_windows(model: ModelConfig, max_model_len: int, device: torch.device) -> tuple[int, ...]:
    """Return how many of the last tokens each cache group keeps, but for a first one that keeps all.

    On a GPU kernels read whole tiles of keys, of which those before the window are masked, but not unread.
    """
    beside = LARGEST_KEY_TILE - 1 if device.type == "cuda" else 0
    groups = model.cache_groups[1 if keeps_all(model) else 0 :]
    return tuple(
        group.window + (0 if group.states else beside) if group.window else max_model_len for group in groups
    )


def keeps_all(model: ModelConfig) -> bool:
    """Return whether the first cache group keeps all tokens."""
    return not model.cache_groups[0].window


def _engine(
    config: EngineConfig, device: torch.device, rank: Rank, runner: ModelRunner | LeadingRunner
) -> tuple[EngineCore, EngineInfo]:
    """Return the engine whose runner executes steps on all ranks, of which `rank` is the first."""
    folders, model_config, limits = rank.folders, rank.part, rank.runner.limits
    num_blocks, num_host_blocks = rank.num_blocks, rank.num_host_blocks
    dtype = choose_dtype(config, model_config, device)
    grammars = grammars_of(folders.tokenizer, model_config.vocab_size, model_config.eos_token_ids)
    matrix_bytes = model_config.vocab_rows * model_config.embedding_size * dtype.itemsize
    block_bytes = bytes_per_block(model_config, rank.block_size, rank.kv_format)
    # transformers' code has its own rotary positions, which the configuration knows nothing of.
    learns = model_config.implementation == "native" and model_config.rope is None
    learned_positions = model_config.max_position_embeddings if learns else 0
    pooling = model_config.pooling
    kept = getattr(rank.runner.model, "kept", {})
    info = EngineInfo(
        model=config.model,
        architecture=model_config.architecture,
        dtype=UNSCALED[dtype].name,
        kv_cache_dtype=rank.kv_format.name,
        device=gpu_of(device).name,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        max_model_len=limits.max_model_len,
        block_size=rank.block_size,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        bytes_per_block=block_bytes,
        expanded_bytes=(rank.device_bytes - block_bytes) * num_blocks,
        weight_bytes=rank.weight_bytes,
        layer_weights=model_config.layer_weights,
        query_width=model_config.query_width,
        latent_width=model_config.latent_width,
        chosen_tokens=model_config.chosen_tokens,
        index_width=max((spec.index for spec in model_config.cache_specs), default=0),
        windows=model_config.windows,
        group_layers=tuple(len(group.layers) for group in model_config.cache_groups),
        group_windows=group_windows(model_config, limits.max_model_len, device),
        keeps_all=keeps_all(model_config),
        state_groups=sum(group.states for group in model_config.cache_groups),
        body_weight_bytes=rank.weight_bytes
        - matrix_bytes * (1 if model_config.tie_word_embeddings else 2)
        - learned_positions * model_config.hidden_size * dtype.itemsize,
        head_weight_bytes=matrix_bytes,
        kept_bits=bits_of(kept),
        keeps_experts=of_experts_alone(kept),
        sampling_defaults=rank.sampling_defaults,
        has_grammars=grammars is not None,
        tensor_parallel_size=config.tensor_parallel_size,
        rank_memory_bytes=rank.memory_bytes,
        all_reduce_seconds=rank.all_reduce_seconds,
        vector_size=pooling.vector_size(model_config.hidden_size) if pooling else 0,
        pooling=pooling,
        merged=merged_names(config.model, config.lora, folders),
    )
    cache_seed = secrets.randbits(64) if config.cache_seed is None else hash_seed(config.cache_seed)
    # Of a prompt's beginning that is found in the cache there are no hidden states to gather.
    caching = config.enable_prefix_caching and not model_config.gathers
    hasher = BlockHasher(rank.block_size, cache_seed) if caching else None
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
