"""The weights of projections that vectors go through, from the files that a folder has for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.models.projection import Projection, ProjectionActivation
from quire.engine.models.weight_files import listed, open_weights

_FILE = "model.safetensors"
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class ProjectionWeights:
    """weight: float32 [out, in]; bias: float32 [out]."""

    weight: Tensor
    bias: Tensor | None
    activation: ProjectionActivation

    def __call__(self, vectors: Tensor) -> Tensor:
        """Project float32 [S, in] -> [S, out]."""
        projected = F.linear(vectors, self.weight, self.bias)
        match self.activation:
            case "identity":
                return projected
            case "tanh":
                return projected.tanh()
            case "relu":
                return projected.relu()
            case "gelu":
                return F.gelu(projected)
            case "silu":
                return F.silu(projected)
            case "sigmoid":
                return projected.sigmoid()

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


def load_projections(
    folder: Path, projections: Sequence[Projection], device: torch.device
) -> list[ProjectionWeights]:
    """Return their weights on `device`. Raises ValueError for what is missing or does not fit, by name."""
    return [_load(folder / each.path, each, device) for each in projections]


def draw_projections(
    projections: Sequence[Projection], device: torch.device, seed: int
) -> list[ProjectionWeights]:
    """Return weights of normal noise, std 0.02, the same for a seed on a kind of device."""
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.empty(shape, device=device).normal_(std=0.02, generator=generator)

    return [
        ProjectionWeights(
            drawn(each.out_features, each.in_features),
            drawn(each.out_features) if each.bias else None,
            each.activation,
        )
        for each in projections
    ]


def _load(folder: Path, projection: Projection, device: torch.device) -> ProjectionWeights:
    path = folder / _FILE
    if not path.is_file():
        found = sorted(file.name for file in folder.glob("*.bin"))
        hint = f" (it has {', '.join(found)})" if found else ""
        raise ValueError(
            f"{folder} has no {_FILE}{hint}. Other formats are never opened; convert with "
            "sentence-transformers: SentenceTransformer(…).save_pretrained(…)"
        )
    shapes = {"linear.weight": [projection.out_features, projection.in_features]}
    if projection.bias:
        shapes["linear.bias"] = [projection.out_features]
    file = open_weights(path)
    problems = [f"{name} is missing" for name in shapes.keys() - set(file.keys())]
    for name in file.keys():  # noqa: SIM118 - it is no mapping
        header = file.get_slice(name)
        shape, kind = list(header.get_shape()), header.get_dtype()
        if name not in shapes:
            problems.append(f"{name} is no weight of it")
        elif shape != shapes[name]:
            problems.append(f"{name} has shape {shape}, but config.json asks for {shapes[name]}")
        elif kind not in _FLOAT_TYPES:
            problems.append(f"{name} holds {kind}; only {', '.join(_FLOAT_TYPES)} are supported")
    if problems:
        raise ValueError(f"{path} does not fit its config.json: {listed(problems)}")
    loaded = {name: file.get_tensor(name).to(device, torch.float32) for name in shapes}
    return ProjectionWeights(loaded["linear.weight"], loaded.get("linear.bias"), projection.activation)
