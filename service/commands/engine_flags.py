"""The flags that an engine is started with."""

from __future__ import annotations

import re
from typing import get_args

from quire.engine.config import BLOCK_SIZES, OTHER_NAMES, KVCacheDtype, ModelImpl, QuantizedWeights
from quire.engine.models.pooling import Runner
from quire.service.commands.flags import add_lora, add_model, flag
from quire.service.commands.parser import Flag, FlagGroup, Parser
from quire.service.commands.unknown_flags import OTHER_PARALLELISM


def add_engine_flags(parser: Parser) -> None:
    """Add what an engine is started with."""
    add_model(parser)
    add_model_flags(parser.group("Model"))
    add_batch_flags(parser.group("Batch", "how much runs at once"))
    add_cache_flags(parser.group("KV cache"))


def add_model_flags(group: FlagGroup) -> None:
    add_lora(group)
    flag(
        group,
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="Where the model runs. auto: on a GPU where there is one.",
    )
    flag(
        group,
        "--dtype",
        type=_dtype,
        choices=("auto", "float32", "float16", "bfloat16"),
        default="auto",
        help="Of weights and activations. auto: the checkpoint's on a GPU, float32 on a CPU.",
    )
    flag(
        group,
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights, only config.json and the tokenizer are read.",
    )
    flag(
        group,
        "--quantized-weights",
        choices=get_args(QuantizedWeights),
        default="keep",
        help="keep: on a GPU, those of layers and experts stay in the 8 or 4 bits that files have, where "
        "kernels multiply by them; expand: all become numbers of --dtype, in twice or four times the bytes.",
    )
    flag(
        group,
        "--quantization",
        metavar="METHOD",
        shown="as the folder is",
        help="fp8: weights of layers of a folder that is not quantised are rounded to 8-bit floats as they "
        "are loaded, which changes answers; of one that is, the method that its config.json names.",
    )
    flag(
        group,
        "--runner",
        choices=get_args(Runner),
        default="auto",
        help="generate: text; pooling: embeddings of texts, or scores of a model with a head for them; auto: "
        "text, unless the model's folder says that it was made to embed or to score.",
    )
    flag(
        group,
        "--model-impl",
        choices=get_args(ModelImpl),
        default="auto",
        help="native: a decoder of Quire's own; transformers: that library's modelling code, in CUDA graphs "
        "where it allows that; auto: native where there is one.",
    )
    flag(
        group,
        "--generation-config",
        default="auto",
        help="How tokens are chosen where a request does not say. auto: as generation_config.json in the "
        "model's folder has it; vllm: temperature 1 and no more; else a folder with such a file.",
    )
    flag(
        group,
        "--tensor-parallel-size",
        type=int,
        default=1,
        help="GPUs, or processes on a CPU, that the model is divided among. It must divide the heads.",
    )
    flag(
        group,
        "--enable-expert-parallel",
        action="store_true",
        help="Give each of those some experts whole, and not a part of the width of every expert.",
    )
    flag(
        group,
        "--disable-custom-all-reduce",
        action="store_true",
        help="Have NCCL alone sum over the GPUs, and not kernels that write into each other's memory.",
    )
    for name in ("--pipeline-parallel-size", "--data-parallel-size"):
        group.add(
            Flag(
                name=name,
                dest=name.removeprefix("--").replace("-", "_"),
                help="There is no other than 1. Default: 1.",
                default=1,
                type=_only_one,
                metavar="1",
            )
        )
    flag(group, "--enforce-eager", action="store_true", help="No CUDA graphs: a quicker start, slower steps.")
    flag(group, "--seed", type=int, shown="0", help="Of dummy weights.")


def _only_one(text: str) -> int:
    if text != "1":
        raise ValueError(OTHER_PARALLELISM)
    return 1


def _dtype(text: str) -> str:
    return OTHER_NAMES["dtype"].get(text, text)


def _cache_dtype(text: str) -> str:
    return OTHER_NAMES["kv_cache_dtype"].get(text, text)


def _byte_count(text: str) -> int:
    """Read a number of bytes as vLLM does: 12884901888, 12G (2^30), 12g (10^9), 1.5G."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", text)
    if found is None:
        raise ValueError(f"bytes are a number, or one with k, m, g, t, K, M, G or T after it, got {text!r}")
    number, unit = found.groups()
    base = 1024 if unit.isupper() else 1000
    return int(float(number) * base ** ("kmgt".index(unit.lower()) + 1)) if unit else int(float(number))


def add_batch_flags(group: FlagGroup) -> None:
    flag(
        group,
        "--max-model-len",
        type=int,
        shown="the model's own limit",
        help="Most tokens of a prompt and its output together.",
    )
    flag(group, "--max-num-seqs", type=int, default=256, help="Most sequences that run at once.")
    flag(
        group,
        "--max-num-batched-tokens",
        type=int,
        shown="64 for each multiprocessor of a GPU (8448 on an H100), 2048 on a CPU",
        help="Most tokens that a step computes.",
    )
    flag(
        group,
        "--preemption-mode",
        choices=("auto", "swap", "recompute"),
        default="auto",
        help="How a request yields when there is no room. auto: whichever costs less, as measured at start.",
    )


def add_cache_flags(group: FlagGroup) -> None:
    flag(
        group,
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="Share of the GPU's memory for weights, activations and KV blocks.",
    )
    flag(
        group,
        "--num-gpu-blocks-override",
        type=int,
        shown="measured",
        help="How many KV blocks there are, on a CPU too.",
    )
    flag(
        group,
        "--kv-cache-memory-bytes",
        type=_byte_count,
        shown="what is left",
        metavar="BYTES",
        help="Of each GPU, for KV blocks, on a CPU too: 12884901888, or 12G (K, M, G and T are powers of "
        "1024, k, m, g and t of 1000).",
    )
    flag(
        group,
        "--swap-space",
        type=float,
        default=4.0,
        metavar="GIB",
        help="GiB of host memory for KV blocks of preempted requests and cached ones; 0: none.",
    )
    flag(
        group,
        "--block-size",
        type=int,
        choices=BLOCK_SIZES,
        default=None,
        help="Tokens in a KV block. Default: 16; 64 to 1024 of a model with states (Mamba and its kin).",
    )
    flag(
        group,
        "--kv-cache-dtype",
        type=_cache_dtype,
        choices=get_args(KVCacheDtype),
        default="auto",
        help="Of keys and values. fp8_e4m3: 8 bits, half of bfloat16's memory; fp12_e4m7: 12 bits, three "
        "quarters of it with bfloat16's precision; model: as --dtype; auto: fp12_e4m7 on a Hopper GPU for a "
        "bfloat16 model whose heads suit its kernels, else model.",
    )
    flag(
        group,
        "--no-enable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="Compute every prompt anew, instead of reusing what it begins with.",
    )
    flag(
        group,
        "--cache-seed",
        shown="drawn at random; empty with --redis-url",
        help="A secret that block digests are seeded with, the same for all replicas and their router.",
    )
