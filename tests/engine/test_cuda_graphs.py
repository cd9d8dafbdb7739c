"""Sizes that are recorded while others run: what runs, in which order they are recorded, and what fails.

Where there is no CUDA, a stand-in records: like a graph's, its results last until something recorded runs.
"""

from __future__ import annotations

import gc
import logging
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from quire.engine import core as core_module
from quire.engine.arrays import Int32
from quire.engine.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.device.graphs import TUNED_SIZES, Captures, Graphs, Record, Results, Run, mixed_sizes
from quire.engine.device.runner import ModelRunner
from quire.engine.device.staging import PaddedInputs, Staging
from quire.engine.frames import FrameReader, StepFrame, encode_frame
from quire.engine.messages import Output, Request, SamplingParams
from quire.engine.process import _serve
from quire.engine.schedule.plan import StepPlan
from quire.engine.startup import start_engine
from tests.engine.oracle import OracleHandle, OracleRunner, expected_tokens
from tests.engine.simulation import make_core

ON_GPU = torch.cuda.is_available()
CPU = torch.device("cpu")
PADDING = -7


class StandIn:
    """Records as CUDA graphs do, for those who use it: the first result is lent until anything runs again."""

    def __init__(self) -> None:
        self.recorded: list[Run] = []
        self._lent: Tensor | None = None

    def record(self, run: Run) -> Run:
        self.recorded.append(run)

        def replay() -> Results:
            if self._lent is not None:
                self._lent.fill_(float("nan") if self._lent.is_floating_point() else -1)
            wide, *rest = run()
            self._lent = wide.clone()
            return self._lent, *rest

        return replay


def idle(size: int, second: int) -> list[Int32]:
    return [np.full(size, PADDING, np.int32), np.full(second, PADDING - 1, np.int32)]


def joined(inputs: list[Tensor]) -> Results:
    return (torch.cat(inputs), inputs[0] * 2)


