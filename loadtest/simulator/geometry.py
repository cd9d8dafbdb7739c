"""Sizes that costs and memory follow from: of a model, of a device, and of the model on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.loadtest.model_configs import CONFIGS

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Model:
    """The bytes that a step reads, and what it computes."""

    name: str
    layers: int
    weight_bytes: int
    kv_bytes_per_token: int
    max_model_len: int
    dtype_bytes: int

    @classmethod
    def from_config(cls, name: str, config: dict[str, Any]) -> Model:
        """Read a config.json of OPT or of the Llama family."""
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim", hidden // heads)
        kv_heads = config.get("num_key_value_heads", heads)
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        # OPT has two matrices and learned positions; Llama's family has three matrices, and rotates.
        mlp = (
            2 * hidden * config["ffn_dim"]
            if "ffn_dim" in config
            else 3 * hidden * config["intermediate_size"]
        )
        positions = config["max_position_embeddings"] * hidden if "ffn_dim" in config else 0
        tied = config.get("tie_word_embeddings", "ffn_dim" in config)
        embeddings = config["vocab_size"] * hidden * (1 if tied else 2)
        size = BYTES[config.get("dtype", "bfloat16")]
        return cls(
            name=name,
            layers=layers,
            weight_bytes=size * (layers * (attention + mlp) + positions + embeddings),
            kv_bytes_per_token=size * 2 * layers * kv_heads * head_dim,
            max_model_len=config["max_position_embeddings"],
            dtype_bytes=size,
        )


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU by its data sheet, and how much of that kernels reach (an assumption; fits replace it)."""

    name: str
    bandwidth: float  # bytes/s of device memory
    flops: float  # dense 16-bit FLOP/s
    link_bandwidth: float  # bytes/s to host memory, one way
    transfer_seconds: float  # to start one copy over the link
    bandwidth_share: float
    flops_share: float


A100_40GB = Device(
    name="A100 40GB",
    bandwidth=1.555e12,
    flops=312e12,
    link_bandwidth=25e9,
    transfer_seconds=10e-6,
    bandwidth_share=0.8,
    flops_share=0.5,
)

OPT_13B = Model.from_config("OPT-13B", CONFIGS["opt-13b"])
LLAMA_13B = Model.from_config(
    "LLaMA-13B",
    {
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "intermediate_size": 13824,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "dtype": "float16",
    },
)

KV_BYTES = 12 << 30  # of an A100 40GB beside a 13B model: 15.7K slots (PagedAttention, table 1)


def kv_slots(model: Model, kv_bytes: int = KV_BYTES) -> int:
    """Return the tokens whose keys and values fit."""
    return kv_bytes // model.kv_bytes_per_token
