"""Grammars are tried out before a request goes to the engine: beside the event loop, and only for so long."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from quire.engine.config import EngineInfo
from quire.service.errors import ApiError, bad_value, worker_lost
from quire.service.text.frames import encode_frame
from quire.service.text.worker_pool import OutOfTime, WorkerCrashed, WorkerLost, Workers

if TYPE_CHECKING:
    from quire.service.text.tokenizer import Tokenizer

PROCESSES = 2
MAX_WAITING = 64  # grammars
MAX_VERDICTS = 512  # that are remembered
SECONDS = 10.0  # of processor time, that a grammar may take


class GrammarTrials:
    """Starts its processes when the first grammars come. They end with this process, or when closed."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._workers: Workers | None = None
        self._waiting = 0
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()  # by digest: what is wrong

    async def check(self, tokenizer: Tokenizer, info: EngineInfo, field: str, grammar: str) -> None:
        """Raises ApiError 400 that names `field` if the engine could not follow `grammar`, or 429 or 503.

        Only what was found out about a grammar is remembered: an accident of its process says nothing.
        """
        if not info.has_grammars:
            raise bad_value(
                field,
                f"{field} is not supported with this model: its folder has no tokenizer, or names no "
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
                self._remember(digest, await self._try(tokenizer, info, grammar))
            except WorkerLost:
                message = f"{field}: the process that compiles schemas was killed: try again"
                raise worker_lost(message) from None
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
        """Return what is wrong with it, if anything. Raises WorkerLost."""
        if self._workers is None:

            def vocabulary() -> tuple[str, int, tuple[int, ...]]:
                return tokenizer.to_json(), info.vocab_size, info.eos_token_ids

            self._workers = Workers(
                "quire.service.text.grammar_compiler", PROCESSES, vocabulary, self._seconds
            )
        try:
            answer = await self._workers.ask(encode_frame(grammar))
        except OutOfTime:
            return f"it takes longer than {self._seconds:g} seconds to compile"
        except WorkerCrashed:
            return "its rules are too deep or too many for what compiling may take of memory: simplify it"
        verdict: str | None = msgspec.json.decode(answer, type=str | None)
        return verdict

    async def close(self) -> None:
        """End the processes."""
        workers, self._workers = self._workers, None
        if workers is not None:
            await workers.close()
