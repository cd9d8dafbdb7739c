"""Log-probabilities as replies give them, whichever API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.engine.messages import TokenLogprob
from quire.service.answer.replies import PromptLogprob, PromptLogprobs

if TYPE_CHECKING:
    from quire.service.answer.generation import Generation
    from quire.service.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # JSON has no infinity


def prompt_logprobs(generation: Generation) -> dict[int, PromptLogprobs]:
    """Return those of each prompt, by its request's number: its choices share them.

    By token id: of each token of the prompt, and of the candidates in its place. None for the first.
    """
    tokenizer = generation.tokenizer
    return {
        group.stream.request_id: [
            None if entry is None else _prompt_logprob(tokenizer, entry)
            for entry in group.prompt_logprobs or []
        ]
        for group in generation.groups
    }


def _prompt_logprob(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, PromptLogprob]:
    ranked = enumerate(zip(entry.top_tokens, entry.top_logprobs, strict=True), 1)
    every = [(entry.token, entry.logprob, entry.rank)]
    every += [(token, logprob, rank) for rank, (token, logprob) in ranked if token != entry.token]
    return {
        str(token): PromptLogprob(max(logprob, MIN_LOGPROB), rank, tokenizer.token_text(token))
        for token, logprob, rank in every
    }
