"""The whole engine on a tiny real model: equal to transformers, whatever the batch and the memory."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
import signal
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from quire.engine.client import AsyncEngine
from quire.engine.config import EngineConfig, StepStats
from quire.engine.core import EngineCore
from quire.engine.errors import EngineDeadError
from quire.engine.messages import Output, Request, SamplingParams
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.startup import start_engine

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def make_core(folder: Path, **settings: object) -> EngineCore:
    config = EngineConfig(model=str(folder), max_num_seqs=64, max_num_batched_tokens=96, **settings)
    return start_engine(config)[0]


def run(core: EngineCore, requests: list[Request]) -> dict[tuple[int, int], list[Output]]:
    for request in requests:
        core.add(request)
    outputs: dict[tuple[int, int], list[Output]] = {}
    while core.has_work:
        for output in core.step():
            outputs.setdefault((output.request_id, output.index), []).append(output)
        check_scheduler(core.scheduler.state)
    assert core.scheduler.blocks.pool.num_available == core.scheduler.blocks.pool.num_blocks
    return outputs


def tokens_of(outputs: dict[tuple[int, int], list[Output]]) -> dict[tuple[int, int], list[int]]:
    return {key: [t for output in each for t in output.tokens] for key, each in outputs.items()}


def ragged_requests(count: int, **params: object) -> list[Request]:
    rng = random.Random(7)
    return [
        Request(
            i,
            [rng.randrange(2, 199) for _ in range(rng.randint(1, 60))],
            SamplingParams(max_tokens=rng.randint(1, 24), seed=1000 + i, **{**GREEDY, **params}),
        )
        for i in range(count)
    ]


def greedily(model: LlamaForCausalLM, requests: list[Request]) -> dict[tuple[int, int], list[int]]:
    """Their tokens by transformers' generate, one by one."""
    tokens = {}
    for request in requests:
        ids = torch.tensor([request.prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.params.max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens[request.id, 0] = out[0, len(request.prompt) :].tolist()
    return tokens


@pytest.fixture(scope="module")
def expected(llama: tuple[Path, LlamaForCausalLM]) -> dict[tuple[int, int], list[int]]:
    return greedily(llama[1], ragged_requests(64))


def test_sixty_four_at_once_one_by_one_and_under_pressure_equal_transformers(
    llama: tuple[Path, LlamaForCausalLM], expected: dict[tuple[int, int], list[int]]
) -> None:
    requests = ragged_requests(64)
    core = make_core(llama[0])
    assert tokens_of(run(core, requests)) == expected
    assert core.scheduler.preemption.recomputes == 0
    one_by_one = {}
    for request in requests:
        one_by_one.update(tokens_of(run(core, [request])))
    assert one_by_one == expected
    for mode in ("recompute", "swap"):
        pressed = make_core(llama[0], num_gpu_blocks_override=20, preemption_mode=mode)
        assert tokens_of(run(pressed, requests)) == expected
        assert (pressed.scheduler.preemption.recomputes > 0) == (mode == "recompute")
        assert (pressed.scheduler.preemption.swaps > 0) == (mode == "swap")


def test_rows_with_one_long_prefix_equal_transformers(
    llama: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    """Two prefixes, which enough rows share for a device to read them once for all, and rows with none."""
    model = copy.deepcopy(llama[1])
    model.config.max_position_embeddings = 512
    model.save_pretrained(tmp_path)
    rng = random.Random(8)
    prefixes = [[rng.randrange(2, 199) for _ in range(length)] for length in (270, 400, 0)]
    requests = [
        Request(
            i,
            prefixes[i % 3] + [rng.randrange(2, 199) for _ in range(rng.randint(1, 30))],
            SamplingParams(max_tokens=rng.randint(30, 50), seed=i, temperature=0.0, ignore_eos=True),
        )
        for i in range(36)
    ]
    assert tokens_of(run(make_core(tmp_path), requests)) == greedily(model, requests)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.7, "n": 3},
        {"temperature": 1.3, "top_k": 5, "min_p": 0.02},
        {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    ],
)
def test_sampled_tokens_do_not_depend_on_batch_or_memory(
    llama: tuple[Path, LlamaForCausalLM], params: dict[str, float]
) -> None:
    requests = ragged_requests(24, **params)
    roomy = make_core(llama[0])
    batched = tokens_of(run(roomy, requests))
    alone = {}
    for request in requests:
        alone.update(tokens_of(run(roomy, [request])))
    assert batched == alone
    for mode in ("recompute", "swap"):
        pressed = make_core(llama[0], num_gpu_blocks_override=16, preemption_mode=mode)
        assert tokens_of(run(pressed, requests)) == batched
        assert pressed.scheduler.preemption.recomputes + pressed.scheduler.preemption.swaps > 0
    others = [
        Request(r.id, r.prompt, SamplingParams(max_tokens=24, **{**GREEDY, **params, "seed": 1}))
        for r in requests
    ]
    assert tokens_of(run(roomy, others)) != batched, "the seed must matter"


def logits_after(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def one(core: EngineCore, prompt: list[int], **params: object) -> list[Output]:
    request = Request(0, prompt, SamplingParams(**{**GREEDY, **params}))
    return run(core, [request])[0, 0]


PROMPT = [5, 9, 33, 7, 120, 61, 8, 8, 17, 99, 150, 2, 44]


def test_logprobs_are_of_the_raw_logits(llama: tuple[Path, LlamaForCausalLM]) -> None:
    core = make_core(llama[0])
    outputs = one(core, PROMPT, max_tokens=8, logprobs=4, prompt_logprobs=3, temperature=1.5, top_k=3, seed=3)
    tokens = [t for o in outputs for t in o.tokens]
    reference = logits_after(llama[1], PROMPT + tokens).log_softmax(-1)
    prompt_entries = outputs[0].prompt_logprobs
    assert prompt_entries is not None and prompt_entries[0] is None
    generated = [entry for o in outputs for entry in o.logprobs or []]
    for position, entry in enumerate([*prompt_entries[1:], *generated]):
        assert entry is not None
        row = reference[position]
        assert entry.token == (PROMPT + tokens)[position + 1]
        assert entry.logprob == pytest.approx(row[entry.token].item(), abs=1e-3)
        assert entry.rank == 1 + int((row > row[entry.token]).sum())
        k = len(entry.top_tokens)
        assert k == (3 if position + 1 < len(PROMPT) else 4)
        assert entry.top_tokens == row.topk(k).indices.tolist()
        assert entry.top_logprobs == pytest.approx(row.topk(k).values.tolist(), abs=1e-3)


def test_prompt_logprobs_survive_chunks_and_preemption(llama: tuple[Path, LlamaForCausalLM]) -> None:
    requests = ragged_requests(24, prompt_logprobs=1)
    roomy = run(make_core(llama[0]), requests)
    pressed = run(make_core(llama[0], num_gpu_blocks_override=9), requests)
    for request in requests:
        a, b = (outputs[request.id, 0][0].prompt_logprobs for outputs in (roomy, pressed))
        assert a is not None and b is not None and len(a) == len(b) == len(request.prompt)
        assert [e and e.token for e in a] == [e and e.token for e in b] == [None, *request.prompt[1:]]
        assert [e.logprob for e in a if e] == pytest.approx([e.logprob for e in b if e], abs=1e-4)


def test_penalties_change_the_logits_as_defined(llama: tuple[Path, LlamaForCausalLM]) -> None:
    core = make_core(llama[0])
    repetition, presence, frequency = 1.4, 0.9, 0.7
    outputs = one(
        core,
        PROMPT,
        max_tokens=30,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    got = [t for o in outputs for t in o.tokens]
    tokens = list(PROMPT)
    for token in got:
        x = logits_after(llama[1], tokens)[-1]
        output = tokens[len(PROMPT) :]
        for seen in set(tokens):
            x[seen] = x[seen] / repetition if x[seen] > 0 else x[seen] * repetition
        for seen in set(output):
            x[seen] -= presence + frequency * output.count(seen)
        assert int(x.argmax()) == token
        tokens.append(token)
    plain = [t for o in one(core, PROMPT, max_tokens=30) for t in o.tokens]
    assert plain != got


def test_logit_bias_bans_and_forces(llama: tuple[Path, LlamaForCausalLM]) -> None:
    core = make_core(llama[0])
    plain = [t for o in one(core, PROMPT, max_tokens=5) for t in o.tokens]
    banned = [t for o in one(core, PROMPT, max_tokens=5, logit_bias={plain[0]: -100.0}) for t in o.tokens]
    assert plain[0] not in banned
    forced = [t for o in one(core, PROMPT, max_tokens=5, logit_bias={42: 100.0}) for t in o.tokens]
    assert forced == [42] * 5


def test_stop_tokens_end_it_but_not_before_min_tokens(llama: tuple[Path, LlamaForCausalLM]) -> None:
    core = make_core(llama[0])
    plain = [t for o in one(core, PROMPT, max_tokens=12) for t in o.tokens]
    stop = plain[3]
    first = plain.index(stop)
    outputs = one(core, PROMPT, max_tokens=12, stop_token_ids=(stop,))
    assert [t for o in outputs for t in o.tokens] == plain[: first + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token) == ("stop", stop)
    held = [
        t for o in one(core, PROMPT, max_tokens=12, stop_token_ids=(stop,), min_tokens=12) for t in o.tokens
    ]
    assert len(held) == 12 and stop not in held[:12]


def test_what_never_fits_is_refused_with_the_numbers(llama: tuple[Path, LlamaForCausalLM]) -> None:
    core = make_core(llama[0], num_gpu_blocks_override=4)
    for request, words in [
        (Request(0, [], SamplingParams()), "empty"),
        (Request(0, [5] * 250, SamplingParams(max_tokens=7)), "257"),
        (Request(0, [5] * 60, SamplingParams(max_tokens=6)), "5 KV blocks"),
        (Request(0, [5], SamplingParams(n=65)), "64 sequences"),
        (Request(0, [199], SamplingParams()), "token id 199"),
        (Request(0, [5], SamplingParams(logit_bias={-1: 1.0})), "token id -1"),
    ]:
        with pytest.raises(ValueError, match=words):
            core.add(request)
    assert not core.has_work


def test_process_gives_the_same_tokens_and_forgets_aborted_requests(
    llama: tuple[Path, LlamaForCausalLM], expected: dict[tuple[int, int], list[int]]
) -> None:
    async def scenario() -> None:
        config = EngineConfig(model=str(llama[0]), max_num_seqs=64, num_gpu_blocks_override=64)
        engine = AsyncEngine(config)
        with pytest.raises(EngineDeadError):
            engine.add([5], SamplingParams())
        await engine.start()
        phases = [progress.phase async for progress in engine.watch_progress()]
        assert phases[-1] == "ready" and engine.state == "ready"

        async def consume(request: Request) -> list[int]:
            stream = engine.add(request.prompt, request.params)
            tokens: list[int] = []
            while True:
                for output in await stream.get():
                    tokens += output.tokens
                    if output.finish_reason is not None:
                        return tokens

        idle = asyncio.Event()
        engine.on_stats = lambda stats: idle.set() if stats.active_blocks == 0 else idle.clear()
        doomed = engine.add([9] * 40, SamplingParams(max_tokens=200, **GREEDY))
        await doomed.get()
        doomed.abort()
        requests = ragged_requests(16)
        assert engine._process is not None
        for told in (signal.SIGINT, signal.SIGTERM):  # as a terminal or a supervisor tells the whole group
            engine._process.send_signal(told)
        results = await asyncio.gather(*(consume(request) for request in requests))
        assert results == [expected[request.id, 0] for request in requests]
        with pytest.raises(ValueError, match="max-model-len"):
            engine.add([5] * 300, SamplingParams())
        await idle.wait()
        assert engine.seconds_since_progress() == 0
        last = engine.add([5], SamplingParams(max_tokens=200, **GREEDY))
        await engine.stop()
        assert [o.finish_reason for o in (await last.get())][-1] == "abort"
        assert engine.state == "dead"

    asyncio.run(scenario())


def test_a_dead_engine_ends_every_stream_with_an_error(llama: tuple[Path, LlamaForCausalLM]) -> None:
    async def scenario() -> None:
        engine = AsyncEngine(EngineConfig(model=str(llama[0]), num_gpu_blocks_override=64))
        await engine.start()
        async for _ in engine.watch_progress():
            pass
        stream = engine.add([5, 6], SamplingParams(max_tokens=250, n=2, **GREEDY))
        assert engine._process is not None
        engine._process.kill()
        ends = []
        while len(ends) < 2:
            ends += [o for o in await stream.get() if o.finish_reason is not None]
        assert {(o.index, o.finish_reason) for o in ends} == {(0, "error"), (1, "error")}
        assert engine.state == "dead" and "unexpectedly" in (engine.error or "")
        with pytest.raises(EngineDeadError, match="unexpectedly"):
            engine.add([5], SamplingParams())
        await engine.stop()

    asyncio.run(scenario())


def test_a_stopped_engine_has_work_until_it_hears_of_the_aborts(llama: tuple[Path, LlamaForCausalLM]) -> None:
    async def scenario() -> None:
        engine = AsyncEngine(EngineConfig(model=str(llama[0]), num_gpu_blocks_override=64))
        await engine.start()
        async for _ in engine.watch_progress():
            pass
        stepped, idle = asyncio.Event(), asyncio.Event()

        def notice(stats: StepStats) -> None:
            stepped.set()
            (idle.clear if stats.active_blocks else idle.set)()

        engine.on_stats = notice
        stream = engine.add([5, 6], SamplingParams(max_tokens=250, **GREEDY))
        await stream.get()
        assert engine._process is not None
        engine._process.send_signal(signal.SIGSTOP)
        with contextlib.suppress(TimeoutError):
            while True:  # what it said before that
                stepped.clear()
                await asyncio.wait_for(stepped.wait(), 0.5)
        stream.abort()
        engine.add([7], SamplingParams(max_tokens=250, **GREEDY)).abort()
        assert engine.seconds_since_progress() >= 0.5
        engine._process.send_signal(signal.SIGCONT)
        await idle.wait()
        assert engine.seconds_since_progress() == 0
        engine._last_step -= 3600
        engine.drain()
        assert engine.seconds_since_progress() < 3600
        await engine.stop()

    asyncio.run(scenario())


def test_a_model_that_is_not_there_is_refused_by_name() -> None:
    async def scenario() -> None:
        engine = AsyncEngine(EngineConfig(model="/nowhere/at/all"))
        await engine.start()
        async for _ in engine.watch_progress():
            pass
        assert engine.state == "dead" and "/nowhere/at/all" in (engine.error or "")
        await engine.stop()

    asyncio.run(scenario())


def test_an_engine_that_still_loads_is_not_waited_for(
    llama: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not look at its socket before it is ready."""
    monkeypatch.setattr("quire.engine.client.EXIT_SECONDS", 600)

    async def stop() -> None:
        engine = AsyncEngine(EngineConfig(model=str(llama[0])))
        await engine.start()
        assert engine._process is not None and engine.state == "loading"
        engine._process.send_signal(signal.SIGSTOP)  # as if it loaded for long
        await asyncio.wait_for(engine.stop(), 60)
        assert engine._process.returncode == -signal.SIGKILL

    asyncio.run(stop())
