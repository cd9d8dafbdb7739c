"""From what a step gives back to outputs: log-probabilities, and what a request's first output tells."""

from __future__ import annotations

import numpy as np

from quire.engine.arrays import Logprobs
from quire.engine.messages import Output, TokenLogprob
from quire.engine.schedule.draft import WantedPromptLogprobs
from quire.engine.schedule.plan import StepResult
from quire.engine.schedule.state import SchedulerState
from quire.engine.sequences.rows import Samples
from quire.engine.sequences.sequence import NO_ROW, SequenceGroup


def not_finite(what: str) -> str:
    """Return the error of a request for which the model gave such numbers."""
    return (
        f"the model gave {what} that are not finite; if its keys or values are larger than a rounded KV "
        "cache holds (fp12_e4m7: 65,280), --kv-cache-dtype model keeps them as they are"
    )


def token_logprobs(tokens: list[int], logprobs: Logprobs, ks: list[int]) -> list[TokenLogprob]:
    """Return one TokenLogprob per row of `logprobs`, with the ks[i] best candidates each."""
    chosen, rank = logprobs.chosen.tolist(), logprobs.rank.tolist()
    top_tokens, top_logprobs = logprobs.top_tokens.tolist(), logprobs.top_logprobs.tolist()
    return [
        TokenLogprob(token, chosen[i], rank[i], top_tokens[i][:k], top_logprobs[i][:k])
        for i, (token, k) in enumerate(zip(tokens, ks, strict=True))
    ]


def sampled_logprobs(samples: Samples, result: StepResult) -> dict[int, TokenLogprob]:
    """Return log-probabilities of sampled tokens by index into the samples; empty when nobody asked."""
    got = result.logprobs
    if got is None:
        return {}
    asked = np.flatnonzero(~samples.chosen_from.take(result.logprob_samples))
    which = result.logprob_samples.take(asked)
    ks = [samples.sequences[i].group.request.params.logprobs or 0 for i in which.tolist()]
    described = token_logprobs(result.tokens.take(which).tolist(), got.of(asked, max(ks, default=0)), ks)
    return dict(zip(which.tolist(), described, strict=True))


def collect_prompt_logprobs(wanted: WantedPromptLogprobs, got: Logprobs) -> None:
    """Append a chunk's log-probabilities to its group's; chunks come in order."""
    collected = wanted.group.prompt_logprobs
    assert collected is not None and len(collected) == wanted.first_target
    k = wanted.group.request.params.prompt_logprobs or 0
    collected.extend(token_logprobs(wanted.targets, got, [k] * len(wanted.targets)))


def describe_first(state: SchedulerState, group: SequenceGroup, output: Output) -> None:
    """Say in a request's first output how its prompt was served."""
    if not group.first_output_due:
        return
    group.first_output_due = False
    for sequence in group.live:
        if sequence.row != NO_ROW:
            state.rows.note_special(sequence)
    output.prompt_logprobs = group.prompt_logprobs
    output.queue_seconds = group.queue_seconds
    output.cached_tokens = group.cached_tokens
    output.cached_host_tokens = group.cached_host_tokens
