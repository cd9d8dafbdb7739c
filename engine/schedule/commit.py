"""What a step brought, booked: tokens appended, sequences ended, beams chosen, blocks made findable."""

from __future__ import annotations

from collections import defaultdict
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.engine.messages import FinishReason, Output, StepOutputs, TokenLogprob
from quire.engine.schedule.beams import choose, ending, outputs_of, reparent
from quire.engine.schedule.draft import Flight
from quire.engine.schedule.logprobs import collect_prompt_logprobs, sampled_logprobs
from quire.engine.schedule.plan import NOT_FINITE, StepResult
from quire.engine.schedule.state import RunQueue
from quire.engine.sequences.beam_search import NOT_A_NUMBER, BeamStep
from quire.engine.sequences.grammar import find_masks
from quire.engine.sequences.sequence import NO_ROW, BeamGroup, Sequence, SequenceGroup

T = TypeVar("T")


def commit(queue: RunQueue, flight: Flight, result: StepResult) -> StepOutputs:
    """Book what `flight`, the oldest one, gave; what it brings for ended sequences is dropped."""
    queue.blocks.copied(flight.delivery.moves)
    queue.blocks.publish(flight.filled)
    if not flight.delivery.is_empty:
        queue.deliveries.append(flight.delivery)
    for wanted, got in zip(flight.prompt_logprobs, result.prompt_logprobs, strict=True):
        collect_prompt_logprobs(wanted, got)
    samples, tokens = flight.samples, result.tokens.tolist()
    watched = _watched(queue, flight, result)
    lines = queue.rows.tokens
    if not np.count_nonzero(watched):
        lines.write(samples.row_index, flight.positions, result.tokens)
        return StepOutputs(samples.request_ids, samples.indices, tokens)
    plain, special = ~watched, np.flatnonzero(watched).tolist()
    lines.write(samples.row_index[plain], flight.positions[plain], result.tokens[plain])
    return StepOutputs(
        _without(samples.request_ids, special),
        _without(samples.indices, special),
        _without(tokens, special),
        _look_at(queue, flight, result, special),
    )


def deliver(queue: RunQueue) -> None:
    """Book the oldest delivery: its step is committed, and its transfers are done."""
    delivery = queue.deliveries.popleft()
    queue.blocks.host.arrived(delivery.moves)
    queue.blocks.publish(delivery.brought)
    for group in delivery.arrivals:
        _arrive(queue, group)


def _without(values: list[T], positions: list[int]) -> list[T]:
    """`values` but for those at `positions`, which ascend."""
    rest = values.copy()
    for position in reversed(positions):
        del rest[position]
    return rest


def _watched(queue: RunQueue, flight: Flight, result: StepResult) -> NDArray[np.bool_]:
    """[S] which samples may be more than one token more."""
    watched = flight.watched
    ending = queue.ending_at.take(result.tokens)
    if np.count_nonzero(ending):
        watched = watched | (ending > 0)
    return watched


def _look_at(queue: RunQueue, flight: Flight, result: StepResult, samples: list[int]) -> list[Output]:
    """Book these samples one by one."""
    logprobs = sampled_logprobs(flight.samples.sequences, result)
    outputs: list[Output] = []
    constrained: list[tuple[Sequence, Output]] = []
    complete: defaultdict[tuple[int, ...], list[BeamGroup]] = defaultdict(list)
    candidates = {sample: at for at, sample in enumerate(result.logprob_samples.tolist())}
    sequences = flight.samples.sequences
    for i in samples:
        sequence = sequences[i]
        beams = sequence.group.beams
        if sequence.finish_reason is not None:
            continue
        if beams is None:
            output = _append(queue, sequence, int(result.tokens[i]), logprobs.get(i))
            outputs.append(output)
            if sequence.constraint is not None and output.finish_reason is None:
                constrained.append((sequence, output))
        elif result.logprobs is not None and beams.collect(sequence, result.logprobs, candidates[i]):
            complete[beams.batch_key].append(beams)
    for alike in complete.values():
        outputs += _go_on(queue, alike, choose(alike))
    _constrain(queue, constrained)
    return outputs


