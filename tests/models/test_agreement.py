"""Ranks run the same code though one of them finds that kernels give something else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.device.block_size import in_blocks
from quire.engine.models.general.delta_nets import DeltaNetModule
from quire.engine.models.general.stateful import state_modules
from quire.engine.models.general.whole_steps import WholeStepModule
from quire.engine.models.reading import read_model
from quire.kernels.backend import torch_backend
from quire.kernels.formats.kv_format import FP32
from quire.kernels.pointwise.sandwich_norm import sandwich_norm_reference
from quire.kernels.recurrence.operations import REFERENCES
from tests.models.any_model import save_tiny
from tests.models.divided_model import on_ranks
from tests.models.paged_driver import BLOCK_SIZE


@pytest.mark.parametrize(
    ("kind", "tokens"), [(kind, tokens) for kind in ("kimi_linear", "kolibri1") for tokens in (1, 8)]
)
def test_a_decoder_is_all_ranks_own_code_if_it_is_ones(kind: str, tokens: int, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path)
    part = read_model(tmp_path, "transformers").of_rank(2)

    def more(x: Tensor, *given: Any) -> Tensor:
        """Norm the sum behind experts, which ranks have alike, otherwise."""
        return sandwich_norm_reference(x, *given) * (1.05 if len(x) == tokens else 1.0)

    right = torch_backend()
    for backend, fused in ((right, True), (replace(right, sandwich_norm=more), False)):
        found = on_ranks(tmp_path, part, [right, backend], lambda model: model.fusion.decoder)
        assert [decoder is not None for decoder in found] == [fused, fused]


def test_layers_keep_states_by_the_same_code_on_all_ranks(tmp_path: Path) -> None:
    save_tiny("olmo_hybrid", tmp_path)
    part = read_model(tmp_path, "transformers").of_rank(2)
    part, _ = in_blocks(part, BLOCK_SIZE, FP32, torch.float32)
    net, rule = REFERENCES.delta_net, REFERENCES.gated_delta_rule
    without_net = replace(REFERENCES, delta_net=lambda *given: 2 * net(*given))
    without_both = replace(without_net, gated_delta_rule=lambda *given, **named: 2 * rule(*given, **named))

    def kinds_of(model: Any) -> tuple[Counter[type], bool]:
        modules = (module for _, module in state_modules(model._decoder))
        return Counter(type(vars(module)["forward"]) for module in modules), model.takes_pieces

    for recurrences, expected in ((REFERENCES, DeltaNetModule), (without_net, WholeStepModule)):
        backends = [replace(torch_backend(), recurrences=each) for each in (REFERENCES, recurrences)]
        assert on_ranks(tmp_path, part, backends, kinds_of) == [({expected: 2}, False)] * 2
    backends[1] = replace(torch_backend(), recurrences=without_both)
    assert [pieces for _, pieces in on_ranks(tmp_path, part, backends, kinds_of)] == [True, True]
