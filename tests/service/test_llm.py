"""Offline use: many prompts in one batch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config import EngineConfig, Progress
from quire.engine.messages import SamplingParams
from quire.engine.schedule.plan import Runner
from quire.llm import LLM
from quire.service.demo import MODEL_FOLDER
from tests.engine.simulation import make_core
from tests.service import tiny_tokenizers

PROMPTS = ["A block table is", "Who preempts whom?", "The prefix cache", "One token at a time"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu", dtype="float32", max_num_seqs=2, num_gpu_blocks_override=64, swap_space=0)


def test_each_prompt_has_its_own_params_and_the_answers_come_in_its_place(llm: LLM) -> None:
    params = [
        SamplingParams(max_tokens=most, temperature=0, n=n, ignore_eos=True)
        for most, n in ((3, 1), (9, 2), (5, 1), (9, 1))
    ]
    together = llm.generate(PROMPTS, params)
    alone = [llm.generate(prompt, own)[0] for prompt, own in zip(PROMPTS, params, strict=True)]
    assert together == alone
    assert [[len(one.token_ids) for one in each] for each in together] == [[3], [9, 9], [5], [9]]


def test_params_for_all(llm: LLM) -> None:
    answers = llm.generate(PROMPTS[:2], SamplingParams(max_tokens=4, ignore_eos=True))
    assert [len(one.token_ids) for (one,) in answers] == [4, 4]


def test_without_params_a_text_has_no_more_tokens_than_fit(llm: LLM) -> None:
    limit = llm.info.max_request_tokens
    for size in (limit - 3, limit - 1):
        ((answer,),) = llm.generate([[5] * size])
        assert 1 <= len(answer.token_ids) <= limit - size
    with pytest.raises(ValueError, match="there are only 64"):
        llm.generate([[5] * (limit + 9)])


def test_the_folders_limit_is_that_of_answers_too_and_no_more_than_fits(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 3, "suppress_tokens": [999999]}')
    settings: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 64, "max_model_len": 64}
    with LLM(generation_config=str(tmp_path), **settings) as llm:
        hello = [{"role": "user", "content": "hello"}]
        for answers in (llm.generate("A block"), llm.chat(hello), llm.generate([[5] * 62])):
            assert len(answers[0][0].token_ids) <= 3


def test_too_few_params_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="there are 4 prompts and 1 params"):
        llm.generate(PROMPTS, [SamplingParams()])


def test_none_is_left_queued_when_one_is_refused(llm: LLM) -> None:
    short, long = SamplingParams(max_tokens=1), SamplingParams(max_tokens=4)
    with pytest.raises(ValueError, match="max_tokens is 1: together 100001"):
        llm.generate([[5] * 3, [5] * 100_000], [long, short])
    with pytest.raises(TypeError):
        llm.generate([[5] * 3, [5, "six"]], [long, short])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="a stop string is empty"):
        llm.generate(PROMPTS, long, stop=("",))
    with pytest.raises(ValueError, match="stop may not be given with beams"):
        llm.generate(PROMPTS, SamplingParams(beam_width=2, n=2, temperature=0), stop="the")
    assert not llm.core.has_work
    assert len(llm.generate([5] * 3, long)[0][0].token_ids) == 4


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"blok_size": 64}, "'blok_size': did you mean 'block_size'"),
        ({"no_enable_prefix_caching": True}, "did you mean 'enable_prefix_caching'"),
        ({"tensors": 2}, "'tensors': there is device, dtype, .*cache_seed"),
    ],
)
def test_a_setting_that_there_is_not_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=told):
        LLM(device="cpu", **wrong)


def test_a_cache_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be one of .*'fp12_e4m7'.*, got 'fp12'"):
        LLM(device="cpu", kv_cache_dtype="fp12")


def test_a_continuation_keeps_its_first_space_and_an_answer_has_none(tmp_path: Path) -> None:
    """As /v1/completions and chat have it, with a tokenizer whose texts drop the first space."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL_FOLDER, folder)
    backend = tiny_tokenizers.llama()
    backend.save(str(folder / "tokenizer.json"))
    llm = LLM(str(folder), device="cpu", max_num_seqs=2, num_gpu_blocks_override=64, swap_space=0)
    word = {backend.token_to_id("▁the"): 100.0}
    params = SamplingParams(max_tokens=2, temperature=0, logit_bias=word)
    continued = [one.text for (one,) in llm.generate(["hello", "the"], params)]
    assert continued == [" the the", " the the"]
    assert (
        llm.generate(llm.tokenizer.encode("hello", add_special_tokens=True), params)[0][0].text == " the the"
    )
    assert "".join(llm.stream("hello", params)) == " the the"
    answer = llm.chat_prompt([{"role": "user", "content": "hello"}])
    assert "".join(llm.stream(answer, params)) == "the the"


