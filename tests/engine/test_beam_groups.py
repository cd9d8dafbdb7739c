"""Beam searches whose next beams are chosen together, through scheduler and block manager."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from quire.engine.arrays import as_int32
from quire.engine.messages import Output, Request, SamplingParams
from quire.engine.schedule.beams import reparent
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.schedule.plan import StepPlan
from quire.engine.sequences.beam_search import BeamStep
from quire.engine.sequences.sequence import BeamGroup, SequenceGroup
from tests.engine.oracle import VOCAB, OracleHandle, OracleRunner, expected_beams
from tests.engine.simulation import EOS, make_core
from tests.engine.tables import Tables

ROWS, BLOCK_SIZE, WIDTH = 12, 2, 3
PROMPT = [1, 2, 3]
SPOILT = 2  # whose third generated token has a candidate of no number


class SpoilingRunner(OracleRunner):
    def launch(self, plan: StepPlan) -> OracleHandle:
        handle = super().launch(plan)
        if handle.result.logprobs is not None:
            for at, sample in enumerate(handle.result.logprob_samples.tolist()):
                row, position = int(plan.sample_rows[sample]), int(plan.sample_positions[sample])
                if self.state[row][0].seed == SPOILT and position == len(PROMPT) + 2:
                    handle.result.logprobs.top_logprobs[at, 0] = np.nan
        return handle


class ThinningRunner(OracleRunner):
    """Leaves one candidate to a search when its third token is chosen."""

    def launch(self, plan: StepPlan) -> OracleHandle:
        handle = super().launch(plan)
        seen: set[int] = set()
        if handle.result.logprobs is not None:
            for at, sample in enumerate(handle.result.logprob_samples.tolist()):
                row, position = int(plan.sample_rows[sample]), int(plan.sample_positions[sample])
                seed = self.state[row][0].seed
                if position == len(PROMPT) + 2:
                    handle.result.logprobs.top_logprobs[at, seed not in seen :] = -np.inf
                    seen.add(seed)
        return handle


@pytest.mark.parametrize("num_blocks", [80, 20])
def test_beams_that_nothing_is_left_for_keep_no_blocks(num_blocks: int) -> None:
    core = make_core(num_blocks, BLOCK_SIZE, ROWS, 40, caching=False, num_host_blocks=num_blocks, mode="swap")
    core.runner = ThinningRunner(num_blocks, BLOCK_SIZE, ROWS, num_blocks)
    for seed in range(4):
        params = SamplingParams(n=2, temperature=0.0, beam_width=WIDTH, max_tokens=8, seed=seed)
        core.add(Request(seed, PROMPT, params))
    widths: defaultdict[int, list[int]] = defaultdict(list)
    for _ in range(500):
        core.step()
        check_scheduler(core.scheduler.state)
        for group in [*core.scheduler.state.running, *core.scheduler.state.waiting]:
            assert group.beams is not None
            ended = [sequence for sequence in group.live if sequence not in group.beams.order]
            widths[group.request.id].append(len(group.beams.order))
            assert not any(sequence.table or sequence.host_table for sequence in ended)
    assert not core.has_work
    assert all((WIDTH, 1) in pairwise(each) for each in widths.values())
    assert (core.scheduler.preemption.swaps > 0) == (num_blocks < 80)
    assert core.scheduler.blocks.pool.num_free == num_blocks


def three_beams() -> tuple[Tables, BeamGroup]:
    """They share a prompt, and have chosen two tokens: the last block of each is its own, and half full."""
    tables = Tables(8, BLOCK_SIZE, num_host_blocks=8)
    params = SamplingParams(n=1, temperature=0.0, beam_width=WIDTH)
    group = SequenceGroup(Request(0, PROMPT, params), as_int32(PROMPT), 0, ())
    for sequence in group.sequences:
        tables.rows.assign(sequence)
    tables.sequences += group.sequences
    beams = BeamGroup(group, VOCAB)
    tables.write(group.sequences[0], [])
    for parents in ([0, 0, 0], [1, 0, 1]):
        shares = reparent([(beams, BeamStep(parents, [4, 5, 6]))], tables.blocks, tables.rows)
        assert (shares == {group}) == (len(PROMPT) % BLOCK_SIZE > 0 and parents == [0, 0, 0])
        for sequence, token in zip(beams.order, [4, 5, 6], strict=True):
            tables.write(sequence, [token])
        tables.step()
    return tables, beams


def test_beams_that_go_on_from_another_keep_their_blocks() -> None:
    tables, beams = three_beams()
    pool, parents, lost = tables.blocks.pool, beams.order[:2], beams.order[2]
    own, allocations = lost.table[-1], pool.allocations
    assert not reparent([(beams, BeamStep([0, 1, 1], [7, 8, 9]))], tables.blocks, tables.rows)
    assert beams.order == [*parents, lost] and pool.allocations == allocations
    assert lost.table == [*parents[1].table[:-1], own]
    assert tables.blocks.moves.copies == {lost.row: (parents[1].table[-1], own)}
    tables.check()


def test_beams_that_nothing_is_left_for_keep_no_host_blocks() -> None:
    tables, beams = three_beams()
    group = beams.group
    assert tables.blocks.swap_out(group)
    tables.leave(*group.sequences)
    tables.step()
    chosen = beams.order[2]
    assert not reparent([(beams, BeamStep([2], [7]))], tables.blocks, tables.rows)
    assert beams.order == [chosen]
    ended = [sequence for sequence in group.sequences if sequence is not chosen]
    assert not any(sequence.host_table for sequence in ended)
    assert tables.blocks.host.pool.num_active == len(chosen.host_table) == 3
    tables.check()


@pytest.mark.parametrize("num_blocks", [80, 20])
def test_a_search_that_meets_a_nan_ends_alone(num_blocks: int) -> None:
    """With few blocks groups are preempted meanwhile, to host memory."""
    core = make_core(num_blocks, BLOCK_SIZE, ROWS, 40, caching=False, num_host_blocks=num_blocks, mode="swap")
    core.runner = SpoilingRunner(num_blocks, BLOCK_SIZE, ROWS, num_blocks)
    params = [
        SamplingParams(n=2, temperature=0.0, beam_width=WIDTH, max_tokens=8, seed=seed) for seed in range(4)
    ]
    requests = [Request(seed, PROMPT, each) for seed, each in enumerate(params)]
    for request in requests:
        core.add(request)
    got: dict[int, list[Output]] = {request.id: [] for request in requests}
    while core.has_work:
        for output in core.step():
            got[output.request_id].append(output)
        check_scheduler(core.scheduler.state)
    for request in requests:
        if request.params.seed == SPOILT:
            assert [output.finish_reason for output in got[request.id]] == ["error", "error"]
            assert all("NaN" in str(output.error) for output in got[request.id])
        else:
            assert [output.tokens for output in got[request.id]] == expected_beams(request, EOS)
    assert (core.scheduler.preemption.swaps > 0) == (num_blocks < 80)
    assert core.scheduler.blocks.pool.num_free == num_blocks


def test_searches_that_begin_apart_go_on_together() -> None:
    """A step computes all beams there are; those of a request with samples alone go on in each step."""
    core = make_core(80, BLOCK_SIZE, ROWS, 40, caching=False)
    decodes: list[int] = []

    def add(number: int, width: int) -> None:
        params = SamplingParams(temperature=0.0, beam_width=width, max_tokens=8, ignore_eos=True)
        core.add(Request(number, PROMPT, params))

    def steps(count: int) -> list[int]:
        """Return how many rows decode in each of the steps that are launched, prefills aside."""
        decodes.clear()
        for _ in range(count):
            core.step()
            decodes.extend([] if core.plan is None else [core.plan.num_decodes])
        return decodes

    add(0, WIDTH)
    assert steps(1) == [0]
    add(1, WIDTH)  # while the first one's prompt is computed, which is then to be chosen from
    assert steps(1) == []
    assert steps(2) == [WIDTH]
    assert steps(4) == [2 * WIDTH, 2 * WIDTH]
    add(2, width=0)
    assert steps(6) == [2 * WIDTH, 1, 1 + 2 * WIDTH, 1, 1 + 2 * WIDTH, 1]
