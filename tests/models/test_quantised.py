"""Folders whose weights are quantised: MXFP4, as gpt-oss has them, is loaded as the numbers it stands for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.kernels.backend import torch_backend
from tests.models.any_model import LENGTHS, MAX_LEN, STEPS, difference, prompts, save_tiny
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


def test_mxfp4_is_loaded_as_its_numbers(tmp_path: Path) -> None:
    reference = save_tiny("gpt_oss", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    held = dict(reference.named_parameters())
    for name in [each for each in weights if each.endswith("_proj") and ".experts." in each]:
        experts, inputs, outputs = weights.pop(name).shape
        shape = (experts, outputs, inputs // IN_A_BLOCK)
        blocks = torch.randint(0, 256, (*shape, IN_A_BLOCK // 2), dtype=torch.uint8)
        scales = torch.randint(121, 125, shape, dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        held[name].data = numbers(blocks, scales)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    quantised_by(tmp_path, "mxfp4")
    config = read_model(tmp_path)
    model, _ = load_model(
        tmp_path, config, torch_backend(), device="cpu", dtype=torch.float32, max_model_len=MAX_LEN
    )
    driver = PagedDriver(model, config, len(LENGTHS) + 1, MAX_LEN)
    assert difference(driver.generate(prompts(), STEPS), reference) < 1e-3
    with pytest.raises(ValueError, match="of weights in MXFP4 no shares are read"):
        config.of_rank(2)


@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_others_are_refused_by_their_method(kind: str, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path)
    quantised_by(tmp_path, "awq")
    with pytest.raises(ValueError, match=r"quantization_config.*awq"):
        read_model(tmp_path)
