"""A limit on the log-probabilities of an answer: each of them costs microseconds, and tens of bytes."""

from __future__ import annotations

from dataclasses import dataclass

from quire.service.api.requests.sampling import SamplingFields
from quire.service.errors import bad_value
from quire.service.json_fields import MAX_ECHOED_LOGPROBS, MAX_REPLY_LOGPROBS


@dataclass(frozen=True)
class LogprobBudget:
    """The log-probabilities of one request, all choices together: a token's own and its candidates'."""

    field: str  # that asks for them
    of_prompt: int  # for each token of a prompt
    of_output: int  # for each new token that a sequence may have; 0 where they are sent as they come
    limit: int

    @classmethod
    def of(cls, body: SamplingFields, logprobs: int | None, echoes: bool = False) -> LogprobBudget:
        """`logprobs`: how many candidates come with each new token; None: nothing does."""
        of_prompt = of_output = 0
        if body.prompt_logprobs is not None:
            of_prompt = 1 + body.prompt_logprobs
        if echoes and logprobs is not None:
            of_prompt += 1 + (logprobs if body.prompt_logprobs is None else body.prompt_logprobs)
        if logprobs is not None and not body.stream:
            of_output = 1 + logprobs
        elif body.ranked is not None:
            of_output = 1  # by which the best are found
        field = body.num_sequences_name if logprobs is None else "logprobs"
        return cls(
            "prompt_logprobs" if body.prompt_logprobs is not None else field,
            of_prompt * (body.n or 1),
            of_output * body.num_sequences,
            MAX_ECHOED_LOGPROBS if body.stream else MAX_REPLY_LOGPROBS,
        )

    def room(self, prompt: int, max_tokens: int) -> int:
        """Return how many of `max_tokens`, which nobody asked for, go with a prompt of so many tokens."""
        if not self.of_output:
            return max_tokens
        return max(1, min(max_tokens, (self.limit - self.of_prompt * prompt) // self.of_output))

    def total(self, prompt: int, new: int) -> int:
        """At most, with so many tokens in all prompts, and for a sequence after each together."""
        return self.of_prompt * prompt + self.of_output * new

    def check(self, prompt: int, new: int) -> None:
        """Raises ApiError 400, with the numbers, if they would be too many."""
        total = self.total(prompt, new)
        if total > self.limit:
            raise bad_value(
                self.field,
                f"{self.field}: the answer would carry up to {total} log-probabilities ({self.of_prompt} for "
                f"each of {prompt} prompt tokens, {self.of_output} for each of {new} new ones), more than "
                f"{self.limit}: ask for fewer tokens, choices, prompts or candidates",
            )
