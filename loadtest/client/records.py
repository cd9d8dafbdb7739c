"""Keep of each request of a load test what its client saw."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request. Times are seconds since the start of the run."""

    session: int
    turn: int
    due: float  # when the schedule wanted it sent; latencies count from here
    sent: float  # when the client turned to it
    first: float = 0.0  # its first token; for a beam search that is its end
    last: float = 0.0  # its last token
    sequences: int = 1  # that came back
    prompt_tokens: int = 0
    output_tokens: int = 0  # of all sequences together
    cached_tokens: int = 0  # of the prompt, as the server says
    gaps: list[float] = []  # between the chunks of each sequence
    failure: str = ""  # its kind; empty: it succeeded
    detail: str = ""  # of the failure

    @property
    def output_len(self) -> float:
        """Return the tokens of one sequence."""
        return self.output_tokens / self.sequences

    @property
    def lag(self) -> float:
        """Return by how much the client missed its own schedule."""
        return self.sent - self.due

    @property
    def ttft(self) -> float:
        return self.first - self.due

    @property
    def latency(self) -> float:
        """Return the seconds from end to end."""
        return self.last - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None where all came at once."""
        return (self.last - self.first) / (self.output_len - 1) if self.gaps else None

    @property
    def normalized_latency(self) -> float:
        """Return the latency from end to end ÷ output length (PagedAttention, section 6.1)."""
        return self.latency / self.output_len
