"""Folders whose weights are quantised: MXFP4, as gpt-oss has them, is loaded as the numbers it stands for."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.models.loader import load_model
from quire.engine.models.mxfp4_files import expand_mxfp4
from quire.engine.models.reading import read_model
from quire.kernels.backend import torch_backend
from tests.models.any_model import LENGTHS, MAX_LEN, STEPS, difference, prompts, save_tiny, tiny_model
from tests.models.divided_model import compare_divided
from tests.models.paged_driver import PagedDriver

FOURS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # by three bits; the fourth is the sign
IN_A_BLOCK = 32


def quantised_by(folder: Path, method: str) -> None:
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | {"quantization_config": {"quant_method": method}}
    path.write_text(json.dumps(fields))


def numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return what blocks [E, out, n, 16] and scales [E, out, n] stand for, [E, in, out]."""
    fours = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
    values = FOURS[fours & 7] * (1 - 2 * (fours >> 3))
    return (values * 2.0 ** (scales.float() - 127)[..., None]).flatten(2).transpose(1, 2)


def pack(folder: Path, reference: Any) -> None:
    """Have a folder's experts in MXFP4, and those of `reference` as the numbers that these stand for."""
    weights = load_file(folder / "model.safetensors")
    held = dict(reference.named_parameters())
    for name in [each for each in weights if each.endswith("_proj") and ".experts." in each]:
        experts, inputs, outputs = weights.pop(name).shape
        shape = (experts, outputs, inputs // IN_A_BLOCK)
        blocks = torch.randint(0, 256, (*shape, IN_A_BLOCK // 2), dtype=torch.uint8)
        scales = torch.randint(121, 125, shape, dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        held[name].data = numbers(blocks, scales)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    quantised_by(folder, "mxfp4")


def test_mxfp4_is_loaded_as_its_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = tiny_model("gpt_oss", tmp_path)
    pack(tmp_path, reference)
    config = read_model(tmp_path)
    with caplog.at_level(logging.INFO, "quire.engine"):
        model, _ = load_model(
            tmp_path, config, torch_backend(), device="cpu", dtype=torch.float32, max_model_len=MAX_LEN
        )
    assert "in MXFP4 are loaded as the float32 numbers that they stand for, in 7.5 times" in caplog.text
    driver = PagedDriver(model, config, len(LENGTHS) + 1, MAX_LEN)
    assert difference(driver.generate(prompts(), STEPS), reference) < 1e-3


@pytest.mark.parametrize("whole_ones", [False, True], ids=["by columns", "whole experts"])
def test_ranks_read_their_shares_of_mxfp4(whole_ones: bool, tmp_path: Path) -> None:
    """Of four each has 24 of 96 inputs, of which 32 have a scale."""
    whole = tiny_model("gpt_oss", tmp_path, num_key_value_heads=4)
    pack(tmp_path, whole)
    verdict = compare_divided(tmp_path, whole, 4, expert_parallel=whole_ones)
    assert verdict.outcome == "equal", verdict.detail


class Held:
    """A tensor, as safetensors has a slice."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return {torch.uint8: "U8", torch.float32: "F32"}[self._tensor.dtype]

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


def drawn(experts: int = 3, outputs: int = 5, blocks: int = 4) -> dict[str, Any]:
    shape = (experts, outputs, blocks)
    return {
        "w_blocks": Held(torch.randint(0, 256, (*shape, IN_A_BLOCK // 2), dtype=torch.uint8)),
        "w_scales": Held(torch.randint(0, 250, shape, dtype=torch.uint8)),
        "other": Held(torch.ones(3)),
    }


@given(st.data())
def test_any_part_of_a_weight_is_that_part_of_its_numbers(data: st.DataObject) -> None:
    slices = drawn()
    whole = numbers(slices["w_blocks"][...], slices["w_scales"][...])
    found = expand_mxfp4(slices, torch.float32)
    assert set(found) == {"w", "other"} and found["other"] is slices["other"]
    assert found["w"].get_shape() == [*whole.shape] and found["w"].get_dtype() == "F32"
    ends = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in whole.shape]
    part = tuple(slice(*each) for each in ends[: data.draw(st.integers(1, 3))])
    assert torch.equal(found["w"][part], whole[part])
    assert torch.equal(found["w"][...], whole)


def test_numbers_are_those_of_bf16_or_refused() -> None:
    slices = drawn()
    whole = numbers(slices["w_blocks"][...], slices["w_scales"][...])
    assert torch.equal(expand_mxfp4(slices, torch.bfloat16)["w"][...], whole.to(torch.bfloat16))
    slices["w_blocks"] = Held(torch.full_like(slices["w_blocks"][...], 0x77))
    slices["w_scales"] = Held(torch.full_like(slices["w_scales"][...], 127 + 14))
    with pytest.raises(ValueError, match=r"w stands for numbers that are not finite in torch\.float16"):
        expand_mxfp4(slices, torch.float16)["w"][...]
    assert expand_mxfp4(slices, torch.bfloat16)["w"][...].unique().tolist() == [6.0 * 2**14]


@pytest.mark.parametrize(
    ("name", "instead", "reason"),
    [
        ("w_scales", None, "w_blocks is there, and w_scales is not"),
        ("w_scales", torch.ones(3, 5, 4), "w_blocks and its scales hold U8 and F32, not bytes"),
        (
            "w_scales",
            torch.ones(3, 5, 3, dtype=torch.uint8),
            r"shape \[3, 5, 4, 16\], and its scales \[3, 5, 3\]",
        ),
    ],
)
def test_blocks_that_do_not_fit_are_refused_by_name(name: str, instead: Tensor | None, reason: str) -> None:
    slices = drawn()
    del slices[name]
    if instead is not None:
        slices[name] = Held(instead)
    with pytest.raises(ValueError, match=reason):
        expand_mxfp4(slices, torch.float32)


@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_others_are_refused_by_their_method(kind: str, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path)
    quantised_by(tmp_path, "awq")
    with pytest.raises(ValueError, match=r"quantization_config.*awq"):
        read_model(tmp_path)
