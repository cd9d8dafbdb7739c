"""Grammars: which tokens a constrained sequence may take next, by llguidance.

A grammar is llguidance's own text of it. All that one can cost is bounded by LIMITS: compiling it, a step
of it (milliseconds), and the memory that a sequence's place in it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from engine.plan import Int32

LIMITS = LLParserLimits(
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=10_000,  # 1 or 2 kB each
    max_grammar_size=100_000,
    verbose_errors=False,
)
_WORD = 32  # tokens in a word of a mask
_MAX_ERROR = 400  # characters


class Constraint:
    """One sequence's place in its grammar, and which tokens may come next.

    mask: [ceil(V / 32)] int32; bit t % 32 of word t // 32 says whether token t may. When nothing else can
    follow, that is only the tokens that end a text.
    """

    __slots__ = ("_executor", "_matcher", "mask")

    def __init__(self, matcher: LLMatcher, executor: LLExecutor, mask: Int32) -> None:
        self._matcher = matcher
        self._executor = executor
        self.mask = mask

    def fork(self) -> Constraint:
        """The same place, for another sequence."""
        return Constraint(self._matcher.deep_copy(), self._executor, self.mask)

    def accept(self, token: int) -> None:
        """The sequence takes `token`; its mask is that of the place before until `find_masks`."""
        self._matcher.consume_token(token)

    @property
    def error(self) -> str | None:
        """Why it cannot go on; once there is an error the mask means nothing."""
        return _words(self._matcher.get_error()) if self._matcher.is_error() else None

    def mask_without(self, tokens: Iterable[int]) -> Int32:
        """The mask less `tokens`, unless nothing is left then."""
        mask = self.mask.copy()
        for token in tokens:
            mask[token // _WORD] &= ~np.int32(np.uint32(1 << token % _WORD).view(np.int32))
        return mask if mask.any() else self.mask


def find_masks(constraints: list[Constraint]) -> None:
    """The masks of all of them, side by side on the host's cores."""
    if not constraints:
        return
    masks = np.zeros((len(constraints), len(constraints[0].mask)), np.int32)
    places = [(constraint._matcher, i) for i, constraint in enumerate(constraints)]
    fill_next_token_bitmask_par(constraints[0]._executor, places, masks)
    for constraint, mask in zip(constraints, masks, strict=True):
        constraint.mask = mask


class Grammars:
    """Compiles grammars over one vocabulary."""

    def __init__(self, load: Callable[[], LLTokenizer]) -> None:
        """`load` is called when the first grammar comes; for a large vocabulary it takes a second."""
        self._load = load

    @cached_property
    def vocabulary(self) -> LLTokenizer:
        return self._load()

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

    def compile(self, grammar: str) -> Constraint:
        """The beginning of `grammar`. Raises ValueError that says what is wrong with it."""
        matcher = LLMatcher(self.vocabulary, grammar, log_level=0, limits=LIMITS)
        words = -(-self.vocabulary.vocab_size // _WORD)
        constraint = Constraint(matcher, self._executor, np.zeros(words, np.int32))
        if constraint.error is None:
            find_masks([constraint])
        if constraint.error is not None:
            raise ValueError(constraint.error)
        if not constraint.mask.any():
            raise ValueError("no token of the vocabulary can begin what it describes")
        return constraint


def load_vocabulary(tokenizer: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """What the tokens stand for. `tokenizer` is the text of a tokenizer.json. Raises ValueError.

    Ids that the tokenizer does not have, up to the model's vocabulary, are never allowed.
    """
    return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids))


def grammars_of(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Grammars | None:
    """For the model in `folder`; None if it has no tokenizer.json, or no token that ends a text."""
    file = folder / "tokenizer.json"
    if not file.is_file() or not eos_token_ids:
        return None
    return Grammars(lambda: load_vocabulary(file.read_text(encoding="utf-8"), vocab_size, eos_token_ids))


def _words(error: str) -> str:
    """The first lines of llguidance's message."""
    lines = error.split("<non-verbose/>", maxsplit=1)[0].splitlines()
    text = " ".join(line.strip() for line in lines if line.strip())
    return text if len(text) <= _MAX_ERROR else text[:_MAX_ERROR] + " …"
