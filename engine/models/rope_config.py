"""Which rotary position embedding a model has, read from its config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.models.json_fields import Fields


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding over the whole head, halves paired (NeoX)."""

    theta: float
    linear_factor: float = 1.0  # positions are divided by it
    llama3: Llama3Scaling | None = None

    @classmethod
    def read(cls, fields: Fields, positions: int) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or top-level `rope_theta` and `rope_scaling` (before).

        `positions` is how many the model has. Raises ValueError that names the field.
        """
        name = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
        parameters = fields.raw.get(name) or {}
        if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
            raise fields.error(name, parameters, "one set of parameters for all layers")
        rope = Fields(parameters, f"{fields.where}: {name}")
        rope.refuse_unless("partial_rotary_factor", None, 1, 1.0)
        theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
        key = "rope_type" if "rope_type" in parameters else "type"
        kind = parameters.get(key, "default")
        if kind == "default":
            return cls(theta)
        if kind not in ("linear", "llama3"):
            raise rope.error(key, kind, "one of default, linear, llama3")
        if not rope.has("factor"):
            raise rope.error("factor", None, f"there for {kind}")
        if kind == "linear":
            return cls(theta, linear_factor=rope.number("factor", 1.0))
        for required in ("low_freq_factor", "high_freq_factor"):
            if not rope.has(required):
                raise rope.error(required, None, "there for llama3")
        original = fields if fields.has("original_max_position_embeddings") else rope
        scaling = Llama3Scaling(
            factor=rope.number("factor", 1.0),
            low_freq_factor=rope.number("low_freq_factor", 1.0),
            high_freq_factor=rope.number("high_freq_factor", 1.0),
            original_max_position_embeddings=original.size("original_max_position_embeddings", positions),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise rope.error("high_freq_factor", scaling.high_freq_factor, "greater than low_freq_factor")
        return cls(theta, llama3=scaling)
