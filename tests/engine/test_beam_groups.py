"""Beam searches whose next beams are chosen together, through scheduler and block manager."""

from __future__ import annotations

import numpy as np
import pytest

from engine.plan import StepPlan
from engine.request import Output, Request, SamplingParams
from tests.engine.oracle import OracleFlight, OracleRunner, expected_beams
from tests.engine.simulation import EOS, make_core

ROWS, BLOCK_SIZE, WIDTH = 12, 2, 3
PROMPT = [1, 2, 3]
SPOILT = 2  # whose third generated token has a candidate of no number


class SpoilingRunner(OracleRunner):
    def launch(self, plan: StepPlan) -> OracleFlight:
        flight = super().launch(plan)
        if flight.result.logprobs is not None:
            for at, sample in enumerate(flight.result.logprob_samples.tolist()):
                row, position = int(plan.sample_rows[sample]), int(plan.sample_positions[sample])
                if self.state[row][0].seed == SPOILT and position == len(PROMPT) + 2:
                    flight.result.logprobs.top_logprobs[at, 0] = np.nan
        return flight


@pytest.mark.parametrize("num_blocks", [80, 20])
def test_a_search_that_meets_a_nan_ends_alone(num_blocks: int) -> None:
    """With few blocks groups yield meanwhile, to host memory."""
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
        core.scheduler.check()
    for request in requests:
        if request.params.seed == SPOILT:
            assert [output.finish_reason for output in got[request.id]] == ["error", "error"]
            assert all("NaN" in str(output.error) for output in got[request.id])
        else:
            assert [output.tokens for output in got[request.id]] == expected_beams(request, EOS)
    assert (core.scheduler.yielding.swaps > 0) == (num_blocks < 80)
    assert core.scheduler.blocks.pool.num_free == num_blocks
