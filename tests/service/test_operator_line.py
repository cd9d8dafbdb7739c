"""What an operator reads every ten seconds while there is work."""

from __future__ import annotations

import msgspec

from quire.engine.config import StepStats
from quire.service.metrics.counts import Metrics
from quire.service.metrics.operator_line import OperatorLine
from quire.service.text.tokenizer import Tokenizer
from tests.service.fake_engine import make_info

IDLE_STATS = StepStats(**dict.fromkeys(StepStats.__struct_fields__, 0))


def test_it_tells_rates_since_the_last_line_and_nothing_when_there_is_no_work(tokenizer: Tokenizer) -> None:
    info = make_info(tokenizer)
    now = [0.0]
    metrics = Metrics("tiny")
    line = OperatorLine(metrics, lambda: now[0])
    assert line.take(info) is None
    now[0] = 10
    metrics.prompt_tokens, metrics.cached_tokens, metrics.generation_tokens = 1000, 250, 500
    metrics.stats = msgspec.structs.replace(
        IDLE_STATS, running=3, waiting=1, active_blocks=info.num_blocks // 2
    )
    load = line.take(info)
    assert load is not None
    assert (load.prompt_tokens_per_second, load.output_tokens_per_second) == (100, 50)
    assert str(load) == (
        "running 3, waiting 1, prompts 100 tokens/s, output 50 tokens/s, KV cache 50%, prefix hits 25%"
    )
    now[0] = 20
    metrics.stats = msgspec.structs.replace(IDLE_STATS, swapped=1)
    assert str(line.take(info)) == (
        "running 0, waiting 0, swapped 1, prompts 0 tokens/s, output 0 tokens/s, KV cache 0%"
    )
    metrics.stats = IDLE_STATS
    assert line.take(info) is None
