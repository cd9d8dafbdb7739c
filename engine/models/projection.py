"""A projection that vectors go through, as a Dense module of sentence-transformers says. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from quire.engine.models.json_fields import Fields, read_json

ProjectionActivation = Literal["identity", "tanh", "relu", "gelu", "silu", "sigmoid"]

_ACTIVATIONS: dict[str, ProjectionActivation] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
_ACTIVATIONS |= {f"torch.nn.{name.rpartition('.')[2]}": kind for name, kind in _ACTIVATIONS.items()}


class Projection(msgspec.Struct, frozen=True, kw_only=True):
    """activation(weight [out, in] · vector [in] + bias [out]); its weights are in `path` of the folder."""

    path: str
    in_features: int
    out_features: int
    bias: bool = True
    activation: ProjectionActivation = "tanh"


def read_projection(folder: Path, path: str) -> Projection:
    """Return what `path`/config.json in a folder says. Raises ValueError that names what is not supported."""
    file = folder / path / "config.json"
    raw = read_json(file)
    if raw is None:
        raise ValueError(f"{file} is missing, which modules.json names")
    fields = Fields(raw, str(file))
    for name in ("module_input_name", "module_output_name"):
        fields.refuse_unless(name, None, "sentence_embedding")
    fields.refuse_unless("use_residual", None, False)
    return Projection(
        path=path,
        in_features=fields.size("in_features"),
        out_features=fields.size("out_features"),
        bias=fields.flag("bias", True),
        activation=fields.choice("activation_function", "tanh", _ACTIVATIONS),
    )