def _constrain(queue: RunQueue, grown: list[tuple[Sequence, Output]]) -> None:
    """Sequences that go on have taken a token: what may follow it is found beside the next steps."""
    constraints = []
    for sequence, output in grown:
        if sequence.constraint is not None:
            sequence.constraint.accept(output.tokens[-1])
            constraints.append(sequence.constraint)
            queue.masking.add(sequence)
    find_masks(constraints)


def unmask(queue: RunQueue, seconds: float | None) -> list[Output]:
    """Sequences whose masks are found decode again; those that cannot go on end. Waits as `Masking.take`."""
    outputs: list[Output] = []
    for sequence, stayed in queue.masking.take(seconds):
        if sequence.finish_reason is not None or sequence.constraint is None:
            continue
        error = sequence.constraint.error
        if error is not None:
            words = f"the grammar cannot be followed any further: {error}"
            outputs.append(
                Output(sequence.group.request.id, sequence.index, [], finish_reason="error", error=words)
            )
            queue.finish(sequence, "error")
        elif stayed:
            queue.rows.may_decode(sequence, True)
    return outputs


def _append(queue: RunQueue, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> Output:
    group = sequence.group
    output = Output(group.request.id, sequence.index, [token])
    _describe_first(queue, group, output)
    if token == NOT_FINITE:
        output.tokens = []
        output.finish_reason = "error"
        output.error = (
            "the model gave logits that are not finite; if its keys or values are larger than a rounded KV "
            "cache holds (fp12_e4m7: 65,280), --kv-cache-dtype model keeps them as they are"
        )
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
        queue.finish(sequence, output.finish_reason)
    return output


def _describe_first(queue: RunQueue, group: SequenceGroup, output: Output) -> None:
    """A request's first output says how its prompt was served."""
    if not group.first_output_due:
        return
    group.first_output_due = False
    for sequence in group.live:
        if sequence.row != NO_ROW:
            queue.rows.watch(sequence)
    output.prompt_logprobs = group.prompt_logprobs
    output.queue_seconds = group.queue_seconds
    output.cached_tokens = group.cached_tokens
    output.cached_host_tokens = group.cached_host_tokens


def _arrive(queue: RunQueue, group: SequenceGroup) -> None:
    """The blocks of `group` are where they were sent."""
    group.transferring = False
    if group.swapped:
        queue.blocks.host.publish(group)
    elif group.beams is None or not group.beams.pending:
        for sequence in group.live:
            if sequence.table and sequence not in group.prefill_queue:
                queue.rows.may_decode(sequence, True)


def _go_on(queue: RunQueue, groups: list[BeamGroup], steps: list[BeamStep | None]) -> list[Output]:
    """Have the chosen beams go on, or end the searches; None: a candidate was NaN."""
    outputs: list[Output] = []
    seated: list[Sequence] = []
    tokens: list[int] = []
    shares = bool(queue.shared_tails)
    for beams, step in zip(groups, steps, strict=True):
        group = beams.group
        if step is None:
            errors = [ending(beams, i, "error", NOT_A_NUMBER) for i in range(group.request.params.n)]
            outputs += _end_beams(queue, group, errors, "error")
        elif beams.search.done:
            outputs += _end_beams(queue, group, outputs_of(beams), "stop")
        else:
            unused, made_some = reparent(beams, step, queue.blocks, queue.rows)
            shares |= made_some
            group.forked = True
            if beams.order[0].row == NO_ROW:  # the group has yielded, and waits
                for sequence, token in zip(beams.order, step.tokens, strict=True):
                    sequence.append(token)
                continue
            seated += beams.order
            tokens += step.tokens
            for sequence in unused:
                queue.rows.may_decode(sequence, False)
                queue.shared_tails.pop(sequence.row, None)
    rows = [sequence.row for sequence in seated]
    queue.rows.go_on(rows, tokens)
    queue.given.update(zip(rows, tokens, strict=True))
    if shares:  # else all of them write to blocks of their own, as nearly always
        for sequence in seated:
            queue.shared_tails.pop(sequence.row, None)
            queue.expect_write(sequence)
    return outputs


def _end_beams(
    queue: RunQueue, group: SequenceGroup, outputs: list[Output], reason: FinishReason
) -> list[Output]:
    _describe_first(queue, group, outputs[0])
    for sequence in group.live:
        queue.finish(sequence, reason)
    return outputs
