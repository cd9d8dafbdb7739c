"""What held a request up, or saved it time, in words with numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

from quire.engine.records import Miss, Preemption, RequestRecord, Waited
from quire.service.explain.reply import Cause
from quire.service.explain.times import RequestTimes

LEAST_MS = 1.0  # of grammars, masks and text, which are not worth a word else
LEAST_SHARE = 0.05  # of the whole time, for text that is made beside the engine's steps

NameOf = Callable[[int], str | None]
"""The X-Request-Id of one of the engine's requests, if whoever asks may know it."""


def causes(times: RequestTimes, total: float, name_of: NameOf) -> Iterator[Cause]:
    """Tell all of one request, which has taken `total` seconds."""
    several = len(times.engine_requests) > 1
    for at, number in enumerate(times.engine_requests):
        record = times.record(number)
        if record is not None:
            for cause in _of_engine(record, name_of):
                if several:
                    cause.prompt_index = at
                yield cause
    if times.text_seconds * 1e3 >= LEAST_MS and times.text_seconds >= LEAST_SHARE * total:
        ms = ms_of(times.text_seconds)
        text = f"making text of its tokens took {_number(ms)} ms, most of it beside the engine's steps"
        yield Cause(kind="detokenising", text=text, ms=ms)
    if times.unread_seconds * 1e3 >= LEAST_MS:
        ms = ms_of(times.unread_seconds)
        yield Cause(kind="client_not_reading", text=f"the client did not read for {_number(ms)} ms", ms=ms)


def _of_engine(record: RequestRecord, name_of: NameOf) -> Iterator[Cause]:
    for waited in record.waited:
        yield _waited(waited, name_of)
    if record.company.steps or record.cached_tokens or record.miss is not None:
        yield _prefix_cache(record)
    yield from _spans(record)
    for (_, beneficiary), group in groupby(record.preemptions, lambda each: (each.mode, each.beneficiary)):
        yield _preempted(list(group), None if beneficiary is None else name_of(beneficiary))
    company = record.company
    if company.mixed and company.steps:
        mean = round(company.sequences / company.steps, 1)
        yield Cause(
            kind="shared_steps",
            text=f"{_number(company.mixed)} of its {_number(company.steps)} steps computed "
            f"{_number(company.prefilled)} prompt tokens of other requests too; {_number(mean)} sequences "
            "decoded in a step on average",
            steps=company.steps,
            steps_with_prefills=company.mixed,
            prefilled_tokens=company.prefilled,
            mean_sequences=mean,
        )


def _waited(waited: Waited, name_of: NameOf) -> Cause:
    wait, ms = waited.wait, ms_of(waited.seconds)
    begin = f"waited {_number(ms)} ms: "
    ahead = f"{_count(wait.running, 'request')} ahead"
    if wait.reason == "blocks":
        text = f"{begin}{ahead} held {_number(wait.held)} of {_number(wait.total)} blocks"
        if wait.needed:
            text += f", and the next in turn needed {_number(wait.needed)}"
        return Cause(
            kind="waiting_for_blocks",
            text=text,
            ms=ms,
            requests=[name for name in map(name_of, wait.holders) if name is not None],
            requests_ahead=wait.running,
            blocks_held=wait.held,
            blocks_total=wait.total,
            blocks_needed=wait.needed,
        )
    if wait.reason == "sequences":
        return Cause(
            kind="waiting_for_sequences",
            text=f"{begin}{ahead} ran {_number(wait.held)} of the {_number(wait.total)} sequences that run "
            "at once (--max-num-seqs)",
            ms=ms,
            requests_ahead=wait.running,
            sequences_running=wait.held,
            sequences_total=wait.total,
        )
    if wait.reason == "budget":
        text = f"{begin}{ahead} took all tokens that a step computes (--max-num-batched-tokens)"
        return Cause(kind="waiting_for_budget", text=text, ms=ms, requests_ahead=wait.running)
    text = f"{begin}a step had raised, and requests were tried apart to find the one that made it"
    return Cause(kind="isolation", text=text, ms=ms)


