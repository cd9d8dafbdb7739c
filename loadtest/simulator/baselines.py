"""Give memory to requests as other systems do: hold a request back until its memory is reserved.

Those let through run on Quire's own scheduler, with more blocks than it can need, so that nothing but memory
differs (PagedAttention, sections 3.1 and 6.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from quire.engine.config import StepStats
from quire.engine.messages import Request
from quire.loadtest.simulator.buddy import BuddyAllocator

Rule = Literal["max", "pow2", "oracle"]


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots that were given to requests, by what they are for (section 3.1)."""

    tokens: int  # they hold a token's keys and values
    reserved: int  # they will in the end
    internal: int  # they never will


class Memory(Protocol):
    """Decides when a request's memory is there."""

    def admit(self, request: Request) -> bool:
        """Reserve for `request`; False: it and all after it must wait. ValueError: it never could."""
        ...

    def begin(self, admitted: Sequence[Request]) -> Sequence[Request]:
        """Note that a step is about to run. Return what runs of those let in since the last one."""
        ...

    def release(self, ended: Request) -> list[Request]:
        """Note that a request has all its tokens. Return those whose answers go out now."""
        ...

    def slots(self, stats: StepStats, context: int) -> Slots:
        """Count slots in a step of such `stats`, whose rows hold `context` tokens, shared ones each time."""
        ...


class Unreserved:
    """Quire itself: the block manager gives memory as tokens come."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def admit(self, request: Request) -> bool:
        return True

    def begin(self, admitted: Sequence[Request]) -> Sequence[Request]:
        return admitted

    def release(self, ended: Request) -> list[Request]:
        return [ended]

    def slots(self, stats: StepStats, context: int) -> Slots:
        tokens = stats.tokens_filled
        return Slots(tokens, 0, stats.active_blocks * self._block_size - tokens)


class Reserved:
    """One contiguous chunk for each sequence, for as many tokens as it may get, as in Orca.

    max: the longest that the model takes; pow2: the prompt and the next power of two of the output, which
    is known to within a factor of two; oracle: exactly what the output will be. Chunks come from a buddy
    allocator and nothing is shared.
    """

    def __init__(self, slots: int, rule: Rule, max_model_len: int) -> None:
        self.arena = BuddyAllocator(slots)
        self.reserved = 0  # slots asked for; a chunk may be larger
        self.final = 0  # slots that will hold tokens in the end
        self._rule = rule
        self._max_model_len = max_model_len
        self._chunks: dict[int, list[int]] = {}  # by request

    def admit(self, request: Request) -> bool:
        count = self.slots_for(request)
        chunks: list[int] = []
        for _ in range(request.params.num_sequences):
            chunk = self.arena.allocate(count)
            if chunk is None:
                for taken in chunks:
                    self.arena.free(taken)
                if self.arena.used == 0:
                    raise ValueError(
                        f"request {request.id} reserves {request.params.num_sequences} × {count} slots in "
                        f"chunks of {BuddyAllocator.chunk_size(count)}, too many for {self.arena.size}"
                    )
                return False
            chunks.append(chunk)
        self._chunks[request.id] = chunks
        self._count(request, 1)
        return True

    def begin(self, admitted: Sequence[Request]) -> Sequence[Request]:
        return admitted

    def release(self, ended: Request) -> list[Request]:
        for chunk in self._chunks.pop(ended.id):
            self.arena.free(chunk)
        self._count(ended, -1)
        return [ended]

    def slots(self, stats: StepStats, context: int) -> Slots:
        """Count. A chunk's rounding counts as given to nobody, as in the paper."""
        return Slots(context, self.final - context, self.reserved - self.final)

    def slots_for(self, request: Request) -> int:
        """Return the slots of one sequence."""
        prompt, output = len(request.prompt), request.params.max_tokens
        return {
            "max": self._max_model_len,
            "pow2": min(prompt + BuddyAllocator.chunk_size(output), self._max_model_len),
            "oracle": prompt + output,
        }[self._rule]

    def _count(self, request: Request, sign: int) -> None:
        sequences = request.params.num_sequences
        self.reserved += sign * sequences * self.slots_for(request)
        self.final += sign * sequences * (len(request.prompt) + request.params.max_tokens)


class RequestLevel:
    """Batches of whole requests: the next begins when the last of one has ended.

    Each sequence has a chunk for the longest that the model takes. Answers go out with their batch. Nothing
    is padded, and what has ended is computed no more.
    """

    def __init__(self, slots: int, max_model_len: int) -> None:
        self.inner = Reserved(slots, "max", max_model_len)
        self._running: set[int] = set()
        self._ended: list[Request] = []
        self._closed = False  # the batch has begun to run: nobody joins any more

    def admit(self, request: Request) -> bool:
        if self._closed or not self.inner.admit(request):
            return False
        self._running.add(request.id)
        return True

    def begin(self, admitted: Sequence[Request]) -> Sequence[Request]:
        self._closed = bool(self._running)
        return admitted

    def release(self, ended: Request) -> list[Request]:
        self._running.remove(ended.id)
        self._ended.append(ended)
        if self._running:
            return []
        batch, self._ended = self._ended, []
        self._closed = False
        for request in batch:
            self.inner.release(request)
        return batch

    def slots(self, stats: StepStats, context: int) -> Slots:
        return self.inner.slots(stats, context)


class Padded:
    """Request-level batches as in FasterTransformer: all prompts of one are as long as the longest.

    All its sequences go on, too, until the last has ended; what comes after an answer's end is thrown away.
    """

    def __init__(self, slots: int, max_model_len: int) -> None:
        self.inner = RequestLevel(slots, max_model_len)
        self._max_model_len = max_model_len

    def admit(self, request: Request) -> bool:
        return self.inner.admit(request)

    def begin(self, admitted: Sequence[Request]) -> Sequence[Request]:
        batch = self.inner.begin(admitted)
        prompt = max((len(request.prompt) for request in batch), default=0)
        output = max((request.params.max_tokens for request in batch), default=0)
        return [self._padded(request, prompt, output) for request in batch]

    def release(self, ended: Request) -> list[Request]:
        return self.inner.release(ended)

    def slots(self, stats: StepStats, context: int) -> Slots:
        """Count. Padding holds tokens, of which there are no more than requests will have."""
        given = self.inner.slots(stats, context)
        final = given.tokens + given.reserved
        return Slots(min(context, final), max(0, final - context), given.internal)

    def _padded(self, request: Request, prompt: int, output: int) -> Request:
        """Lengthen prompt and output to those of the batch, as far as the model's longest leaves room."""
        most, own, params = self._max_model_len, len(request.prompt), request.params
        length = max(own, min(prompt, most - output))
        tokens = max(params.max_tokens, min(output, most - length))
        return msgspec.structs.replace(
            request,
            prompt=[request.prompt[0]] * (length - own) + list(request.prompt),
            params=msgspec.structs.replace(params, max_tokens=tokens),
        )
