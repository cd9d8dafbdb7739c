"""The device that a rank computes on, and what it computes there unless told otherwise."""

from __future__ import annotations

import torch

from quire.engine.allocation import gib, host_memory
from quire.engine.config import EngineConfig
from quire.engine.models.config import ModelConfig
from quire.kernels.gpu import FIRST_CAPABILITY, Gpu, gpu_of

CPU_BATCHED_TOKENS = 2048
# Tokens of a step for each multiprocessor of a GPU: tiles of 128 or 192 tokens then come out even, and no
# matrix product of a full step ends with most of the device idle.
BATCHED_TOKENS_PER_MULTIPROCESSOR = 64


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


def choose_dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's own on a GPU, and float32 on a CPU, where it is quickest and exact."""
    name = config.dtype
    if name == "auto":
        name = model.dtype if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def default_batched_tokens(device: torch.device, gpu: Gpu) -> int:
    if device.type == "cpu":
        return CPU_BATCHED_TOKENS
    return BATCHED_TOKENS_PER_MULTIPROCESSOR * gpu.multiprocessors


def memory_of(device: torch.device) -> str:
    """Return how much memory there is for what is on a device."""
    if device.type != "cuda":
        return host_memory()
    free, total = torch.cuda.mem_get_info(device)
    return f"the GPU has {gib(total)}, of which {gib(free)} are free"
