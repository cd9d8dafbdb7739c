"""Safetensors files of NVIDIA's ModelOpt, read as if they had the numbers that weights stand for."""

from __future__ import annotations

from typing import Any

import torch

from quire.engine.models.expanded_file import ExpandedFile
from quire.engine.models.float8 import Float8
from quire.engine.models.float8_files import expand_float8
from quire.engine.models.modelopt import ModelOpt
from quire.engine.models.nvfp4_files import OF_MODELOPT, expand_nvfp4
from quire.engine.models.packed import Packed
from quire.engine.models.packed_files import expand_packed

# Behind names: what a cache of fewer bits would go by. The cache here has the format that is asked for.
_OF_CACHE = (".k_scale", ".v_scale", ".k_proj.k_bias", ".v_proj.v_bias")


def expand_modelopt(
    files: list[Any], modelopt: ModelOpt, dtype: torch.dtype, device: torch.device
) -> list[ExpandedFile]:
    """Return the files as if they had the numbers that weights stand for, in a dtype on a device.

    Raises ValueError for weights that do not fit, by name.
    """
    hidden = {name for file in files for name in file.offset_keys() if name.endswith(_OF_CACHE)}
    files = [ExpandedFile(file, {}, hidden) for file in files]
    if isinstance(modelopt.weights, Float8):
        return expand_float8(files, modelopt.weights, dtype, device)
    if isinstance(modelopt.weights, Packed):
        return expand_packed(files, modelopt.weights, dtype, device)
    return expand_nvfp4(files, OF_MODELOPT, dtype, device)
