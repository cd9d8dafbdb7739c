"""Draws a model's weights where none are read: the same for a seed on a kind of device, on any rank."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from quire.engine.models.drawn_weights import draw_rounded
from quire.engine.models.general.division.plan import experts_by_name
from quire.engine.models.general.division.shares import Held
from quire.engine.models.general.expert_modules import DOWN, GATE_UP
from quire.engine.models.rounded_files import ROUNDED_FORMAT

STD = 0.02


def draw_matrices(model: nn.Module, seed: int, device: torch.device) -> None:
    """Fill matrices with normal noise."""
    generator = torch.Generator(device).manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(std=STD, generator=generator)


def draw_rounded_matrices(
    model: nn.Module, names: Collection[str], seed: int, dtype: torch.dtype, held: Mapping[str, Held]
) -> None:
    """Fill those of these weights that are not kept in few bits with the numbers that they would stand for.

    names, dtype: of what is rounded, as `rounded_names` has them, and in what it is drawn. held: as
    `draw_vectors` has it.
    """
    parameters = dict(model.named_parameters())
    experts = {f"{name}.{weight}": name for name in experts_by_name(model) for weight in (GATE_UP, DOWN)}
    here = {name: weight for name, weight in parameters.items() if name in names}

    def whole_of(name: str) -> Tensor:
        share = held.get(name)
        shape = here[name].shape if share is None else share.share.shape
        return torch.empty(shape, dtype=dtype, device=here[name].device)

    def fill(name: str, whole: Tensor) -> None:
        share = held.get(name)
        here[name].data.copy_(whole if share is None else share.of(whole))

    for name in here.keys() - experts.keys():
        whole = whole_of(name)
        draw_rounded(whole, ROUNDED_FORMAT, None, dtype, _generator(whole.device, seed, name))
        fill(name, whole)
    for layer in {experts[name] for name in here.keys() & experts.keys()}:
        wholes = {name: whole_of(name) for name in (f"{layer}.{GATE_UP}", f"{layer}.{DOWN}")}
        for expert in range(len(wholes[f"{layer}.{DOWN}"])):
            generator = _generator(here[f"{layer}.{DOWN}"].device, seed, f"{layer}.{expert}")
            for whole in wholes.values():
                draw_rounded(whole[expert], ROUNDED_FORMAT, None, dtype, generator)
        for name, whole in wholes.items():
            fill(name, whole)


def _generator(device: torch.device, seed: int, name: str) -> torch.Generator:
    """Return what draws numbers of a part, the same as where it is kept in few bits."""
    return torch.Generator(device).manual_seed(seed + zlib.crc32(name.encode()))


def draw_vectors(model: nn.Module, seed: int, device: torch.device, held: Mapping[str, Held]) -> None:
    """Fill vectors with noise that the model's code began by chance: sinks, some biases. Others stay.

    held: a rank's shares of parameters, by their names; the others are whole.
    """
    for name, weight in model.named_parameters():
        if weight.dim() != 1 or not bool(((weight != 0) & (weight != 1)).any()):
            continue
        share = held.get(name)
        shape = tuple(weight.shape) if share is None else share.share.shape
        generator = _generator(device, seed, name)
        whole = torch.empty(shape, dtype=weight.dtype, device=device).normal_(std=STD, generator=generator)
        weight.data.copy_(whole if share is None else share.of(whole))
