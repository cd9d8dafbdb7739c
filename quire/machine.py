"""What of this machine a server needs: torch and its CUDA, driver, GPU, compiler, disk, port, Redis."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_DRIVERS = {"13": 580, "12": 525, "11": 450}  # the least for a release of CUDA
_REDIS_SECONDS = 3.0
_LEAST_DISK = 5 << 30  # bytes, for a small model


@dataclass(frozen=True)
class Finding:
    """`advice` is what to do about it, nothing if it is fine; `fatal`: without it no server starts."""

    name: str
    words: str
    advice: str = ""
    fatal: bool = False


def look(device: str, host: str, port: int, redis_url: str | None) -> Iterator[Finding]:
    """Yield what there is, one after the other, as some take a moment."""
    yield Finding("Python", f"{platform.python_version()} at {sys.prefix}")
    yield from _look_at_gpu(device)
    yield _look_at_disk()
    yield _look_at_port(host, port)
    if redis_url is not None:
        yield _look_at_redis(redis_url)


def _look_at_gpu(device: str) -> Iterator[Finding]:
    import torch

    from quire.kernels.gpu import FIRST_CAPABILITY, gpu_of

    cuda = torch.version.cuda
    yield Finding("torch", f"{torch.__version__}, {'without CUDA' if cuda is None else f'with CUDA {cuda}'}")
    driver = driver_version()
    needed = _DRIVERS.get((cuda or "").split(".")[0], 0)
    if driver is None:
        yield Finding("driver", "no NVIDIA driver")
    elif cuda is not None and driver < needed:
        advice = f"CUDA {cuda} needs a driver of version {needed} or later: update it"
        yield Finding("driver", f"NVIDIA {driver}", advice, fatal=device == "cuda")
    else:
        advice = "" if cuda is not None else "this torch cannot use the GPU: install one with CUDA"
        yield Finding("driver", f"NVIDIA {driver}", advice)
    if not torch.cuda.is_available():
        advice = "see to driver and torch, or leave out --device cuda" if device == "cuda" else ""
        yield Finding("GPU", "none: models run on the CPU, slowly", advice, fatal=device == "cuda")
        return
    gpu = gpu_of(torch.device("cuda"))
    free, total = torch.cuda.mem_get_info()
    old = gpu.capability < FIRST_CAPABILITY
    advice = "Quire needs compute capability 8.0 (Ampere) or later: --device cpu" if old else ""
    if not advice and free < total * 0.5:
        advice = "other processes have most of its memory: end them, or lower --gpu-memory-utilization"
    yield Finding(
        "GPU",
        f"{gpu.name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
        advice,
        fatal=old and device != "cpu",
    )
    if shutil.which("cc") is None:
        yield Finding(
            "compiler", "none", "Triton needs a C compiler: apt-get install gcc libc6-dev", fatal=True
        )


def usable_device(device: str) -> str:
    """Return what --device is to be here: not cuda without a GPU, and cpu beside one that is too old."""
    import torch

    from quire.kernels.gpu import FIRST_CAPABILITY, gpu_of

    if not torch.cuda.is_available():
        return "auto" if device == "cuda" else device
    return "cpu" if gpu_of(torch.device("cuda")).capability < FIRST_CAPABILITY else device


def driver_version() -> int | None:
    """Return the first number of the NVIDIA driver's version, None if there is no driver."""
    try:
        found = re.search(r"Module\s+(?:for \S+\s+)?(\d+)\.", _DRIVER_FILE.read_text(encoding="utf-8"))
    except OSError:
        return None
    return int(found[1]) if found else None


def _look_at_disk() -> Finding:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    there = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    advice = "set HF_HOME to a folder with more room for models" if free < _LEAST_DISK else ""
    return Finding("disk", f"{free / 2**30:.1f} GiB free for models in {home}", advice)


def _look_at_port(host: str, port: int) -> Finding:
    from quire.service.commands.address import check_address

    try:
        check_address(host, port)
    except ValueError as error:
        return Finding("port", f"{host}, {port}: no", str(error))
    return Finding("port", f"{host}, {port}: free")


def _look_at_redis(url: str) -> Finding:
    from quire.engine.registry.redis import FAILURES, client_of

    try:
        with client_of(url, _REDIS_SECONDS) as client:
            client.ping()
    except FAILURES as error:
        why = str(error).rstrip(".")
        advice = f"A server starts, but routers do not learn of it: see to --redis-url ({why})."
        return Finding("Redis", "no answer", advice)
    return Finding("Redis", "answers")
