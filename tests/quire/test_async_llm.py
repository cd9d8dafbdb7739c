"""AsyncLLM: answers and streams in an asyncio program, from an engine in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from quire import LLM, AsyncLLM, SamplingParams

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(max_tokens=12, temperature=0)
SMALL = {"device": "cpu", "num_gpu_blocks_override": 64, "swap_space": 0.0, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def llm() -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(**SMALL) as started:
        yield started


async def test_its_answers_are_those_of_llm(llm: AsyncLLM) -> None:
    prompts = ["A block table is", "The KV cache", "Copy on write"]
    answers = await asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in prompts))
    assert list(answers) == LLM(**SMALL).generate(prompts, GREEDY)


async def test_a_stream_is_the_answer_in_pieces(llm: AsyncLLM) -> None:
    pieces = [piece async for piece in llm.stream("A block table is", GREEDY)]
    (answer,) = await llm.generate("A block table is", GREEDY)
    assert "".join(pieces) == answer.text
    assert len(pieces) > 1


async def test_samples_and_stop_strings(llm: AsyncLLM) -> None:
    answers = await llm.generate("A block", SamplingParams(max_tokens=8, n=3, seed=1))
    assert len(answers) == 3
    (whole,) = await llm.generate("A block table is", GREEDY)
    word = whole.text.split()[1]
    (cut,) = await llm.generate("A block table is", GREEDY, stop=word)
    assert cut.text == whole.text[: whole.text.index(word)]
    assert cut.finish_reason == "stop"


async def test_a_stream_that_is_closed_is_aborted(llm: AsyncLLM) -> None:
    stream = llm.stream("A block table is", SamplingParams(max_tokens=500, ignore_eos=True))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert not llm._engine._streams


async def test_what_cannot_run_is_refused(llm: AsyncLLM) -> None:
    with pytest.raises(ValueError, match="max_tokens is 5000"):
        await llm.generate("A", SamplingParams(max_tokens=5000))
    with pytest.raises(TypeError, match="did you mean 'max_num_seqs'"):
        AsyncLLM(max_num_seq=4)


async def test_numbers_of_numpy_are_numbers(llm: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=np.int64(4), temperature=np.float32(0), seed=np.int32(1))
    (answer,) = await llm.generate(np.array([5, 6, 7]), params)
    (same,) = await llm.generate([5, 6, 7], SamplingParams(max_tokens=4, temperature=0))
    assert answer == same


async def test_a_start_that_is_given_up_leaves_no_process() -> None:
    """Nobody leaves an `async with` that was not entered."""
    llm = AsyncLLM(**SMALL, on_progress=lambda _: entering.cancel())
    entering = asyncio.create_task(llm.__aenter__())
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert llm._engine._process is not None and llm._engine._process.returncode is not None


async def test_a_start_whose_progress_nobody_can_be_told_of_leaves_no_process() -> None:
    def tell(progress: object) -> None:
        raise RuntimeError("no terminal")

    llm = AsyncLLM(**SMALL, on_progress=tell)
    with pytest.raises(RuntimeError, match="no terminal"):
        await llm.start()
    assert llm._engine._process is not None and llm._engine._process.returncode is not None
