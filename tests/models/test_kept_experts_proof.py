"""That kernels compute experts by weights in few bits is proved, or those are not kept."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.models.general import kept_experts
from quire.engine.models.reading import read_model
from quire.engine.models.stored_weights import keep_in_folder
from tests.models.kept_experts_folder import TAKING, expanded_in, experts_in, load, save


def test_experts_that_kernels_would_compute_otherwise_are_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a small stand-in for their module shows, before any weight is read."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    folder = save("mxfp4", tmp_path)
    own = GptOssExperts._apply_gate
    monkeypatch.setattr(GptOssExperts, "_apply_gate", lambda module, both: own(module, both) * 1.1)
    with caplog.at_level(logging.INFO, "quire.engine"):
        model, _ = load(folder)
    assert "no weights are kept in few bits: experts of a kind that kernels do not compute (4)" in caplog.text
    assert not experts_in(model) and len(expanded_in(model)) == 2


def test_layers_that_are_alike_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many parts of the model are asked for."""
    folder, looked = save("gptq of qwen3_moe", tmp_path), []
    is_computed = kept_experts.is_computed
    monkeypatch.setattr(
        kept_experts, "is_computed", lambda *given: looked.append(given) or is_computed(*given)
    )
    model = read_model(folder, "transformers")
    keep = keep_in_folder(folder, model, torch.bfloat16, TAKING)
    assert all(len(keep(model.of_rank(ranks)).formats) == 4 for ranks in (1, 2))
    assert len(looked) == 1


def test_a_stand_in_shows_rows_that_are_in_another_order(tmp_path: Path) -> None:
    folder = save("mxfp4", tmp_path)
    keep = keep_in_folder(folder, read_model(folder), torch.bfloat16, TAKING)
    model = keep.keywords["model"]  # type: ignore[attr-defined]
    module = model.model.layers[0].mlp.experts
    forms = [*keep(read_model(folder)).formats.values()][:2]
    assert kept_experts.is_computed(module, forms)
    module._apply_gate = lambda both: both.chunk(2, dim=-1)[0]
    assert not kept_experts.is_computed(module, forms)


def test_what_kernels_do_not_compute_after_all_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("mxfp4", tmp_path)
    monkeypatch.setattr("quire.engine.models.general.expert_weights.are_computed", lambda *given: False)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts: .*give --quantized-weights expand"):
        load(folder)


def test_what_the_models_own_code_rounds_in_bf16_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are compared with what it computes in fp32."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    own = GptOssExperts._apply_gate

    def rounded(module: Any, both: Tensor) -> Tensor:
        return own(module, both) * (1.02 if both.dtype == torch.bfloat16 else 1.0)

    monkeypatch.setattr(GptOssExperts, "_apply_gate", rounded)
    assert len(experts_in(load(save("mxfp4", tmp_path), dtype=torch.bfloat16)[0])) == 2
