"""LLM and AsyncLLM as people who know vLLM's expect them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from os import PathLike
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import numpy as np
import pytest
import torch
from msgspec import structs
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from quire import LLM, AsyncLLM, SamplingParams
from quire.arguments import engine_config
from quire.engine.config import EngineConfig
from quire.service.demo import MODEL_FOLDER

SMALL: dict[str, Any] = {
    "device": "cpu",
    "num_gpu_blocks_override": 64,
    "swap_space": 0.0,
    "max_num_seqs": 4,
}
GREEDY = SamplingParams(max_tokens=8, temperature=0)
HELLO = [{"role": "user", "content": "What is a KV cache?"}]

# vLLM's README has it so, with another import.
VLLM_EXAMPLE = """
prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(model="facebook/opt-125m")

outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SMALL) as made:
        yield made
    with pytest.raises(RuntimeError, match="this LLM is closed: make a new one"):
        made.generate("A")
    assert repr(made).endswith(", closed)")
    made.close()


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_every_setting_of_an_engine_is_a_parameter_with_its_type_and_default(kind: Any) -> None:
    parameters = dict(inspect.signature(kind).parameters)
    hints = get_type_hints(kind.__init__)
    fields = dict(zip(EngineConfig.__struct_fields__, EngineConfig.__struct_defaults__, strict=False))
    types = get_type_hints(EngineConfig)
    names = [name for name in EngineConfig.__struct_fields__ if name != "model"]
    assert set(names) <= set(parameters)
    defaults = EngineConfig(model="m")
    for name in names:
        assert parameters[name].default == getattr(defaults, name), name
        if name == "lora":  # as the model, it may be a path
            assert hints[name] == types[name] | PathLike[str]
        else:
            assert hints[name] == types[name], name
    assert fields and parameters["model"].default == MODEL_FOLDER


def test_vllms_first_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def small(model: str) -> LLM:
        return LLM(model=MODEL_FOLDER, **SMALL)

    exec(VLLM_EXAMPLE, {"LLM": small, "SamplingParams": SamplingParams})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("Prompt: 'Hello, my name is', Generated text: ")


def test_a_folder_may_be_a_path() -> None:
    assert AsyncLLM(Path(MODEL_FOLDER), **SMALL)._config == AsyncLLM(MODEL_FOLDER, **SMALL)._config


def test_a_setting_of_vllms_is_explained() -> None:
    with pytest.raises(
        TypeError, match="LLM has no setting 'enable_lora': adapters that requests choose among are"
    ):
        LLM(enable_lora=True)
    for other in ("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"):
        with pytest.raises(
            TypeError, match=f"'{other}': a server divides its model by --tensor-parallel-size only"
        ):
            LLM(**{other: 2})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"dtype": "int8"}, "dtype must be one of 'auto', 'bfloat16', 'float16', 'float32', got 'int8'"),
        ({"dtype": torch.int8}, "dtype must be one of .*'float32', got 'int8'"),
        ({"kv_cache_dtype": "fp12"}, "kv_cache_dtype must be one of .*'fp8_e4m3'.*, got 'fp12'"),
        ({"max_num_seqs": "4"}, "max_num_seqs must be int, got '4'"),
        ({"seed": 1.5}, "seed must be int or None, got 1.5"),
        ({"block_size": 17}, "--block-size must be one of .*, got 17"),
    ],
)
def test_a_setting_that_cannot_be(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}$"):
        AsyncLLM(**settings)


def test_types_have_the_names_of_vllm_and_torch_too() -> None:
    settings = structs.asdict(EngineConfig(model="model"))
    for setting, given, name in (
        ("dtype", "half", "float16"),
        ("dtype", torch.half, "float16"),
        ("dtype", "float", "float32"),
        ("dtype", torch.bfloat16, "bfloat16"),
        ("kv_cache_dtype", "fp8", "fp8_e4m3"),
    ):
        config = engine_config("model", {**settings, setting: given}, ())
        assert getattr(config, setting) == name


