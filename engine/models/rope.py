"""Cosines and sines of rotary position embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.engine.models.rope_config import Llama3Scaling, RopeConfig


def rope_table(config: RopeConfig, head_dim: int, max_model_len: int, device: torch.device) -> Tensor:
    """Return [max_model_len, head_dim] f32: cosines in the columns' first half, sines in the second."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / config.theta**exponents / config.linear_factor
    if config.llama3 is not None:
        frequencies = _scale_llama3(frequencies, config.llama3)
    positions = torch.arange(max_model_len, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies.to(device))
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def _scale_llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide by `factor` where the wavelength is long, keep where it is short, blend in between."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor
