"""Grammars: which tokens a constrained sequence may take next, by llguidance.

A grammar is llguidance's own text of it. All that one can cost is bounded by LIMITS: compiling it, a step
of it (milliseconds), and the memory that a sequence's place in it takes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from quire.engine.arrays import Int32
from quire.engine.models.tokenizer_json import has_tokenizer, tokenizer_json

LIMITS = LLParserLimits(
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=10_000,  # 1 or 2 kB each
    max_grammar_size=100_000,
    verbose_errors=False,
)
# Compiling recurses as deep as a grammar's rules name each other, and where the stack ends the process does.
STACK_BYTES = 32 << 20
_WORD = 32  # tokens in a word of a mask
_MAX_ERROR = 400  # characters


@dataclass(slots=True, eq=False, repr=False)
class Constraint:
    """One sequence's place in its grammar, and which tokens may come next.

    mask: [ceil(V / 32)] int32; bit t % 32 of word t // 32 says whether token t may. When nothing else can
    follow, that is only the tokens that end a text.
    """

    _matcher: LLMatcher
    _finder: MaskFinder
    _mask: Int32
    _search: Search | None = None  # what finds the mask, while it may still do
    _failure: str | None = None  # of that search

    def fork(self) -> Constraint:
        """Return the same place, for another sequence."""
        return Constraint(self._matcher.deep_copy(), self._finder, self.mask, None, self._failure)

    def accept(self, token: int) -> None:
        """Go on by `token`; the mask is that of the place before until `find_masks`."""
        self.settles(None)
        self._matcher.consume_token(token)

    def settles(self, seconds: float | None) -> bool:
        """Return whether the mask is found once it has taken so long to find; None: wait for it."""
        if self._search is not None and self._search.ends(seconds):
            self._failure = self._search.failure
            self._search = None
        return self._search is None

    @property
    def mask(self) -> Int32:
        """Return the tokens allowed next, a bit each; waited for while they are being found."""
        self.settles(None)
        return self._mask

    @property
    def error(self) -> str | None:
        """Return the reason that it cannot go on, waited for likewise; the mask means nothing then."""
        self.settles(None)
        return _words(self._matcher.get_error()) if self._matcher.is_error() else self._failure

    def mask_without(self, tokens: Iterable[int]) -> Int32:
        """Return the mask less `tokens`, unless nothing is left then."""
        mask = self.mask.copy()
        for token in tokens:
            mask[token // _WORD] &= ~np.int32(np.uint32(1 << token % _WORD).view(np.int32))
        return mask if mask.any() else self.mask


class Search:
    """Masks while a thread finds them."""

    def __init__(self, found: Future[None]) -> None:
        self._found = found
        self._begun = time.monotonic()

    def ends(self, seconds: float | None) -> bool:
        """Return whether it ends within so many seconds of its start; None: wait."""
        left = None if seconds is None else max(0.0, self._begun + seconds - time.monotonic())
        if not self._found.done():
            wait([self._found], left)
        return self._found.done()

    @property
    def failure(self) -> str | None:
        """Return what it raised, waited for; a panic of llguidance, too, which is no Exception."""
        raised = self._found.exception()
        return None if raised is None else f"{type(raised).__name__}: {raised}"


class MaskFinder:
    """Finds masks side by side on the host's cores, beside the interpreter."""

    def __init__(self) -> None:
        self._executor = LLExecutor()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="quire-masks")

    def begin(self, places: list[tuple[LLMatcher, int]], masks: Int32) -> Search:
        """Begin to find the masks of matchers, each in its row of `masks`."""
        return Search(self._worker.submit(fill_next_token_bitmask_par, self._executor, places, masks))


def find_masks(constraints: list[Constraint]) -> None:
    """Begin to find the masks of all of them."""
    if not constraints:
        return
    masks = np.zeros((len(constraints), len(constraints[0].mask)), np.int32)
    places = [(constraint._matcher, i) for i, constraint in enumerate(constraints)]
    search = constraints[0]._finder.begin(places, masks)
    for constraint, mask in zip(constraints, masks, strict=True):
        constraint._mask = mask
        constraint._search = search


class Grammars:
    """Compiles grammars over one vocabulary."""

    def __init__(self, load: Callable[[], LLTokenizer]) -> None:
        """`load` is called when the first grammar comes; for a large vocabulary it takes a second."""
        self._load = load

    @cached_property
    def vocabulary(self) -> LLTokenizer:
        return self._load()

    @cached_property
    def _finder(self) -> MaskFinder:
        return MaskFinder()

    def compile(self, grammar: str) -> Constraint:
        """Return the beginning of `grammar`. Raises ValueError that says what is wrong with it."""
        matcher = LLMatcher(self.vocabulary, grammar, log_level=0, limits=LIMITS)
        words = -(-self.vocabulary.vocab_size // _WORD)
        constraint = Constraint(matcher, self._finder, np.zeros(words, np.int32))
        if constraint.error is None:
            find_masks([constraint])
        if constraint.error is not None:
            raise ValueError(constraint.error)
        if not constraint.mask.any():
            raise ValueError("no token of the vocabulary can begin what it describes")
        return constraint


def load_vocabulary(tokenizer: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Return the texts of all tokens. `tokenizer` is the text of a tokenizer.json. Raises ValueError.

    Ids that the tokenizer does not have, up to the model's vocabulary, are never allowed. Tokens that were
    added to it, but not to the model, are left out.
    """
    described = json.loads(tokenizer)
    added = described.get("added_tokens") or []
    known = [token for token in added if token["id"] < vocab_size]
    if len(known) < len(added):
        tokenizer = json.dumps(described | {"added_tokens": known})
    return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids))


def grammars_of(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Grammars | None:
    """Return the grammars of the model in `folder`; None without a tokenizer or eos token."""
    if not eos_token_ids or not has_tokenizer(folder):
        return None
    return Grammars(lambda: load_vocabulary(tokenizer_json(folder), vocab_size, eos_token_ids))


def _words(error: str) -> str:
    """Return the first lines of llguidance's message."""
    lines = error.split("<non-verbose/>", maxsplit=1)[0].splitlines()
    text = " ".join(line.strip() for line in lines if line.strip())
    return text if len(text) <= _MAX_ERROR else text[:_MAX_ERROR] + " …"
