"""The answer of GET /v1/requests/{id}/why, as types."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.engine.records import MissKind
from quire.service.explain.times import Status

CauseKind = Literal[
    "waiting_for_blocks",
    "waiting_for_sequences",
    "waiting_for_budget",
    "isolation",
    "prefix_cache",
    "loading",
    "preemption",
    "stalled",
    "shared_steps",
    "grammar",
    "masks",
    "detokenising",
    "client_not_reading",
]


class TokenCounts(msgspec.Struct):
    prompt: int
    cached: int  # prompt tokens whose keys and values were found
    computed: int  # the other ones
    output: int


class SpanReply(msgspec.Struct, omit_defaults=True):
    name: str
    start_ms: float
    ms: float
    tokens: int = 0  # that a prefill chunk computed
    steps: int = 0  # of a decode
    pieces: int = 1  # which `ms` is the sum of; the first began at start_ms


class Cause(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What took time, or saved it: in words, and the numbers in them. Only those of its kind are there."""

    kind: CauseKind
    text: str
    prompt_index: int | UnsetType = UNSET  # of a list of prompts
    ms: float | UnsetType = UNSET
    requests: list[str] | UnsetType = UNSET  # that were ahead, as far as they are this key's
    requests_ahead: int | UnsetType = UNSET
    blocks_held: int | UnsetType = UNSET
    blocks_total: int | UnsetType = UNSET
    blocks_needed: int | UnsetType = UNSET
    sequences_running: int | UnsetType = UNSET
    sequences_total: int | UnsetType = UNSET
    found_tokens: int | UnsetType = UNSET
    host_tokens: int | UnsetType = UNSET  # of those found, from host memory
    prompt_tokens: int | UnsetType = UNSET
    reason: MissKind | UnsetType = UNSET  # why not all were found
    missed_from: int | UnsetType = UNSET  # the first token that was not, counted from 0
    first_differing_token: int | UnsetType = UNSET
    evicted_seconds_ago: float | UnsetType = UNSET
    times: int | UnsetType = UNSET
    mode: Literal["swap", "recompute"] | UnsetType = UNSET
    for_request: str | UnsetType | None = UNSET  # null: another key's, or none
    blocks: int | UnsetType = UNSET
    away_ms: float | UnsetType = UNSET
    back_ms: float | UnsetType = UNSET
    steps: int | UnsetType = UNSET
    steps_with_prefills: int | UnsetType = UNSET
    prefilled_tokens: int | UnsetType = UNSET
    mean_sequences: float | UnsetType = UNSET


class PreemptionReply(msgspec.Struct):
    at_ms: float
    mode: Literal["swap", "recompute"]
    for_request: str | None  # null: another key's, or none: a step raised, and requests were tried apart
    blocks: int
    tokens: int
    away_ms: float | None  # null: it never came back
    back_ms: float | None


class WhyReply(msgspec.Struct):
    request_id: str
    status: Status
    total_ms: float
    tokens: TokenCounts
    spans: list[SpanReply]
    causes: list[Cause]
    preemptions: list[PreemptionReply]  # the first 32 of each prompt
