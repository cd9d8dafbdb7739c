"""Folders whose weights are bitsandbytes' codes are loaded as the numbers that those stand for."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.models import expanded_file
from quire.engine.models.bitsandbytes_files import expand_bitsandbytes
from quire.engine.models.quantisation import BITSANDBYTES
from quire.engine.models.reading import read_model
from quire.engine.models.weight_files import open_weights
from tests.models.divided_model import compare_divided
from tests.models.quantised_folder import save_twice
from tests.models.test_float8 import EVERY, assert_same, load

BLOCK, NESTED_BLOCK = 64, 256
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
QUERIES = "model.layers.0.self_attn.q_proj.weight"  # [192, 160]
Parts = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]


def as_bytes(fields: dict[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


def four_bits(
    name: str, weight: Tensor, *, nested: bool, kind: str = "nf4"
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors that files have of random codes, and the numbers that they stand for."""
    count = weight.numel()
    codes = torch.randint(0, 16, (count + count % 2,))
    meanings, blocks = torch.randn(16).sort().values, -(-count // BLOCK)
    scales = torch.rand(blocks) * 0.1
    state: dict[str, Any] = {"quant_type": kind, "blocksize": BLOCK, "shape": [*weight.shape]}
    found = {name: (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None], f"{name}.quant_map": meanings}
    if nested:
        of_scales, map_of_scales = torch.randint(0, 256, (blocks,)), torch.rand(256) * 0.1
        over = torch.rand(-(-blocks // NESTED_BLOCK))
        scales = map_of_scales[of_scales] * over[torch.arange(blocks) // NESTED_BLOCK] + 0.03
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_offset": 0.03, "nested_dtype": "float32"}
        found |= {f"{name}.nested_quant_map": map_of_scales, f"{name}.nested_absmax": over}
        found[f"{name}.absmax"] = of_scales.to(torch.uint8)
    else:
        found[f"{name}.absmax"] = scales
    found[f"{name}.quant_state.bitsandbytes__{kind}"] = as_bytes(state)
    numbers = meanings[codes[:count]] * scales.repeat_interleave(BLOCK)[:count]
    return found, numbers.view(weight.shape)


def eight_bits(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    integers = torch.randint(-127, 128, weight.shape, dtype=torch.int8)
    largest = weight.abs().amax(1)
    layer = name.removesuffix("weight")
    found = {
        name: integers,
        f"{layer}SCB": largest,
        f"{layer}weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return found, integers.float() * (largest / 127)[:, None]


FORMS: dict[str, Parts] = {
    "nf4": lambda name, weight: four_bits(name, weight, nested=False),
    "nested fp4": lambda name, weight: four_bits(name, weight, nested=True, kind="fp4"),
    "8 bits": eight_bits,
}


def save_coded(kind: str, form: str, folder: Path) -> tuple[Path, Path]:
    """Save a random model twice: with coded weights, and with the numbers that those stand for."""
    return save_twice(kind, CONFIG, FORMS[form], folder)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_every_form_is_loaded_as_its_numbers(
    kind: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, plain = save_coded(kind, form, tmp_path)
    assert read_model(quantised).quantised == BITSANDBYTES
    with caplog.at_level(logging.INFO, "quire.engine"):
        assert_same(load(quantised)[0], load(plain)[0])
    assert "loaded as the float32 numbers that they stand for; of 4 bits in 8 times the bytes" in caplog.text


@pytest.mark.parametrize("form", ["nested fp4", "8 bits"])
def test_ranks_expand_their_shares(form: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    quantised, plain = save_coded("gemma2", form, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    verdict = compare_divided(quantised, reference, 2)
    assert verdict.outcome == "equal", verdict.detail


PARTS = [(), (slice(3, 50),), (EVERY, slice(70, 77)), (slice(7, 7), EVERY), (slice(9, 41), slice(13, 13))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", PARTS)
def test_any_part_of_a_weight_is_read_as_its_numbers(
    part: tuple[slice, ...], form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 161 numbers begin within a byte, and within a block. On a GPU if there is one."""
    monkeypatch.setattr(expanded_file, "_PIECE", 1000)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors, numbers = FORMS[form]("layer.weight", torch.randn(73, 161))
    save_file(tensors, tmp_path / "layer.safetensors")
    (file,) = expand_bitsandbytes([open_weights(tmp_path / "layer.safetensors")], torch.bfloat16, device)
    assert file.offset_keys() == ["layer.weight"]
    read = file.get_slice("layer.weight")[part or ...]
    assert read.device.type == device.type
    assert torch.equal(read.cpu(), numbers[part].bfloat16())


Edit = Callable[[dict[str, Tensor]], object]
STATE = f"{QUERIES}.quant_state.bitsandbytes__nf4"


def told(**fields: Any) -> Edit:
    given = {"blocksize": BLOCK, "shape": [192, 160]} | fields
    return lambda tensors: tensors.update({STATE: as_bytes(given)})


WRONG: list[tuple[str, Edit, str]] = [
    ("nf4", lambda t: t.pop(STATE), "it is of bytes, and .quant_state.bitsandbytes__nf4 or"),
    ("nf4", lambda t: t.pop(f"{QUERIES}.absmax"), ".absmax beside it are missing"),
    ("nf4", told(shape=[192, 161]), "which do not fit [192, 161] in blocks of 64"),
    ("nf4", told(blocksize=128), "480 scales and 16 meanings, which do not fit"),
    ("nf4", told(blocksize=0), "its quant_state has blocks of 0"),
    ("nf4", told(nested_blocksize=256), "its quant_state is not understood: KeyError('nested_offset')"),
    ("nf4", told(shape=7), "its quant_state is not understood: TypeError"),
    ("nested fp4", lambda t: t.pop(f"{QUERIES}.nested_absmax"), ".nested_absmax beside it are missing"),
    (
        "nested fp4",
        lambda t: t.update({f"{QUERIES}.nested_absmax": torch.ones(3)}),
        "3 nested scales do not fit 480 of 256 each",
    ),
    ("nf4", lambda t: t[f"{QUERIES}.absmax"].fill_(torch.inf), "stands for numbers that are not finite"),
    ("8 bits", lambda t: t.pop(f"{QUERIES.removesuffix('weight')}SCB"), "and SCB is not there"),
    ("8 bits", lambda t: t[f"{QUERIES}_format"].fill_(2), "its weight_format is 2; only rows (0) are read"),
    (
        "8 bits",
        lambda t: t.update({f"{QUERIES.removesuffix('weight')}SCB": torch.ones(191)}),
        "it has shape [192, 160], and SCB [191]",
    ),
]


@pytest.mark.parametrize(("form", "edit", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_parts_that_do_not_fit_are_refused_by_name(
    form: str, edit: Edit, message: str, tmp_path: Path
) -> None:
    quantised, _ = save_coded("qwen3", form, tmp_path)
    tensors = load_file(quantised / "model.safetensors")
    edit(tensors)
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=QUERIES) as refused:
        load(quantised)
    assert message in str(refused.value)
