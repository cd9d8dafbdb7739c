"""Rank 0 leads: it starts the other ranks' processes, tells them each step, and notices when one is lost."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist

from quire.engine import child
from quire.engine.config import EngineConfig
from quire.engine.device.runner import ModelRunner
from quire.engine.device.streams import CudaHandle, ThreadHandle
from quire.engine.frames import FatalFrame, FrameReader, RankStart, encode_frame
from quire.engine.parallel.channel import Writer
from quire.engine.parallel.digest import TokenDigest, is_of_same_step
from quire.engine.parallel.frames import encode_capture, encode_step
from quire.engine.parallel.group import RankGroup
from quire.engine.parallel.pulse import Pulse
from quire.engine.schedule.plan import Runner, StepPlan, StepResult

LOOK_SECONDS = 0.25  # between two looks at whether the processes are stopped
WAIT_SECONDS = 0.05  # for which a step is waited for before the ranks are looked at
STEP_SECONDS = 60.0  # that no step takes on GPUs; on a CPU one may take as long
BLAME_SECONDS = 1.0  # that it may take to notice that a rank has ended, after a step that raised for it
KEPT_MARKS = 8  # digests of ours that those of slower ranks may still be compared with
EXIT_SECONDS = 2.0  # that a rank may take to end by itself


class RankLost(RuntimeError):
    """A rank has died, hangs, or disagrees: the engine cannot go on."""


class Leader:
    """The processes of ranks 1 to N - 1, and the channel to them.

    A thread watches them. When one is lost it ends the others, and tells `on_lost` why: who waits for a step
    may wait for ever.
    """

    def __init__(self, config: EngineConfig, on_lost: Callable[[str], None] | None = None) -> None:
        self.size = config.tensor_parallel_size
        self.lost: str | None = None
        self.step_seconds = math.inf  # after which a step never ends
        self.group: RankGroup | None = None
        self._on_lost = on_lost
        self._with_peers = not config.disable_custom_all_reduce
        self._closed = False
        self._lock = threading.Lock()
        self.writer = Writer(self.size - 1)
        self.awaited = 0  # frames, from the first one, that rank 0 cannot go on without
        self._store_fd = os.memfd_create("quire-store")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        for rank in range(1, self.size):
            self._start(config, rank)
        self._watcher = threading.Thread(target=self._watch, name="quire-ranks", daemon=True)
        self._watcher.start()

    @property
    def pids(self) -> list[int]:
        """Return the process ids of ranks 1 to N - 1."""
        return [process.pid for process in self._processes]

    def join(self, device: torch.device) -> RankGroup:
        """Return the group, once all ranks have joined it. Raises RankLost if one never does."""
        store = dist.FileStore(store_path(self._store_fd), self.size)
        if device.type == "cuda":
            self.step_seconds = STEP_SECONDS
        try:
            self.group = RankGroup(0, self.size, device, store, with_peers=self._with_peers)
        except RuntimeError:
            self.check()
            raise
        return self.group

    def check(self) -> None:
        """Raise RankLost if a rank is lost."""
        if self.lost is not None:
            raise RankLost(self.lost)

    def send(self, frame: bytes) -> None:
        """Tell all other ranks."""
        self.check()
        self.writer.send(frame, self.check)

    def close(self) -> None:
        """End the other ranks."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        end = time.monotonic() + EXIT_SECONDS
        for process in self._processes:
            try:
                process.wait(max(end - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # Else the watcher may be the last to hold the group: gloo's must not end in a daemon thread while the
        # interpreter ends.
        if threading.current_thread() is not self._watcher:
            self._watcher.join(EXIT_SECONDS)
        group, self.group = self.group, None
        if group is not None:
            group.close(EXIT_SECONDS)  # last: aborting waits for ranks that are still there

    def _start(self, config: EngineConfig, rank: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._processes.append(
                subprocess.Popen(
                    child.command("quire.engine.parallel.follower", str(theirs.fileno())),
                    pass_fds=[theirs.fileno(), self.writer.fd, self._store_fd],
                    stdin=subprocess.DEVNULL,
                )
            )
        self._sockets.append(ours)
        start = RankStart(config, rank, store_path(self._store_fd), self.writer.fd)
        ours.sendall(encode_frame(start))

    def _watch(self) -> None:
        ranks = {connection: rank for rank, connection in enumerate(self._sockets, 1)}
        pulses = {rank: Pulse(process.pid) for rank, process in enumerate(self._processes, 1)}
        while not self._closed:
            ready, _, _ = select.select(list(ranks), [], [], LOOK_SECONDS)
            lost = next((self._last_words(ranks[connection], connection) for connection in ready), None)
            if lost is None:
                behind = self.writer.behind(self.awaited)
                looks = ((rank, pulse.look(owes=rank - 1 in behind)) for rank, pulse in pulses.items())
                hanging = [f"rank {rank} hangs: {why}" for rank, why in looks if why is not None]
                lost = hanging[0] if hanging else None
            if lost is not None:
                self.lose(lost)
                return

    def _last_words(self, rank: int, connection: socket.socket) -> str:
        """Return what a rank has sent, or how it has ended: it sends nothing but what it ends of."""
        try:
            (frame, *_) = FrameReader(connection).read(wait=True)
        except (EOFError, OSError):
            process = self._processes[rank - 1]
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_SECONDS)
            return f"rank {rank} ended unexpectedly (exit code {process.returncode})"
        return msgspec.msgpack.decode(frame, type=FatalFrame).error

    def lose(self, reason: str) -> None:
        """End all ranks but this one, which cannot go on either."""
        with self._lock:
            if self._closed or self.lost is not None:
                return
            self.lost = reason
        for process in self._processes:
            process.kill()
        if self._on_lost is not None:
            self._on_lost(reason)
        group = self.group
        if group is not None:
            group.close()


def store_path(fd: int) -> str:
    """Return the path of an inherited file that has no name: nothing is left of it after the processes."""
    return f"/proc/self/fd/{fd}"


class LeadingHandle:
    """A step of all ranks, as rank 0 waits for it."""

    def __init__(self, handle: CudaHandle | ThreadHandle, number: int, runner: LeadingRunner) -> None:
        self._handle = handle
        self._number = number
        self._frames = runner.leader.writer.sent
        self._runner = runner

    def wait(self) -> StepResult:
        """Wait for its results. Raises RankLost if a rank is lost meanwhile."""
        leader, waited = self._runner.leader, 0.0  # by looks: a machine that stood still is not a hanging one
        while not self._handle.arrived(WAIT_SECONDS):
            waited += WAIT_SECONDS
            leader.awaited = self._frames
            if waited > leader.step_seconds:
                leader.lose(f"some rank hangs: a step has not ended after {leader.step_seconds:g} s")
            leader.check()
        leader.awaited = 0
        result = self._handle.wait()
        leader.check()
        self._runner.compare(result)
        return result

    def has_moved(self, *, wait: bool = False) -> bool:
        moved = self._handle.has_moved(wait=wait)
        if moved:
            self._runner.booked = max(self._runner.booked, self._number)
        return moved


class LeadingRunner(Runner):
    """Rank 0's runner: what it launches, all ranks launch."""

    def __init__(self, runner: ModelRunner, leader: Leader) -> None:
        self.runner = runner
        self.leader = leader
        self.booked = 0  # steps, from the first one, whose transfers are over
        self._launched = 0
        self._digest = TokenDigest()
        self._marks: deque[int] = deque(maxlen=KEPT_MARKS)
        weakref.finalize(self, _end, runner, leader)

    def launch(self, plan: StepPlan) -> LeadingHandle:
        self.leader.send(encode_step(plan, self.booked))
        self._launched += 1
        return LeadingHandle(self.runner.launch(plan), self._launched, self)

    def settle(self) -> None:
        """Raise RankLost: what one rank could not compute, the others wait for."""
        end = time.monotonic() + BLAME_SECONDS
        while time.monotonic() < end:
            self.leader.check()
            time.sleep(WAIT_SECONDS)
        raise RankLost("rank 0 could not compute a step, which the other ranks wait for")

    def compare(self, result: StepResult) -> None:
        """Raise RankLost if another rank has sampled other tokens, in steps that all have digests of."""
        mark = self._digest.add(result)
        if mark is None:
            return
        self._marks.append(mark)
        for rank, theirs in enumerate(self.leader.writer.told(), 1):
            ours = next((kept for kept in self._marks if is_of_same_step(kept, theirs)), theirs)
            if ours != theirs:
                self.leader.lose(f"rank {rank} disagrees: by step {theirs >> 32} it had sampled other tokens")
                self.leader.check()

    @property
    def graphs_left(self) -> int:
        return self.runner.graphs_left

    def capture(self, *, missed: bool = False) -> None:
        if self.runner.graphs_left:
            self.leader.send(encode_capture(missed=missed))
            self.runner.capture(missed=missed)


def _end(runner: ModelRunner, leader: Leader) -> None:
    """End all ranks. Graphs go first: NCCL's communicator waits for those that have captured its sums."""
    if leader.lost is None:  # else what is under way may never end
        runner.drop_graphs()
    leader.close()
