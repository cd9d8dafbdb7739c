"""Connects GPUs that reach each other's memory, and measures which way of summing over ranks is quickest.

Peer to peer over torch's symmetric memory, never NVLink multicast.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quire.kernels.parallel.all_reduce import (
    one_shot,
    one_shot_norm,
    one_shot_units,
    two_shot,
    two_shot_units,
)
from quire.kernels.parallel.buffers import BUFFERS, SymmetricBuffers, make_buffers
from quire.kernels.parallel.peer_sums import Limits, PeerKernels
from quire.kernels.pointwise.norm import add_rms_norm

UNITS = 2**24 + 2**16  # 16-bit numbers of a buffer: two-shot sums of 16 MiB, one-shot ones of 32 / ranks
HIDDEN = 4096  # of what is measured
KIB = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CALLS, ROUNDS = 10, 5  # calls in a graph, and replays of it
ALIKE = 1.03  # times as long: what two ways of the same speed may differ by
_groups = itertools.count()

Gather = Callable[[int], tuple[int, ...]]
_Mapped = tuple[Tensor, list[int], object]  # this rank's memory, where each rank's begins, what maps it


class NoPeers(Exception):
    """Some GPU does not reach another's memory; says why, as far as this rank knows."""


def connect(
    rank: int, size: int, device: torch.device, store: dist.Store, gather: Gather
) -> SymmetricBuffers:
    """Return this rank's buffers. Raises NoPeers on all ranks where some GPU does not reach another's memory.

    gather: of every rank's value on the host. All ranks call this together.
    """
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    index = torch.cuda.current_device() if device.index is None else device.index
    devices = gather(index)
    others = [other for other in devices if other != index]
    reached = len(others) == size - 1 and all(
        torch.cuda.can_device_access_peer(index, other) for other in others
    )
    if not min(gather(int(reached))):
        raise NoPeers(f"GPUs {sorted(devices)} do not all reach each other's memory")
    mapped: _Mapped | str
    try:
        mapped = _mapped(rank, size, device, store)
    except Exception as error:  # of torch's; the other ranks wait to be told
        mapped = f"torch's symmetric memory: {type(error).__name__}: {error}"
    if not min(gather(int(not isinstance(mapped, str)))):
        raise NoPeers(mapped if isinstance(mapped, str) else "another rank could not map its peers' memory")
    assert not isinstance(mapped, str)
    own, bases, mapping = mapped
    # An allocator may have cut the tensor out of what peers map.
    offsets = gather(own.data_ptr() - bases[rank])
    addresses = [base + offset for base, offset in zip(bases, offsets, strict=True)]
    buffers = make_buffers(rank, own.view(BUFFERS, UNITS), addresses, mapping=mapping)
    torch.cuda.synchronize(device)
    gather(0)  # nobody sends before all buffers are empty
    return buffers


def _mapped(rank: int, size: int, device: torch.device, store: dist.Store) -> _Mapped:
    """Allocate this rank's memory, and map every rank's here."""
    import torch.distributed._symmetric_memory as symmetric
    from torch._C import _distributed_c10d as c10d

    functions: Any = c10d  # whose types differ between versions of torch
    name, own_store = f"quire-{next(_groups)}", dist.PrefixStore("peers", store)
    group = functions.ProcessGroup(own_store, rank, size)
    functions._register_process_group(name, group)  # which newer versions look up by its name
    functions._SymmetricMemory.set_group_info(name, rank, size, own_store)  # as older ones do
    own = symmetric.empty(BUFFERS * UNITS, dtype=torch.int16, device=device)
    mapping = functions._SymmetricMemory.rendezvous(own, name)
    return own, list(mapping.buffer_ptrs), (group, mapping)


def measured(buffers: SymmetricBuffers, library: Callable[[Tensor], Tensor], gather: Gather) -> PeerKernels:
    """Time each way at each size on all ranks, beside the library's sum; return the kernels with limits.

    The slowest rank's times count, so all ranks choose the same. All ways run before any is timed: a device
    that has just waited for a compiler has a low clock, which would count against whoever is timed then.
    """
    ways_by_size = {kib * 1024: _ways(kib * 1024, buffers, library) for kib in KIB}
    for ways in ways_by_size.values():
        for call in ways.values():
            call()
            torch.cuda.synchronize(buffers.own.device)
    times: dict[int, dict[str, int]] = {}
    for num_bytes, ways in ways_by_size.items():
        times[num_bytes] = {name: max(gather(_nanoseconds(call, gather))) for name, call in ways.items()}
        if not any(suited(times[num_bytes]).values()):
            break
    return PeerKernels(buffers, limits_of(times))


def _ways(
    num_bytes: int, buffers: SymmetricBuffers, library: Callable[[Tensor], Tensor]
) -> dict[str, Callable[[], object]]:
    """Return the ways that have room for an x of so many bytes, and the norm, which "fused" has beside it."""
    x = torch.zeros(num_bytes // (2 * HIDDEN), HIDDEN, dtype=torch.bfloat16, device=buffers.own.device)
    residual, weight = torch.zeros_like(x), x.new_ones(HIDDEN)
    ways: dict[str, Callable[[], object]] = {"library": partial(library, x)}
    if one_shot_units(x, buffers.ranks) <= buffers.units:
        ways["one_shot"] = partial(one_shot, x, buffers)
        ways["fused"] = partial(one_shot_norm, x, residual, weight, 1e-5, buffers)
    if two_shot_units(x, buffers.ranks) <= buffers.units:
        ways["two_shot"] = partial(two_shot, x, buffers)
    ways["norm"] = partial(add_rms_norm, x, residual, weight, 1e-5)
    return ways


def limits_of(times: Mapping[int, Mapping[str, int]]) -> Limits:
    """Return up to which size each way is taken, of the times by size in bytes: where it gains most in all.

    One size at which chance made it slow does not keep it from larger ones at which it is the quickest.
    """
    limits = {"one_shot": 0, "fused": 0, "two_shot": 0}
    for name in limits:
        gained = most = 0.0
        for num_bytes in sorted(times):
            if name not in times[num_bytes]:
                break
            gained += math.log(ALIKE * _others(times[num_bytes])[name] / times[num_bytes][name])
            if gained >= most:
                limits[name], most = num_bytes, gained
    return Limits(**limits)


def suited(times: Mapping[str, int]) -> dict[str, bool]:
    """Tell which ways are about as quick as any other of one size: one that cannot be taken has no time."""
    return {name: name in times and times[name] <= ALIKE * most for name, most in _others(times).items()}


def _others(times: Mapping[str, int]) -> dict[str, int]:
    """Return by way what one size takes by the quickest of the ways that would be taken instead."""
    without = min(times[name] for name in ("library", "two_shot") if name in times)
    least = min(without, times.get("one_shot", without))
    return {"one_shot": without, "fused": least + times["norm"], "two_shot": times["library"]}


def _nanoseconds(call: Callable[[], object], gather: Gather) -> int:
    """Return what a call takes in a CUDA graph on this rank, the median of some replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                call()
        times = []
        for _ in range(ROUNDS):
            gather(0)
            graph.replay()  # the first waits for the last rank
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(int(begin.elapsed_time(end) * 1e6 / CALLS))
    return sorted(times)[len(times) // 2]
