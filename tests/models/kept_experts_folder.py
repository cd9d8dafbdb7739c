"""Folders of random models by transformers' code with experts in few bits, and what is loaded of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.engine.models.general.model import GeneralModel
from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.engine.models.stored_weights import keep_in_folder
from quire.engine.parallel.group import OneOfRanks
from quire.kernels.backend import torch_backend
from quire.kernels.experts.quantised import QuantisedExperts, expand_experts, takes
from tests.models import kept_folder, test_fours
from tests.models.any_model import MAX_LEN, tiny_model
from tests.models.float8_folder import save_quantised
from tests.models.packed_folder import save_packed
from tests.models.test_quantised import pack

KEEPING = replace(torch_backend(), keeps_experts=lambda form, dtype: True)  # as a GPU's, of experts alone
TAKING = replace(torch_backend(), keeps_experts=takes)  # what kernels of a GPU take, likewise
MOST_APART = 1e-4  # of logits, by the order of sums
SIZES: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 2}
OF_EXPERTS: dict[str, dict[str, Any]] = {  # whose width is in a field of each one's own
    "qwen3_moe": SIZES | {"moe_intermediate_size": 256},
    "glm4_moe": SIZES | {"moe_intermediate_size": 128},
    "minimax_m2": SIZES | {"intermediate_size": 128},
    "mixtral": SIZES | {"intermediate_size": 128},
    "deepseek_v3": {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2},
}
LAYERS = {"glm4_moe": 1, "deepseek_v3": 1}  # that have experts, of two


def save_mxfp4(folder: Path) -> Path:
    """Save a model whose lines of 128 inputs are not full, neither whole nor divided among two ranks."""
    pack(folder, tiny_model("gpt_oss", folder, intermediate_size=192, num_hidden_layers=2))
    return folder


def of_kind(kind: str, form: str) -> Callable[[Path], Path]:
    """Return what saves a model of a type with weights in a form of `kept_folder`."""

    def save_kind(folder: Path) -> Path:
        if form in kept_folder.PACKED:
            return save_packed(kind, kept_folder.PACKED[form], folder, OF_EXPERTS[kind])[0]
        return save_quantised(kind, kept_folder.FLOATS[form], folder, OF_EXPERTS[kind])[0]

    return save_kind


def save_fours(folder: Path) -> Path:
    sizes = OF_EXPERTS["qwen3_moe"] | {"moe_intermediate_size": 192}
    return test_fours.save_fours("qwen3_moe", "MXFP4", folder, sizes)[0]


FORMS: dict[str, Callable[[Path], Path]] = {"mxfp4": save_mxfp4, "mxfp4 of qwen3_moe": save_fours} | {
    f"{form} of {kind}": of_kind(kind, form)
    for kind, form in (
        ("qwen3_moe", "blocks"),
        ("qwen3_moe", "rows"),
        ("qwen3_moe", "awq"),
        ("qwen3_moe", "gptq"),
        ("glm4_moe", "matrices"),
        ("mixtral", "words"),
        ("minimax_m2", "words with zero points"),
        ("deepseek_v3", "blocks"),
    )
}


def save(form: str, folder: Path) -> Path:
    return FORMS[form](folder)


def load(
    folder: Path, backend: Any = KEEPING, dtype: torch.dtype = torch.float32, **given: Any
) -> tuple[GeneralModel, int]:
    config = given.pop("config", None) or read_model(folder, "transformers")
    if asked := given.pop("quantized_weights", None):
        dummy = given.get("load_format") == "dummy"
        keep = keep_in_folder(folder, config, dtype, backend, dummy=dummy, quantized_weights=asked)
        given["kept"] = keep(config)
    model, num_bytes = load_model(
        folder, config, backend, device="cpu", dtype=dtype, max_model_len=MAX_LEN, **given
    )
    assert isinstance(model, GeneralModel)
    return model, num_bytes


def experts_in(model: GeneralModel) -> list[QuantisedExperts]:
    found = [vars(module).get("quire_experts") for module in model._decoder.modules()]
    return [each for each in found if isinstance(each, QuantisedExperts)]


def kept_in(model: GeneralModel) -> list[list[Tensor]]:
    """Return the numbers that a model's kept experts stand for, the gate's rows first, and their biases."""
    every = (expand_experts(experts, torch.float32) for experts in experts_in(model))
    found = ((each.gate_up, each.down, each.gate_up_bias, each.down_bias) for each in every)
    return [[part for part in parts if part is not None] for parts in found]


def expanded_in(model: GeneralModel) -> list[list[Tensor]]:
    """Return the same of a model that keeps none."""
    found = []
    for module in model._decoder.modules():
        if not isinstance(getattr(module, "gate_up_proj", None), Tensor):
            continue
        part: Any = module
        parts = [part.gate_up_proj, part.down_proj]
        if part.is_transposed:
            parts = [each.transpose(1, 2) for each in parts]
        if part.has_bias:
            parts += [part.gate_up_proj_bias, part.down_proj_bias]
        if not part.is_concatenated:
            parts[::2] = [torch.cat((each[:, ::2], each[:, 1::2]), 1) for each in parts[::2]]
        found.append(parts)
    return found


def load_ranks(folder: Path, ranks: int, *, whole_ones: bool, **given: Any) -> list[GeneralModel]:
    """Return a model as each of so many ranks has it, which are alone."""
    part = read_model(folder, "transformers").of_rank(ranks, expert_parallel=whole_ones)
    return [load(folder, config=part, ranks=OneOfRanks(rank, ranks), **given)[0] for rank in range(ranks)]


def joined(ranks: list[GeneralModel], *, whole_ones: bool) -> list[list[Tensor]]:
    """Return what the experts of all ranks stand for together, without biases, as `kept_in` has it."""
    found = []
    for parts in zip(*(kept_in(rank) for rank in ranks), strict=True):
        ups, downs = [each[0] for each in parts], [each[1] for each in parts]
        if whole_ones:
            found.append([torch.cat(ups), torch.cat(downs)])
            continue
        halves = zip(*(each.chunk(2, 1) for each in ups), strict=True)
        found.append([torch.cat([part for half in halves for part in half], 1), torch.cat(downs, 2)])
    return found


def same(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> bool:
    return len(ours) == len(theirs) > 0 and all(
        torch.equal(mine, other)
        for some, others in zip(ours, theirs, strict=True)
        for mine, other in zip(some, others, strict=True)
    )
