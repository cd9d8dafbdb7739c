"""Layers that keep states of all tokens together: in blocks, as their ends leave them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.engine.config import EngineConfig
from quire.engine.device.block_size import MOST_STATE_GROUPS, in_blocks
from quire.engine.device.kv_cache import KVCache, bytes_per_block
from quire.engine.device.runner import ModelRunner
from quire.engine.messages import Request, SamplingParams
from quire.engine.models.cache_groups import STATE_WINDOW
from quire.engine.models.config import ModelConfig
from quire.engine.models.general.delta_nets import DeltaNetModule
from quire.engine.models.general.model import GeneralModel
from quire.engine.models.general.pieces import PieceModule, cut
from quire.engine.models.general.selective_scan import selective_scan
from quire.engine.models.general.stateful import CacheOfStates, state_modules
from quire.engine.models.general.states import StepStates, give_states
from quire.engine.models.general.whole_steps import WholeStepModule
from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.engine.startup import start_engine
from quire.kernels.attention.batch import Span
from quire.kernels.backend import torch_backend
from quire.kernels.formats.kv_format import BF16, FP32
from quire.kernels.formats.state_spec import LayerStates, StateSpec
from quire.kernels.recurrence.operations import REFERENCES
from tests.models.any_model import compare, save_tiny, tiny_model
from tests.models.divided_model import compare_divided

# Delta rules, a convolution alone, Mamba's three kinds, states beside attention in a layer, layers that keep
# nothing, attention whose module all layers share, and a cache of their own.
EQUAL = (
    "qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "lfm2", "falcon_mamba", "mamba2", "jamba",
    "falcon_h1", "nemotron_h", "zamba2", "minimax",
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", EQUAL)
def test_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    verdict = compare(kind, tmp_path)
    assert verdict.outcome == "equal", verdict.detail
    assert not verdict.reads


@pytest.mark.parametrize("kind", [kind for kind in EQUAL if kind != "minimax"])
def test_logits_equal_transformers_where_a_step_is_computed_at_once(kind: str, tmp_path: Path) -> None:
    """By the definition of what kernels compute; all but the cache of its own."""
    verdict = compare(kind, tmp_path, recurrences=REFERENCES)
    assert verdict.outcome == "equal", verdict.detail
    assert not verdict.reads


def test_what_gives_other_numbers_is_left_to_transformers_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny("mamba2", tmp_path)
    scan = REFERENCES.state_space_scan
    wrong = replace(REFERENCES, state_space_scan=lambda x, dt, *others: scan(x, 2 * dt, *others))
    for recurrences, takes_pieces in ((REFERENCES, False), (wrong, True)):
        backend = replace(torch_backend(), recurrences=recurrences)
        config, _ = in_blocks(read_model(tmp_path), None, FP32, torch.float32)
        model, _ = load_model(tmp_path, config, backend, device="cpu", dtype=torch.float32, max_model_len=64)
        assert isinstance(model, GeneralModel) and model.takes_pieces == takes_pieces
        assert ("Mamba2Mixer keeps states by transformers' code" in caplog.text) == takes_pieces


class Summing(nn.Module):
    """A norm with a gate that no kernel knows: of all tokens up to each, if it is not `alone`."""

    def __init__(self, like: Any, *, alone: bool) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self._alone = like.weight, like.variance_epsilon, alone

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        summed = hidden_states if self._alone else hidden_states.cumsum(0)
        return torch.tanh(summed * self.weight) * gate


def with_epsilon_that_is_no_number(norm: Any) -> Any:
    norm.variance_epsilon = torch.tensor(norm.variance_epsilon)
    return norm


@pytest.mark.parametrize(
    ("other", "by", "named"),
    [
        (with_epsilon_that_is_no_number, WholeStepModule, False),
        (partial(Summing, alone=True), WholeStepModule, False),
        (partial(Summing, alone=False), PieceModule, True),
    ],
)
def test_a_later_layer_that_is_another_is_tried_by_itself(
    other: Callable[[Any], Any], by: type, named: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("qwen3_5_text", tmp_path)
    config, _ = in_blocks(read_model(tmp_path), None, FP32, torch.float32)
    net = model.model.layers[2].linear_attn
    net.norm = other(net.norm)
    step, backend = (
        StepStates(config.group_of_states, REFERENCES),
        replace(torch_backend(), recurrences=REFERENCES),
    )
    takes_pieces = give_states(model, config.states, step, backend, config.hidden_size)
    found = [type(module.forward) for _, module in state_modules(model)]
    assert found == [DeltaNetModule, by] and takes_pieces == (by is PieceModule)
    assert ("layers.2.linear_attn" in caplog.text) == named
    assert "layers.0" not in caplog.text


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next", "olmo_hybrid", "kimi_linear"])
def test_delta_nets_have_no_code_of_transformers_where_kernels_give_the_same(
    kind: str, tmp_path: Path
) -> None:
    save_tiny(kind, tmp_path)
    net = REFERENCES.delta_net
    wrong = replace(REFERENCES, delta_net=lambda q, k, v, a, b, *others: net(q, k, v, a, 2 * b, *others))
    for recurrences, expected in ((REFERENCES, DeltaNetModule), (wrong, WholeStepModule)):
        backend = replace(torch_backend(), recurrences=recurrences)
        config, _ = in_blocks(read_model(tmp_path), None, FP32, torch.float32)
        model, _ = load_model(tmp_path, config, backend, device="cpu", dtype=torch.float32, max_model_len=64)
        assert isinstance(model, GeneralModel) and not model.takes_pieces
        found = {type(module.forward) for _, module in state_modules(model._decoder)}
        assert found == {expected}


def test_states_that_sum_up_stay_in_float32_whatever_the_model_computes_in(tmp_path: Path) -> None:
    save_tiny("qwen3_next", tmp_path)
    config = read_model(tmp_path)
    assert [each.name for each in config.states] == [f"model.layers.{i}.linear_attn" for i in (0, 2)]
    for dtype, rolling in ((torch.bfloat16, "bfloat16"), (torch.float32, "float32")):
        part, _ = in_blocks(config, None, BF16, dtype)
        assert [(each.rolls, each.dtype) for each in part.states[0].parts] == [
            (True, rolling),
            (False, "float32"),
        ]


@pytest.mark.parametrize("kind", ["qwen3_next", "nemotron_h", "olmo_hybrid", "kimi_linear"])
def test_logits_of_ranks_equal_transformers(kind: str, tmp_path: Path) -> None:
    """All have whole states; of attention, experts and products each has a share."""
    verdict = compare_divided(tmp_path, tiny_model(kind, tmp_path), 2)
    assert verdict.outcome == "equal", verdict.detail


def test_all_that_a_model_of_states_alone_keeps_is_one_block_of_a_sequence(tmp_path: Path) -> None:
    save_tiny("mamba2", tmp_path)
    core, info = start_engine(
        EngineConfig(
            model=str(tmp_path), device="cpu", block_size=16, num_gpu_blocks_override=40, swap_space=0
        )
    )
    assert info.max_model_len > 100_000 and not info.keeps_all and info.group_windows == (STATE_WINDOW,)
    answers = []
    for at in range(2):
        core.add(Request(at, [*range(3, 33)], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)))
        outputs = []
        while core.has_work:
            outputs += list(core.step())
            if len(outputs) > 2:  # else all of the prompt's are there
                held = [sequence.blocks for group in core.scheduler.state.running for sequence in group.live]
                assert all(len(blocks) <= 2 for blocks in held)
        answers.append([token for output in outputs for token in output.tokens])
    assert answers[0] == answers[1] and len(answers[0]) == 9
    assert outputs[0].cached_tokens == 16


def test_steps_of_nobody_leave_states_alone(tmp_path: Path) -> None:
    """Of latents beside states they tell of more tokens than there are."""
    save_tiny("kimi_linear", tmp_path)
    core, _ = start_engine(
        EngineConfig(model=str(tmp_path), device="cpu", num_gpu_blocks_override=8, swap_space=0)
    )
    assert isinstance(core.runner, ModelRunner) and core.runner.cache.states is not None
    core.runner.cache.blocks.fill_(0)
    for each in core.runner.cache.states.layers:
        for state in each:
            state.fill_(1)
    core.runner.warm_up()
    core.runner.run_idle(5)
    core.runner.queue.settle()
    assert all((state[:-1] == 1).all() for each in core.runner.cache.states.layers for state in each)


def test_keys_and_values_of_few_bits_are_for_models_that_keep_some(tmp_path: Path) -> None:
    save_tiny("mamba2", tmp_path)
    with pytest.raises(ValueError, match=r"fp8_e4m3 is for keys and values, and all layers .* keep states"):
        start_engine(EngineConfig(model=str(tmp_path), device="cpu", kv_cache_dtype="fp8_e4m3"))


def test_the_block_of_rows_that_pad_is_of_the_memory_that_is_given(tmp_path: Path) -> None:
    save_tiny("lfm2", tmp_path)
    settings = {"model": str(tmp_path), "device": "cpu"}
    info = start_engine(EngineConfig(**settings, num_gpu_blocks_override=4))[1]
    given = 10 * info.bytes_per_block
    info = start_engine(EngineConfig(**settings, kv_cache_memory_bytes=given))[1]
    assert info.num_blocks == 9
    with pytest.raises(ValueError, match="--kv-cache-memory-bytes must have room for a block"):
        start_engine(EngineConfig(**settings, kv_cache_memory_bytes=2 * info.bytes_per_block - 1))


def test_chunks_are_cut_where_blocks_end_and_earlier_tokens_come_first() -> None:
    """So that who shares a block that another row computes in the same step finds its states there."""
    spans = (Span(0, 6, 14), Span(1, 1, 0), Span(2, 9, 9))  # the second pads
    pieces = sorted(cut(spans, 5, block_size=4))
    assert pieces == [(0, 12, 16, 2), (4, 16, 20, 2), (8, 5, 9, 0), (8, 20, 21, 2), (12, 9, 11, 0)]


def test_a_convolution_goes_on_from_the_newest_tokens() -> None:
    tokens = torch.randn(1, 3, 11)
    whole = CacheOfStates({})
    whole.update_conv_state(tokens, 0, conv_kernel_size=4)
    state: dict[tuple[bool, int], torch.Tensor] = {}
    for begin, end in ((0, 2), (2, 3), (3, 9), (9, 11)):
        cache = CacheOfStates(state)
        read = cache.update_conv_state(tokens[..., begin:end], 0, conv_kernel_size=4)
        assert torch.equal(read[..., -(end - begin) :], tokens[..., begin:end])
        state = cache.states
    assert torch.equal(state[True, 0], whole.states[True, 0])
    assert torch.equal(state[True, 0], tokens[..., -4:])


def test_a_scan_in_pieces_is_the_scan() -> None:
    torch.manual_seed(0)
    x, dt, z = torch.randn(3, 2, 6, 9).unbind()
    a, b, c = -torch.rand(6, 4), *torch.randn(2, 2, 4, 9).unbind()
    given = {"D": torch.randn(6), "delta_bias": torch.randn(6), "delta_softplus": True}
    out, last = selective_scan(None, x, dt, a, b, c, z=z, **given)
    parts, state = [], None
    for piece in (slice(0, 4), slice(4, 5), slice(5, 9)):
        cut = [each[..., piece] for each in (x, dt)]
        part, state = selective_scan(state, *cut, a, b[..., piece], c[..., piece], z=z[..., piece], **given)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, -1), out)
    assert state is not None
    torch.testing.assert_close(state, last)


def with_states(config: ModelConfig, layers: int, *shapes: tuple[int, ...]) -> ModelConfig:
    parts = tuple(StateSpec(shape, "bfloat16", number, exact=False) for number, shape in enumerate(shapes))
    return replace(config, states=tuple(LayerStates(f"layers.{i}", parts) for i in range(layers)))


@pytest.mark.parametrize(
    ("layers", "numbers", "given", "block_size", "in_group"),
    [
        (9, 512, None, 64, 9),  # two attention layers keep 16 KiB of 64 tokens
        (9, 4096, None, 64, 2),
        (40, 4096, None, 256, 8),
        (9, 40_960, None, 1024, 3),
        (9, 400_000, None, 1024, 2),  # 1024 tokens take less than a layer's states
        (9, 4096, 16, 16, 2),
    ],
)
def test_blocks_are_so_large_that_states_are_in_few(
    layers: int, numbers: int, given: int | None, block_size: int, in_group: int, tmp_path: Path
) -> None:
    save_tiny("qwen3_next", tmp_path, num_hidden_layers=4)
    config = with_states(read_model(tmp_path), layers, (numbers,))
    part, chosen = in_blocks(config, given, BF16, torch.bfloat16)
    groups = [group for group in part.cache_groups if group.states]
    assert chosen == block_size and max(len(group.layers) for group in groups) == in_group
    assert len(groups) <= MOST_STATE_GROUPS
    assert sorted(layer for group in groups for layer in group.layers) == [*range(layers)]
    assert {group.window for group in groups} == {STATE_WINDOW}


def test_states_of_a_block_lie_apart_in_it(tmp_path: Path) -> None:
    save_tiny("qwen3_next", tmp_path)
    config = with_states(read_model(tmp_path), 5, (7,), (3, 5))
    config, block_size = in_blocks(config, 4, FP32, torch.float32)
    cache = KVCache(config, 3, block_size, FP32, CPU, torch_backend().copy_blocks)
    assert cache.states is not None and cache.states.spare == 3
    assert cache.blocks.shape == (3, bytes_per_block(config, block_size, FP32))
    for group in config.cache_groups:
        if group.states:
            cache.blocks.zero_()
            views = [view for layer in group.layers for view in cache.states.layers[layer]]
            for at, view in enumerate(views):
                assert view.shape[0] == 4
                view[:3] = at + 1
            for at, view in enumerate(views):
                assert (view[:3] == at + 1).all()
