"""RankGroup: the ranks of one model, as one of them sees them, and what they compute together."""

from __future__ import annotations

import copy
import logging
import os
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions

from quire.engine.parallel.peers import NoPeers, connect, measured
from quire.engine.parallel.sums import sum_in_order, sum_in_slices
from quire.kernels.parallel.buffers import SymmetricBuffers
from quire.kernels.parallel.ranks import PeerSums, rounded
from quire.kernels.pointwise.norm import add_rms_norm, add_rms_norm_reference

logger = logging.getLogger("quire.engine")

TIMEOUT = timedelta(minutes=30)  # of the library's own; ranks that hang are noticed long before
SLICED_BYTES = 2**18  # of a rank's term, from which on each rank adds up a slice of the numbers


class OneOfRanks:
    """A rank without the others: sums are its own terms, and what it gathers is its own."""

    def __init__(self, rank: int, size: int, peers: PeerSums | None = None) -> None:
        """peers: kernels to launch, where launched kernels are only compiled."""
        self.rank = rank
        self.size = size
        self._peers = peers

    @property
    def buffers(self) -> SymmetricBuffers | None:
        return None if self._peers is None else self._peers.buffers

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._peers is not None and self._peers.supports(x):
            return self._peers.all_reduce(x)
        return x

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if self._peers is not None and self._peers.supports(residual):
            return self._peers.add_rms_norm(x, residual, weight, eps)
        return _add_rms_norm(rounded(x, residual), residual, weight, eps)

    def all_gather(self, x: Tensor) -> Tensor:
        return x.expand(self.size, *x.shape).contiguous()


class RankGroup:
    """Sums and gathers over `size` ranks, of which this process is `rank`; each has a device of its own.

    NCCL between GPUs, gloo between CPUs. Every rank calls the same methods in the same order with the same
    shapes. With one rank there is no group: models take None, and compute what they did without.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, store: dist.Store, *, with_peers: bool = True
    ) -> None:
        """store: of torch.distributed, through which the ranks find each other.

        with_peers: between GPUs that reach each other's memory connect and measure kernels that sum through
        it. What those do not take, NCCL or gloo sums.
        """
        self.rank = rank
        self.size = size
        self.device = device
        self.store = store
        self.peers: PeerSums | None = None
        self._host = _gloo(store, rank, size)
        self._nccl = None if device.type == "cpu" else _nccl(store, rank, size, device)
        if with_peers and device.type == "cuda":
            self._connect()

    @property
    def buffers(self) -> SymmetricBuffers | None:
        """Return the memory that kernels of all ranks write to, if they reach each other's."""
        return None if self.peers is None else self.peers.buffers

    def _connect(self) -> None:
        """Have kernels sum through the other ranks' memory, as far as that is quicker; else say why not."""
        try:
            buffers = connect(self.rank, self.size, self.device, self.store, self.gather)
        except NoPeers as error:
            logger.warning("rank %d: NCCL alone sums over the ranks: %s", self.rank, error)
            return
        peers = measured(buffers, self.all_reduce, self.gather)
        logger.info("rank %d: sums over the ranks go through peers' memory: %s", self.rank, peers.limits)
        self.peers = peers

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's x, contiguous, in the order of the ranks; x may be overwritten."""
        if self.peers is not None and self.peers.supports(x):
            return self.peers.all_reduce(x)
        # The libraries' own sums of more than two add in an order that depends on where a number stands.
        if self._nccl is not None and self.size == 2:
            return self.library_sum(x)
        if self._nccl is not None and x.nbytes >= SLICED_BYTES:
            return self.sliced_sum(x)
        return self.gathered_sum(x)

    def gathered_sum(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's x, of which each rank gets all."""
        return sum_in_order(self.all_gather(x))

    def sliced_sum(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's x, of which each rank adds up a slice: between GPUs."""
        return sum_in_slices(x, self.size, self._exchange, self.all_gather)

    def library_sum(self, x: Tensor) -> Tensor:
        """Sum every rank's x in place, as NCCL does: of more than two, in an order of its own."""
        assert self._nccl is not None
        _finish(self._nccl.allreduce([x], _on_this_stream(AllreduceOptions())))
        return x

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add the sum of every rank's x [T, H] to residual [T, H] in place -> (RMSNorm of that, residual)."""
        if self.peers is not None and self.peers.supports(residual):
            return self.peers.add_rms_norm(x, residual, weight, eps)
        return _add_rms_norm(self.all_reduce(rounded(x, residual)), residual, weight, eps)

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's x, contiguous: [size, *x.shape]."""
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        if self._nccl is not None:
            _finish(self._nccl._allgather_base(gathered, x, _on_this_stream(AllgatherOptions())))
        else:
            self._host.allgather([list(gathered.unbind())], [x]).wait()
        return gathered

    def _exchange(self, x: Tensor) -> Tensor:
        """Send row i of x [size, N] to rank i, between GPUs -> what every rank sent to this one."""
        assert self._nccl is not None
        received = torch.empty_like(x)
        options = _on_this_stream(AllToAllOptions())
        _finish(self._nccl.alltoall_base(received, x, [], [], options))
        return received

    def gather(self, value: int) -> tuple[int, ...]:
        """Return every rank's value, on the host."""
        values = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        self._host.allgather([values], [torch.tensor([value])]).wait()
        return tuple(int(other) for other in values)

    def least(self, value: int) -> int:
        """Return the smallest of every rank's values, on the host."""
        return min(self.gather(value))

    def barrier(self) -> None:
        """Wait on the host until every rank is here."""
        self._host.barrier().wait()

    def alone(self) -> OneOfRanks:
        """Return the group without the others: what it gives has the right shapes, for kernels to compile."""
        return OneOfRanks(self.rank, self.size, self.peers)

    def without_peers(self) -> RankGroup:
        """Return the same group that sums by NCCL or gloo alone."""
        other = copy.copy(self)
        other.peers = None
        return other

    def close(self, seconds: float = 0.0) -> None:
        """Leave the group. What is under way with ranks that are gone ends with an error.

        NCCL's communicator goes with the last CUDA graph that has captured an operation of it, which is
        waited for up to so many seconds.
        """
        if self.peers is not None:
            self.peers.close()
        if self._nccl is not None:
            leaving = threading.Thread(target=self._nccl.abort, name="quire-nccl", daemon=True)
            leaving.start()
            leaving.join(seconds)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return (add_rms_norm if x.is_cuda else add_rms_norm_reference)(x, residual, weight, eps)


# The library's process groups, whose types leave out most of what they do.


def _gloo(store: dist.Store, rank: int, size: int) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(interface="lo")]  # heard by nobody else
    options._timeout = TIMEOUT
    return gloo(dist.PrefixStore("host", store), rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int, device: torch.device) -> Any:
    """Return the ranks' group over NCCL, which is set up by its first operation."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast: a program that dies with it can take GPUs along
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(device)
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = TIMEOUT
    group = nccl(dist.PrefixStore("nccl", store), rank, size, options)
    group.allreduce([torch.zeros(1, device=device)]).wait()
    torch.cuda.synchronize(device)
    return group


def _on_this_stream(options: Any) -> Any:
    """Have an operation run where it is called, and not on a stream of the library's own."""
    options.asyncOp = False
    return options


def _finish(work: Any) -> None:
    """Have the stream wait for an operation of NCCL's, which is None if it runs on that stream."""
    if work is not None:
        work.wait()
