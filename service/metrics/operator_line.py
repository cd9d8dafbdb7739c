"""A line in the log every ten seconds while there is work: what a server does, and how full it is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from quire.engine.config import EngineInfo
from quire.service.metrics.counts import Metrics

log = logging.getLogger("quire.service")

EVERY_SECONDS = 10.0


@dataclass(frozen=True)
class Load:
    """Requests now, tokens a second since the last line, shares between 0 and 1."""

    running: int
    waiting: int
    swapped: int
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    kv_cache: float
    prefix_hits: float | None  # None: no prompt was looked up

    def __str__(self) -> str:
        hits = "" if self.prefix_hits is None else f", prefix hits {self.prefix_hits:.0%}"
        swapped = f", swapped {self.swapped}" if self.swapped else ""
        return (
            f"running {self.running}, waiting {self.waiting}{swapped}, prompts "
            f"{self.prompt_tokens_per_second:,.0f} tokens/s, output {self.output_tokens_per_second:,.0f} "
            f"tokens/s, KV cache {self.kv_cache:.0%}{hits}"
        )


class OperatorLine:
    """Compares the counters with what they were."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._last = (clock(), 0, 0, 0)

    async def keep_telling(self, info: Callable[[], EngineInfo | None]) -> None:
        """Log a line whenever there was work. Until it is cancelled."""
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            engine = info()
            load = None if engine is None else self.take(engine)
            if load is not None:
                log.info("%s", load, extra=asdict(load))

    def take(self, info: EngineInfo) -> Load | None:
        """Return the load since the last time, None for none."""
        metrics, stats = self._metrics, self._metrics.stats
        now = (self._clock(), metrics.prompt_tokens, metrics.cached_tokens, metrics.generation_tokens)
        seconds, prompt, cached, output = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        if stats is None or not (prompt or output or stats.running or stats.waiting or stats.swapped):
            return None
        return Load(
            running=stats.running,
            waiting=stats.waiting,
            swapped=stats.swapped,
            prompt_tokens_per_second=round(prompt / seconds, 1) if seconds else 0.0,
            output_tokens_per_second=round(output / seconds, 1) if seconds else 0.0,
            kv_cache=round(stats.active_blocks / info.num_blocks, 4),
            prefix_hits=round(cached / prompt, 4) if prompt else None,
        )
