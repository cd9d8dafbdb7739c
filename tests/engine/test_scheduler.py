"""The scheduler and block manager against the oracle model: every token right under any schedule."""

from __future__ import annotations

import random

import pytest

from engine.admission import Capacity
from engine.core import EngineCore
from engine.preemption import PreemptionMode, PreemptionPolicy
from engine.prefix_cache import BlockHasher
from engine.request import Output, Request, SamplingParams
from engine.scheduler import Scheduler
from tests.engine.oracle import VOCAB, OracleRunner, expected_beams, expected_tokens

EOS = (3,)


def make_core(
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    budget: int,
    *,
    caching: bool = True,
    num_host_blocks: int = 0,
    mode: PreemptionMode = "recompute",
) -> EngineCore:
    capacity = Capacity(num_blocks, block_size, max_num_seqs, max_model_len=1000, vocab_size=VOCAB)
    hasher = BlockHasher(block_size, seed=0) if caching else None
    policy = PreemptionPolicy(mode=mode)
    scheduler = Scheduler(
        capacity, budget, EOS, hasher=hasher, num_host_blocks=num_host_blocks, policy=policy
    )
    runner = OracleRunner(num_blocks, block_size, max_num_seqs, num_host_blocks)
    return EngineCore(scheduler, runner, clock=lambda: 0.0)


def random_request(rng: random.Random, request_id: int, longest: int, widest: int) -> Request:
    n = rng.choice([1, 1, 1, rng.randint(1, widest)])
    if rng.random() < 0.2:
        width = rng.randint(1, widest)
        beams = SamplingParams(
            n=rng.randint(1, width),
            temperature=0.0,
            beam_width=width,
            length_penalty=rng.choice([0.0, 1.0, -1.0]),
            early_stopping=rng.choice([True, False, "never"]),
            max_tokens=rng.randint(1, longest),
            stop_token_ids=tuple(rng.sample(range(VOCAB), rng.randint(0, 8))),
            seed=rng.randrange(1 << 40),
            prompt_logprobs=rng.choice([None, 0]),
        )
        return Request(request_id, [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))], beams)
    params = SamplingParams(
        n=n,
        temperature=rng.choice([0.0, 1.0]),
        max_tokens=rng.randint(1, longest),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=tuple(rng.sample(range(VOCAB), rng.randint(0, 2))),
        seed=rng.randrange(1 << 40),
        logprobs=rng.choice([None, 0, 2]),
        prompt_logprobs=rng.choice([None, None, 0, 3]),
    )
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))]
    if rng.random() < 0.5:  # few prompts, so that they come again, whole or as prefixes
        prompt = [7 * i % VOCAB for i in range(rng.choice([4, 8, 12, 16, longest]))] + prompt[
            : rng.randint(0, 3)
        ]
    return Request(request_id, prompt, params, cache_salt=rng.choice(["", "", "tenant"]))


def distinct_filled(core: EngineCore) -> int:
    """Token slots in use, counted block by block."""
    scheduler = core.scheduler
    filled: dict[int, int] = {}
    for sequence in scheduler.rows.sequences:
        if sequence is not None:
            context = int(scheduler.rows.context[sequence.row])
            for i, block in enumerate(sequence.table):
                here = min(scheduler.blocks.block_size, max(0, context - i * scheduler.blocks.block_size))
                filled[block] = max(filled.get(block, 0), here)
    return sum(filled.values())


@pytest.mark.parametrize("chunk", range(10))
def test_every_request_gets_its_tokens_under_any_schedule(chunk: int) -> None:
    recomputes = swaps = copies = cached = from_host = evictions = searches = 0
    for seed in range(chunk * 200, chunk * 200 + 200):
        rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4, 8])
        max_num_seqs = rng.randint(1, 8)
        num_blocks = max(3, rng.randint(16, 90) // block_size)
        budget = rng.randint(max_num_seqs, 24)
        caching = rng.random() < 0.7
        host = rng.choice([0, num_blocks // 3, num_blocks])
        core = make_core(
            num_blocks,
            block_size,
            max_num_seqs,
            budget,
            caching=caching,
            num_host_blocks=host,
            mode=rng.choice(["swap", "swap", "recompute"]),
        )
        pending = [random_request(rng, i, rng.choice([4, 12, 24]), max_num_seqs) for i in range(12)]
        accepted: dict[int, Request] = {}
        aborted: set[int] = set()
        got: dict[tuple[int, int], list[Output]] = {}
        order = iter(pending)
        steps = 0
        upcoming = next(order, None)
        while upcoming is not None or core.has_work:
            while upcoming is not None and (rng.random() < 0.4 or not core.has_work):
                refused = core.handle(upcoming)
                if not refused:
                    accepted[upcoming.id] = upcoming
                upcoming = next(order, None)
            if accepted and rng.random() < 0.03:
                victim = rng.choice(sorted(accepted))
                aborted.add(victim)
                core.abort(victim)
            for output in core.step():
                assert output.request_id not in aborted
                got.setdefault((output.request_id, output.index), []).append(output)
            core.scheduler.check()
            assert core.scheduler.tokens_filled == distinct_filled(core)
            steps += 1
            assert steps < 20_000, f"seed {seed} does not end"
        assert core.scheduler.blocks.pool.num_available == core.scheduler.blocks.pool.num_blocks
        if core.scheduler.blocks.host is not None:
            assert core.scheduler.blocks.host.pool.num_available == host
        recomputes += core.scheduler.recomputes
        swaps += core.scheduler.swaps
        copies += core.scheduler.blocks.copies_on_write
        evictions += core.scheduler.blocks.pool.evictions
        for request in accepted.values():
            if request.id in aborted:
                continue
            if request.params.beam_width:
                beams = [got.pop((request.id, index)) for index in range(request.params.n)]
                assert all(len(outputs) == 1 for outputs in beams)
                assert [outputs[0].tokens for outputs in beams] == expected_beams(request, EOS), (
                    f"seed {seed} request {request.id}"
                )
                assert all(outputs[0].cumulative_logprob is not None for outputs in beams)
                searches += 1
                continue
            for index in range(request.params.n):
                outputs = got.pop((request.id, index))
                cached += outputs[0].cached_tokens
                from_host += outputs[0].cached_host_tokens
                tokens = [token for output in outputs for token in output.tokens]
                assert tokens == expected_tokens(request, index, EOS), f"seed {seed} request {request.id}"
                assert [o.finish_reason for o in outputs[:-1]] == [None] * (len(outputs) - 1)
                last = outputs[-1]
                assert last.finish_reason == ("stop" if last.stop_token is not None else "length")
                if request.params.logprobs is not None:
                    flat = [entry for output in outputs for entry in output.logprobs or []]
                    assert [entry.token for entry in flat] == tokens
                    assert all(len(entry.top_tokens) == request.params.logprobs for entry in flat)
                if index == 0 and request.params.prompt_logprobs is not None:
                    everyone = outputs[0].prompt_logprobs
                    assert everyone is not None
                    assert [entry and entry.token for entry in everyone] == [None, *request.prompt[1:]]
    assert min(recomputes, swaps, copies, cached, from_host, evictions, searches) > 8, (
        "the runs no longer reach what they are for"
    )
