"""Worker processes as those see them who have questions: they start when needed, and end when they must."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable

import msgspec

from quire.service.text.frames import LENGTH, encode_frame

TRIES = 2  # of a question whose process is lost
START_SECONDS = 60.0  # until a process is ready
FAULTS = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)  # a stack that ended; memory that was not there
END_SECONDS = 5.0  # for a process that has closed its pipes
ANSWER_SECONDS = 60.0  # on the clock, for an answer: many times the processor time that one may take


class OutOfTime(Exception):
    """A question took all the processor time that one may take, and its process with it."""


class WorkerLost(Exception):
    """A process was killed, could not start or hung: which says nothing of the question."""


class WorkerCrashed(WorkerLost):
    """A process ended by a fault of its own while it answered, as it does whenever it is asked that."""


class Workers:
    """At most `count` processes that run `module` (a `worker`), each with one question at a time.

    `opening` makes what they are told first; it is called in a thread. They end with this process, or when
    closed. A question whose asker leaves while a process has it is answered all the same, which costs less
    than a new process; one that waits for its turn is not.
    """

    def __init__(self, module: str, count: int, opening: Callable[[], object], seconds: float) -> None:
        """`seconds`: of processor time, that an answer may take."""
        self._module = module
        self._opening = opening
        self._seconds = seconds
        self._idle: list[_Process] = []
        self._started: list[_Process] = []  # all that may not have ended
        self._turns = asyncio.Semaphore(count)
        self._asked: set[asyncio.Task[bytes]] = set()
        self._closed = False

    async def start(self) -> None:
        """Have one process ready. Raises as `ask`, but for OutOfTime."""
        async with self._turns:
            self._idle.append(await self._start())

    async def ask(self, question: bytes) -> bytes:
        """Return the answer to a frame, as JSON.

        Raises OutOfTime, WorkerCrashed, WorkerLost, or ValueError for a wrong opening.
        """
        await self._turns.acquire()
        task = asyncio.get_running_loop().create_task(self._ask(question))
        self._asked.add(task)
        task.add_done_callback(self._answered)
        return await asyncio.shield(task)

    def _answered(self, task: asyncio.Task[bytes]) -> None:
        self._turns.release()
        self._asked.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, even if the asker has left

    async def _ask(self, question: bytes) -> bytes:
        for _ in range(TRIES):
            try:
                process = self._take() or await self._start()
                answer = await process.ask(question)
            except WorkerCrashed:
                raise
            except WorkerLost:
                self._end_idle()  # what ended one may have ended others, too
                continue
            self._idle.append(process)
            return answer
        raise WorkerLost

    def _take(self) -> _Process | None:
        """Return one that waits for a question, if any does."""
        self._idle = [process for process in self._idle if not process.ended]
        return self._idle.pop() if self._idle else None

    def _end_idle(self) -> None:
        idle, self._idle = self._idle, []
        for process in idle:
            process.kill()

    async def _start(self) -> _Process:
        if self._closed:
            raise WorkerLost
        opening = await asyncio.to_thread(lambda: encode_frame(self._opening()))
        process = await _Process.start(self._module, self._seconds)
        self._started = [other for other in self._started if not other.ended] + [process]
        await process.open(opening)
        return process

    async def close(self) -> None:
        """End the processes."""
        self._closed = True
        started, self._started, self._idle = self._started, [], []
        for process in started:
            process.kill()
        await asyncio.gather(*(process.wait() for process in started))
        await asyncio.gather(*self._asked, return_exceptions=True)


class _Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, module: str, seconds: float) -> _Process:
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                str(seconds),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the parent, which closes the pipe
            )
        )

    async def open(self, opening: bytes) -> None:
        """Until it is ready. Raises WorkerLost, or ValueError with its words."""
        try:
            ready = await self._exchange(opening, START_SECONDS)
        except (OutOfTime, WorkerCrashed):
            raise WorkerLost from None
        error = msgspec.json.decode(ready, type=str | None)
        if error is not None:
            raise ValueError(error)

    async def ask(self, question: bytes) -> bytes:
        """Raises OutOfTime, WorkerCrashed or WorkerLost."""
        return await self._exchange(question, ANSWER_SECONDS)

    async def _exchange(self, frame: bytes, seconds: float) -> bytes:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                self._process.stdin.write(frame)
                (length,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
                return await self._process.stdout.readexactly(length)
        except TimeoutError:
            self.kill()
            raise WorkerLost from None
        except (EOFError, OSError, RuntimeError):  # uvloop's, of a pipe that is closed
            code = await self._end()
            if code == -signal.SIGPROF:
                raise OutOfTime from None
            if code in FAULTS:
                raise WorkerCrashed from None
            raise WorkerLost from None
        except BaseException:  # a frame that was not read would be the next question's answer
            self.kill()
            raise

    async def _end(self) -> int:
        """Return how it ended, which it did when its pipes closed. To kill it at once would hide that."""
        try:
            async with asyncio.timeout(END_SECONDS):
                return await self.wait()
        except TimeoutError:
            self.kill()
            return await self.wait()

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self) -> int:
        """Return how it ended."""
        return await self._process.wait()
