"""The engine that this process steps: texts, several callers in turn, interrupts at any moment."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.completion import Gathered
from quire.engine.core import EngineCore
from quire.engine.messages import Output, Request, SamplingParams
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.schedule.plan import StepResult
from quire.interrupts import PostponedInterrupt
from quire.offline_engine import OfflineEngine
from quire.offline_requests import RequestFailed
from quire.service.answer.choice import Choice
from quire.service.demo import MODEL_FOLDER
from quire.service.text.detokenizer import Detokenizer
from quire.service.text.tokenizer import Tokenizer
from tests.engine.oracle import OracleHandle, OracleRunner, expected_tokens
from tests.engine.poison import PoisonedRunner, poisoned
from tests.engine.simulation import EOS, make_core
from tests.service.test_detokenizer import KINDS, TOKENIZERS, ids

TOKENIZER = Tokenizer.from_folder(MODEL_FOLDER)
BLOCKS = 64


def offline_engine() -> OfflineEngine:
    return OfflineEngine(make_core(BLOCKS, 4, 4, 16), TOKENIZER)


def request(i: int, max_tokens: int = 6, **params: Any) -> Request:
    given = {"ignore_eos": True, "seed": i, **params}
    return Request(i, [i % 7 + 5, i % 11], SamplingParams(max_tokens=max_tokens, **given))


def at_rest(core: EngineCore) -> bool:
    check_scheduler(core.scheduler.state)
    return not core.has_work and core.scheduler.blocks.pool.num_available == BLOCKS


def text_of(tokens: list[int], prompt: list[int]) -> str:
    detokenizer = TOKENIZER.detokenizer(prompt, skip_special_tokens=True)
    return detokenizer.push(tokens) + detokenizer.finish()


# -- texts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_text_made_at_the_end_is_the_text_made_token_by_token(kind: str, data: st.DataObject) -> None:
    tokens = data.draw(ids(kind))
    context = data.draw(st.sampled_from([[], [1, 2]]))
    stop = data.draw(st.booleans()) and bool(tokens)
    pieces = [TOKENIZERS[kind].detokenizer(context, skip_special_tokens=True) for _ in range(2)]
    ends: list[int] = []
    gathered, choice = Gathered(3, pieces[0], ends.append), Choice(0, pieces[1], ())
    reason, stop_token = ("stop", tokens[-1]) if stop else ("length", None)
    last = Output(0, 0, tokens[-1:], finish_reason=reason, stop_token=stop_token)  # type: ignore[arg-type]
    for token in tokens[:-1]:
        gathered.tokens.append(token)
        choice.add(Output(0, 0, [token]))
    for each in (gathered, choice):
        each.add(last)
    completion = gathered.completion(with_logprobs=False, prompt_logprobs=None)
    assert completion.text == choice.take_text()
    assert (completion.token_ids, completion.finish_reason) == (tokens, reason)
    assert ends == [3]


def test_a_completion_is_detokenised_in_one_go_and_no_token_becomes_an_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pushes: list[int] = []

    class Counting:
        def __init__(self, detokenizer: Detokenizer) -> None:
            self._detokenizer = detokenizer

        def push(self, tokens: list[int]) -> str:
            pushes.append(len(tokens))
            return self._detokenizer.push(tokens)

        def finish(self) -> str:
            return self._detokenizer.finish()

    detokenizer = TOKENIZER.detokenizer
    monkeypatch.setattr(TOKENIZER, "detokenizer", lambda *a, **k: Counting(detokenizer(*a, **k)))
    monkeypatch.delattr("quire.engine.messages.StepOutputs.__iter__")
    requests = [request(i, 20 + i, n=1 + i % 2) for i in range(6)]
    engine = offline_engine()
    outputs: list[Output] = []
    add = Gathered.add

    def counted(self: Gathered, output: Output) -> None:
        outputs.append(output)
        add(self, output)

    monkeypatch.setattr(Gathered, "add", counted)
    engine.answer(requests, engine.core.add_all)
    assert sorted(pushes) == sorted(20 + i for i in range(6) for _ in range(1 + i % 2))
    assert len(outputs) <= 3 * len(pushes)  # the first and the last, and what a neighbour's changes


def test_answers_are_in_the_order_of_the_requests() -> None:
    engine = offline_engine()
    requests = [request(i, 3 + 5 * i % 13, n=1 + i % 3) for i in range(10)]
    answers = engine.answer(requests, engine.core.add_all)
    for asked, completions in zip(requests, answers, strict=True):
        for index, one in enumerate(completions):
            tokens = expected_tokens(asked, index, EOS)
            assert (one.token_ids, one.text) == (tokens, text_of(tokens, asked.prompt))
            assert one.finish_reason == "length"
    assert at_rest(engine.core)


def test_garbage_is_left_alone_while_answers_are_made_and_collected_again_after() -> None:
    engine = offline_engine()
    seen: list[bool] = []
    step = engine.core.step
    engine.core.step = lambda: (seen.append(gc.isenabled()), step())[1]  # type: ignore[method-assign]
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            engine.answer([request(int(enabled))], engine.core.add_all)
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
    assert seen and not any(seen)


# -- several callers ----------------------------------------------------------------------------------


def test_streams_and_answers_in_turn() -> None:
    engine = offline_engine()
    first, second = request(0, 30), request(1, 12)
    streams = [engine.stream(each) for each in (first, second)]
    texts = ["", ""]
    texts[0] += next(streams[0])
    for i in range(2, 8):
        (answer,) = engine.answer([request(i, 5)], engine.core.add_all)
        assert answer[0].token_ids == expected_tokens(request(i, 5), 0, EOS)
        for at in (0, 1):
            texts[at] += next(streams[at], "")
    for at in (0, 1):
        texts[at] += "".join(streams[at])
    for asked, text in zip((first, second), texts, strict=True):
        assert text == text_of(expected_tokens(asked, 0, EOS), asked.prompt)
    assert at_rest(engine.core)


def test_a_stream_that_is_left_ends_its_request() -> None:
    engine = offline_engine()
    stream = engine.stream(request(3, 40))
    next(stream)
    stream.close()
    assert at_rest(engine.core)
    assert next(stream, None) is None
    stream = engine.stream(request(4, 40))
    next(stream)
    del stream
    assert at_rest(engine.core)
    never = engine.stream(request(5, 40))
    assert engine.core.has_work
    del never
    assert at_rest(engine.core)


def test_a_stream_that_is_left_in_the_middle_of_a_step_waits_for_its_end() -> None:
    """As a garbage collector does to it."""
    engine = offline_engine()
    stream = engine.stream(request(0, 40))
    schedule = engine.core.bisection.schedule

    def collects(now: float) -> Any:
        stream.close()
        assert engine.core.scheduler.state.waiting or engine.core.scheduler.state.running
        return schedule(now)

    engine.core.bisection.schedule = collects  # type: ignore[method-assign]
    (answer,) = engine.answer([request(1)], engine.core.add_all)
    assert answer[0].token_ids == expected_tokens(request(1), 0, EOS)
    assert at_rest(engine.core)


def test_who_fails_alone_fails_alone() -> None:
    core = make_core(BLOCKS, 4, 4, 16)
    core.runner = PoisonedRunner(BLOCKS, 4, 4, 0, random.Random(0))
    engine = OfflineEngine(core, TOKENIZER)
    stream = engine.stream(request(0, 30))
    next(stream)
    with pytest.raises(RequestFailed, match="the engine failed on a prompt: computing it raised Poisoned"):
        engine.answer([request(1, 20), poisoned(request(2, 20), "token", 0)], core.add_all)
    assert len("".join(stream)) > 0
    assert at_rest(core)


def test_what_is_refused_leaves_nothing() -> None:
    engine = offline_engine()
    with pytest.raises(ValueError, match="more than the 1000"):
        engine.answer([request(0), request(1, 5_000)], engine.core.add_all)
    with pytest.raises(ValueError, match="more than the 1000"):
        engine.stream(request(2, 5_000))
    assert at_rest(engine.core)


def test_a_second_thread_is_refused() -> None:
    engine = offline_engine()
    refused: list[BaseException] = []
    step = engine.core.step

    def beside() -> Any:
        if not refused:
            thread = threading.Thread(target=answer)
            thread.start()
            thread.join()
        return step()

    def answer() -> None:
        try:
            engine.answer([request(1)], engine.core.add_all)
        except RuntimeError as error:
            refused.append(error)

    engine.core.step = beside  # type: ignore[method-assign]
    (only,) = engine.answer([request(0)], engine.core.add_all)
    assert only[0].token_ids == expected_tokens(request(0), 0, EOS)
    assert "one thread at a time" in str(refused[0])
    assert at_rest(engine.core)


# -- interrupts ---------------------------------------------------------------------------------------


@pytest.fixture
def interrupts() -> Iterator[Callable[[int | FrameType, Any], None]]:
    """Python's own handler, whatever runs these tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler  # type: ignore[misc]
    signal.signal(signal.SIGINT, before)


