"""Fig. 10: a prompt for translation, with which all requests begin, is computed before any of them comes."""

from __future__ import annotations

from quire.engine.messages import Output, Request, SamplingParams
from quire.engine.pinned_prefixes import pin_prefixes
from quire.engine.schedule.invariants import check_scheduler
from tests.engine.oracle import expected_tokens
from tests.engine.simulation import make_core
from tests.paper.memory import tokens

BLOCK_SIZE = 8

PREFIX = tokens(
    "Translate English to French: “sea otter” => “loutre de mer” “peppermint” => “menthe poivrée” "
    "“plush girafe” => “girafe en peluche”"
)
A, B = tokens("“cheese” =>"), tokens("“I love you” =>")
PARAMS = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


def test_fig10_only_the_task_input_is_computed() -> None:
    core = make_core(40, BLOCK_SIZE, 4, 64)
    assert len(PREFIX) % BLOCK_SIZE, "the last block of the prefix is partly filled"
    num_pinned = pin_prefixes(core, [PREFIX])
    assert num_pinned == -(-len(PREFIX) // BLOCK_SIZE)
    requests = [
        Request(0, PREFIX + A, PARAMS, cache_salt="a"),
        Request(1, PREFIX + B, PARAMS, cache_salt="b"),
    ]
    for request in requests:
        core.add(request)
    outputs: list[Output] = list(core.step())

    # "The prompt phase computation only needs to execute on the user's task input."
    assert core.stats.prefill_tokens == len(A) + len(B)
    # Both map their logical blocks to the cached physical ones, and copy the last one, which they write to.
    full = len(PREFIX) // BLOCK_SIZE
    tables = [sequence.table for sequence in core.scheduler.rows.sequences if sequence is not None]
    assert tables[0][:full] == tables[1][:full]
    assert all(core.scheduler.blocks.pool.count(block) == 2 for block in tables[0][:full])
    assert core.plan is not None
    (tail,) = core.scheduler.blocks.tails.blocks()
    assert core.plan.copies.tolist() == [[tail, tables[0][full]], [tail, tables[1][full]]]
    assert len({tail, tables[0][full], tables[1][full]}) == 3

    while core.has_work:
        outputs += core.step()
        check_scheduler(core.scheduler.state)
    for request in requests:
        mine = [output for output in outputs if output.request_id == request.id]
        assert mine[0].cached_tokens == len(PREFIX)
        assert [token for output in mine for token in output.tokens] == expected_tokens(request, 0)
    assert core.stats.active_blocks == 0 and core.scheduler.blocks.pool.num_pinned == num_pinned
