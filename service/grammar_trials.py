"""Grammars are tried out before a request goes to the engine: beside the event loop, and only for so long."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import struct
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from engine.config import EngineInfo
from service.errors import ApiError, bad_value

if TYPE_CHECKING:
    from service.tokenizer import Tokenizer

PROCESSES = 2
MAX_WAITING = 64  # grammars
MAX_VERDICTS = 512  # that are remembered
SECONDS = 10.0  # that a grammar may take
START_SECONDS = 60.0  # that a process may take for its first one, with the vocabulary


LENGTH = struct.Struct("<I")


class Vocabulary(msgspec.Struct, frozen=True, array_like=True):
    """What a process is told first."""

    tokenizer: str  # the text of a tokenizer.json
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def encode_frame(message: object) -> bytes:
    """In msgpack, with its length before it."""
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data


class GrammarTrials:
    """Starts its processes when the first grammars come. They end with this process, or when closed."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._idle: list[_Process] = []
        self._started: list[_Process] = []  # all that may not have ended
        self._turns = asyncio.Semaphore(PROCESSES)
        self._waiting = 0
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()  # by digest: what is wrong

    async def check(self, tokenizer: Tokenizer, info: EngineInfo, field: str, grammar: str) -> None:
        """Raises ApiError 400 that names `field` if the engine could not follow `grammar`, or 429."""
        if not info.has_grammars:
            raise bad_value(
                field,
                f"{field} is not supported with this model: its folder has no tokenizer.json, or it has no "
                "eos token",
            )
        digest = hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()
        if digest not in self._verdicts:
            if self._waiting >= MAX_WAITING:
                raise ApiError(
                    429,
                    f"{field}: {self._waiting} schemas wait to be compiled",
                    param=field,
                    code="queue_full",
                    retry_after=1,
                )
            self._waiting += 1
            try:
                async with self._turns:
                    self._remember(digest, await self._try(tokenizer, info, grammar))
            finally:
                self._waiting -= 1
        self._verdicts.move_to_end(digest)
        error = self._verdicts[digest]
        if error is not None:
            raise bad_value(field, f"{field}: {error}", "invalid_grammar")

    def _remember(self, digest: bytes, error: str | None) -> None:
        self._verdicts[digest] = error
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    async def _try(self, tokenizer: Tokenizer, info: EngineInfo, grammar: str) -> str | None:
        self._idle = [process for process in self._idle if not process.ended]
        if self._idle:
            process, seconds = self._idle.pop(), self._seconds
        else:
            process, seconds = await _Process.start(tokenizer, info), START_SECONDS
            self._started = [other for other in self._started if not other.ended] + [process]
        try:
            async with asyncio.timeout(seconds):
                error = await process.ask(grammar)
        except TimeoutError:
            process.kill()
            return f"it takes longer than {seconds:g} seconds to compile"
        except asyncio.IncompleteReadError:
            process.kill()
            return "compiling it ended the process that did: it may take too much memory"
        except BaseException:  # its client left
            process.kill()
            raise
        self._idle.append(process)
        return error

    async def close(self) -> None:
        """End the processes."""
        started, self._started, self._idle = self._started, [], []
        for process in started:
            process.kill()
        await asyncio.gather(*(process.wait() for process in started))


class _Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, tokenizer: Tokenizer, info: EngineInfo) -> _Process:
        text = await asyncio.to_thread(tokenizer.to_json)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "service.grammar_compiler",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent, which closes the pipe
        )
        assert process.stdin is not None
        process.stdin.write(encode_frame(Vocabulary(text, info.vocab_size, info.eos_token_ids)))
        return cls(process)

    async def ask(self, grammar: str) -> str | None:
        """What is wrong with it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(encode_frame(grammar))
        (length,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
        answer: str | None = msgspec.msgpack.decode(
            await self._process.stdout.readexactly(length), type=str | None
        )
        return answer

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self) -> None:
        await self._process.wait()