def test_a_conversation_is_answered_as_over_http(llm: LLM) -> None:
    (answer,) = llm.chat(HELLO, sampling_params=GREEDY)
    assert answer[0].text == "".join(llm.stream(llm.chat_prompt(HELLO), GREEDY))
    both = llm.chat([HELLO, [*HELLO, {"role": "assistant", "content": "A"}, *HELLO]], GREEDY)
    assert len(both) == 2 and both[0] == answer
    (whole,) = llm.chat(HELLO)
    assert whole.outputs[0].finish_reason == "stop"  # and not after 16 tokens


def test_prompts_may_be_any_iterable_and_have_vllms_forms(llm: LLM) -> None:
    ids = llm.tokenizer.encode("A block", add_special_tokens=True)
    (one,) = llm.generate("A block", GREEDY)
    forms = ("A block", ids, {"prompt": "A block"}, {"prompt_token_ids": ids})
    assert llm.generate((form for form in forms), GREEDY) == [one] * 4
    arrays: Any = [np.array(ids), list(np.array(ids)), {"prompt_token_ids": torch.tensor(ids)}]
    assert llm.generate(arrays, GREEDY) == [one] * 3
    assert llm.generate(arrays[0], GREEDY) == llm.generate(arrays[1], GREEDY) == [one]
    assert llm.generate({"prompt": "A block"}, GREEDY) == llm.generate(iter(["A block"]), GREEDY) == [one]
    assert llm.generate([], GREEDY) == []
    with pytest.raises(TypeError, match=r"just 'prompt' or 'prompt_token_ids', got 'text'"):
        llm.generate({"text": "A"})
    with pytest.raises(TypeError, match="a prompt must be a text or a list of token ids, got None"):
        llm.generate(["A", None])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"a prompt must be a text or a list of token ids, got \['A', 'B'\]"):
        llm.generate([["A", "B"]])  # type: ignore[list-item]


def test_a_sample_that_a_stop_string_ends_is_computed_no_further(llm: LLM) -> None:
    asked: dict[str, Any] = {"n": 3, "max_tokens": 40, "temperature": 1.5, "seed": 2, "ignore_eos": True}
    (whole,) = llm.generate("The", SamplingParams(**asked))
    steps = llm.engine.core.scheduler.state.steps
    before = steps.sequences
    (cut,) = llm.generate("The", SamplingParams(**asked, stop="month"))
    assert sorted(one.finish_reason for one in cut.outputs) == ["length", "stop", "stop"]
    assert [one.text for one in cut.outputs] == [one.text.split("month")[0] for one in whole.outputs]
    tokens = sum(len(one.token_ids) for one in cut.outputs)
    assert steps.sequences - before <= tokens + 2 * 2  # of each that was stopped two steps are under way


def test_each_params_have_their_own_stop_strings(llm: LLM) -> None:
    (whole,) = llm.generate("A block table is", GREEDY)
    word = whole[0].text.split()[1]
    stopping = SamplingParams(max_tokens=8, temperature=0, stop=word)
    cut, other = llm.generate(["A block table is"] * 2, [stopping, GREEDY])
    assert cut[0].text == whole[0].text[: whole[0].text.index(word)]
    assert (cut[0].finish_reason, other) == ("stop", whole)
    assert "".join(llm.stream("A block table is", stopping)) == cut[0].text
    with pytest.raises(ValueError, match="a stop string is empty"):
        llm.generate("A", SamplingParams(stop=[""]))
    with pytest.raises(ValueError, match="stop may not be given with beams"):
        llm.generate("A", SamplingParams(beam_width=2, temperature=0, stop=["a"]))


def test_a_text_may_be_given_its_form(llm: LLM) -> None:
    choices = SamplingParams(max_tokens=8, guided_choice=["yes", "no"])
    assert {one[0].text for one in llm.generate(["Really?"] * 4, choices)} <= {"yes", "no"}
    digits = SamplingParams(max_tokens=8, guided_regex="[0-9]{3}")
    assert llm.generate("A number:", digits)[0][0].text.isdigit()
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    answer = llm.generate("JSON:", SamplingParams(max_tokens=32, guided_json=schema, temperature=0))
    assert answer[0][0].text.startswith('{"a')
    for wrong, told in (
        ({"guided_json": "{"}, "guided_json is nothing that can be followed"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice may not be given together with"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos may not be given with a grammar"),
        ({"guided_choice": []}, "guided_choice is nothing that can be followed: there must be a text"),
        ({"guided_choice": "ab"}, "guided_choice must be a list of strings, got 'ab'"),
        ({"guided_choice": ["a", 1]}, "guided_choice must be a list of strings, got 1 in it"),
        ({"guided_regex": 5}, "guided_regex must be a string, got 5"),
        ({"guided_json": 5}, "guided_json must be a dict or a string, got 5"),
    ):
        with pytest.raises((ValueError, TypeError), match=told):
            SamplingParams(**wrong)
    with pytest.raises(RuntimeError, match=r"the grammar is refused: .*unclosed group"):
        llm.generate("A", SamplingParams(guided_regex="("))