@given(data=st.data())
def test_a_padded_upload_is_the_arrays_and_the_rest_padding(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    padding = [np.arange(length, dtype=np.int32) - 100 * i for i, length in enumerate(lengths)]
    inputs, staging = PaddedInputs(padding, CPU), Staging(64, CPU)
    assert [view.tolist() for view in inputs.split()] == [array.tolist() for array in padding]
    for _ in range(3):
        arrays = [np.full(data.draw(st.integers(0, length)), 5, np.int32) for length in lengths]
        staging.upload_into(inputs, arrays)
        for array, full, view in zip(arrays, padding, inputs.split(), strict=True):
            assert view.tolist() == [*array, *full[len(array) :]]
    assert inputs.hold(arrays) and not inputs.hold([np.zeros(lengths[0] + 1, np.int32), *arrays[1:]])


def run(graphs: Graphs, count: int, staging: Staging) -> Results:
    size = graphs.load([np.full(count, 4, np.int32), np.zeros(0, np.int32)], staging)
    assert size is not None
    return size.run()


@given(data=st.data())
def test_results_stay_the_same_and_what_is_missed_is_recorded_first(
    data: st.DataObject,
) -> None:
    sizes = {"a": [(1, 0), (2, 0), (2, 2), (4, 4)], "b": [(3, 3), (8, 8)]}
    families = {
        name: Graphs(name, joined, [idle(*size) for size in of_it], CPU) for name, of_it in sizes.items()
    }
    graphs = list(families.values())
    stand_in, staging = StandIn(), Staging(64, CPU)
    captures = Captures(graphs, stand_in.record)
    left = {(name, size): 0 for name, of_it in sizes.items() for size in of_it}
    largest = {(name, of_it[-1]) for name, of_it in sizes.items()}
    for _ in range(data.draw(st.integers(1, 30))):
        if data.draw(st.booleans()):
            name = data.draw(st.sampled_from(list(sizes)))
            count, second = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 4))
            given_ = [np.arange(count, dtype=np.int32), np.arange(second, dtype=np.int32)]
            fitting = [size for size in sizes[name] if size[0] >= count and size[1] >= second]
            size = families[name].load(given_, staging)
            assert (size is None) == (not fitting)
            if size is not None:
                ran = size.run()
                full, doubled = fitting[0], ran[1]
                padded = [PADDING] * (full[0] - count), [PADDING - 1] * (full[1] - second)
                assert ran[0].tolist() == [*given_[0], *padded[0], *given_[1], *padded[1]]
                assert doubled[:count].tolist() == (2 * given_[0]).tolist()
                if (name, full) in left:
                    left[name, full] += 1
        else:
            missed = data.draw(st.booleans())
            captures.next(missed=missed)
            if left and not (missed and not any(left.values())):
                words = {key: sum(-(-length // 4) for length in key[1]) for key in left}
                first = max(left, key=lambda key: (key in largest, left[key], words[key]))
                del left[first]
            assert len(captures) == len(left)
            assert len(stand_in.recorded) == sum(map(len, sizes.values())) - len(left)


def test_a_capture_that_fails_is_the_last_and_nothing_else_changes(caplog: pytest.LogCaptureFixture) -> None:
    stand_in, staging = StandIn(), Staging(64, CPU)
    graphs = Graphs("decode", joined, [idle(size, 0) for size in (1, 2, 3)], CPU)

    def record(run: Run) -> Run:
        if len(stand_in.recorded) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return stand_in.record(run)

    captures = Captures([graphs], record)
    captures.next(missed=False)
    assert run(graphs, 1, staging)
    with caplog.at_level(logging.INFO, "quire.engine"):
        for _ in range(3):
            captures.next(missed=False)
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "decode step of 1" in warning.message and "out of memory" in warning.message
    assert len(captures) == 0
    for size in (1, 2, 3):
        assert run(graphs, size, staging)[1].tolist() == [8] * size


def test_the_last_capture_says_that_all_are_there(caplog: pytest.LogCaptureFixture) -> None:
    captures = Captures([Graphs("mixed", joined, [idle(1, 0), idle(2, 0)], CPU)], StandIn().record)
    with caplog.at_level(logging.INFO, "quire.engine"):
        captures.next(missed=False)
        assert not caplog.records
        captures.next(missed=False)
    assert "graphs ready: 2 captured" in caplog.text


class SlowCaptures(OracleRunner):
    """Steps take a tenth of a second by its own clock, captures a second."""

    def __init__(self) -> None:
        super().__init__(num_blocks=16, block_size=4, max_num_seqs=4)
        self.graphs = 30
        self.now = 0.0
        self.launches: list[float] = []
        self.captures: list[tuple[float, bool]] = []  # when, and whether only of what was missed

    @property
    def graphs_left(self) -> int:
        return self.graphs

    def launch(self, plan: StepPlan) -> OracleHandle:
        self.now += 0.1
        self.launches.append(self.now)
        return super().launch(plan)

    def capture(self, *, missed: bool = False) -> None:
        self.captures.append((self.now, missed))
        self.graphs -= 1
        self.now += 1.0


def test_captures_take_a_bounded_share_while_requests_run_and_all_the_time_else() -> None:
    runner = SlowCaptures()
    scheduler = make_core(16, 4, 4, 64).scheduler
    core = EngineCore(scheduler, runner, lambda: runner.now)
    assert core.stats.graphs_left == 30
    for i in range(6):
        core.add(Request(i, [i] * 3, SamplingParams(max_tokens=40, ignore_eos=True, seed=i)))
    while core.has_work:
        core.step()
    moments = [moment for moment, missed in runner.captures if missed]
    assert len(moments) == len(runner.captures) >= 2
    assert runner.launches[0] <= moments[0], "the first step waits for nothing"
    for first, second in pairwise(moments):
        launched = sum(first < moment <= second for moment in runner.launches)
        assert second - first >= 1 / core_module.CAPTURE_SHARE and launched >= 1
    left = core.stats.graphs_left
    assert left == runner.graphs == 30 - len(moments)
    while core.capture():
        left -= 1
        assert core.stats.graphs_left == left
    assert runner.graphs == 0 and not any(missed for _, missed in runner.captures[len(moments) :])


def test_a_serving_engine_captures_when_idle_and_says_when_it_is_done() -> None:
    runner = SlowCaptures()
    core = EngineCore(make_core(16, 4, 4, 64).scheduler, runner, lambda: runner.now)
    request = Request(0, [5, 6], SamplingParams(max_tokens=9, ignore_eos=True))
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        frames, decoder = FrameReader(ours), msgspec.msgpack.Decoder(StepFrame)
        try:
            serving = pool.submit(_serve, theirs, FrameReader(theirs), core, [], None)
            (idle_frame,) = frames.read(wait=True)
            assert decoder.decode(idle_frame).stats.graphs_left == runner.graphs == 0
            assert [missed for _, missed in runner.captures] == [False] * 30
            ours.sendall(encode_frame(request))
            outputs: list[Output] = []
            while not any(output.finish_reason for output in outputs):
                for frame in frames.read(wait=True):
                    outputs += decoder.decode(frame).outputs
            assert [token for output in outputs for token in output.tokens] == expected_tokens(request, 0)
            ours.shutdown(socket.SHUT_WR)
            with pytest.raises(EOFError):
                serving.result(60)
        finally:
            ours.close()
            gc.enable()


def requests(first: int, **params: Any) -> list[Request]:
    return [
        Request(
            first + i,
            [2 + (7 * i + j) % 190 for j in range(3 + 11 * i)],
            SamplingParams(max_tokens=12 + 5 * i, ignore_eos=True, seed=i, **params),
        )
        for i in range(7)
    ]


Answers = tuple[dict[int, list[int]], dict[int, list[float]]]  # tokens and their log-probabilities


def answers(core: EngineCore, asked: list[Request]) -> Answers:
    """Return the answers to `asked`, the later ones while the earlier ones run."""
    tokens: dict[int, list[int]] = {request.id: [] for request in asked}
    logprobs: dict[int, list[float]] = {request.id: [] for request in asked}
    waiting = list(asked)
    while waiting or core.has_work:
        if waiting:
            core.add(waiting.pop(0))
        for output in core.step():
            tokens[output.request_id] += output.tokens
            logprobs[output.request_id] += [entry.logprob for entry in output.logprobs or []]
    return tokens, logprobs


def start(folder: Path, record: Record) -> EngineCore:
    """Without CUDA, `record` is what captures."""
    core, _ = start_engine(
        EngineConfig(
            model=str(folder),
            max_num_seqs=40,
            max_num_batched_tokens=64,
            num_gpu_blocks_override=200,
            enable_prefix_caching=False,
            swap_space=0,
        )
    )
    if not ON_GPU:
        assert isinstance(core.runner, ModelRunner)
        core.runner.add_graphs(record)
    return core


def answers_without_captures(core: EngineCore, asked: list[Request]) -> Answers:
    assert isinstance(core.runner, ModelRunner)
    captures, core.runner.captures = core.runner.captures, None
    given = answers(core, asked)
    core.runner.captures = captures
    return given


def test_an_engine_answers_the_same_before_while_and_after_graphs_are_captured(
    llama: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start(llama[0], StandIn().record)
    asked = [*requests(0, temperature=0.0, logprobs=1), *requests(7, temperature=0.8, logprobs=1)]
    asked[5:5] = requests(14, temperature=0.0, logprobs=1, prompt_logprobs=1)[:3]
    total = core.runner.graphs_left
    assert total >= 10

    before = answers_without_captures(core, asked)
    assert core.runner.graphs_left == total
    monkeypatch.setattr(core_module, "CAPTURE_SHARE", 1.0)  # what is missed is captured after the same step
    during = answers(core, asked)
    assert 0 < core.runner.graphs_left < total, "only some sizes have been missed"
    while core.capture():
        pass
    assert core.runner.graphs_left == core.stats.graphs_left == 0
    after = answers(core, asked)

    assert all(len(before[0][request.id]) == request.params.max_tokens for request in asked)
    assert before == during == after
    assert isinstance(core.runner, ModelRunner)
    core.runner.graphs = None
    unpadded = answers(core, asked)
    if not ON_GPU:  # where a product's last bits depend on the batch
        assert unpadded[0] == after[0]


@contextmanager
def no_memory_left() -> Iterator[None]:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.0)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_an_engine_goes_on_when_there_is_no_memory_for_graphs(
    llama: tuple[Path, LlamaForCausalLM], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(run: Run) -> Run:
        raise torch.OutOfMemoryError("out of memory")

    core = start(llama[0], fail)
    asked = requests(0, temperature=0.0, logprobs=1)
    before = answers_without_captures(core, asked)
    assert core.runner.graphs_left >= 10
    with no_memory_left() if ON_GPU else nullcontext(), caplog.at_level(logging.INFO, "quire.engine"):
        assert not core.capture()
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING and "out of memory" in warning.message
    assert answers(core, asked) == before


@pytest.mark.parametrize("max_tokens", [1, 16, 100, 512, 2048, 2100, 8448, 100_000])
@pytest.mark.parametrize("layer_weights", [1000, 15_700_000, 50_000_000, 218_000_000])
def test_a_full_step_has_a_size_of_its_own_if_it_is_worth_a_graph(
    max_tokens: int, layer_weights: int
) -> None:
    sizes = mixed_sizes(max_tokens, layer_weights)
    assert sizes == sorted(set(sizes))
    most = sizes[-1]
    assert most == max_tokens or TUNED_SIZES[-1] <= most < max_tokens
    seconds = 2 * layer_weights * most / 600e12
    assert most <= TUNED_SIZES[-1] or seconds <= 1.1e-3
    assert most == max_tokens or 2 * layer_weights * (most + 1) / 600e12 > 1.1e-3
    assert all(above <= 1.26 * below for below, above in pairwise(sizes) if below >= TUNED_SIZES[-1])
