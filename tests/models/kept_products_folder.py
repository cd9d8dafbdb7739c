"""Folders of random models by transformers' code with products in few bits, and what is loaded of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.device.block_size import in_blocks
from quire.engine.models.general.kept_linear import KeptLinear
from quire.engine.models.general.model import GeneralModel
from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.engine.models.stored_weights import keep_in_folder
from quire.kernels.backend import torch_backend
from quire.kernels.formats.kv_format import UNSCALED
from quire.kernels.quantised.weight import expand_reference
from quire.kernels.recurrence.operations import REFERENCES
from tests.models import kept_folder
from tests.models.any_model import MAX_LEN
from tests.models.float8_folder import save_quantised
from tests.models.packed_folder import save_packed
from tests.models.paged_driver import BLOCK_SIZE

EXPANDING = replace(torch_backend(), recurrences=REFERENCES)
KEEPING = replace(EXPANDING, keeps=lambda form, dtype: True)  # as a GPU's
MOST_APART = 1e-4  # of logits, by the order of sums
SIZES: dict[str, Any] = kept_folder.SIZES
PLAIN = {name: value for name, value in SIZES.items() if name != "head_dim"}
NETS = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
KINDS: dict[str, dict[str, Any]] = {  # a type for each kind of decoder
    "mistral": SIZES,  # pre-norm layers
    "phi3": PLAIN,
    "starcoder2": PLAIN,  # plain ones
    "gemma3_text": SIZES,  # sandwiches
    "qwen3_5_text": SIZES | NETS | {"linear_num_value_heads": 16},  # branches
    "qwen3_next": SIZES | NETS | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    "cohere": PLAIN,  # modules one by one
}


def save(kind: str, form: str, folder: Path) -> Path:
    """Save a model of a type with weights in a form of `kept_folder`."""
    if form in kept_folder.PACKED:
        return save_packed(kind, kept_folder.PACKED[form], folder, KINDS[kind])[0]
    return save_quantised(kind, kept_folder.FLOATS[form], folder, KINDS[kind])[0]


def load(
    folder: Path, backend: Any = KEEPING, dtype: torch.dtype = torch.float32, **given: Any
) -> tuple[GeneralModel, int]:
    config = given.pop("config", None) or read_model(folder, "transformers")
    device = given.pop("device", "cpu")
    config, _ = in_blocks(config, BLOCK_SIZE, UNSCALED[dtype], dtype)
    if asked := given.pop("quantized_weights", None):
        dummy = given.get("load_format") == "dummy"
        given["kept"] = keep_in_folder(folder, config, dtype, backend, dummy=dummy, quantized_weights=asked)(
            config
        )
    model, num_bytes = load_model(
        folder, config, backend, device=device, dtype=dtype, max_model_len=MAX_LEN, **given
    )
    assert isinstance(model, GeneralModel)
    return model, num_bytes


def layers_in(model: GeneralModel) -> dict[str, nn.Linear]:
    """Return the linear layers of a model's decoder, by their names."""
    return {name: part for name, part in model._decoder.named_modules() if isinstance(part, nn.Linear)}


def kept_in(model: GeneralModel) -> dict[str, Tensor]:
    """Return the numbers that kept weights stand for, of layers that have them yet."""
    return {
        name: expand_reference(layer.kept, torch.float32)
        for name, layer in layers_in(model).items()
        if isinstance(layer, KeptLinear)
    }
