"""What is asked of a model that pools, for LLM and AsyncLLM alike: prompts, and what their vectors become."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from msgspec.structs import replace

from quire.arguments import Prompt, prompt_list, prompt_tokens
from quire.engine.config import EngineInfo
from quire.engine.messages import Output, PoolingParams
from quire.engine.models.pooled_texts import PooledTexts
from quire.pooling import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    classification_params,
    cosine,
    embedding_params,
    numbers,
    pair_tokens,
    pooling_of,
    scoring_params,
    text_pairs,
)
from quire.service.text.pooled_prompt import PooledPrompt, unpooled_tokens
from quire.service.text.tokenizer import Tokenizer

Outputs = TypeVar("Outputs")
R = TypeVar("R")


@dataclass(frozen=True)
class PoolingTask(Generic[R]):
    prompts: list[list[int]]
    params: list[PoolingParams]  # of each
    results: Callable[[Sequence[Output]], list[R]]  # of the output of each prompt


def embedding_task(
    info: EngineInfo,
    tokenizer: Tokenizer,
    prompts: Prompt | Iterable[Prompt],
    dimensions: int | None,
    normalize: bool | None,
) -> PoolingTask[EmbeddingRequestOutput]:
    """Raises ValueError for what the model cannot do."""
    params = embedding_params(info, dimensions, normalize)
    pooled = _tokens(tokenizer, prompts, pooling_of(info).texts)
    return _each(pooled, params, EmbeddingRequestOutput, EmbeddingOutput)


def classification_task(
    info: EngineInfo, tokenizer: Tokenizer, prompts: Prompt | Iterable[Prompt]
) -> PoolingTask[ClassificationRequestOutput]:
    """Raises ValueError for a model that tells no labels apart."""
    params = classification_params(info)
    return _each(_tokens(tokenizer, prompts), params, ClassificationRequestOutput, ClassificationOutput)


def scoring_task(
    info: EngineInfo, tokenizer: Tokenizer, text_1: str | Sequence[str], text_2: str | Sequence[str]
) -> PoolingTask[ScoringRequestOutput]:
    """Score by the head of a model that has one for that, or by the cosine of embeddings.

    Raises ValueError.
    """
    params, pairs = scoring_params(info), text_pairs(text_1, text_2)
    if pooling_of(info).labels:
        tokens_of_pairs = [PooledPrompt(each) for each in pair_tokens(tokenizer, pairs)]
        return _each(tokens_of_pairs, params, ScoringRequestOutput, lambda vector: ScoringOutput(vector[0]))
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    prompts = _tokens(tokenizer, texts, pooling_of(info).texts)
    tokens = {text: prompt.tokens for text, prompt in zip(texts, prompts, strict=True)}

    def results(outputs: Sequence[Output]) -> list[ScoringRequestOutput]:
        by_text = dict(zip(texts, outputs, strict=True))
        return [
            ScoringRequestOutput(
                str(by_text[second].request_id),
                tokens[first] + tokens[second],
                ScoringOutput(cosine(by_text[first].vector, by_text[second].vector)),
                by_text[first].cached_tokens + by_text[second].cached_tokens,
            )
            for first, second in pairs
        ]

    return PoolingTask(list(tokens.values()), _params(params, prompts), results)


def _each(
    prompts: list[PooledPrompt],
    params: PoolingParams,
    kind: Callable[[str, list[int], Outputs, int], R],
    made: Callable[[list[float]], Outputs],
) -> PoolingTask[R]:
    """Return the task of which each prompt's result is `made` of its own vector."""

    def results(outputs: Sequence[Output]) -> list[R]:
        return [
            kind(str(output.request_id), prompt, made(numbers(output.vector)), output.cached_tokens)
            for prompt, output in zip(tokens, outputs, strict=True)
        ]

    tokens = [prompt.tokens for prompt in prompts]
    return PoolingTask(tokens, _params(params, prompts), results)


def _params(params: PoolingParams, prompts: Sequence[PooledPrompt]) -> list[PoolingParams]:
    """Return those of each prompt."""
    return [replace(params, unpooled=prompt.unpooled) for prompt in prompts]


def _tokens(
    tokenizer: Tokenizer, prompts: Prompt | Iterable[Prompt], texts: PooledTexts | None = None
) -> list[PooledPrompt]:
    """Return the tokens of each; a text is put behind the prompt of `texts`."""
    texts = texts or PooledTexts()
    unpooled = unpooled_tokens(tokenizer, texts, add_special_tokens=True)
    return [
        PooledPrompt(prompt_tokens(tokenizer, texts.prompt + prompt), unpooled)
        if isinstance(prompt, str)
        else PooledPrompt(prompt)
        for prompt in prompt_list(prompts)
    ]
