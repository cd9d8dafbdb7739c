"""One of a request's prompts with its choices, which share what is known of the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.engine.messages import TokenLogprob
from quire.service.answer.choice import Choice, LogprobEntry
from quire.service.engine_client import RequestStream

if TYPE_CHECKING:
    from quire.service.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    text: str | None  # what to echo; None: nothing


@dataclass
class Group:
    """One prompt and its choices: n, or the best_of that n are chosen of."""

    prompt: Prompt
    stream: RequestStream
    choices: list[Choice]
    unfinished: int
    started: bool = False
    first_output: float = 0.0  # when it came, as monotonic() has it
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def echo(self, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        """Have each choice's text begin with the prompt's, if that is shown."""
        if self.prompt.text is None:
            return
        entries = self._entries(tokenizer, self.prompt.text) if logprobs else []
        for choice in self.choices:
            choice.echo(self.prompt.text, entries)

    def _entries(self, tokenizer: Tokenizer, text: str) -> list[LogprobEntry]:
        """Return the log-probabilities of the prompt's tokens, and where in `text` each begins."""
        if self.prompt_logprobs is None:
            return []
        detokenizer = tokenizer.detokenizer([], skip_special_tokens=True)
        entries, offset = [], 0
        for token, logprob in zip(self.prompt.tokens, self.prompt_logprobs, strict=True):
            entries.append(LogprobEntry(token, logprob, offset))
            special = tokenizer.token_text(token) if token in tokenizer.special else ""
            if special and text.startswith(special, offset):  # it was written, not added
                offset += len(special)
            offset += len(detokenizer.push([token]))
        return entries
