"""Where the time of one request went, and why: all that is known of it."""

from __future__ import annotations

from quire.engine.records import Preemption
from quire.service.explain.causes import NameOf, causes, ms_of
from quire.service.explain.reply import PreemptionReply, SpanReply, TokenCounts, WhyReply
from quire.service.explain.spans import stretches
from quire.service.explain.times import RequestTimes


def why(times: RequestTimes, now: float, name_of: NameOf) -> WhyReply:
    """Tell of a request; of one that runs, until `now`: what the engine knows comes when it has ended."""
    total, found = stretches(times, now)
    spans = [
        SpanReply(each.name, ms_of(each.start), ms_of(each.seconds), each.tokens, each.steps, each.pieces)
        for each in found
    ]
    preemptions = [
        _preemption(each, times.began, name_of)
        for number in times.engine_requests
        if (record := times.record(number)) is not None
        for each in record.preemptions
    ]
    cached = times.cached_tokens
    return WhyReply(
        request_id=times.request_id,
        status=times.status,
        total_ms=ms_of(total),
        tokens=TokenCounts(times.prompt_tokens, cached, times.prompt_tokens - cached, times.output_tokens),
        spans=spans,
        causes=list(causes(times, total, name_of)),
        preemptions=preemptions,
    )


def _preemption(preemption: Preemption, began: float, name_of: NameOf) -> PreemptionReply:
    return PreemptionReply(
        at_ms=ms_of(preemption.at - began),
        mode=preemption.mode,
        for_request=None if preemption.beneficiary is None else name_of(preemption.beneficiary),
        blocks=preemption.blocks,
        tokens=preemption.tokens,
        away_ms=None if preemption.away is None else ms_of(preemption.away),
        back_ms=None if preemption.back is None else ms_of(preemption.back),
    )
