"""Routers that `gpu_routers` times: found by the kernels' side, and alike on both."""

from __future__ import annotations

import pytest
import torch

from quire.loadtest.gpu_routers import ROUTERS, make_router, measure

SMALL = {"hidden_size": 64}


@pytest.mark.parametrize("name", ROUTERS)
def test_both_sides_choose_the_same_experts(name: str) -> None:
    kind, model_type, sizes = ROUTERS[name]
    modules = [make_router(kind, model_type, {**sizes, **SMALL}, torch.device("cpu")) for _ in range(2)]
    found = measure(name, modules, 16)
    assert (found.rows_that_differ, found.tokens) == (0, 16)
    assert found.weights_apart < 1e-5 and found.logits_apart < 1e-4
    assert min(found.transformers_us, found.kernels_us, found.product_us, found.choice_us) > 0


def test_what_kernels_do_not_compute_is_told() -> None:
    kind, model_type, sizes = ROUTERS["deepseek-v3"]
    module = make_router(kind, model_type, {**sizes, **SMALL}, torch.device("cpu"))
    module.forward = lambda x: (x, x, x)
    with pytest.raises(ValueError, match="was not found"):
        measure("other", [module], 4)