class Bar:
    """As tqdm, for whoever counts."""

    def __init__(self, total: int, desc: str) -> None:
        self.counts = [0]
        self.total, self.desc = total, desc
        bars.append(self)

    def update(self, count: int) -> None:
        self.counts.append(self.counts[-1] + count)

    def close(self) -> None:
        self.closed = True


bars: list[Bar] = []


def test_a_bar_counts_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=Bar)
    (bar,) = bars
    assert (bar.total, bar.counts[-1], bar.closed) == (3, 3, True)
    llm.generate(["a", "b"], GREEDY)
    assert capsys.readouterr().err == ""  # which is no terminal


def test_an_output_tells_what_it_cost(llm: LLM) -> None:
    text = "A block table maps the blocks of a sequence <to> blocks of the cache, one after the other."
    llm.generate(text, GREEDY)
    (output,) = llm.generate(text, SamplingParams(max_tokens=4, n=2, ignore_eos=True))
    metrics = output.metrics
    assert metrics.output_tokens == 8
    assert output.num_cached_tokens == metrics.cached_tokens > 0
    assert 0 < metrics.time_to_first_token <= metrics.seconds
    assert metrics.tokens_per_second > 0
    assert (output.prompt, output.finished, len(output.outputs)) == (text, True, 2)
    assert repr(output).startswith("RequestOutput(prompt='A block table maps")
    assert "&lt;to&gt;" in output._repr_html_() and "<to>" not in output._repr_html_()
    assert repr(llm).startswith(
        f"LLM({MODEL_FOLDER!r}: LlamaForCausalLM in float32 on cpu, 64 KV blocks of 16"
    )


def test_several_engines_fit_in_one_process(llm: LLM) -> None:
    with LLM(**SMALL) as other:
        assert other.generate("A block", GREEDY) == llm.generate("A block", GREEDY)
    assert llm.generate("A block", GREEDY)


# -- asyncio ------------------------------------------------------------------------------------------


def make_app() -> Starlette:
    """An application with a model of its own, as one would write it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AsyncLLM(**SMALL) as llm:
            app.state.llm = llm
            yield

    async def say(request: Request) -> StreamingResponse:
        llm: AsyncLLM = request.app.state.llm
        prompt = llm.chat_prompt([{"role": "user", "content": request.query_params["q"]}])
        return StreamingResponse(llm.stream(prompt, SamplingParams(max_tokens=40, ignore_eos=True)))

    return Starlette(routes=[Route("/say", say)], lifespan=lifespan)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_model_lives_in_a_web_application() -> None:
    app = make_app()
    async with app.router.lifespan_context(app):
        llm: AsyncLLM = app.state.llm
        assert repr(llm) == f"AsyncLLM({MODEL_FOLDER!r}: ready)"
        (direct,) = await llm.chat(HELLO, GREEDY)
        assert len(direct.token_ids) == 8
        (whole,) = await llm.chat(HELLO)
        assert whole.finish_reason == "stop"  # and not after 16 tokens
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            assert (await client.get("/say", params={"q": "Hello"})).text
        output = await llm.generate("A block", SamplingParams(max_tokens=4, n=2, ignore_eos=True))
        assert (output.prompt, output.metrics.output_tokens) == ("A block", 8)
        task = asyncio.create_task(llm.generate("A", SamplingParams(max_tokens=400, ignore_eos=True)))
        await asyncio.sleep(0.01)  # in which it is begun
        assert llm._engine._streams
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not llm._engine._streams