def _prefix_cache(record: RequestRecord) -> Cause:
    found, miss = record.cached_tokens, record.miss
    prompt = record.prompt_tokens
    cause = Cause(kind="prefix_cache", text="", found_tokens=found, prompt_tokens=prompt)
    cause.text = f"{_number(found)} of {_count(prompt, 'prompt token')} found in the cache"
    if record.cached_host_tokens:
        cause.host_tokens = record.cached_host_tokens
        cause.text += f", {_number(record.cached_host_tokens)} of them in host memory"
    if miss is not None:
        cause.reason, cause.missed_from = miss.kind, miss.token
        if miss.differs_at is not None:
            cause.first_differing_token = miss.differs_at
        if miss.seconds is not None:
            cause.evicted_seconds_ago = round(miss.seconds, 3)
        cause.text += f"; {_missed(miss)}"
    return cause


def _missed(miss: Miss) -> str:
    begin = f"missed from token {_number(miss.token)}: "
    match miss.kind:
        case "differs":
            return f"{begin}first differing token {_number(miss.differs_at or 0)}"
        case "evicted":
            return f"{begin}evicted {_number(round(miss.seconds or 0.0, 1))} s ago"
        case "salted_otherwise":
            return f"{begin}salted otherwise: it is cached with another cache_salt of this key"
        case "never_seen":
            return f"{begin}never seen with this key"
        case "partial_block":
            return f"{begin}what follows fills no block, and only full ones are kept"
        case "last_token":
            return f"{begin}the last block is computed for the logits of its last token"
        case "behind_window":
            return f"{begin}it is cached, but no longer what layers with windows read there"
        case "prompt_logprobs":
            return f"{begin}prompt_logprobs has all that follow computed"
        case "off":
            return "there is no prefix cache (--no-enable-prefix-caching)"


def _spans(record: RequestRecord) -> Iterator[Cause]:
    seconds: dict[str, float] = {}
    stalled = 0.0
    admitted = False
    for span in record.spans:
        admitted |= span.name in ("prefill", "loading", "decode")
        if span.name == "waiting_for_blocks":
            stalled += span.seconds * admitted
        else:
            seconds[span.name] = seconds.get(span.name, 0.0) + span.seconds
    if seconds.get("loading"):
        ms = ms_of(seconds["loading"])
        text = f"cached blocks took {_number(ms)} ms from host memory to the device"
        yield Cause(kind="loading", text=text, ms=ms)
    if stalled:
        ms = ms_of(stalled)
        text = f"while it ran it waited {_number(ms)} ms for blocks that were on their way to host memory"
        yield Cause(kind="stalled", text=text, ms=ms)
    if seconds.get("grammar", 0.0) * 1e3 >= LEAST_MS:
        ms = ms_of(seconds["grammar"])
        yield Cause(kind="grammar", text=f"its grammar took {_number(ms)} ms to compile", ms=ms)
    if seconds.get("masks", 0.0) * 1e3 >= LEAST_MS:
        ms = ms_of(seconds["masks"])
        text = f"finding the tokens that its grammar allows took {_number(ms)} ms"
        yield Cause(kind="masks", text=text, ms=ms)


def _preempted(those: list[Preemption], name: str | None) -> Cause:
    """Tell of those that came one after the other, of one mode and for one request."""
    first = those[0]
    blocks = sum(each.blocks for each in those)
    away, back = _sum(each.away for each in those), _sum(each.back for each in those)
    times = {1: "once", 2: "twice"}.get(len(those), f"{len(those)} times")
    whom = "after a step that raised" if first.beneficiary is None else f"for request {name}"
    if first.beneficiary is not None and name is None:
        whom = "for a request of another key, or one that is forgotten"
    cause = Cause(
        kind="preemption",
        text=f"preempted {times} ({first.mode}), {whom}, {_count(blocks, 'block')}",
        times=len(those),
        mode=first.mode,
        for_request=name,
        blocks=blocks,
    )
    if away is not None:
        cause.away_ms = ms_of(away)
        cause.text += f", {_number(cause.away_ms)} ms away"
    if back is not None:
        cause.back_ms = ms_of(back)
        cause.text += f", {_number(cause.back_ms)} ms back"
    return cause


def _sum(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def ms_of(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _number(value: float) -> str:
    """Write it with commas, and a decimal where it says something."""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"
    return f"{int(value):,}"


def _count(number: int, thing: str) -> str:
    return f"{_number(number)} {thing}{'' if number == 1 else 's'}"
