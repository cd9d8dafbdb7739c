"""Sizes that costs and memory follow from: of a model, of a device, and of the model on the device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from quire.loadtest.model_configs import CONFIGS

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Model:
    """The bytes that a step reads, and what it computes."""

    name: str
    layers: int
    hidden: int
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
            hidden=hidden,
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

# The same chip with more and quicker memory.
A100_80GB = dataclasses.replace(A100_40GB, name="A100 80GB", bandwidth=2.039e12)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Devices that compute one model together (tensor parallelism), and what a sum over them takes.

    bandwidth: bytes/s that a device sends to the others. sum_seconds: a sum over ranks of next to nothing.
    """

    size: int = 1
    bandwidth: float = 1.0
    sum_seconds: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Return what a sum of so many bytes a rank takes: each sends 2 (size - 1) / size of them."""
        if self.size == 1:
            return 0.0
        return self.sum_seconds + 2 * (self.size - 1) / self.size * nbytes / self.bandwidth


ONE_RANK = Ranks()


def a100s(size: int) -> Ranks:
    """Return A100s joined by NVLink: 300 GB/s a device one way, of which sums reach four fifths.

    20 µs is what NCCL takes for a small sum; both are assumptions.
    """
    return Ranks(size, bandwidth=0.8 * 300e9, sum_seconds=20e-6)


def _opt(name: str, hidden: int, layers: int, heads: int) -> Model:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return Model.from_config(name, {**CONFIGS["opt-13b"], **sizes, "ffn_dim": 4 * hidden})


OPT_13B = _opt("OPT-13B", 5120, 40, 40)
OPT_66B = _opt("OPT-66B", 9216, 64, 72)
OPT_175B = _opt("OPT-175B", 12288, 96, 96)
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


@dataclass(frozen=True, slots=True)
class Server:
    """A model on its devices, and the bytes of all of them together that are left for keys and values."""

    model: Model
    device: Device
    ranks: Ranks
    kv_bytes: int

    @property
    def slots(self) -> int:
        """Return the tokens whose keys and values fit."""
        return kv_slots(self.model, self.kv_bytes)


# PagedAttention, table 1.
SERVERS = (
    Server(OPT_13B, A100_40GB, ONE_RANK, KV_BYTES),
    Server(OPT_66B, A100_40GB, a100s(4), 21 << 30),
    Server(OPT_175B, A100_80GB, a100s(8), 264 << 30),
)
