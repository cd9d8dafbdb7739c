"""What a folder with quantised weights has of a KV cache of few bits. Imports neither torch nor transformers.

The cache here has the format of `--kv-cache-dtype`, whatever scales of keys and values were measured for.
"""

from __future__ import annotations

from typing import Any

from quire.engine.models.quantisation_config import object_of

# Behind names of files' tensors: scales, zero points and what is added, of keys and values.
OF_CACHES = (
    *(".k_scale", ".v_scale", ".kv_scale", ".k_zero_point", ".v_zero_point"),
    *(f".{layer}_proj.{name}" for layer in "kv" for name in ("output_scale", "output_zero_point")),
    *(".k_proj.k_bias", ".v_proj.v_bias"),
)


def measured_cache(given: dict[str, Any]) -> str:
    """Return what a quantization_config says that a cache would have, in words; "": nothing."""
    given = object_of(given, "quantization") or given  # as ModelOpt's own file has it
    scheme = given.get("kv_cache_quant_algo") or given.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        return f"{scheme.get('type', 'int')}s of {scheme.get('num_bits', 8)} bits"
    return str(scheme or "")
