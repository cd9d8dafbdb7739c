"""The figures of a load test, from the records of its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from quire.loadtest.client.records import Record

MOST_LAG = 0.010  # seconds at the 99th percentile: beyond it the client did not keep its own schedule


class Slo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits that a request must keep to be good, in seconds; None: no such limit."""

    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None

    def is_met(self, record: Record) -> bool:
        """Say whether `record` keeps the limits. Tokens that all came at once have no TPOT to keep one."""
        tpot = record.tpot if record.tpot is not None or record.output_len > 1 else 0.0
        pairs = ((record.ttft, self.ttft), (tpot, self.tpot), (record.latency, self.latency))
        return not record.failure and all(
            limit is None or (value is not None and value <= limit) for value, limit in pairs
        )


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and percentiles; all NaN-free, 0 where there was nothing to measure."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        array = np.fromiter(values, float)
        if not len(array):
            return cls(count=0, mean=0.0, p50=0.0, p90=0.0, p99=0.0, most=0.0)
        p50, p90, p99 = (float(value) for value in np.percentile(array, [50, 90, 99]))
        return cls(
            count=len(array), mean=float(array.mean()), p50=p50, p90=p90, p99=p99, most=float(array.max())
        )

    def in_ms(self) -> Spread:
        """Return the same in milliseconds, of seconds."""
        return Spread(
            count=self.count,
            mean=1e3 * self.mean,
            p50=1e3 * self.p50,
            p90=1e3 * self.p90,
            p99=1e3 * self.p99,
            most=1e3 * self.most,
        )


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds, rates per second of the whole run: from the first due time to the last token."""

    requests: int
    failures: dict[str, int]  # by kind
    seconds: float
    request_rate: float  # that succeeded
    output_rate: float  # tokens
    input_rate: float  # tokens
    goodput: float  # requests that met the SLO
    ttft: Spread
    tpot: Spread
    itl: Spread  # between chunks
    latency: Spread
    normalized_latency: Spread
    lag: Spread  # of the client behind its own schedule
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    is_valid: bool  # the client kept its schedule

    @property
    def is_sustained(self) -> bool:
        """Say whether the server answered all that came, in a run that says so."""
        return self.is_valid and self.requests > 0 and not self.failures

    def spreads(self) -> list[tuple[str, Spread]]:
        """Return each with its name, in the order in which they are shown."""
        return [
            ("TTFT", self.ttft),
            ("TPOT", self.tpot),
            ("ITL", self.itl),
            ("end to end", self.latency),
            ("normalised latency", self.normalized_latency),
            ("schedule lag", self.lag),
        ]


def summarize(records: Sequence[Record], slo: Slo) -> Summary:
    """Summarise a run. Failed requests count among requests and failures only."""
    good = [record for record in records if not record.failure]
    begin = min((record.due for record in records), default=0.0)
    seconds = max((record.last for record in good), default=begin) - begin
    rate = 1 / seconds if seconds > 0 else 0.0
    lag = Spread.of(record.lag for record in records)
    output_tokens = sum(record.output_tokens for record in good)
    prompt_tokens = sum(record.prompt_tokens for record in good)
    return Summary(
        requests=len(records),
        failures=dict(Counter(record.failure for record in records if record.failure)),
        seconds=seconds,
        request_rate=len(good) * rate,
        output_rate=output_tokens * rate,
        input_rate=prompt_tokens * rate,
        goodput=sum(slo.is_met(record) for record in records) * rate,
        ttft=Spread.of(record.ttft for record in good),
        tpot=Spread.of(record.tpot for record in good if record.tpot is not None),
        itl=Spread.of(gap for record in good for gap in record.gaps),
        latency=Spread.of(record.latency for record in good),
        normalized_latency=Spread.of(record.normalized_latency for record in good),
        lag=lag,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(record.cached_tokens for record in good),
        is_valid=lag.p99 <= MOST_LAG,
    )
