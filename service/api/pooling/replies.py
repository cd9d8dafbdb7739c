"""Replies with vectors and scores."""

from __future__ import annotations

import secrets
import time
from typing import Literal

import msgspec

from quire.service.text.pooled_prompt import PooledPrompt


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompts: list[PooledPrompt]) -> PoolingUsage:
        tokens = sum(len(prompt.tokens) for prompt in prompts)
        return cls(tokens, tokens)


class _Listed(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str


class EmbeddingData(msgspec.Struct, kw_only=True):
    """`embedding` is a list of numbers, or their bytes as little-endian float32 in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingReply(_Listed, kw_only=True):
    data: list[EmbeddingData]
    usage: PoolingUsage


class RankedDocument(msgspec.Struct):
    text: str


class RerankResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    document: RankedDocument | msgspec.UnsetType = msgspec.UNSET
    relevance_score: float


class RerankReply(msgspec.Struct, kw_only=True):
    """The best document first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]


class ScoreData(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreReply(_Listed, kw_only=True):
    data: list[ScoreData]
    usage: PoolingUsage


class ClassifyData(msgspec.Struct, kw_only=True):
    """`probs` are of the labels in the order of the model's config.json."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyReply(_Listed, kw_only=True):
    data: list[ClassifyData]
    usage: PoolingUsage


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(16)}"


def now() -> int:
    return int(time.time())
