"""What came of one prompt: its completions, and what they cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from quire.completion import Completion, PromptLogprobs


@dataclass(frozen=True)
class RequestMetrics:
    """Times are seconds since the prompt was given."""

    time_to_first_token: float
    seconds: float
    cached_tokens: int  # of the prompt: found in the prefix cache
    output_tokens: int  # of all completions

    @property
    def tokens_per_second(self) -> float:
        """After the first one."""
        rest = self.seconds - self.time_to_first_token
        return (self.output_tokens - 1) / rest if rest > 0 and self.output_tokens > 1 else 0.0


class RequestOutput(list[Completion]):
    """A prompt's n completions, a list that knows its prompt; `outputs` is the list itself, as in vLLM."""

    def __init__(
        self,
        completions: Iterable[Completion],
        request_id: str,
        prompt_token_ids: list[int],
        metrics: RequestMetrics,
    ) -> None:
        super().__init__(completions)
        self.request_id = request_id
        self.prompt: str | None = None  # None: it was given as token ids
        self.prompt_token_ids = prompt_token_ids
        self.metrics = metrics
        self.finished = True

    @property
    def outputs(self) -> list[Completion]:
        return self

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        return self[0].prompt_logprobs

    @property
    def num_cached_tokens(self) -> int:
        return self.metrics.cached_tokens

    def __repr__(self) -> str:
        texts = ", ".join(repr(one.text) for one in self)
        return f"RequestOutput(prompt={self._asked()!r}, outputs=[{texts}], {self._cost()})"

    def _repr_html_(self) -> str:
        """For notebooks."""
        rows = "".join(
            f"<tr><td style='text-align:left;white-space:pre-wrap'>{escape(one.text)}</td>"
            f"<td>{escape(one.finish_reason)}</td><td>{len(one.token_ids)}</td></tr>"
            for one in self
        )
        return (
            f"<p><b>{escape(self._asked())}</b></p><table><thead><tr><th>text</th><th>ended by</th>"
            f"<th>tokens</th></tr></thead><tbody>{rows}</tbody></table><p>{self._cost()}</p>"
        )

    def _asked(self) -> str:
        return f"{len(self.prompt_token_ids)} token ids" if self.prompt is None else self.prompt

    def _cost(self) -> str:
        metrics = self.metrics
        return (
            f"{len(self.prompt_token_ids)} tokens in ({metrics.cached_tokens} cached), "
            f"{metrics.output_tokens} out, first after {metrics.time_to_first_token:.3f} s, all after "
            f"{metrics.seconds:.3f} s"
        )
