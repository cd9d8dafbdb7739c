"""One sequence of an offline request, from its first token to a Completion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.engine.messages import Output, TokenLogprob
from quire.service.answer.choice import Choice
from quire.service.text.detokenizer import Detokenizer

PromptLogprobs = list[TokenLogprob | None]


@dataclass(frozen=True)
class Completion:
    """One of a prompt's n samples or beams; token_ids include a stopping eos, the text does not.

    Log-probabilities are there where its params ask for them, one for each token of the output or prompt.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: PromptLogprobs | None = None  # None for the first token
    cumulative_logprob: float | None = None  # of a beam


class Gathered:
    """Its text is made once, when all its tokens are there."""

    __slots__ = ("_detokenizer", "_end", "_index", "_last", "_logprobs", "_text", "tokens")

    def __init__(self, index: int, detokenizer: Detokenizer, end: Callable[[int], object]) -> None:
        """Gather the one of this index; give it to `end` when it has ended."""
        self._index = index
        self._detokenizer = detokenizer
        self._end = end
        self.tokens: list[int] = []  # what is no more than a token is added here
        self._logprobs: list[TokenLogprob] = []
        self._text = ""
        self._last: Output | None = None

    def add(self, output: Output) -> None:
        self.tokens += output.tokens
        self._logprobs += output.logprobs or ()
        if output.finish_reason is not None:
            self._last = output
            shown = self.tokens if output.stop_token is None else self.tokens[:-1]
            self._text = self._detokenizer.push(shown) + self._detokenizer.finish()
            self._end(self._index)

    def completion(self, *, with_logprobs: bool, prompt_logprobs: PromptLogprobs | None) -> Completion:
        assert self._last is not None and self._last.finish_reason is not None
        return Completion(
            self._text,
            self.tokens,
            self._last.finish_reason,
            self._logprobs if with_logprobs else None,
            prompt_logprobs,
            self._last.cumulative_logprob,
        )


class Followed:
    """Its text is made as its tokens come: it is shown at once, or a stop string may end it."""

    __slots__ = ("_end", "choice", "tokens")

    def __init__(self, choice: Choice, end: Callable[[int], object]) -> None:
        """Follow one; give its index to `end` when it has ended."""
        self.choice = choice
        self._end = end
        self.tokens: list[int] = []  # what is no more than a token is added here

    def follow(self) -> None:
        """Take in the tokens that were added."""
        if self.tokens:
            self.add(Output(0, self.choice.index, self.tokens.copy()))
            self.tokens.clear()

    def add(self, output: Output) -> None:
        if self.choice.finish_reason is None:  # else the engine was ahead of a stop string
            self.choice.add(output)
            if self.choice.finish_reason is not None:
                self._end(self.choice.index)

    def completion(self, *, with_logprobs: bool, prompt_logprobs: PromptLogprobs | None) -> Completion:
        choice = self.choice
        assert choice.finish_reason is not None
        return Completion(
            choice.take_text(),
            choice.tokens,
            choice.finish_reason,
            [entry.logprob for entry in choice.logprobs if entry.logprob] if with_logprobs else None,
            prompt_logprobs,
            choice.cumulative_logprob,
        )
