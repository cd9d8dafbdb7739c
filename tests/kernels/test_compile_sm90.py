"""The kernels as served compile for sm_90, GPU or not, fit its registers and shared memory, and wait in time.

Compiling needs the kernels outside the interpreter, so it has a process of its own: this file as a script.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any

import pytest
from apart import run_apart
from compiled import Case, compiled_for, spilled_bytes
from early_reads import read_early
from made_once import made_once
from quantised_variants import (
    few_quantised_experts_variants,
    few_quantised_variants,
    stream_quantised_experts_variants,
    stream_quantised_variants,
)

SHARED_MEMORY_LIMIT = 227 * 1024  # bytes a program can have
# Bytes a thread. Prefill is held to 128 registers so that two programs share a multiprocessor: what that
# spills in Triton 3.6 to 3.9 costs less than the second program gains (367 -> 490 TFLOP/s at 2 x 8192).
SPILLS_LIMIT = {
    "decode_16": 0,
    "decode_64": 0,
    "decode_shared": 0,
    "decode_new": 0,
    "decode_new_whole": 0,
    "decode_new_plain": 0,
    "decode_full_shared": 0,
    "decode_full_fp8": 0,
    "decode_new_short": 0,
    "decode_beside": 0,
    "shared_prefix": 0,
    "decode_16_fp8": 0,
    "decode_shared_fp8": 0,
    "shared_prefix_fp8": 0,
    "decode_16_fp12": 0,
    "decode_shared_fp12": 0,
    "decode_new_fp12": 0,
    "decode_new_short_fp12": 0,
    "shared_prefix_fp12": 0,
    "decode_16_sinks": 0,
    "decode_new_sinks": 0,
    "prefill_16_sinks": 176,
    "decode_16_slopes": 0,
    "decode_16_chunked": 0,
    "prefill_16_slopes": 168,
    "prefill_16_chunked": 200,
    "prefill_16": 176,
    "prefill_64": 88,
    "prefill_16_fp8": 432,
    "prefill_16_fp12": 208,
    "dequantize_fp12": 0,
    "hopper_prefill_16": 0,
    "hopper_prefill_16_short": 0,
    "hopper_prefill_64": 0,
    "hopper_prefill_group_7": 0,
    "hopper_decode": 0,
    "hopper_decode_known": 0,
    "hopper_decode_beside_split": 0,
    "hopper_decode_new_split": 0,
    "hopper_decode_beside": 0,
    "hopper_decode_new": 0,
    "hopper_decode_new_small": 0,
    "hopper_decode_new_plain": 0,
    "hopper_decode_fp12": 0,
    "hopper_decode_64_fp12": 0,
    "hopper_decode_known_fp12": 0,
    "hopper_decode_beside_split_fp12": 0,
    "hopper_decode_new_fp12": 0,
    "hopper_decode_new_split_fp12": 0,
    "hopper_decode_new_small_fp12": 0,
    "hopper_decode_known_96": 0,
    "hopper_decode_new_96": 0,
    "hopper_decode_new_small_96": 0,
    "hopper_decode_shared_96": 0,
    "hopper_decode_new_group_16_72": 0,
    "hopper_decode_known_40": 0,
    "hopper_decode_known_256": 0,
    "hopper_decode_new_256": 0,
    "hopper_decode_new_split_256": 0,
    "hopper_decode_beside_split_256": 0,
    "hopper_decode_shared_256": 0,
    "hopper_decode_new_group_16_192": 0,
    "hopper_decode_new_group_24_136": 0,
    "hopper_decode_shared": 0,
    "hopper_decode_shared_fp12": 0,
    "hopper_decode_new_group_16": 0,
    "hopper_decode_new_group_24": 0,
    "hopper_decode_shared_group_32": 0,
    "hopper_decode_new_group_16_fp12": 0,
    "hopper_decode_new_group_24_fp12": 0,
    "hopper_decode_shared_group_32_fp12": 0,
    "hopper_linear_16": 0,
    "hopper_linear_head_16": 0,
    "hopper_linear_64": 0,
    "hopper_linear_128": 0,
    "hopper_linear_gated_16": 0,
    "hopper_linear_gated_32": 0,
    "hopper_linear_gated_64": 0,
    "hopper_linear_gated_128": 0,
    "hopper_linear_gated_256": 0,
    "hopper_linear_gated_paired_128": 0,
    "hopper_linear_parts_32": 0,
    "hopper_linear_parts_64": 0,
    "hopper_linear_narrow_64": 0,
    "hopper_linear_narrow_gated_256": 0,
    "hopper_linear_narrow_parts_64": 0,
    "hopper_linear_gelu_tanh_16": 0,
    "hopper_linear_gelu_128": 0,
    "hopper_gemv_norm": 0,
    "hopper_gemv_gate": 0,
    "hopper_gemv_add": 0,
    "hopper_gemv_half_lines": 0,
    "hopper_matmul": 0,
    "hopper_matmul_silu": 0,
    "hopper_matmul_add": 0,
    "few_tokens_norm": 0,
    "few_tokens_gated": 0,
    "few_tokens_add": 0,
    "few_tokens_norm_wide": 0,
    "few_tokens_gated_wide": 16,
    "few_tokens_add_wide": 0,
    "few_tokens_exact": 0,
    "qkv_to_cache_fp8": 0,
    "qkv_to_cache_fp12": 0,
    "qkv_to_cache_numbers_fp12": 0,
    "gemv_add": 0,
    "gemv_add_long": 0,
    "gemv_gate_up": 0,
    "gemv_gelu": 0,
    "gemv_geglu": 0,
    "gemv_exact": 0,
    "layer_norm": 0,
    "sandwich_norm": 0,
    "sandwich_norm_parts": 0,
    "sandwich_norm_rounded": 0,
    "activation": 0,
    "embed": 0,
    "merge": 0,
    "split_output": 0,
    "split_output_alone": 0,
    "thresholds": 0,
    "chunk_argmax": 0,
    "argmax": 0,
    "experts_few_up": 0,
    "experts_few_down": 0,
    "experts_few_up_biased": 0,
    "experts_up_16": 0,
    "experts_up_32": 0,
    "experts_up_64": 0,
    "experts_up_128": 0,
    "experts_down_16": 0,
    "experts_down_32": 0,
    "experts_down_64": 0,
    "experts_down_128": 0,
    "experts_up_biased": 0,
    "experts_down_biased": 0,
    "experts_combine": 0,
    "experts_count": 0,
    "experts_place": 0,
    "experts_place_alone": 0,
    "experts_route": 0,
    "experts_route_biased": 0,
    "convolve": 0,
    "convolve_chunks": 0,
    "convolve_gated": 0,
    "convolve_gated_chunks": 0,
    "delta_gates": 0,
    "delta_gates_by_key": 0,
    "delta_rule": 0,
    "delta_rule_by_key": 0,
    "decode_blocks": 0,
    "sigmoid_gate": 0,
    "selective_scan": 0,
    "selective_scan_chunks": 0,
    "selective_scan_chunks_wide": 0,
    "few_quantised_norm": 0,
    "few_quantised_gate": 0,
    "few_quantised_add": 20,
    "few_quantised_add_fp16": 0,
    "few_quantised_gate_int4": 0,
    "expand_floats": 0,
    "expand_int4": 0,
    "expand_small_groups": 0,
    "few_experts_fours_up_8": 0,
    "few_experts_fours_down_8": 0,
    "few_experts_float8_up_8": 0,
    "few_experts_int4_down_8": 0,
    "few_experts_fours_up_16": 0,
    "few_experts_int4_up_16": 0,
    "stream_experts_fours_up_8": 0,
    "stream_experts_fours_up_128": 0,
    "stream_experts_fours_down_128": 0,
    "stream_experts_float8_up_64": 0,
    "stream_experts_int4_up_32": 0,
    "stream_experts_int4_down_128": 0,
    "stream_quantised_8": 0,
    "stream_quantised_gate_16": 0,
    "stream_quantised_gate_64": 0,
    "stream_quantised_parts_64": 0,
    "stream_quantised_parts_128": 0,
}
# Loads before a kernel waits: of what was there before the kernel ahead began, and of nothing else.
READS_EARLY = {
    "argmax": 1,
    "chunk_argmax": 2,
    "merge": 1,
    "split_output": 9,
    "hopper_decode": 7,
    "hopper_decode_known": 8,
    "hopper_decode_new": 17,
    "thresholds": 0,
    "embed": 0,
}
LITTLE_SHARED_MEMORY = (
    48 * 1024
)  # bytes: with more a program has another division of L1 cache and shared memory
LITTLE = ("decode_new", "decode_new_plain", "decode_new_short", "decode_new_fp12", "decode_new_short_fp12")
LITTLE += ("hopper_decode_new_small", "hopper_decode_new_small_fp12")
LITTLE += ("hopper_gemv_norm", "hopper_gemv_gate", "hopper_gemv_add")
# What is copied to shared memory as early: by the copy engine a box for each stage of weights, two of a gate
# and an up; or by each thread 16 bytes of 8 keys and 8 values for each stage, if the cache held them by then.
COPIES_EARLY = {
    "hopper_decode": 0,
    "hopper_decode_known": 32,
    "hopper_decode_new": 32,
    "hopper_decode_fp12": 0,
    "hopper_decode_known_fp12": 24,
    "hopper_decode_known_256": 32,
    "hopper_decode_new_split_256": 64,
    "hopper_linear_16": 9,
    "hopper_linear_head_16": 5,
    "hopper_linear_64": 6,
    "hopper_linear_128": 3,
    "hopper_linear_gated_16": 10,
    "hopper_linear_gated_32": 8,
    "hopper_linear_gated_64": 8,
    "hopper_linear_gated_128": 6,
    "hopper_linear_gated_256": 8,
    "hopper_linear_parts_32": 8,
    "hopper_linear_parts_64": 6,
    "hopper_linear_narrow_64": 8,
    "hopper_linear_narrow_gated_256": 12,
    "hopper_linear_narrow_parts_64": 8,
    "hopper_gemv_norm": 3,
    "hopper_gemv_gate": 6,
    "hopper_gemv_add": 1,
    "hopper_gemv_half_lines": 5,
}
# In names of what is not launched dependently.
APART = ("prefill", "dequantize", "matmul", "chunks", "expand", "blocks")
WRITES_EARLY = {
    "decode_beside",
    "hopper_decode_beside",
    "hopper_decode_beside_split",
    "hopper_decode_beside_split_fp12",
    "hopper_decode_beside_split_256",
}  # what no kernel ahead touches; all others wait before they write


def plain_variants() -> dict[str, Case]:
    """Return kernels in plain Triton: bf16 (the cache as named), head dim 128, group 4."""
    from triton.compiler import ASTSource

    from quire.kernels.attention import cascade as prefix
    from quire.kernels.attention import (
        decode,
        decode_kernel,
        dequantize,
        prefill,
    )
    from quire.kernels.attention import (
        splits as decode_splits,
    )
    from quire.kernels.attention import (
        write_kv as qkv_cache,
    )
    from quire.kernels.linear import gemv
    from quire.kernels.pointwise import activation, embedding, layer_norm, sandwich_norm
    from quire.kernels.sampling import sample as sampling
    from quire.kernels.sampling import thresholds

    dependent = {"DEPENDENT": True}
    alone = dict.fromkeys(("cascade_of", "shared_lens", "prefix_partials", "prefix_lse"))
    shape = {"GROUP": 4, "HEAD_DIM": 128, "DIM": 128, "TILE": 64}
    four_warps = {"num_warps": 4, "num_stages": 4}
    prefill_16 = shape | {"BLOCK_M": 128, "BLOCK_SIZE": 16}
    no_scales: dict[str, object] = {"kv_scales": None}
    decode_shape = shape | dependent | {"BLOCK_M": 16, "BLOCK_SIZE": 16, "BESIDE": False, "SPARING": None}
    decode_shape |= {"FIRST": False, "EARLY": decode.EARLY}
    new_rounded = decode_shape | alone | {"NEW": True}
    new = new_rounded | no_scales
    decode_shape |= {"NEW": False} | dict.fromkeys(("rope", "q_norm", "k_norm"))
    eight_warps = {"num_warps": 8, "num_stages": 2, "maxnreg": 128}
    variants = {
        "decode_16": (
            decode_kernel.decode_kernel,
            decode_shape | alone | no_scales,
            four_warps,
        ),
        "decode_shared": (
            decode_kernel.decode_kernel,
            decode_shape | no_scales,
            four_warps,
        ),
        "decode_new": (decode_kernel.decode_kernel, new, four_warps | {"num_stages": decode.SMALL_STAGES}),
        "decode_new_whole": (decode_kernel.decode_kernel, new, four_warps),
        "decode_new_plain": (
            decode_kernel.decode_kernel,
            new | {"FIRST": True, "EARLY": 0, "q_norm": None, "k_norm": None},
            four_warps | {"num_stages": decode.SMALL_STAGES},
        ),
        "decode_full_shared": (
            decode_kernel.decode_kernel,
            decode_shape | no_scales | {"EARLY": 1},
            four_warps | {"num_stages": decode.FULL_STAGES},
        ),
        "decode_full_fp8": (
            decode_kernel.decode_kernel,
            decode_shape | alone | {"EARLY": 1, "TILE": 128},
            four_warps | {"num_stages": decode.FULL_STAGES},
        ),
        "decode_new_short": (
            decode_kernel.decode_kernel,
            new | {"FIRST": True, "EARLY": 0, "SPARING": "merging"},
            four_warps | {"num_stages": decode.SMALL_STAGES},
        ),
        "decode_beside": (
            decode_kernel.decode_kernel,
            decode_shape | alone | no_scales | {"BESIDE": True, "EARLY": 0},
            four_warps,
        ),
        "decode_16_fp8": (
            decode_kernel.decode_kernel,
            decode_shape | alone | {"TILE": 128},
            four_warps,
        ),
        "decode_shared_fp8": (
            decode_kernel.decode_kernel,
            decode_shape | {"TILE": 128},
            four_warps,
        ),
        "shared_prefix_fp8": (
            prefix._prefix_kernel,
            shape | dependent | {"ROWS": 16, "BLOCK_M": 64, "BLOCK_SIZE": 16},
            {"num_warps": 4, "num_stages": 3},
        ),
        "shared_prefix": (
            prefix._prefix_kernel,
            shape | dependent | no_scales | {"ROWS": 16, "BLOCK_M": 64, "BLOCK_SIZE": 16},
            {"num_warps": 4, "num_stages": 3},
        ),
        "decode_64": (
            decode_kernel.decode_kernel,
            decode_shape | alone | no_scales | {"BLOCK_SIZE": 64},
            four_warps,
        ),
        "decode_16_sinks": (decode_kernel.decode_kernel, decode_shape | alone | no_scales, four_warps),
        "decode_new_sinks": (
            decode_kernel.decode_kernel,
            new,
            four_warps | {"num_stages": decode.SMALL_STAGES},
        ),
        "prefill_16_sinks": (prefill._prefill_kernel, prefill_16 | no_scales, eight_warps),
        "decode_16_slopes": (decode_kernel.decode_kernel, decode_shape | alone | no_scales, four_warps),
        "decode_16_chunked": (decode_kernel.decode_kernel, decode_shape | alone | no_scales, four_warps),
        "prefill_16_slopes": (prefill._prefill_kernel, prefill_16 | no_scales, eight_warps),
        "prefill_16_chunked": (prefill._prefill_kernel, prefill_16 | no_scales, eight_warps),
        "prefill_16": (prefill._prefill_kernel, prefill_16 | no_scales, eight_warps),
        "prefill_64": (prefill._prefill_kernel, prefill_16 | no_scales | {"BLOCK_SIZE": 64}, eight_warps),
        "prefill_16_fp8": (prefill._prefill_kernel, prefill_16, eight_warps),
        "prefill_16_fp12": (prefill._prefill_kernel, prefill_16, eight_warps),
        "decode_16_fp12": (decode_kernel.decode_kernel, decode_shape | alone, four_warps),
        "decode_shared_fp12": (decode_kernel.decode_kernel, decode_shape, four_warps),
        "decode_new_fp12": (
            decode_kernel.decode_kernel,
            new_rounded,
            four_warps | {"num_stages": decode.SMALL_STAGES},
        ),
        "decode_new_short_fp12": (
            decode_kernel.decode_kernel,
            new_rounded | {"FIRST": True, "EARLY": 0},
            four_warps | {"num_stages": decode.SMALL_STAGES},
        ),
    }
    dequantizing = {"SEQUENCES": dequantize.SEQUENCES, "KV_HEADS": 8, "BLOCK_SIZE": 16, "DIM": 128}
    variants["dequantize_fp12"] = (dequantize._dequantize_kernel, dequantizing, {"num_warps": 4})
    variants["shared_prefix_fp12"] = variants["shared_prefix_fp8"]
    qk_heads = {"Q_HEADS": 32, "KV_HEADS": 8, "BLOCK_SIZE": 16, "HALF": 64, "HALF_PADDED": 64, "HEADS": 8}
    qk_heads |= dependent
    variants["qkv_to_cache_numbers_fp12"] = (qkv_cache._qkv_to_cache_kernel, qk_heads, {"num_warps": 4})
    qk_heads |= {"dequantized_ptr": None}
    variants["qkv_to_cache_fp8"] = (qkv_cache._qkv_to_cache_kernel, qk_heads, {"num_warps": 4})
    variants["qkv_to_cache_fp12"] = variants["qkv_to_cache_fp8"]
    linear = dependent | {"OUTPUTS": 4096, "COLUMNS": 14336, "ROWS": 4, "CHUNK": 1024, "ADDED": True}
    linear |= {"KIND": None}
    gate_up = linear | {"COLUMNS": 4096, "ROWS": 1, "CHUNK": 512}
    gate_up |= {"GATED": True, "ADDED": False, "bias": None, "KIND": "silu"}
    geglu = gate_up | {"OUTPUTS": 6912, "COLUMNS": 1152, "CHUNK": 2048, "norm": None, "KIND": "gelu_tanh"}
    linear |= {"GATED": False, "bias": None, "norm": None}
    activated = linear | {"OUTPUTS": 12288, "COLUMNS": 3072, "ADDED": False, "KIND": "gelu_tanh"}
    del activated["bias"]
    exact = linear | {"OUTPUTS": 256, "COLUMNS": 7168, "CHUNK": 2048, "ADDED": False}
    normed = dependent | {"HIDDEN": 3072, "BLOCK": 4096, "PARTS": 2}
    gemma = dependent | {"HIDDEN": 1152, "BLOCK": 2048, "PARTS": 0}
    alone_gelu = {"WIDTH": 12288, "BLOCK": activation.BLOCK, "KIND": "gelu"}
    variants |= {
        "gemv_add": (gemv._gemv_kernel, linear, {"num_warps": 4}),
        "gemv_add_long": (gemv._gemv_kernel, linear | {"ROWS": 8, "CHUNK": 2048}, {"num_warps": 8}),
        "gemv_gate_up": (gemv._gemv_kernel, gate_up, {"num_warps": 1}),
        "gemv_gelu": (gemv._gemv_kernel, activated, {"num_warps": 4}),
        "gemv_geglu": (gemv._gemv_kernel, geglu, {"num_warps": 2}),
        "gemv_exact": (gemv._gemv_kernel, exact, {"num_warps": 8}),
        "layer_norm": (layer_norm._layer_norm_kernel, normed, {"num_warps": 16}),
        "sandwich_norm": (sandwich_norm._sandwich_kernel, gemma, {"num_warps": 8}),
        "sandwich_norm_rounded": (
            sandwich_norm._sandwich_kernel,
            gemma,
            {"num_warps": 8, "enable_fp_fusion": False},
        ),
        "sandwich_norm_parts": (sandwich_norm._sandwich_kernel, gemma | {"PARTS": 4}, {"num_warps": 16}),
        "activation": (activation._activation_kernel, dependent | alone_gelu, {"num_warps": 8}),
    }
    merge = {"HEAD_DIM": 128, "PART": 32, "TILE": 64, "SPLITS": 64, "SPARING": None}
    argmax = {"CHUNKS": 63, "CHUNKS_PADDED": 64}
    embedded = {"COLUMNS": 4096, "BLOCK": 1024, "FIRST": None, "ROWS": 128256, "scale": None}
    vocabulary = {"VOCABULARY": 128256}
    chunk_argmax = vocabulary | {"CHUNK": sampling.CHUNK, "ON_GPU": True, "FIRST": 0}
    threshold = vocabulary | {"MIN_TEMPERATURE": thresholds.MIN_TEMPERATURE, "BLOCK": thresholds.BLOCK}
    variants |= {
        "embed": (embedding._embed_kernel, dependent | embedded, {"num_warps": 4}),
        "merge": (decode_splits._merge_kernel, dependent | merge, {"num_warps": 1}),
        "thresholds": (thresholds._threshold_kernel, dependent | threshold, {"num_warps": 32}),
        "chunk_argmax": (sampling.chunk_argmax_kernel, dependent | chunk_argmax, {"num_warps": 4}),
        "argmax": (sampling.argmax_kernel, dependent | argmax, {"num_warps": 4}),
    }
    pointers = {"q": "*bf16", "out": "*bf16", "partials": "*fp32", "lse": "*fp32"}
    pointers |= dict.fromkeys(("x", "weight", "norm"), "*bf16")
    pointers |= dict.fromkeys(
        ("block_tables", "rows", "query_starts", "context_lens", "order", "cascade_of"), "*i32"
    )
    pointers |= dict.fromkeys(("members", "lens", "shared_lens"), "*i32")
    pointers |= dict.fromkeys(("prefix_partials", "prefix_lse"), "*fp32")
    pointers |= {"kv_scales": "*i32", "kv_scales_ptr": "*fp16", "rope_ptr": "*fp32", "slots_ptr": "*i64"}
    pointers |= dict.fromkeys(("tokens", "rows_ptr", "top_k_ptr", "index_ptr", "best_tokens_ptr"), "*i32")
    pointers |= dict.fromkeys(("tokens_ptr", "last_tokens_ptr"), "*i32")
    pointers |= dict.fromkeys(("temperature_ptr", "top_p_ptr", "min_p_ptr", "thresholds_ptr"), "*fp32")
    pointers |= {"table": "*bf16", "logits_ptr": "*bf16", "seed_ptr": "*i64", "best_ptr": "*fp32"}
    pointers |= {"rope": "*fp32", "q_norm": "*bf16", "k_norm": "*bf16"}
    pointers |= {"sinks": "*bf16", "slopes": "*fp32", "softcap_log2": "fp32"}
    pointers |= {
        "dequantized_ptr": "*bf16",
        "qkv_ptr": "*bf16",
        "q_norm_ptr": "*bf16",
        "k_norm_ptr": "*bf16",
        "positions_ptr": "*i32",
    }
    pointers |= {"x_ptr": "*fp32"} | dict.fromkeys(("residual_ptr", "weight_ptr", "bias_ptr"), "*bf16")
    pointers |= dict.fromkeys(("added_ptr", "y_ptr"), "*bf16")
    pointers |= dict.fromkeys(("inner_ptr", "outer_ptr"), "*fp32")  # as Gemma's
    found = {}
    for name, (kernel, constants, options) in variants.items():
        kv = {"fp8": "*fp8e4nv", "fp12": "*u8"}.get(name.rsplit("_")[-1], "*bf16")
        types = pointers | {"kv": kv, "kv_ptr": kv, "scale_log2": "fp32", "eps": "fp32"}
        types |= {"inner_eps": "fp32", "outer_eps": "fp32"}
        kind: dict[str, object] = {"PLANES": name.endswith("fp12"), "CHUNKED": name.endswith("chunked")}
        kind |= {} if name.endswith("sinks") else {"softcap_log2": None, "sinks": None}
        kind |= {} if name.endswith("slopes") else {"slopes": None}
        kind = {argument: value for argument, value in kind.items() if argument in kernel.arg_names}
        types |= {"bias": "*bf16"} if name == "gemv_gelu" else {}
        types |= {"out": "*fp32"} if name == "gemv_exact" else {}
        types |= {"x_ptr": "*bf16", "out_ptr": "*bf16"} if name == "activation" else {}
        types |= {"x_ptr": "*bf16"} if name in ("sandwich_norm", "sandwich_norm_rounded") else {}
        types |= {"inner_ptr": "*bf16"} if name == "sandwich_norm_rounded" else {}
        types |= {"into": "*bf16", "kv_scales": "*fp16"} if name == "dequantize_fp12" else {}
        # Pointers and strides are multiples of 16, as the launcher finds them when serving.
        aligned = {name for name, kind in types.items() if kind[0] == "*"}
        aligned |= {name for name in kernel.arg_names if name.endswith("_stride")}
        found[name] = Case(ASTSource, kernel, kind | constants, types, aligned, options)
    return found


def hopper_variants() -> dict[str, Case]:
    """Return variants of prefill attention in Gluon."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from quire.kernels.attention.hopper_prefill import prefill as hopper_prefill

    kernel = hopper_prefill._kernel
    boxes, panels = (gl.NVMMASharedLayout(128, 16, rank=rank) for rank in (2, 3))
    pointers = dict.fromkeys(("block_tables", "rows", "query_starts", "context_lens"), "*i32")
    found = {}
    for name, block_size, tile, group in (
        ("16", 16, 128, 4), ("16_short", 16, 64, 4), ("64", 64, 128, 4), ("group_7", 16, 128, 7)
    ):  # fmt: skip
        lanes = 4 if group == 4 else 8
        constants = {"GROUP": group, "LANES": lanes, "BLOCK_SIZE": block_size, "DIM": 128, "TILE": tile}
        constants |= {"STAGES": 256 // tile}
        types = pointers | {
            "out": "*bf16",
            "q_source": f"tensordesc<bf16[{64 // lanes}, {lanes}, 64],{panels!r}>",
            "kv_source": f"tensordesc<bf16[{block_size}, 64],{boxes!r}>",
            "scale_log2": "fp32",
        }
        found[f"hopper_prefill_{name}"] = Case(GluonASTSource, kernel, constants, types, (), {"num_warps": 4})
    return found


def hopper_decode_variants() -> dict[str, Case]:
    """Return variants of decode attention in Gluon."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from quire.kernels.attention.hopper_decode import decode as hopper_decode

    pointers = dict.fromkeys(("out", "q", "kv", "q_norm", "k_norm"), "*bf16")
    pointers |= dict.fromkeys(("partials", "lse", "rope", "prefix_partials", "prefix_lse"), "*fp32")
    pointers |= dict.fromkeys(("arrivals", "block_tables", "rows", "context_lens", "order"), "*i32")
    pointers |= dict.fromkeys(("cascade_of", "shared_lens"), "*i32")
    types = pointers | {"scale_log2": "fp32", "eps": "fp32"}
    strides = [name for name in hopper_decode.decode_kernel.arg_names if name.endswith("_stride")]
    no_scales: dict[str, object] = {"kv_scales": None}
    heads = dict.fromkeys(("rope", "q_norm", "k_norm"))
    both = {"GROUP": 4, "HEAD_DIM": 128, "DIM": 128, "TILE": hopper_decode.TILE}
    both |= {"STAGES": hopper_decode.STAGES, "BLOCK_SIZE": 16, "NEW": False, "BESIDE": False}
    both |= {"MERGES": True, "BRINGS": True, "SPARING": None}
    shared = both | heads | {"READY": 1, "BRINGS": False}
    both |= dict.fromkeys(("cascade_of", "shared_lens", "prefix_partials", "prefix_lse"))
    variants = {
        "": both | heads | {"READY": 0, "BRINGS": False},
        "_known": both | heads | {"READY": 1},
        "_beside": both | heads | {"READY": 2, "BESIDE": True},
        "_beside_split": both | heads | {"READY": 2, "BESIDE": True, "MERGES": False},
        "_new": both | {"NEW": True, "READY": 2},
        "_new_split": both | {"NEW": True, "READY": 2, "MERGES": False, "SPARING": "room"},
        "_new_small": both
        | {"NEW": True, "READY": 2, "MERGES": False}
        | {"STAGES": hopper_decode.SMALL_STAGES, "SPARING": "merging"},
        "_new_plain": both | {"NEW": True, "READY": 2, "q_norm": None, "k_norm": None, "BLOCK_SIZE": 64},
        "_shared": shared,
    }
    groups = (("_new", 16), ("_new", 24), ("_shared", 32))
    variants |= {f"{name}_group_{group}": variants[name] | {"GROUP": group} for name, group in groups}
    as_planes = ("", "_known", "_beside_split", "_new", "_new_split", "_new_small", "_shared")
    as_planes += tuple(f"{name}_group_{group}" for name, group in groups)
    rounded = {f"{name}_fp12": variants[name] for name in as_planes}
    rounded["_64_fp12"] = variants[""] | {"HEAD_DIM": 64, "DIM": 64, "GROUP": 1}
    padded = [(96, name) for name in ("_known", "_new", "_new_small", "_shared")] + [(72, "_new_group_16")]
    variants |= {f"{name}_{dim}": variants[name] | {"HEAD_DIM": dim} for dim, name in padded}
    variants["_known_40"] = variants["_known"] | {"HEAD_DIM": 40, "DIM": 64}
    halved = [(256, name) for name in ("_known", "_new", "_new_split", "_beside_split", "_shared")]
    halved += [(192, "_new_group_16"), (136, "_new_group_24")]
    for dim, name in halved:
        stages = hopper_decode.STAGES if "split" in name else hopper_decode.STAGES_OF_HALVES
        wide = {"HEAD_DIM": dim, "DIM": 256, "STAGES": stages}
        variants[f"{name}_{dim}"] = variants[name] | wide
    variants = {name: constants | no_scales for name, constants in variants.items()} | rounded
    found = {}
    for name, constants in variants.items():
        planes = name.endswith("fp12")
        cache = {"kv": "*i16", "kv_scales": "*i32"} if planes else {}
        found[f"hopper_decode{name}"] = Case(
            GluonASTSource, hopper_decode.decode_kernel, constants | {"PLANES": planes}, types | cache,
            (*pointers, "kv_scales", *strides), {"num_warps": 4},
        )  # fmt: skip
    return found


def few_tokens_variants() -> dict[str, Case]:
    """Return the fused linear layers of a few tokens, with the widths of Qwen3-0.6B and -1.7B."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from quire.kernels.linear import skinny as few_tokens
    from quire.kernels.linear import split_output

    kernel = few_tokens._kernel
    both: dict[str, object] = {"TOKENS": 16, "ROWS": few_tokens.ROWS, "CHUNK": few_tokens.CHUNK}
    both |= {"DEPENDENT": True, "bias": None}
    pointers = dict.fromkeys(("out", "x", "weight", "norm"), "*bf16")
    types = pointers | {"eps": "fp32"}
    # (outputs, columns, GATED, ADDED, warps)
    layers = {
        "norm": (4096, 1024, False, False, 4),
        "gated": (3072, 1024, True, False, 4),
        "add": (1024, 3072, False, True, 8),
        "norm_wide": (4096, 2048, False, False, 4),
        "gated_wide": (6144, 2048, True, False, 4),
        "add_wide": (2048, 6144, False, True, 8),
        "exact": (256, 7168, False, False, 8),
    }
    found = {}
    for name, (outputs, columns, gated, added, warps) in layers.items():
        ahead = few_tokens.chunks_ahead(columns, warps, added=added)
        constants = both | {"OUTPUTS": outputs, "COLUMNS": columns, "GATED": gated, "ADDED": added}
        constants |= {"AHEAD": ahead} | ({"norm": None} if warps == 8 else {})
        result = {"out": "*fp32"} if name == "exact" else {}
        found[f"few_tokens_{name}"] = Case(
            GluonASTSource, kernel, constants, types | result, pointers, {"num_warps": warps}
        )
    output: dict[str, object] = {"HEADS": 16, "HEAD_DIM": 128, "TILE": 64, "bias": None, "DEPENDENT": True}
    output |= {"ROWS": split_output.ROWS, "ROUND": split_output.ROUND, "SPARING": "merging", "ADDED": True}
    pointers = {"residual": "*bf16", "weight": "*bf16", "partials": "*fp32", "lse": "*fp32"}
    pointers |= {"context_lens": "*i32"}
    found["split_output"] = Case(
        GluonASTSource, split_output._kernel, output, pointers, pointers, {"num_warps": 8}
    )
    alone = output | {"HEADS": 4, "HEAD_DIM": 256, "ADDED": False}
    found["split_output_alone"] = Case(
        GluonASTSource, split_output._kernel, alone, pointers, pointers, {"num_warps": 4}
    )
    return found


def hopper_linear_variants() -> dict[str, Case]:
    """Return the linear layers in Gluon, with the widths of Llama-3.1-8B, and of Qwen3-0.6B (narrow)."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from quire.kernels.linear import hopper_stream as hopper_linear

    kernel = hopper_linear._kernel
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    # (tokens, outputs, columns, gated, divided)
    layers = {
        "16": (16, 6144, 4096, False, False),
        "head_16": (16, 128256, 4096, False, False),
        "64": (64, 6144, 4096, False, False),
        "128": (128, 128256, 4096, False, False),
        "gated_16": (16, 28672, 4096, True, False),
        "gated_32": (32, 28672, 4096, True, False),
        "gated_64": (64, 28672, 4096, True, False),
        "gated_128": (128, 28672, 4096, True, False),
        "gated_256": (256, 28672, 4096, True, False),
        "gated_paired_128": (128, 17920, 1536, True, False),
        "parts_32": (32, 4096, 14336, False, True),
        "parts_64": (64, 4096, 14336, False, True),
        "narrow_64": (64, 4096, 1024, False, False),
        "narrow_gated_256": (256, 6144, 1024, True, False),
        "narrow_parts_64": (64, 1024, 3072, False, True),
        "gelu_tanh_16": (16, 13824, 1152, True, False),
        "gelu_128": (128, 13824, 1152, True, False),
    }
    found = {}
    for name, (count, outputs, columns, gated, divided) in layers.items():
        tiles = hopper_linear.tiling(count, outputs, columns, gated=gated, divided=divided)
        assert tiles is not None
        constants: dict[str, object] = {"TOKENS": tiles.tokens, "ROWS": tiles.rows, "CHUNK": tiles.chunk}
        constants |= {"STAGES": tiles.stages, "GATED": gated}
        kind = name.rpartition("_")[0] if name.startswith("gelu") else "silu"
        constants |= {"KIND": kind if gated else None}
        constants |= {"bias": None} if gated or divided else {}
        types = {
            "out": "*fp32" if divided else "*bf16",
            "x_source": f"tensordesc<bf16[{tiles.tokens}, {tiles.chunk}],{layout!r}>",
            "w_source": f"tensordesc<bf16[{tiles.rows >> gated}, {tiles.chunk}],{layout!r}>",
            "bias": "*bf16",
        }
        aligned, options = ("out", "outputs", "columns"), {"num_warps": hopper_linear.warps_of(tiles)}
        found[f"hopper_linear_{name}"] = Case(GluonASTSource, kernel, constants, types, aligned, options)
    return found


def hopper_gemv_variants() -> dict[str, Case]:
    """Return products of one token that wait in shared memory, of Qwen2.5-1.5B and of others."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from quire.kernels.linear import hopper_gemv

    layout = gl.NVMMASharedLayout(0, 16, rank=3)
    # (outputs, columns, gated, added, normed, biased, activation)
    layers = {
        "norm": (2048, 1536, False, False, True, True, None),
        "gate": (8960, 1536, True, False, True, False, "silu"),
        "add": (2048, 2048, False, True, False, False, None),
        "half_lines": (6912, 1152, False, False, True, True, "gelu_tanh"),
    }
    found = {}
    for name, (outputs, columns, gated, added, normed, biased, activation) in layers.items():
        division = hopper_gemv.division(outputs, columns, plain=not gated and not added)
        assert division is not None
        constants: dict[str, object] = {"OUTPUTS": outputs, "COLUMNS": columns, "ROWS": division.rows}
        constants |= {"LINE": division.line, "COPIED": division.copied}
        constants |= {"GATED": gated, "ADDED": added, "KIND": activation, "DEPENDENT": True}
        constants |= {} if normed else {"norm": None}
        constants |= {} if biased else {"bias": None}
        box = f"{division.rows}, {division.copied}, {division.line}"
        types = {"w_source": f"tensordesc<bf16[{box}],{layout!r}>", "eps": "fp32"}
        types |= dict.fromkeys(("out", "x", "bias", "norm"), "*bf16")
        found[f"hopper_gemv_{name}"] = Case(
            GluonASTSource, hopper_gemv._kernel, constants, types, ("out", "x", "norm"),
            {"num_warps": division.warps},
        )  # fmt: skip
    return found


def hopper_matmul_variants() -> dict[str, Case]:
    """Return products of many tokens."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from quire.kernels.linear import hopper_matmul

    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    found = {}
    for name, width, gated, added in (
        ("", 256, False, False),
        ("_silu", 128, True, False),
        ("_add", 256, False, True),
    ):
        stages = hopper_matmul.STAGES_OF_GATED if gated else hopper_matmul.STAGES
        constants: dict[str, object] = {"GATED": gated, "ADDED": added, "STAGES": stages}
        types = {
            "out": f"tensordesc<bf16[64, {width}],{layout!r}>",
            "x_source": f"tensordesc<bf16[64, 64],{layout!r}>",
            "w_source": f"tensordesc<bf16[{width}, 64],{layout!r}>",
        }
        found[f"hopper_matmul{name}"] = Case(
            GluonASTSource, hopper_matmul._kernel, constants, types, ("outputs", "columns"), {"num_warps": 4}
        )
    return found


def experts_variants() -> dict[str, Case]:
    """Return experts as Qwen3-30B-A3B has them, and as gpt-oss-20b does (biased); and V3's router."""
    from triton.compiler import ASTSource

    from quire.kernels.experts import few, grouped, groups, routing
    from quire.kernels.experts.grouped import TILES, Tile

    pointers = dict.fromkeys(("inner_ptr", "x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), "*bf16")
    pointers |= dict.fromkeys(("parts_ptr", "weights_ptr", "logits_ptr"), "*bf16")
    pointers |= dict.fromkeys(("pairs_ptr", "counts_ptr", "by_block_ptr"), "*i32") | {"index_ptr": "*i64"}
    types = pointers | dict.fromkeys(("alpha", "limit", "added", "least", "scale"), "fp32")
    aligned = (*pointers, "x_stride", "expert_stride", "row_stride", "stride")
    silu: dict[str, object] = {"INTERLEAVED": False, "ACTIVATION": "silu", "bias_ptr": None}
    clamped: dict[str, object] = {"INTERLEAVED": True, "ACTIVATION": "clamped"}
    shape = {"TOP": 8, "EXPERTS": 128, "PADDED": 128}
    biased_shape = {"TOP": 4, "EXPERTS": 32, "PADDED": 32}

    def tiled(tile: Tile) -> tuple[dict[str, object], dict[str, object]]:
        constants = {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "CHUNK": tile.columns}
        constants |= {"TOGETHER": tile.together}
        return constants, {"num_warps": tile.warps, "num_stages": tile.stages}

    found: dict[str, tuple[Any, dict[str, object], dict[str, object]]] = {}
    for _, tiles in TILES:
        constants, options = tiled(tiles.up)
        sizes = shape | {"INNER": 768, "COLUMNS": 2048}
        found[f"up_{tiles.up.rows}"] = (grouped._up_kernel, silu | sizes | constants, options)
        sizes = biased_shape | {"INNER": 2880, "COLUMNS": 2880}
        found["up_biased"] = (grouped._up_kernel, clamped | sizes | constants, options)
        constants, options = tiled(tiles.down)
        sizes = shape | {"HIDDEN": 2048, "COLUMNS": 768, "bias_ptr": None}
        found[f"down_{tiles.down.rows}"] = (grouped._down_kernel, sizes | constants, options)
        sizes = biased_shape | {"HIDDEN": 2880, "COLUMNS": 2880}
        found["down_biased"] = (grouped._down_kernel, sizes | constants, options)
    pieces = few.pieces_of(2048, 768)
    few_up = {"TOP": 8, "INNER": 768, "COLUMNS": 2048, "CHUNK": pieces.up}
    few_down = {"TOP": 8, "OUTPUTS": 2048, "COLUMNS": 768, "CHUNK": pieces.down, "bias_ptr": None}
    sorted_by = {"BLOCK": 128, "EXPERTS": 128}
    placed = sorted_by | {"COUNTED": groups.COUNTED}
    routed = {"TOP": 8, "TOP_PADDED": 8, "NORMALIZED": True}
    softmax = routed | {"EXPERTS": 128, "SIZE": 128, "SIZE_PADDED": 128, "GROUPS": 1, "GROUPS_PADDED": 1}
    softmax |= {"KEPT": 1, "TWO": False, "SIGMOID": False, "BY_LOGITS": True}
    sigmoid = routed | {"EXPERTS": 256, "SIZE": 32, "SIZE_PADDED": 32, "GROUPS": 8, "GROUPS_PADDED": 8}
    sigmoid |= {"KEPT": 4, "TWO": True, "SIGMOID": True, "BY_LOGITS": False}
    found |= {
        "few_up": (few._up_kernel, silu | few_up, {"num_warps": few.warps_of(pieces.up)}),
        "few_up_biased": (few._up_kernel, clamped | few_up, {"num_warps": few.warps_of(pieces.up)}),
        "few_down": (few._down_kernel, few_down, {"num_warps": few.warps_of(pieces.down)}),
        "combine": (grouped._combine_kernel, {"HIDDEN": 2048, "TOP": 8, "BLOCK": 1024}, {"num_warps": 4}),
        "count": (groups._count_kernel, sorted_by, {"num_warps": 4}),
        "place": (groups._place_kernel, placed | {"ALONE": False}, {"num_warps": 4}),
        "place_alone": (groups._place_kernel, placed | {"ALONE": True}, {"num_warps": 4}),
        "route": (routing._route_kernel, softmax | {"bias_ptr": None}, {"num_warps": 1}),
        "route_biased": (routing._route_kernel, sigmoid, {"num_warps": 1}),
    }
    wide = types | dict.fromkeys(("logits_ptr", "bias_ptr", "weights_ptr"), "*fp32")
    return {
        f"experts_{name}": Case(
            ASTSource,
            kernel,
            {key: value for key, value in constants.items() if key in kernel.arg_names} | {"DEPENDENT": True},
            wide if name == "route_biased" else types,
            aligned,
            options,
        )
        for name, (kernel, constants, options) in found.items()
    }


def recurrence_variants() -> dict[str, Case]:
    """Return kernels of states: of Qwen3.5, and Mamba's scan as Falcon-Mamba-7B has it, and a wide one."""
    from triton.compiler import ASTSource

    from quire.kernels.pointwise import gate
    from quire.kernels.recurrence import (
        convolution,
        convolution_kernels,
        decode_blocks,
        delta_gates,
        delta_products,
        delta_rule,
        selective_scan_kernels,
    )
    from quire.kernels.recurrence.step import CHUNK

    types = dict.fromkeys(
        ("x_ptr", "into_ptr", "onto_ptr", "weight_ptr", "bias_ptr", "dt_ptr", "b_ptr", "c_ptr"), "*bf16"
    )
    types |= dict.fromkeys(("z_ptr", "out_ptr", "state_ptr"), "*bf16")
    types |= dict.fromkeys(("before_ptr", "after_ptr", "chunks_ptr", "used_ptr"), "*i32")
    of_gates = dict.fromkeys(("a_ptr", "b_ptr", "a_log_ptr", "dt_bias_ptr", "betas_ptr"), "*bf16")
    of_gates |= {"decays_ptr": "*fp32", "most": "fp32"}
    of_rule = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "beta_ptr", "out_ptr"), "*bf16")
    of_rule |= dict.fromkeys(("g_ptr", "a_log_ptr", "dt_bias_ptr"), "*bf16")
    of_rule |= {"state_ptr": "*fp32", "scale": "fp32", "most": "fp32"}
    of_rule |= {"before_ptr": "*i32", "after_ptr": "*i32"}
    of_blocks = dict.fromkeys(("tables_ptr", "rows_ptr", "lens_ptr", "before_ptr", "after_ptr"), "*i32")
    of_scan = types | dict.fromkeys(("a_ptr", "d_ptr", "bias_ptr", "state_ptr"), "*fp32")
    newest = {"CHANNELS": 8192, "INPUTS": 4, "KEPT": 4, "KEPT_PADDED": 4, "SILU": True, "bias_ptr": None}
    alone: dict[str, Any] = {"into_ptr": None, "onto_ptr": None}
    chunked = {"SLICE": convolution.CHUNK_CHANNELS, "TOKENS": CHUNK}
    scanned = {"CHANNELS": 8192, "COLUMNS": 16, "SOFTPLUS": True}
    scan, wide = selective_scan_kernels, selective_scan_kernels.chunk_tile(256)
    ruled = {"HEADS": 32, "GROUP": 2, "KEY_DIM": 128, "VALUE_DIM": 128, "KEYS": 128, "NORMALISED": True}
    ruled |= {"SLICE": delta_rule.SLICE, "EPS": delta_products.EPS, "DEPENDENT": True}
    by_key = {"HEADS": 32, "HEADS_PADDED": 32, "NUMBERS": 4096, "BLOCK": delta_gates.NUMBERS}
    found: dict[str, tuple[Any, dict[str, Any], int]] = {
        "delta_gates_by_key": (
            delta_gates._gates_by_key_kernel, by_key | {"DEPENDENT": True}, delta_gates.WARPS,
        ),
        "delta_rule": (delta_rule._decode_kernel, ruled | {"BY_KEY": False}, delta_rule.WARPS),
        "delta_rule_by_key": (delta_rule._decode_kernel, ruled | {"BY_KEY": True}, delta_rule.WARPS),
        "decode_blocks": (
            decode_blocks._kernel, {"BLOCK_SIZE": 256, "ROWS": decode_blocks.ROWS}, decode_blocks.WARPS,
        ),
        "sigmoid_gate": (
            gate._gate_kernel, {"WIDTH": 4096, "BLOCK": gate.BLOCK, "DEPENDENT": True}, gate.WARPS,
        ),
        "convolve": (
            convolution_kernels.decode_kernel,
            newest | alone | {"SLICE": convolution.DECODE_CHANNELS, "INPUTS_PADDED": 4, "DEPENDENT": True},
            convolution.DECODE_WARPS,
        ),
        "convolve_gated": (
            convolution_kernels.decode_kernel,
            newest | {"SLICE": convolution.DECODE_CHANNELS, "INPUTS_PADDED": 4, "DEPENDENT": True},
            convolution.DECODE_WARPS,
        ),
        "convolve_chunks": (
            convolution_kernels.chunk_kernel, newest | alone | chunked, convolution.CHUNK_WARPS,
        ),
        "convolve_gated_chunks": (
            convolution_kernels.chunk_kernel, newest | chunked, convolution.CHUNK_WARPS,
        ),
        "delta_gates": (
            delta_gates._gates_kernel,
            {"HEADS": 32, "HEADS_PADDED": 32, "ROWS": delta_gates.NUMBERS // 32, "DEPENDENT": True},
            delta_gates.WARPS,
        ),
        "selective_scan": (
            scan.decode_kernel, scanned | scan.decode_tile(16) | {"DEPENDENT": True}, scan.DECODE_WARPS,
        ),
        "selective_scan_chunks": (scan.chunk_kernel, scanned | scan.chunk_tile(16), scan.WARPS),
        "selective_scan_chunks_wide": (scan.chunk_kernel, scanned | {"COLUMNS": 256} | wide, scan.WARPS),
    }  # fmt: skip
    kinds = {"delta_gates": of_gates, "delta_rule": of_rule, "decode_blocks": of_blocks, "convolve": types}
    kinds["sigmoid_gate"] = dict.fromkeys(("x_ptr", "gate_ptr", "y_ptr"), "*bf16")
    cases = {}
    for name, (kernel, constants, warps) in found.items():
        own = next((each for begin, each in kinds.items() if name.startswith(begin)), of_scan)
        aligned = (*own, *(each for each in kernel.arg_names if each.endswith("_stride")))
        cases[name] = Case(ASTSource, kernel, constants, own, aligned, {"num_warps": warps})
    return cases


def described(case: Case) -> dict[str, Any]:
    """Return what a kernel is once compiled. Places in the PTX are lines, and -1 stands for never."""
    result = compiled_for(case, 90)
    ptx = result.asm["ptx"]
    lines = ptx.splitlines()

    def first(instruction: str) -> int:
        return next((i for i, line in enumerate(lines) if instruction in line), -1)

    return {
        "shared": result.metadata.shared,
        "spills": spilled_bytes(ptx),
        "waits": first("griddepcontrol.wait"),
        "lets_go": first("griddepcontrol.launch_dependents"),
        "module": case.kernel.fn.__module__,
        "arguments_early": sorted(read_early(ptx, case)),
        "writes_early": writes_unwaited(lines),
        "reads_early": sum("ld.global" in line for line in lines[: first("griddepcontrol.wait")]),
        "copies_early": sum(
            bool(re.search(r"cp\.async\.(bulk|cg)", line)) for line in lines[: first("griddepcontrol.wait")]
        ),
    }


def writes_unwaited(lines: list[str]) -> bool:
    """Whether some way through the PTX comes to a write before it has come to a wait."""
    places = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith("$L")}
    ways, gone = [0], set()
    while ways:
        place = ways.pop()
        while place < len(lines) and place not in gone:
            gone.add(place)
            line = lines[place]
            if re.search(r"\b(st|red|atom)\.global|cp\.async\.bulk.*global\.shared", line):
                return True
            if "griddepcontrol.wait" in line or re.search(r"^\s*ret;", line):
                break
            if branch := re.search(r"bra(?:\.uni)?\s+(\$L\w+);", line):
                ways.append(places[branch[1]])
                if not line.strip().startswith("@"):
                    break
            place += 1
    return False


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    compile_all = partial(run_apart, __file__)
    variants: dict[str, dict[str, Any]] = made_once(tmp_path_factory, "compiled_for_sm90", compile_all)
    return variants


def test_serving_variants_fit(found: dict[str, dict[str, Any]]) -> None:
    assert found.keys() == SPILLS_LIMIT.keys()
    for name, variant in found.items():
        assert variant["spills"] <= SPILLS_LIMIT[name], name
        assert variant["shared"] <= (LITTLE_SHARED_MEMORY if name in LITTLE else SHARED_MEMORY_LIMIT), name


def test_kernels_wait_before_they_write(found: dict[str, dict[str, Any]]) -> None:
    """Those that are launched dependently; prefill and products of many tokens are not and need not."""
    for name, variant in found.items():
        launched_dependently = not any(kind in name for kind in APART)
        assert (variant["waits"] >= 0) == launched_dependently, name
        assert variant["writes_early"] == (name in WRITES_EARLY or not launched_dependently), name


def test_kernels_read_no_results_before_they_wait(found: dict[str, dict[str, Any]]) -> None:
    assert {name: found[name]["reads_early"] for name in READS_EARLY} == READS_EARLY
    assert {name: found[name]["copies_early"] for name in COPIES_EARLY} == COPIES_EARLY


def test_kernels_declare_the_arguments_that_they_read_before_they_wait(
    found: dict[str, dict[str, Any]],
) -> None:
    early: dict[str, set[str]] = {}
    for variant in found.values():
        early.setdefault(variant["module"], set()).update(variant["arguments_early"])
    for module, arguments in early.items():
        assert arguments == getattr(import_module(module), "READS_EARLY", set()), module


def test_the_first_layer_begins_when_what_is_known_of_tokens_is_there(
    found: dict[str, dict[str, Any]],
) -> None:
    embed = found["embed"]
    assert 0 <= embed["waits"] < embed["lets_go"]


if __name__ == "__main__":
    cases = plain_variants() | few_tokens_variants() | hopper_variants() | hopper_decode_variants()
    cases |= hopper_linear_variants() | hopper_gemv_variants() | hopper_matmul_variants() | experts_variants()
    cases |= recurrence_variants() | few_quantised_variants() | stream_quantised_variants()
    cases |= few_quantised_experts_variants() | stream_quantised_experts_variants()
    with ThreadPoolExecutor() as pool:
        print(json.dumps(dict(zip(cases, pool.map(described, cases.values()), strict=True))))