def interrupted_at(line: int, work: Callable[[], object]) -> bool:
    """Do `work` with a SIGINT at the nth line that it comes to. Whether it was interrupted."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_name == "__del__":  # from where Python lets no exception out
            return None
        if event == "line":
            count += 1
            if count == line:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.usefixtures("interrupts")
def test_an_answer_may_be_interrupted_at_any_line() -> None:
    rng = random.Random(0)
    core = make_core(BLOCKS, 4, 4, 16, num_host_blocks=BLOCKS, mode="auto")
    engine = OfflineEngine(core, TOKENIZER)
    number = 0
    interrupted = 0
    for _ in range(150):
        requests = [request(number + i, rng.randint(1, 12), n=rng.choice([1, 3])) for i in range(5)]
        stops = rng.choice([(), ("the",)])
        number += 5
        interrupted += interrupted_at(
            rng.randrange(1, 60_000) if rng.random() < 0.5 else rng.randrange(1, 3_000),
            lambda: engine.answer(requests, core.add_all, [stops] * 5),  # noqa: B023
        )
        assert at_rest(core), "an interrupted answer left something behind"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert gc.isenabled()
        number += 1
        (after,) = engine.answer([request(number, 4)], core.add_all)
        assert after[0].token_ids == expected_tokens(request(number, 4), 0, EOS)
    assert interrupted > 75


@pytest.mark.usefixtures("interrupts")
def test_a_stream_may_be_interrupted_at_any_line() -> None:
    rng = random.Random(1)
    engine = offline_engine()
    number = interrupted = 0

    def read() -> None:
        for _ in engine.stream(request(number, 8)):
            pass

    for _ in range(150):
        number += 1
        interrupted += interrupted_at(rng.randrange(1, 4_000), read)
        assert at_rest(engine.core), "an interrupted stream left something behind"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert interrupted > 75


@pytest.mark.usefixtures("interrupts")
def test_an_interrupted_answer_does_not_disturb_a_stream() -> None:
    engine = offline_engine()
    stream = engine.stream(request(0, 60))
    text = next(stream)
    assert interrupted_at(2_000, lambda: engine.answer([request(1, 200)], engine.core.add_all))
    text += "".join(stream)
    assert text == text_of(expected_tokens(request(0, 60), 0, EOS), request(0, 60).prompt)
    assert at_rest(engine.core)


class StuckHandle(OracleHandle):
    """Takes long, and is interrupted as often as somebody asks for it."""

    def wait(self) -> StepResult:
        assert isinstance(self.runner, StuckRunner)
        while self.runner.interrupts:
            self.runner.interrupts -= 1
            signal.raise_signal(signal.SIGINT)
        return super().wait()


class StuckRunner(OracleRunner):
    interrupts = 0

    def launch(self, plan: Any) -> OracleHandle:
        handle = super().launch(plan)
        return StuckHandle(self, handle.result, handle.arrive, handle.due)


@pytest.mark.usefixtures("interrupts")
def test_a_second_interrupt_does_not_wait_for_a_step_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once the first has been waiting for a while: fingers are quick."""
    core = make_core(BLOCKS, 4, 4, 16)
    core.runner = runner = StuckRunner(BLOCKS, 4, 4)
    engine = OfflineEngine(core, TOKENIZER)
    runner.interrupts = 3
    with pytest.raises(KeyboardInterrupt) as ended:
        engine.answer([request(0)], core.add_all)
    assert not any(entry.name == "wait" for entry in ended.traceback)
    monkeypatch.setattr("quire.interrupts.PATIENCE", 0.0)
    runner.interrupts = 2
    with pytest.raises(KeyboardInterrupt) as ended:
        engine.answer([request(1)], core.add_all)
    assert any(entry.name == "wait" for entry in ended.traceback)
    runner.interrupts = 0
    (after,) = engine.answer([request(2)], core.add_all)
    assert after[0].token_ids == expected_tokens(request(2), 0, EOS)
    assert at_rest(core)


@pytest.mark.usefixtures("interrupts")
def test_an_engine_that_a_step_was_torn_of_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = offline_engine()

    def raises(now: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.core.bisection, "schedule", raises)
    with pytest.raises(KeyboardInterrupt):
        engine.answer([request(0)], engine.core.add_all)
    with pytest.raises(
        RuntimeError, match="cannot go on, make a new LLM: a step ended with KeyboardInterrupt"
    ):
        engine.answer([request(1)], engine.core.add_all)


@pytest.mark.usefixtures("interrupts")
def test_a_handler_of_ones_own_is_called_once_and_may_go_on() -> None:
    calls: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: calls.append(number))
    engine = offline_engine()
    assert not interrupted_at(3_000, lambda: engine.answer([request(0, 50)], engine.core.add_all))
    assert calls == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with PostponedInterrupt():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.usefixtures("interrupts")
def test_other_threads_have_no_signals_to_put_off() -> None:
    answers: list[Any] = []
    engine = offline_engine()
    thread = threading.Thread(target=lambda: answers.append(engine.answer([request(0)], engine.core.add_all)))
    thread.start()
    thread.join()
    assert len(answers) == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
