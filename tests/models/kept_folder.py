"""Folders of a random model with weights in few bits that a decoder keeps, and what it has of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.models.config import ModelConfig
from quire.engine.models.decoder import Decoder
from quire.engine.models.general.model import GeneralModel
from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.engine.models.stored_weights import keep_in_folder
from quire.kernels.backend import Backend, torch_backend
from quire.kernels.quantised.weight import QuantisedWeight, expand_reference
from tests.models import float8_folder
from tests.models.any_model import MAX_LEN, prompts
from tests.models.divided_model import on_ranks
from tests.models.float8_folder import save_quantised
from tests.models.packed_folder import Form, awq, compressed, gptq, save_packed
from tests.models.paged_driver import PagedDriver

STEPS = 4
LAYERS = 2  # one of each type where there are two
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
SIZES |= {"num_hidden_layers": LAYERS}
KEEPING = replace(torch_backend(), keeps=lambda form, dtype: True)  # as a GPU's
W4A16 = compressed("pack-quantized", strategy="group", group_size=64)
PACKED = {
    "awq": Form(awq(group_size=128), "awq", group=128),
    "awq in rows": Form(awq(version="gemv", group_size=64), "awq_rows", group=64),
    "gptq": Form(gptq(group_size=128), "gptq", group=128, symmetric=True),
    "gptq v2": Form(gptq(group_size=64, checkpoint_format="gptq_v2"), "gptq_v2", group=64),
    "gptq, a group": Form(gptq(group_size=-1), "gptq", group=0),
    "words": Form(W4A16, "pack-quantized", group=64, symmetric=True, scale_dtype=torch.bfloat16),
    "words with zero points": Form(
        compressed("pack-quantized", strategy="group", group_size=128, symmetric=False),
        "pack-quantized",
        group=128,
    ),
}
FLOATS = {
    "blocks": float8_folder.FORMS["blocks"],
    "blocks of 48 rows": float8_folder.Form(
        float8_folder.compressed(strategy="block", block_structure=[48, 64]), 48, 64
    ),
    "rows": float8_folder.FORMS["compressed rows"],
    "matrices": float8_folder.FORMS["matrices"],
}
FORMS = [*PACKED, *FLOATS]


def save(form: str, folder: Path, kind: str = "qwen3") -> Path:
    if form in PACKED:
        return save_packed(kind, PACKED[form], folder, SIZES)[0]
    return save_quantised(kind, FLOATS[form], folder, SIZES)[0]


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def load(
    folder: Path, backend: Any = KEEPING, dtype: torch.dtype = torch.float32, **given: Any
) -> tuple[Decoder, int]:
    config = given.pop("config", None) or read_model(folder)
    if asked := given.pop("quantized_weights", None):
        dummy = given.get("load_format") == "dummy"
        keep = keep_in_folder(folder, config, dtype, backend, dummy=dummy, quantized_weights=asked)
        given["kept"] = keep(config)
    model, num_bytes = load_model(
        folder, config, backend, device="cpu", dtype=dtype, max_model_len=MAX_LEN, **given
    )
    assert isinstance(model, Decoder)
    return model, num_bytes


def asked() -> list[list[int]]:
    """Return prompts that are shorter than others': what weights stand for is in each token."""
    return [prompt[:20] for prompt in prompts()]


def generate(model: Decoder | GeneralModel) -> tuple[list[list[int]], list[Tensor]]:
    """Return the tokens and the logits of each prompt, which comes in chunks; several rows decode at once."""
    return PagedDriver(model, model.config, len(asked()) + 1, MAX_LEN).generate(asked(), STEPS)


def generate_on_ranks(
    folder: Path, part: ModelConfig, ranks: int, backend: Backend
) -> tuple[list[Any], list[tuple[list[list[int]], list[Tensor]]]]:
    """Return the models that ranks have of a folder's, and the same of each.

    part: the model as each of them computes it.
    """
    found = on_ranks(folder, part, [backend] * ranks, lambda model: (model, generate(model)))
    return [model for model, _ in found], [generated for _, generated in found]


def weights_of(model: Decoder, layers: int = LAYERS) -> list[QuantisedWeight | Tensor]:
    """Return the weights of all products, a layer after the other."""
    every = [weight for layer in model.layers for weight in layer.weights]
    assert len(every) == 4 * layers
    return every


def tensors_of(model: Decoder) -> list[Tensor]:
    """Return the same of a model that keeps none in few bits."""
    every = weights_of(model)
    tensors = [weight for weight in every if isinstance(weight, Tensor)]
    assert len(tensors) == len(every)
    return tensors


def expanded(weight: QuantisedWeight | Tensor) -> Tensor:
    return weight if isinstance(weight, Tensor) else expand_reference(weight, torch.float32)
