"""Grammars over the oracle's fifty tokens, and a plain reading of what they allow."""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from quire.engine.sequences.grammar import Grammars

EOS = 3
CHARACTERS = 'abcdefghijklmnopqrstuvwxyz0123456789{}[]",:-. '
TOKENS = [b"ab", b"ba", b"01", b"<eos>", *(character.encode() for character in CHARACTERS)]


class _Toy:
    eos_token_id = EOS
    bos_token_id = None
    tokens = TOKENS
    special_token_ids = (EOS,)

    def __call__(self, text: str) -> list[int]:
        return [TOKENS.index(character.encode()) for character in text]


VOCABULARY = LLTokenizer(TokenizerWrapper(_Toy()))

REGEXES = ["[ab]{3,9}", "(ab|ba|01)*", "[a-z]+[0-9]+", "x", "[^x]{0,30}"]
GRAMMARS = [LLMatcher.grammar_from_regex(regex) for regex in REGEXES]
COMPILER = Grammars(lambda: VOCABULARY)
COMPILED = {grammar: COMPILER.compile(grammar) for grammar in GRAMMARS}


def tokens_in(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def deep_rules(depth: int) -> str:
    """Return Lark in which so many rules are each the next one."""
    names = "".join(f"a{i}: a{i + 1}\n" for i in range(depth))
    return f'start: a0\n{names}a{depth}: "a"'


class Reading:
    """A grammar after the tokens so far."""

    def __init__(self, grammar: str) -> None:
        self._matcher = LLMatcher(VOCABULARY, grammar, log_level=0)

    def allowed(self) -> list[int]:
        return tokens_in(np.frombuffer(self._matcher.compute_bitmask(), np.uint8))

    def take(self, token: int) -> None:
        assert self._matcher.consume_token(token)
