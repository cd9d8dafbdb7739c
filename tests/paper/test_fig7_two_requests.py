"""Fig. 7: two requests at once. Neighbouring logical blocks need not be neighbours in memory."""

from __future__ import annotations

from quire.engine.messages import Request, SamplingParams
from tests.engine.oracle import expected_tokens
from tests.engine.simulation import make_core
from tests.paper.memory import Memory


def test_fig7_two_requests_share_the_memory() -> None:
    memory = Memory(9, next_blocks=[7, 1, 5, 2, 3])
    (a,) = memory.request("Four score and seven years ago our")
    (b,) = memory.request("It was the best of")
    memory.write(a, "fathers")
    memory.write(b, "times")
    memory.write(a, "brought")
    assert memory.block_table(a) == [(7, 4), (1, 4), (3, 1)]
    assert memory.block_table(b) == [(5, 4), (2, 2)]
    assert memory.physical_blocks() == {
        7: "Four score and seven",
        1: "years ago our fathers",
        3: "brought",
        5: "It was the best",
        2: "of times",
    }
    # "Once a request finishes its generation, its KV blocks can be freed to store the KV cache of other
    # requests" (section 4.3).
    memory.tables.leave(a)
    memory.write(b, "it was the")
    assert memory.block_table(b)[:2] == [(5, 4), (2, 4)]
    assert memory.block_table(b)[2][0] in {7, 1, 3}


def test_fig7_as_the_scheduler_does_it() -> None:
    """Both are in every step, and neither ever reads or writes a block of the other's."""
    core = make_core(9, 4, 4, 64, caching=False)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    requests = [Request(0, list(range(7)), params), Request(1, list(range(20, 25)), params)]
    got: dict[int, list[int]] = {0: [], 1: []}
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in core.step():
            got[output.request_id] += output.tokens
        tables = [set(sequence.table) for sequence in core.scheduler.rows.sequences if sequence is not None]
        assert len(set().union(*tables)) == sum(map(len, tables))
    assert got == {request.id: expected_tokens(request, 0) for request in requests}