@pytest.mark.parametrize("messages", ["Hi", ["Hi"], [[]], [[{"role": "user", "content": "Hi"}, "you"]]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a list of messages, .*'role'"):
        llm.chat(messages)


def test_stop_strings_are_looked_for_after_min_tokens(llm: LLM) -> None:
    token, other = llm.tokenizer.encode("a b", add_special_tokens=False)[:2]
    word = llm.tokenizer.token_text(token)
    params = SamplingParams(max_tokens=6, min_tokens=4, temperature=0, logit_bias={token: 100.0})
    ((one,),) = llm.generate([[other]], params, stop=(word,))
    assert llm.generate([[other]], params, stop=word) == [[one]]
    assert (one.text, len(one.token_ids), one.finish_reason) == (word * 4, 5, "stop")


def test_log_probabilities_that_were_asked_for_are_there(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, n=2, logprobs=2, prompt_logprobs=1)
    plain = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    samples, (bare,) = llm.generate(["A block table is", "The prefix cache"], [params, plain])
    prompt = llm.tokenizer.encode("A block table is", add_special_tokens=True)
    for one in samples:
        assert one.logprobs is not None and one.prompt_logprobs is not None
        assert [entry.token for entry in one.logprobs] == one.token_ids
        assert all((entry.rank, len(entry.top_tokens)) == (1, 2) for entry in one.logprobs)
        first, *others = one.prompt_logprobs
        assert first is None and [entry and entry.token for entry in others] == prompt[1:]
        assert one.cumulative_logprob is None
    assert (bare.logprobs, bare.prompt_logprobs) == (None, None)


def test_beams_have_their_cumulative_log_probability(llm: LLM) -> None:
    params = SamplingParams(n=2, beam_width=2, max_tokens=3, temperature=0, ignore_eos=True)
    best, second = (one.cumulative_logprob for one in llm.generate("A block table is", params)[0])
    assert best is not None and second is not None
    assert second <= best < 0


def test_a_repetition_penalty_that_logits_do_not_bear_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"repetition_penalty must be between 0\.01 and 10"):
        SamplingParams(repetition_penalty=1e-300)
    strong = SamplingParams(repetition_penalty=0.01, temperature=0, max_tokens=3, ignore_eos=True)
    assert len(llm.generate(PROMPTS[0], strong)[0][0].token_ids) == 3


def test_prompts_that_share_params_without_a_seed_have_noise_of_their_own(llm: LLM) -> None:
    """Nor does the next call have the same again."""
    flat = SamplingParams(max_tokens=32, temperature=2.0, ignore_eos=True)  # too long for two to agree
    answers = llm.generate(["My"] * 4, flat) + llm.generate(["My"] * 4, flat)
    assert len({tuple(one.token_ids) for (one,) in answers}) == 8
    assert len({"".join(llm.stream("My", flat)) for _ in range(3)}) == 3
    assert len({llm.generate("My")[0][0].text for _ in range(6)}) > 1


def test_a_seed_that_is_given_is_every_prompts(llm: LLM) -> None:
    seeded = SamplingParams(max_tokens=8, temperature=2.0, ignore_eos=True, seed=7)
    (first,), *others = llm.generate(["My"] * 4, seeded) + llm.generate(["My"], seeded)
    assert all(one == first for (one,) in others)


def test_params_of_another_type_are_refused(llm: LLM) -> None:
    for wrong in ({"temperature": 0}, [{"temperature": 0}], "greedy"):
        with pytest.raises(TypeError, match="params must be SamplingParams, or a list of them, got "):
            llm.generate("My", wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="stop must be a string or several, got 5"):
        llm.generate("My", stop=[5])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="temperature must be a number, got 'hot'"):
        llm.generate("My", SamplingParams(temperature="hot"))  # type: ignore[arg-type]
    assert not llm.core.has_work


def test_a_stream_beside_answers(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    alone = "".join(llm.stream(PROMPTS[0], params))
    stream = llm.stream(PROMPTS[0], params)
    text = next(stream)
    answers = llm.generate(PROMPTS[1:], params)
    assert text + "".join(stream) == alone
    assert answers == llm.generate(PROMPTS[1:], params)
    left = llm.stream(PROMPTS[0], params)
    next(left)
    left.close()
    assert not llm.core.has_work


class Uncaptured(Runner):
    left = 3

    @property
    def graphs_left(self) -> int:
        return self.left

    def capture(self, *, missed: bool = False) -> None:
        assert not missed
        self.left -= 1


def test_all_graphs_are_captured_before_an_llm_is_there(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Progress] = []
    core = make_core(8, 4, 4, 16)
    core.runner = Uncaptured()

    def start(config: EngineConfig, report: object) -> object:
        return core, llm.info

    monkeypatch.setattr("quire.engine.startup._start", start)
    LLM(on_progress=events.append)
    assert core.runner.graphs_left == 0
    assert [(event.phase, event.done, event.total) for event in events] == [
        *(("graphs", done, 3) for done in range(4)),
        ("ready", 1, 1),
    ]
