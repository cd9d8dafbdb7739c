"""What became of a request in the engine: where its time went, and what held it up, as plain data.

Times are time.monotonic() of the machine, which the front end has too.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.engine.messages import FinishReason

SpanName = Literal[
    "grammar",  # its grammar is compiled
    "queue",
    "waiting_for_blocks",  # for blocks that others hold, before it runs or while it does
    "loading",  # cached blocks come from host memory
    "prefill",
    "decode",
    "masks",  # the tokens that a grammar allows next are found
    "swapped_out",  # preempted: its blocks are in host memory
    "swap_in",
    "preempted",  # without blocks
    "recompute",
    "ended",
]
WaitReason = Literal["blocks", "sequences", "budget", "trials"]
MissKind = Literal[
    "differs",
    "evicted",
    "salted_otherwise",
    "never_seen",
    "partial_block",
    "last_token",
    "behind_window",
    "prompt_logprobs",
    "off",
]


class Span(msgspec.Struct, array_like=True):
    """Time between two changes of a request's state; of `pieces`, the sum, and where the first began."""

    name: SpanName
    start: float
    seconds: float
    count: int = 0  # tokens that a prefill chunk computes
    pieces: int = 1


class Miss(msgspec.Struct, array_like=True, frozen=True):
    """Why prompt token `token`, counted from 0, and those after it were not found in the prefix cache."""

    kind: MissKind
    token: int
    differs_at: int | None = None  # first token that is another one than in what is cached
    seconds: float | None = None  # since it was evicted


class Wait(msgspec.Struct, array_like=True, frozen=True):
    """What the queue's head waited for, as things were when it began to."""

    reason: WaitReason
    running: int  # requests
    holders: list[int]  # some of them, the oldest first
    held: int  # of blocks, or of sequences that run at once
    total: int  # that there are
    needed: int = 0  # blocks that the head could not have


class Waited(msgspec.Struct, array_like=True, frozen=True):
    """For how long the queue stood still for one reason while a request was in it."""

    seconds: float
    wait: Wait


class Preemption(msgspec.Struct, array_like=True):
    """A request lost its blocks to an older one."""

    at: float
    mode: Literal["swap", "recompute"]
    beneficiary: int | None = None  # the request that took them; None: a step raised, and all were preempted
    blocks: int = 0
    tokens: int = 0  # that they held
    away: float | None = None  # seconds until it was let in again
    back: float | None = None  # seconds from then on until it was where it had been


class Company(msgspec.Struct, array_like=True):
    """The steps that a request decoded in, and what else they computed."""

    steps: int = 0
    mixed: int = 0  # of those, steps with prefills of others
    prefilled: int = 0  # prompt tokens of others that these computed
    sequences: int = 0  # that decoded in them, its own included, over all steps


class RequestRecord(msgspec.Struct, array_like=True):
    """All of one request, when it has ended. Its spans follow one another from `arrival` to `ended`."""

    request_id: int
    arrival: float
    ended: float
    reason: FinishReason  # of the sequence that ended last
    spans: list[Span]
    queued_behind: int  # requests that waited already when it came
    waited: list[Waited]
    prompt_tokens: int
    cached_tokens: int  # of those, found in the prefix cache
    cached_host_tokens: int  # of these, in host memory
    miss: Miss | None
    preemptions: list[Preemption]  # the first of them
    num_preemptions: int
    company: Company
