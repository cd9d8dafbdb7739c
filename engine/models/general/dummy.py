"""Draws a model's weights where none are read: the same for a seed on a kind of device, on any rank."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import nn

from quire.engine.models.general.division.shares import Held

STD = 0.02


def draw_matrices(model: nn.Module, seed: int, device: torch.device) -> None:
    """Fill matrices with normal noise."""
    generator = torch.Generator(device).manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(std=STD, generator=generator)


def draw_vectors(model: nn.Module, seed: int, device: torch.device, held: Mapping[str, Held]) -> None:
    """Fill vectors with noise that the model's code began by chance: sinks, some biases. Others stay.

    held: a rank's shares of parameters, by their names; the others are whole.
    """
    for name, weight in model.named_parameters():
        if weight.dim() != 1 or not bool(((weight != 0) & (weight != 1)).any()):
            continue
        share = held.get(name)
        shape = tuple(weight.shape) if share is None else share.share.shape
        generator = torch.Generator(device).manual_seed(seed + zlib.crc32(name.encode()))
        whole = torch.empty(shape, dtype=weight.dtype, device=device).normal_(std=STD, generator=generator)
        weight.data.copy_(whole if share is None else share.of(whole))
