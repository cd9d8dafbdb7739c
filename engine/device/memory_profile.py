"""How many KV blocks a device has room for, beside the weights and what a step allocates."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from quire.engine.config import EngineConfig
from quire.engine.device.runner import ModelRunner
from quire.engine.dummy_steps import largest_step
from quire.engine.models.asked_quantisation import may_round
from quire.engine.models.config import ModelConfig
from quire.engine.models.decoder import Decoder
from quire.engine.models.kept_weights import Keep, may_keep
from quire.engine.models.loader import Model
from quire.engine.models.quantisation import ROUNDED
from quire.engine.models.stored_weights import keep_in_folder
from quire.engine.parallel.fit import fits, keep_none, smallest, weight_bytes
from quire.engine.parallel.group import RankGroup
from quire.engine.schedule.plan import StepPlan
from quire.kernels.attention.latent.earlier import MOST_BYTES as EXPANDED_BYTES
from quire.kernels.backend import triton_backend
from quire.kernels.formats.kv_format import KVFormat
from quire.kernels.quantised.weight import QuantisedWeight

CPU_CACHE_BYTES = 2 << 30  # most that the KV cache takes of a CPU's memory unless told otherwise
UNFUSED_TOKENS = (
    304  # whose products `quire.kernels.linear.hopper_matmul` does not take but for the smallest models
)
RESERVE_BYTES = 1 << 30  # CUDA graphs, and allocations between the profiled step and the largest
CHOICE_BYTES = 1 << 30  # by which an indexer scores tokens, and what it chose is brought together


def refuse_too_large(
    config: EngineConfig,
    folder: Path,
    model: ModelConfig,
    itemsize: int,
    held: KVFormat,
    total: int,
    keep: Keep = keep_none,
) -> None:
    """Raise ValueError if a GPU of `total` bytes does not hold its weights; name how many GPUs do.

    itemsize and keep are as `fit.weight_bytes` has them.
    """
    ranks = config.tensor_parallel_size
    budget = int(total * config.gpu_memory_utilization) - RESERVE_BYTES
    part = model.of_rank(ranks, expert_parallel=config.enable_expert_parallel)
    weights = weight_bytes(folder, part, itemsize, keep)
    if weights < budget:
        return
    whole_ones = config.enable_expert_parallel
    enough = smallest(fits(folder, model, itemsize, held, budget, keep, expert_parallel=whole_ones))
    hint = "take a smaller model" if enough is None else f"give --tensor-parallel-size {enough}"
    if ranks > 1 and may_keep(model) and model.has_experts and not whole_ones:
        wide = model.of_rank(ranks, expert_parallel=True)  # whose weights may be kept where shares' are not
        if weight_bytes(folder, wide, itemsize, keep) < budget:
            hint += ", have experts whole by --enable-expert-parallel"
    if config.quantized_weights == "expand" and may_keep(model):
        hint += ", leave out --quantized-weights expand"
    elif itemsize == 2 and may_round(model) and _rounded_bytes(folder, part, itemsize) < budget:
        hint += ", have its weights rounded to 8 bits by --quantization fp8"
    where = "one GPU" if ranks == 1 else f"each of {ranks} GPUs"
    raise ValueError(
        f"on {where} the weights take {weights / 2**30:.1f} GiB, and {budget / 2**30:.1f} GiB "
        f"of its {total / 2**30:.1f} may be used; {hint}, or raise --gpu-memory-utilization"
    )


def _rounded_bytes(folder: Path, part: ModelConfig, itemsize: int) -> int:
    """Return the bytes that one rank's weights take if those of layers are rounded to 8-bit floats."""
    rounded = dataclasses.replace(part, quantised=ROUNDED)
    keep = keep_in_folder(folder, rounded, torch.bfloat16, triton_backend(), dummy=True)
    return weight_bytes(folder, rounded, itemsize, keep)


