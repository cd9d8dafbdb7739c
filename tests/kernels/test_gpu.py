"""A GPU's description: asked of the device, and what kernels make of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from gpus import GPUS

from quire.kernels.gpu import NO_GPU, Gpu, gpu_of


def test_the_device_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def properties(device: torch.device) -> SimpleNamespace:
        asked.append(device)
        return SimpleNamespace(
            name="an L4",
            major=8,
            minor=9,
            shared_memory_per_block_optin=101376,
            multi_processor_count=58,
            total_memory=24_000_000_000,
        )

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    device = torch.device("cuda", 63)  # which nobody has
    assert [gpu_of(device), gpu_of(device)] == [Gpu("an L4", (8, 9), 101376, 58, 24_000_000_000)] * 2
    assert asked == [device]
    assert gpu_of(torch.device("cpu")) is NO_GPU


def test_hoppers_of_more_memory_have_a_quicker_one() -> None:
    """Those of HBM3 have up to 96 GiB, a GH200's; an H200 and the larger GH200 have HBM3e."""
    hopper = GPUS[90]
    sizes = (0, 80 * 10**9, 99_961_274_368, 97_871 << 20, 141 * 10**9, 144 * 10**9)
    quick = [size for size in sizes if replace(hopper, memory=size).has_quick_memory]
    assert quick == [141 * 10**9, 144 * 10**9]
    assert not replace(GPUS[100], memory=192 * 10**9).has_quick_memory


def test_each_has_what_its_capability_brings() -> None:
    features = {
        "has_kernels": set(GPUS),
        "has_e4m3": {89, 90, 100, 120},
        "has_dependent_launch": {90, 100, 120},
        "has_warpgroup_products": {90},
        "has_products_of_shared_memory": {90, 100},
    }
    for feature, capabilities in features.items():
        assert {number for number, gpu in GPUS.items() if getattr(gpu, feature)} == capabilities
        assert not getattr(NO_GPU, feature)
