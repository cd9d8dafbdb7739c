"""Commit a step: append its tokens, end sequences, choose beams, make blocks findable."""

from __future__ import annotations

from itertools import compress

import numpy as np
from numpy.typing import NDArray

from quire.engine.messages import Output, StepOutputs, TokenLogprob
from quire.engine.schedule.beams import commit_beams
from quire.engine.schedule.draft import InFlightStep
from quire.engine.schedule.lifecycle import finish
from quire.engine.schedule.outputs import (
    collect_prompt_logprobs,
    describe_first,
    not_finite,
    sampled_logprobs,
)
from quire.engine.schedule.plan import NOT_FINITE, StepResult
from quire.engine.schedule.pooled import commit_vectors
from quire.engine.schedule.state import SchedulerState
from quire.engine.sequences.grammar import find_masks
from quire.engine.sequences.sequence import NO_ROW, BeamGroup, Sequence, SequenceGroup


def commit(state: SchedulerState, result: StepResult) -> StepOutputs:
    """Book what the oldest step in flight gave; what it gives to ended sequences is dropped."""
    step = state.in_flight.popleft()
    state.blocks.copied(step.transfers.moves)
    state.blocks.publish(step.filled)
    if not step.transfers.is_empty:
        step.transfers.handle = step.handle
        state.transfers.append(step.transfers)
    for wanted, got in zip(step.prompt_logprobs, result.prompt_logprobs, strict=True):
        collect_prompt_logprobs(wanted, got)
    for group in step.begun:
        if group.timeline.name in ("prefill", "recompute"):  # else it has been preempted or aborted since
            group.timeline.decode(state.clock(), state.steps)
    if result.vectors is not None:
        return StepOutputs(others=commit_vectors(state, step, result.vectors))
    needs_host = _needs_host(state, step, result)
    special = np.flatnonzero(needs_host).tolist() if np.count_nonzero(needs_host) else []
    outputs = commit_plain(state, step, result, special)
    if special:
        alone = np.flatnonzero(needs_host & ~step.samples.chosen_from).tolist()
        outputs.others = commit_special(state, step, result, alone) if alone else []
        outputs.others += commit_beams(state, _complete(step, result)) if step.samples.searching else []
    return outputs


def _needs_host(state: SchedulerState, step: InFlightStep, result: StepResult) -> NDArray[np.bool_]:
    """Return which samples [S] may be more than one token more."""
    needs_host = step.needs_host
    ending = state.ending_at.take(result.tokens)
    if np.count_nonzero(ending):
        needs_host = needs_host | (ending > 0)
    return needs_host


def commit_plain(
    state: SchedulerState, step: InFlightStep, result: StepResult, special: list[int]
) -> StepOutputs:
    """Write samples that are one token more to their rows: all but `special`, which ascend."""
    write, samples = state.rows.tokens.write, step.samples
    if len(special) == len(result.tokens):
        return StepOutputs()
    tokens = result.tokens.tolist()
    if not special:
        write(samples.row_index, step.positions, result.tokens)
        return StepOutputs(samples.request_ids, samples.indices, tokens)
    plain = np.ones(len(tokens), np.bool_)
    plain[special] = False
    write(samples.row_index[plain], step.positions[plain], result.tokens[plain])
    chosen = plain.tolist()
    each = (list(compress(values, chosen)) for values in (samples.request_ids, samples.indices, tokens))
    return StepOutputs(*each)


def commit_special(
    state: SchedulerState, step: InFlightStep, result: StepResult, samples: list[int]
) -> list[Output]:
    """Book these samples one by one."""
    logprobs = sampled_logprobs(step.samples, result)
    outputs: list[Output] = []
    constrained: list[tuple[Sequence, Output]] = []
    sequences = step.samples.sequences
    for i in samples:
        sequence = sequences[i]
        if sequence.finish_reason is not None:
            continue
        output = _append(state, sequence, int(result.tokens[i]), logprobs.get(i))
        outputs.append(output)
        if sequence.constraint is not None and output.finish_reason is None:
            constrained.append((sequence, output))
    _find_masks(state, constrained)
    return outputs


def _complete(step: InFlightStep, result: StepResult) -> list[BeamGroup]:
    """Hand out the candidates of beams; return the groups that have all."""
    complete: list[BeamGroup] = []
    searching, logprobs, asked = step.samples.searching, result.logprobs, result.logprob_samples
    if len(asked) < len(result.tokens):  # not each sample has a row
        row_of = dict(zip(asked.tolist(), range(len(asked)), strict=True))
        searching = {group: {i: row_of[k] for i, k in rows.items()} for group, rows in searching.items()}
    for group, rows in searching.items():
        beams = group.beams  # none once the search has ended
        if beams is not None and logprobs is not None and beams.collect(logprobs, rows):
            complete.append(beams)
    return complete


def _append(state: SchedulerState, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> Output:
    group = sequence.group
    output = Output(group.request.id, sequence.index, [token])
    describe_first(state, group, output)
    if token == NOT_FINITE:
        output.tokens = []
        output.finish_reason = "error"
        output.error = not_finite("logits")
    else:
        sequence.append(token)
        if logprob is not None:
            output.logprobs = [logprob]
        if token in group.stop_tokens:
            output.finish_reason = "stop"
            output.stop_token = token
        elif sequence.num_generated >= group.request.params.max_tokens:
            output.finish_reason = "length"
    if output.finish_reason is not None:
        finish(state, sequence, output.finish_reason)
    return output


def _find_masks(state: SchedulerState, grown: list[tuple[Sequence, Output]]) -> None:
    """Begin to find what may follow the tokens of sequences that go on, beside the next steps."""
    constraints = []
    for sequence, output in grown:
        if sequence.constraint is not None:
            sequence.constraint.accept(output.tokens[-1])
            if sequence.row != NO_ROW:  # else it has been preempted, and waits for more than that
                sequence.group.timeline.enter("masks", state.clock())
            constraints.append(sequence.constraint)
            state.pending_masks.add(sequence)
    find_masks(constraints)


def resume_masked(state: SchedulerState, seconds: float | None) -> list[Output]:
    """Have sequences whose masks are found decode on; return the outputs of those that cannot go on.

    Waits as `PendingMasks.take` does.
    """
    outputs: list[Output] = []
    for sequence, stayed in state.pending_masks.take(seconds):
        if sequence.finish_reason is not None or sequence.constraint is None:
            continue
        error = sequence.constraint.error
        if error is not None:
            words = f"the grammar cannot be followed any further: {error}"
            outputs.append(
                Output(sequence.group.request.id, sequence.index, [], finish_reason="error", error=words)
            )
            finish(state, sequence, "error")
        elif stayed:
            sequence.group.timeline.enter("decode", state.clock())
            state.rows.set_decoding(sequence, True)
    return outputs


def finish_transfers(state: SchedulerState) -> None:
    """Book the oldest committed step's transfers, which are done."""
    transfers = state.transfers.popleft()
    state.blocks.host.arrived(transfers.moves)
    state.blocks.publish(transfers.loaded)
    for group in transfers.groups:
        _resume(state, group)


def _resume(state: SchedulerState, group: SequenceGroup) -> None:
    """Let `group` go on, whose blocks are where they were sent."""
    group.transferring = False
    if group.swapped:
        state.blocks.host.publish(group)
    elif group.beams is None or not group.beams.pending:
        there = [each for each in group.live if each.num_blocks and each not in group.prefill_queue]
        if there and not group.prefill_queue:  # without any it has been preempted since
            group.timeline.decode(state.clock(), state.steps)
        for sequence in there:
            state.rows.set_decoding(sequence, True)
