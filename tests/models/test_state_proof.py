"""What proves kernels of states at loading takes the references, and finds faults that kernels could have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from quire.engine.device.block_size import in_blocks
from quire.engine.models.general.delta_nets import DeltaNetModule
from quire.engine.models.general.scans import ScanModule, StateSpaceModule
from quire.engine.models.general.short_convolutions import ShortConvolutionModule
from quire.engine.models.general.state_proof import StandIn, is_proved
from quire.engine.models.general.stateful import state_modules
from quire.engine.models.general.whole_steps import WholeStepModule
from quire.engine.models.reading import read_model
from quire.kernels.backend import torch_backend
from quire.kernels.formats.kv_format import FP32
from quire.kernels.formats.state_spec import LayerStates
from quire.kernels.recurrence.operations import REFERENCES, Recurrences
from quire.kernels.recurrence.step import CARRIED, NO_STATE, PADS, StateStep
from tests.models.any_model import save_tiny

Function = Callable[[Tensor, StateStep], Tensor]
Fault = Callable[[Function, Tensor, StateStep], Tensor]


def by(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes one that takes a backend."""
    return lambda recurrences, *given: kind(replace(torch_backend(), recurrences=recurrences), *given)


# Of a delta rule, a convolution alone, Mamba 2 and Mamba by their own code, and each by ours.
KINDS = [
    (WholeStepModule, "qwen3_next"), (WholeStepModule, "lfm2"), (WholeStepModule, "mamba2"),
    (WholeStepModule, "falcon_mamba"),
    *((by(DeltaNetModule), kind) for kind in ("qwen3_5_text", "qwen3_next", "olmo_hybrid", "kimi_linear")),
    *((by(StateSpaceModule), kind) for kind in ("mamba2", "bamba", "nemotron_h")),
    *((by(ScanModule), kind) for kind in ("mamba", "falcon_mamba", "jamba")),
    (by(ShortConvolutionModule), "lfm2"),
]  # fmt: skip


def first_module(kind: str, folder: Path) -> tuple[nn.Module, LayerStates, int]:
    """Return a tiny model's first module that keeps states, what it keeps, and its inputs' columns."""
    save_tiny(kind, folder)
    config, _ = in_blocks(read_model(folder), None, FP32, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layer = config.states[0]
    return dict(state_modules(model))[layer.name], layer, config.hidden_size


def with_fault(fault: Fault) -> Recurrences:
    """Return the references with a fault in each that takes states."""

    def wrapped(reference: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*given: Any, **named: Any) -> Tensor:
            *others, state, step = given
            return fault(lambda state, step: reference(*others, state, step, **named), state, step)

        return run

    names = {each.name for each in fields(REFERENCES)} - {"decode_blocks"}
    return replace(REFERENCES, **{name: wrapped(getattr(REFERENCES, name)) for name in names})


def none(run: Function, state: Tensor, step: StateStep) -> Tensor:
    return run(state, step)


def leaves_states_of_what_pads(run: Function, state: Tensor, step: StateStep) -> Tensor:
    return run(state, replace(step, after=step.after.where(step.after != PADS, len(state) - 1)))


def leaves_states_ahead_of_the_first_block(run: Function, state: Tensor, step: StateStep) -> Tensor:
    out = run(state, step)
    if (step.after == PADS).any():
        state.as_strided(
            state.shape[1:], state.stride()[1:], state.storage_offset() - state.stride(0)
        ).zero_()
    return out


def has_no_numbers_where_a_decode_pads(run: Function, state: Tensor, step: StateStep) -> Tensor:
    out = run(state, step)
    if not len(step.chunks):
        out[step.after == PADS] = torch.nan
    return out


def has_decodes_that_pad_after_chunks(run: Function, state: Tensor, step: StateStep) -> Tensor:
    out = run(state, step)
    out[: step.decodes][step.after == PADS] = 0.0
    return out


def leaves_states_of_chunks_without_tokens(run: Function, state: Tensor, step: StateStep) -> Tensor:
    out = run(state, step)
    for _, tokens, _, after in step.chunks.tolist():
        if not tokens and after >= 0:
            state[after] = 0.0
    return out


def begins_anew_behind_chunks_without_tokens(run: Function, state: Tensor, step: StateStep) -> Tensor:
    chunks = step.chunks.clone()
    for ahead, chunk in zip(step.chunks, chunks[1:], strict=False):
        if not ahead[1] and chunk[2] == CARRIED:
            chunk[2] = NO_STATE
    return run(state, replace(step, chunks=chunks))


def has_all_decodes_go_on_from_one_block(run: Function, state: Tensor, step: StateStep) -> Tensor:
    return run(state, replace(step, before=step.before[:1].expand_as(step.before)))


def computes_one_decode(run: Function, state: Tensor, step: StateStep) -> Tensor:
    return run(state, replace(step, before=step.before[:1], after=step.after[:1]))


def has_blocks_next_to_each_other(run: Function, state: Tensor, step: StateStep) -> Tensor:
    strides = state[0].numel(), *state.stride()[1:]
    return run(state.as_strided(state.shape, strides), step)


def reads_a_block_where_a_decode_begins(run: Function, state: Tensor, step: StateStep) -> Tensor:
    """One that nobody wrote: it would be right if there were zeros."""
    return run(state, replace(step, before=step.before.where(step.before != NO_STATE, len(state) - 1)))


def reads_a_block_where_a_chunk_begins(run: Function, state: Tensor, step: StateStep) -> Tensor:
    chunks = step.chunks.clone()
    chunks[:, 2] = chunks[:, 2].where(chunks[:, 2] != NO_STATE, len(state) - 1)
    return run(state, replace(step, chunks=chunks))


FAULTS = [
    leaves_states_of_what_pads,
    leaves_states_ahead_of_the_first_block,
    has_no_numbers_where_a_decode_pads,
    has_decodes_that_pad_after_chunks,
    leaves_states_of_chunks_without_tokens,
    begins_anew_behind_chunks_without_tokens,
    has_all_decodes_go_on_from_one_block,
    computes_one_decode,
    has_blocks_next_to_each_other,
    reads_a_block_where_a_decode_begins,
    reads_a_block_where_a_chunk_begins,
]


@pytest.mark.parametrize(("make", "kind"), KINDS)
def test_references_are_taken_and_faults_found(
    make: Callable[..., Callable[..., Any]], kind: str, tmp_path: Path
) -> None:
    module, layer, hidden = first_module(kind, tmp_path)

    def proved(recurrences: Recurrences) -> bool:
        stand_in: StandIn = partial(make, recurrences)
        return is_proved(module, layer, stand_in, hidden)

    assert proved(with_fault(none))
    for fault in FAULTS:
        assert not proved(with_fault(fault)), fault.__name__
    # In 16 bits some tokens' sums all but cancel, and what is left has rounding of the size of others'.
    module.to(torch.bfloat16)
    parts = (replace(part, dtype="bfloat16") if part.rolls else part for part in layer.parts)
    assert is_proved(module, replace(layer, parts=tuple(parts)), partial(make, REFERENCES), hidden)
