"""A prompt that is pooled, and where in it its vector begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quire.engine.models.pooled_texts import PooledTexts

if TYPE_CHECKING:
    from quire.service.text.tokenizer import Tokenizer


class PooledPrompt(NamedTuple):
    """A prompt's tokens; its vector is not of the first `unpooled` of them."""

    tokens: list[int]
    unpooled: int = 0


def unpooled_tokens(tokenizer: Tokenizer, texts: PooledTexts, *, add_special_tokens: bool) -> int:
    """Return how many of its first tokens a text's vector is not of: what its prompt begins a text with.

    As sentence-transformers has it they are the prompt's alone, without a special token at their end.
    """
    if texts.pools_prompt or not texts.prompt:
        return 0
    tokens = tokenizer.encode(texts.prompt, add_special_tokens=add_special_tokens)
    return len(tokens) - (len(tokens) > 0 and tokens[-1] in tokenizer.special)