def choose_blocks(
    config: EngineConfig, runner: ModelRunner, block_bytes: int, ranks: RankGroup | None = None
) -> int:
    """Return how many KV blocks there are to be: as the flags say, or as many as fit.

    Raises ValueError where not one does, or not as many as the flags say.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    given = config.kv_cache_memory_bytes
    if given is None:
        return measure_blocks(config, runner, block_bytes, ranks)
    least = block_bytes * (1 + runner.keeps_states)  # states have a block of rows that pad
    if given < least:
        raise ValueError(
            f"--kv-cache-memory-bytes must have room for a block, {least} bytes here, got {given}"
        )
    if runner.device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(runner.device)[0]
        if given > free:
            raise ValueError(
                f"--kv-cache-memory-bytes is {given}, and {free} bytes are free beside the weights"
            )
    return given // block_bytes - runner.keeps_states


def measure_blocks(
    config: EngineConfig, runner: ModelRunner, block_bytes: int, ranks: RankGroup | None = None
) -> int:
    """Return how many KV blocks fit on every rank beside the weights and the largest step's activations."""
    if runner.device.type == "cuda":
        # Of a step of any size the same: a weight in few bits is written out for the products of many tokens.
        written = written_out_bytes(runner.model)
        activations = activation_bytes(runner, written)
        if runner.model.config.chosen_tokens:  # of long contexts, which the profiled step has not
            activations += CHOICE_BYTES
        if not config.enforce_eager:  # a graph's are its own, which all share
            activations += activations * runner.mixed_sizes[-1] // runner.limits.max_num_batched_tokens
            written *= 2
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(runner.device)
        budget = int(total * config.gpu_memory_utilization) - (total - free)
        spare = budget - activations - written - RESERVE_BYTES
        hint = (
            "raise --gpu-memory-utilization, lower --max-num-batched-tokens or --max-num-seqs, or divide the "
            f"model among more GPUs than {config.tensor_parallel_size} by --tensor-parallel-size"
        )
    else:
        spare = min(CPU_CACHE_BYTES, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
        spare //= config.tensor_parallel_size
        hint = "free some memory, or give --num-gpu-blocks-override"
    spare -= block_bytes * runner.keeps_states
    if ranks is not None:
        spare = ranks.least(spare)
    if spare < block_bytes:
        raise ValueError(
            f"no memory is left for the KV cache: {spare / 2**20:.0f} MiB beside the weights, and one block "
            f"takes {block_bytes / 2**20:.1f} MiB; {hint}"
        )
    most = config.max_num_seqs * -(-runner.limits.max_model_len // runner.cache.block_size)
    most *= len(runner.model.config.cache_groups)
    return min(spare // block_bytes, most)


def written_out_bytes(model: Model) -> int:
    """Return the bytes of the largest weight that is kept in few bits, as products of many tokens take it."""
    if not isinstance(model, Decoder):
        return 0
    weights = [weight for layer in model.layers for weight in layer.weights]
    kept = [weight.shape for weight in weights if isinstance(weight, QuantisedWeight)]
    return max((outputs * inputs for outputs, inputs in kept), default=0) * model.embedding.element_size()


def activation_bytes(runner: ModelRunner, written: int) -> int:
    """Return the most bytes that a step allocates on a CUDA device, beside `written` of any step."""

    def taken(run: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(runner.device)
        before = torch.cuda.memory_allocated(runner.device)
        run()
        return torch.cuda.max_memory_allocated(runner.device) - before

    def of(step: StepPlan) -> int:
        return max(taken(lambda: runner.launch(step).wait()) - written, 0)

    limits = runner.limits
    few_tokens = min(UNFUSED_TOKENS, limits.max_num_batched_tokens)
    few = largest_step(dataclasses.replace(limits, max_num_batched_tokens=few_tokens), sampled=1)
    largest = largest_step(limits, limits.max_num_seqs)
    runner.launch(few).wait()  # cuBLAS takes its workspace now, and keeps it
    # A smaller step than the largest may take more: where products are not fused, what is between them is in
    # memory, as much a token as in a small step.
    unfused = of(few) * len(largest.prefill_tokens) // len(few.prefill_tokens)
    most = max(of(largest), unfused)
    if not runner.attends_to_latents:
        return most
    # Chunks that are not known to begin a prompt take queries of latents as well, and those that are known to
    # begin none take keys and values of what is before them.
    idle = partial(runner.run_idle, limits.max_num_batched_tokens)
    return max(most, taken(lambda: runner.queue.run(torch.inference_mode()(idle)))) + EXPANDED_BYTES
