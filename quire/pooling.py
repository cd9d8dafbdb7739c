"""Vectors, labels and scores in vLLM's form: what `embed`, `classify` and `score` give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from quire.engine.config import EngineInfo
from quire.engine.messages import PoolingParams
from quire.engine.models.pooling import Pooling
from quire.service.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class ClassificationOutput:
    """`probs` are of the labels that config.json names, in its order; of a regression, its numbers."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    score: float


Outputs = TypeVar("Outputs")


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[Outputs]):
    """What came of a prompt."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: Outputs
    num_cached_tokens: int
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """A prompt's vector."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Which labels fit a prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """How well two texts fit. prompt_token_ids: of both, one after the other."""


def pooling_of(info: EngineInfo) -> Pooling:
    """Return how the model pools. Raises ValueError if it generates text."""
    if info.pooling is None:
        raise ValueError('this model generates text: make the LLM with runner="pooling"')
    return info.pooling


def embedding_params(info: EngineInfo, dimensions: int | None, normalize: bool | None) -> PoolingParams:
    """Return what becomes of vectors. Raises ValueError for a model that does not embed."""
    pooling = pooling_of(info)
    if pooling.labels:
        use = "classify" if pooling.labels > 1 else "score"
        raise ValueError(f"this model has a head that scores texts, and gives no embeddings: use {use}")
    return PoolingParams(
        pooling.checked_dimensions(dimensions, info.vector_size),
        normalize=pooling.normalize if normalize is None else normalize,
    )


def classification_params(info: EngineInfo) -> PoolingParams:
    """Return what makes probabilities. Raises ValueError for a model that tells no labels apart."""
    pooling = pooling_of(info)
    if not pooling.names:
        raise ValueError("this model tells no labels apart: its config.json names none; use embed or score")
    return PoolingParams(activation=pooling.class_activation)


def scoring_params(info: EngineInfo) -> PoolingParams:
    """Return what becomes of vectors that are scores, or of which scores are made. Raises ValueError."""
    pooling = pooling_of(info)
    if pooling.labels > 1:
        raise ValueError(
            f"this model tells {pooling.labels} labels apart; a score needs a head with one: use classify"
        )
    if not pooling.labels:
        return embedding_params(info, None, True)
    return PoolingParams(activation=pooling.activation)


def text_pairs(first: str | Sequence[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return one text with each of several, or two lists pair by pair. Raises ValueError."""
    left = [first] if isinstance(first, str) else list(first)
    right = [second] if isinstance(second, str) else list(second)
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right) or not right:
        raise ValueError(
            f"there are {len(left)} first texts and {len(right)} second ones: give one first text for all, "
            "or as many as second ones"
        )
    return list(zip(left, right, strict=True))


def pair_tokens(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
    """Return the tokens of each pair, as a template for that or the tokenizer puts them together."""
    template = tokenizer.pair_template
    if template is None:
        return [tokenizer.encode_pair(*pair, add_special_tokens=True) for pair in pairs]
    texts = [template.render(tokenizer.pair_messages(*pair), add_generation_prompt=False) for pair in pairs]
    return [tokenizer.encode(text, add_special_tokens=True) for text in texts]


def numbers(vector: bytes | None) -> list[float]:
    """Return the numbers of a float32 vector."""
    found: list[float] = np.frombuffer(vector or b"", np.float32).tolist()
    return found


def cosine(first: bytes | None, second: bytes | None) -> float:
    """Return that of two vectors of length 1."""
    return float(np.frombuffer(first or b"", np.float32) @ np.frombuffer(second or b"", np.float32))
