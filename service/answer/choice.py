"""One sequence of a request as its client sees it: text up to the stop, tokens, logprobs, how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quire.engine.messages import Output, TokenLogprob
from quire.service.text.pieces import AnswerParser
from quire.service.text.stop_strings import StopMatcher
from quire.service.text.tools.calls import AnswerParts, Part

if TYPE_CHECKING:
    from quire.service.text.detokenizer import Detokenizer


class LogprobEntry(NamedTuple):
    token: int
    logprob: TokenLogprob | None  # None for the first token of a prompt
    offset: int  # of the token, in characters of the choice's text
    thought: bool = False  # the token is of the thinking


class Choice:
    """Collects what has come and not yet been taken."""

    __slots__ = (
        "_detokenizer",
        "_eos",
        "_include_stop",
        "_length",
        "_matcher",
        "_min_tokens",
        "_parser",
        "_turn_ends",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "last_time",
        "logprobs",
        "num_reasoning",
        "num_tokens",
        "parts",
        "stop_reason",
        "texts",
        "tokens",
    )

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: tuple[str, ...],
        min_tokens: int = 0,
        parser: AnswerParser | None = None,
        *,
        include_stop: bool = False,
        turn_ends: tuple[str, ...] = (),
        eos: int | None = None,
    ) -> None:
        """Stop strings are looked for in what follows the first `min_tokens` tokens.

        include_stop: the text shows what ended it. turn_ends: further strings, which end it in order. eos: a
        token that is no reason of its own, as in vLLM.
        """
        self.index = index
        self._detokenizer = detokenizer
        self._eos = eos
        self._include_stop = include_stop
        self._turn_ends = turn_ends
        stops += turn_ends
        self._matcher = StopMatcher(stops, included=include_stop) if stops else None
        self._min_tokens = min_tokens
        self._parser = parser
        self.parts = None if parser is None else AnswerParts()  # instead of texts
        self._length = 0  # characters so far, held back ones included
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[LogprobEntry] = []
        self.num_tokens = 0
        self.num_reasoning = 0  # tokens of those, by which it thought
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob: float | None = None  # of a beam
        self.last_time = 0.0  # when its latest token came

    def echo(self, text: str, logprobs: list[LogprobEntry]) -> None:
        """Have the prompt stand before the text."""
        self.texts.append(text)
        self.logprobs.extend(logprobs)
        self._length = len(text)

    def add(self, output: Output) -> None:
        """Add it, unless it has finished (the engine may be ahead of a stop string)."""
        if self.finish_reason is not None:
            return
        tokens = output.tokens
        self.cumulative_logprob = output.cumulative_logprob
        plain = self._matcher is None and (self._parser is None or self._parser.plain)
        if plain and output.logprobs is None and output.stop_token is None:
            text = self._detokenizer.push(tokens) if tokens else ""
            if text:
                self._tell_plain(text)
            self.tokens += tokens
            self.num_tokens += len(tokens)
        else:
            self._add_one_by_one(output)
        if output.finish_reason is not None and self.finish_reason is None:
            self._show(self._detokenizer.finish())
            if self.finish_reason is None and self._matcher is not None:
                self._tell(self._matcher.finish())
            if self.finish_reason is None:
                self._finish(output.finish_reason, output.stop_token)

    def _add_one_by_one(self, output: Output) -> None:
        last = len(output.tokens) - 1
        for at, token in enumerate(output.tokens):
            self.tokens.append(token)
            self.num_tokens += 1
            offset, thought = self._length, False
            if at < last or output.stop_token is None or self._include_stop:
                thought = self._thinks
                self._show(self._detokenizer.push([token]))
                thought = thought or self._thinks
                self.num_reasoning += thought
            if output.logprobs is not None:
                self.logprobs.append(LogprobEntry(token, output.logprobs[at], offset, thought))
            if self.finish_reason is not None:
                return

    @property
    def _thinks(self) -> bool:
        return self._parser is not None and self._parser.thinking

    def _show(self, text: str) -> None:
        if not text:
            return
        self._length += len(text)
        if self._matcher is not None and self.num_tokens > self._min_tokens:
            self._tell(self._matcher.push(text))
            if self._matcher.matched is not None and self.finish_reason is None:
                self._finish("stop", self._matcher.matched)
        else:
            self._tell(text)

    def _tell(self, text: str) -> None:
        if self._parser is not None and self.parts is not None:
            for piece in self._parser.push(text):
                self.parts.add(piece)
            if self._parser.done:
                self.finish_reason = "tool_calls"
        elif text:
            self.texts.append(text)

    def _tell_plain(self, text: str) -> None:
        if self.parts is not None:
            self.parts.add(text)
        else:
            self.texts.append(text)

    def _finish(self, reason: str, stop: int | str | None) -> None:
        """End it: no more text comes. `stop`: the token or the string that ended it."""
        if self._parser is not None and self.parts is not None:
            for piece in self._parser.finish():
                self.parts.add(piece)
            cut = isinstance(stop, str) and stop not in self._turn_ends
            if self._parser.num_calls and reason == "stop" and not cut:
                reason = "tool_calls"
        self.finish_reason = reason
        self.stop_reason = stop if reason == "stop" and stop != self._eos else None

    @property
    def mean_logprob(self) -> float:
        """Return the mean per token generated.

        All came with their log-probabilities, of which none was taken.
        """
        entries = self.logprobs[len(self.logprobs) - self.num_tokens :]  # an echoed prompt stands before
        return sum(entry.logprob.logprob for entry in entries if entry.logprob) / max(len(entries), 1)

    def take_parts(self) -> list[Part]:
        """Return text and calls in their order."""
        if self.parts is not None:
            return self.parts.take()
        text = self.take_text()
        return [text] if text else []

    def take_text(self) -> str:
        """Return the text that has come, of an answer that is all text."""
        texts = self.texts
        if len(texts) == 1:
            text = texts[0]
        elif not texts:
            return ""
        else:
            text = "".join(texts)
        self.texts = []
        return text

    def take_tokens(self) -> list[int]:
        tokens, self.tokens = self.tokens, []
        return tokens

    def take_logprobs(self) -> list[LogprobEntry]:
        logprobs, self.logprobs = self.logprobs, []
        return logprobs
