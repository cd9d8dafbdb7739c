"""Every kernel that is not for Hopper alone compiles for other GPUs, present or not, and fits their memory.

Compiling needs the kernels outside the interpreter, so it has a process of its own: this file as a script. Of
attention, whose shared memory depends on heads, types and tiles, every format is compiled as far as that
memory is allotted, as tiles are chosen for each GPU: with the widest heads, or nightly with all. One case of
each kernel is compiled down to machine code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import triton.language as tl
from apart import run_apart
from compiled import Case, compiled_for, shared_bytes
from gpus import GPUS
from made_once import made_once
from quantised_variants import few_quantised_experts_variants, few_quantised_variants
from test_compile_sm90 import few_tokens_variants, hopper_decode_variants, plain_variants

from quire.kernels.attention import cascade as shared_prefix
from quire.kernels.attention import prefill as prefill_attention
from quire.kernels.attention import token_places
from quire.kernels.attention.decode import EARLY, SMALL_STAGES, decode_tiles, has_room_for_new_heads
from quire.kernels.attention.decode_kernel import decode_kernel
from quire.kernels.attention.hopper_decode import decode as hopper_decode
from quire.kernels.attention.key_tiles import KeyTiles
from quire.kernels.formats.kv_format import BF16, FP8, FP12, FP16, FP32, KVFormat
from quire.kernels.gpu import Gpu
from quire.kernels.parallel import all_reduce, terms
from quire.kernels.pointwise import activation, block_copy, gated_norm, norm, pinned_copy
from quire.kernels.sampling import logprobs, part_thresholds, peer_sampling, peer_thresholds
from quire.kernels.sampling import masks as token_mask
from tests.engine.nightly import NIGHTLY

# fp16 takes what bf16 takes, and heads of 80 and 96 what those of 128 take: they are padded to as many.
HELD = [(BF16, BF16), (FP32, FP32), (BF16, FP8), (FP32, FP8), (BF16, FP12), (FP32, FP12)]
OTHERS = [(FP16, FP16, 80), (BF16, FP8, 96), (BF16, BF16, 512)]
DIMS = (256, 128, 64)
ALIKE = {80: 80, 86: 80, 89: 80, 120: 80}  # what is allotted for one of them is for the others
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32", FP8: "fp8e4nv", FP12: "u8"}
# One case of each kernel, down to machine code: for the oldest GPU, and those after Hopper.
WHOLE = {
    80: (
        "decode_16",
        "decode_new_short_fp12",
        "prefill_16",
        "prefill_16_fp12",
        "shared_prefix",
        "qkv_to_cache_fp12",
        "gemv_gate_up",
        "few_tokens_gated",
        "few_quantised_gate",
        "few_quantised_gate_int4",
        "few_experts_fours_up_16",
        "expand_floats",
        "split_output",
        "merge",
        "thresholds",
        "chunk_argmax",
        "one_shot_sum",
        "two_shot_sum",
    ),
    89: ("decode_16_fp8", "prefill_16_fp8", "qkv_to_cache_fp8"),
    100: (
        "decode_16",
        "prefill_16",
        "hopper_decode_known",
        "hopper_decode_new_fp12",
        "few_tokens_gated",
        "one_shot_sum",
        "two_shot_sum",
    ),
    120: ("decode_16", "decode_16_fp8", "prefill_16", "hopper_decode_known", "hopper_decode_new_fp12"),
}
SHARED_OF_HOPPER_DECODE = (
    "hopper_decode",
    "hopper_decode_fp12",
    "hopper_decode_new",
    "hopper_decode_64_fp12",
    "hopper_decode_new_split_256",
)


class Attention(NamedTuple):
    """A kernel of attention as it is launched, but for the types: what tells cases apart, and the case."""

    name: str
    lanes: int
    tiles: KeyTiles
    kernel: Any
    constants: dict[str, object]
    options: dict[str, object]


def decode_kernels(gpu: Gpu, dim: int, dtype: torch.dtype, held: KVFormat) -> Iterator[Attention]:
    alone = dict.fromkeys(("cascade_of", "shared_lens", "prefix_partials", "prefix_lse"))
    for group in (4, 64) if dim == 256 and held.planes == 0 else (4,):
        lanes = max(group, 16)
        tiles = decode_tiles(gpu, lanes, dim, dtype, held)
        both = {"GROUP": group, "BLOCK_M": lanes, "BESIDE": False, "DEPENDENT": gpu.has_dependent_launch}
        known = {"NEW": False, "FIRST": False, "EARLY": EARLY, "rope": None, "q_norm": None, "k_norm": None}
        options: dict[str, object] = {"num_warps": 4, "num_stages": tiles.stages}
        yield Attention("decode", lanes, tiles, decode_kernel, both | known | alone, options)
        fused = held.written_by_decode and has_room_for_new_heads(gpu, group, dim, dtype)
        if fused and tiles.stages <= SMALL_STAGES:  # with more stages the others take more
            new = {"NEW": True, "FIRST": tiles.stages == SMALL_STAGES, "EARLY": 0}
            yield Attention("decode_new", lanes, tiles, decode_kernel, both | new | alone, options)


def prefix_kernels(gpu: Gpu, dim: int, dtype: torch.dtype, held: KVFormat) -> Iterator[Attention]:
    lanes = shared_prefix.LANES
    tiles = shared_prefix.prefix_tiles(gpu, dim, dtype, held)
    constants = {"GROUP": 4, "ROWS": lanes // 4, "BLOCK_M": lanes, "DEPENDENT": gpu.has_dependent_launch}
    options: dict[str, object] = {"num_warps": max(4, dim // 64), "num_stages": tiles.stages}
    yield Attention("prefix", lanes, tiles, shared_prefix._prefix_kernel, constants, options)


def prefill_kernels(gpu: Gpu, dim: int, dtype: torch.dtype, held: KVFormat) -> Iterator[Attention]:
    wide = dim * dtype.itemsize <= 256
    tiles = {
        lanes: prefill_attention.prefill_tiles(gpu, lanes, dim, dtype, held)
        for lanes in ((128, 64) if wide else (64,))
    }
    for lanes, chosen in tiles.items():
        if lanes == 64 and wide and chosen == tiles[128]:
            continue  # takes less than with more lanes
        options = {"num_warps": max(lanes // 16, dim // 64), "num_stages": chosen.stages}
        options |= {"maxnreg": 128} if lanes == 128 else {}
        constants = {"GROUP": 4, "BLOCK_M": lanes}
        yield Attention("prefill", lanes, chosen, prefill_attention._prefill_kernel, constants, options)


def attention_cases(gpu: Gpu) -> Iterator[tuple[tuple[Any, ...], Case]]:
    """Yield cases and what tells them apart; of heads with as many keys and stages the largest."""
    from triton.compiler import ASTSource

    seen = set()
    for plain, held, head_dim in [(*types, dim) for types in HELD for dim in DIMS] + OTHERS:
        if held == FP8 and not gpu.has_e4m3:
            continue
        dim = 1 << (head_dim - 1).bit_length()
        kernels = (decode_kernels, prefix_kernels, prefill_kernels)
        for found in (found for make in kernels for found in make(gpu, dim, plain.dtype, held)):
            sort = (found.name, plain, held, found.lanes, found.tiles, head_dim < dim)
            if sort in seen:
                continue
            seen.add(sort)
            constants: dict[str, object] = {"BLOCK_SIZE": 16, "HEAD_DIM": head_dim, "DIM": dim}
            constants |= found.constants | {"TILE": found.tiles.keys}
            if "CHUNKED" in found.kernel.arg_names:
                constants["CHUNKED"] = False
            constants |= {"PLANES": held.planes > 0} | ({} if held.scaled else {"kv_scales": None})
            unused = {"softcap_log2", "sinks", "slopes", "SPARING"} & {*found.kernel.arg_names}
            constants |= dict.fromkeys(unused)
            types = types_of(NAMES[plain], NAMES[held])
            aligned = [name for name, kind in types.items() if kind[0] == "*"]
            aligned += [name for name in found.kernel.arg_names if name.endswith("_stride")]
            case = Case(ASTSource, found.kernel, constants, types, aligned, found.options)
            tiles = (found.tiles.keys, found.tiles.stages)
            yield (found.name, NAMES[plain], NAMES[held], head_dim, found.lanes, *tiles), case


def widest_cases(gpu: Gpu) -> Iterator[tuple[tuple[Any, ...], Case]]:
    """Yield those with the widest heads of each kernel, types and lanes, and all of OTHERS."""
    seen = set()
    for kind, case in attention_cases(gpu):
        name, plain, held, head_dim, lanes, *_ = kind
        sort = (name, plain, held, lanes, 0 if head_dim in DIMS else head_dim)
        if sort not in seen:  # the first is the widest
            seen.add(sort)
            yield kind, case


def types_of(dtype: str, kv_dtype: str) -> dict[str, str]:
    types = dict.fromkeys(("block_tables", "rows", "query_starts", "context_lens", "order"), "*i32")
    types |= dict.fromkeys(("cascade_of", "members", "lens", "shared_lens", "kv_scales"), "*i32")
    types |= dict.fromkeys(("partials", "lse", "prefix_partials", "prefix_lse", "rope"), "*fp32")
    types |= dict.fromkeys(("q", "out", "q_norm", "k_norm"), f"*{dtype}")
    return types | {"kv": f"*{kv_dtype}", "scale_log2": "fp32", "eps": "fp32"}


def small_cases() -> dict[str, Case]:
    """Return the kernels that need little shared memory, whatever the model."""
    from triton.compiler import ASTSource

    pointers = dict.fromkeys(
        ("x_ptr", "residual_ptr", "weight_ptr", "y_ptr", "gate_up_ptr", "out_ptr"), "*bf16"
    )
    pointers |= dict.fromkeys(("peaks_ptr", "totals_ptr", "greater_ptr", "best_ptr", "chosen_ptr"), "*fp32")
    pointers |= dict.fromkeys(("best_tokens_ptr", "rank_ptr", "top_tokens_ptr", "tokens_ptr"), "*i32")
    pointers |= dict.fromkeys(("words_ptr", "pairs_ptr", "masks_ptr", "target_ptr", "source_ptr"), "*i32")
    pointers |= {"logits_ptr": "*bf16", "top_ptr": "*fp32", "lens": "*i32", "members": "*i32", "rows": "*i32"}
    pointers |= dict.fromkeys(("given_ptr", "positions_ptr", "last_tokens_ptr", "block_tables_ptr"), "*i32")
    pointers |= dict.fromkeys(("places_ptr", "context_lens", "block_tables"), "*i32")
    pointers |= {"slots_ptr": "*i64", "rows_ptr": "*i32"}
    pointers |= dict.fromkeys(("wanted_ptr", "limit_ptr", "highest_ptr", "thresholds_ptr"), "*fp32")
    pointers |= dict.fromkeys(("temperature_ptr", "top_p_ptr", "min_p_ptr", "found_ptr"), "*fp32")
    pointers |= {"low_ptr": "*i64", "masses_ptr": "*i64", "top_k_ptr": "*i32", "other_ptr": "*bf16"}
    pointers |= {"own_ptr": "*i16", "addresses_ptr": "*i64", "state_ptr": "*i32"}
    norm_of_8b = {"HIDDEN": 4096, "BLOCK": 4096, "PARTS": 4, "DEPENDENT": True}
    wide = {"HIDDEN": 4096, "BLOCK": 4096, "PARTS": 0}
    of_two = {"RANKS": 2, "BEGIN": 0, "END": 9, "DEPENDENT": True}
    all_known: dict[str, object] = {"known_ptr": None}
    chunks = {"VOCABULARY": 151936, "CHUNK": logprobs.CHUNK}
    searched: dict[str, object] = {"WEIGHTED": True, "MASSES": part_thresholds.MASSES}
    searched |= {"INFINITY": part_thresholds.INFINITY[torch.bfloat16]}
    masses = searched | {"VOCABULARY": 64128, "CHUNK": part_thresholds.CHUNK, "MIN_TEMPERATURE": 1e-20}
    kept = {name: masses[name] for name in ("VOCABULARY", "CHUNK", "MIN_TEMPERATURE", "INFINITY")}
    kept |= {"RANKS": 2, "DEPENDENT": True}
    kept |= {"SENDERS_PADDED": 32, "ROUNDS": 4, "MASSES": part_thresholds.MASSES}
    drawn = of_two | {"CHUNKS": 32, "CHUNKS_PADDED": 32, "RANKS_PADDED": 2}
    narrowed = searched | {"DTYPE": tl.bfloat16}
    best = all_known | {"CHUNKS": 38, "CHUNKS_PADDED": 64, "WIDTH": 32}
    eight: dict[str, object] = {"TERMS": 8, "BLOCK": terms.BLOCK, "DEPENDENT": True}
    bf16_terms = dict.fromkeys(("terms_ptr", "total_ptr"), "*bf16")
    gate_of_8b = {"WIDTH": 14336, "BLOCK": 1024, "KIND": "silu", "DEPENDENT": True}
    gated_heads = {"HIDDEN": 128, "COLUMNS": 128, "BLOCK": 128, "ROWS": 8, "GATE_FIRST": False, "SILU": True}
    gated_heads["DEPENDENT"] = True
    found: dict[str, tuple[Any, dict[str, Any], int, dict[str, str]]] = {
        "add_rms_norm": (norm._rms_norm_kernel, norm_of_8b, 16, {"x_ptr": "*fp32"}),
        "gated_norm": (gated_norm._gated_norm_kernel, gated_heads, 4, {"gate_ptr": "*bf16"}),
        "silu_mul": (activation._gated_kernel, gate_of_8b, 8, {}),
        "copy_blocks": (block_copy._copy_blocks_kernel, {"WORDS": block_copy.WORDS}, 8, {}),
        "copy_pinned": (pinned_copy.copy_kernel, {"WORDS": pinned_copy.WORDS}, 4, {}),
        "logprobs": (logprobs.chunk_kernel, all_known | chunks, 8, {}),
        "logprobs_merge": (logprobs.merge_kernel, best, 8, {}),
        "one_shot_sum": (all_reduce._one_shot_kernel, of_two | wide, 16, {"rows": "i32"}),
        "two_shot_sum": (all_reduce._two_shot_kernel, of_two | {"TILE": all_reduce.TILE}, 8, {}),
        "sum_terms": (terms._sum_kernel, eight, 8, bf16_terms),
        "sum_one_number": (terms._sum_kernel, eight | {"length": 1}, 8, bf16_terms),
        "kept_by_peers": (peer_thresholds._keep_kernel, kept, 8, {}),
        "drawn_by_peers": (peer_sampling._best_kernel, drawn, 4, {"best_ptr": "*fp32"}),
        "mask_tokens": (token_mask._mask_tokens_kernel, {"BLOCK": token_mask.BLOCK}, 4, {"rows_ptr": "*i64"}),
        "part_masses": (part_thresholds.masses_kernel, masses, 8, {}),
        "part_narrowed": (part_thresholds.narrow_kernel, narrowed, 4, {}),
        "shared_lens": (
            shared_prefix._lens_kernel, {"ROWS": 16, "LANE_ROWS": 16, "BLOCK_SIZE": 16}, 4, {},
        ),
        "token_places": (
            token_places.token_places_kernel,
            {"BLOCK_SIZE": 16, "BLOCK": token_places.BLOCK, "DEPENDENTS": True}, 4, {},
        ),
    }  # fmt: skip
    return {
        name: Case(
            ASTSource, kernel, constants, pointers | {"eps": "fp32"} | types, pointers, {"num_warps": warps}
        )
        for name, (kernel, constants, warps, types) in found.items()
    }


def for_gpu(case: Case, gpu: Gpu) -> Case:
    """Return the case as that GPU launches it."""
    return case if gpu.has_dependent_launch else case.on_older_gpu()


def attention_bytes(likeness: int) -> list[tuple[int, tuple[Any, ...], int]]:
    """Return shared memory of attention, by GPU and case, of the GPUs that allot as `likeness` does."""
    measured: dict[tuple[Any, ...], int] = {}
    found = []
    for capability in alike_to(likeness):
        for kind, case in (attention_cases if NIGHTLY else widest_cases)(GPUS[capability]):
            if kind not in measured:
                measured[kind] = shared_bytes(case, capability)
            found.append((capability, kind, measured[kind]))
    return found


def hopper_case(case: Case, gpu: Gpu) -> Case:
    """Return the same with the stages that few programs have on a GPU."""
    stages = hopper_decode.stages_of(gpu, case.constants["DIM"], 1, small=False)
    return case._replace(constants={**case.constants, "STAGES": stages})


def small_bytes() -> list[tuple[int, str, int]]:
    """Return shared memory of all other kernels, by GPU and name, for the oldest GPU and the newest."""
    both = variants()
    attention = ("decode", "prefill", "shared_prefix", "hopper")
    fixed = small_cases() | {name: case for name, case in both.items() if not name.startswith(attention)}
    found = []
    for capability in (80, 120):
        chip = GPUS[capability]
        of_chip = fixed | {
            name: hopper_case(both[name], chip)
            for name in SHARED_OF_HOPPER_DECODE
            if chip.has_dependent_launch
        }
        for name, case in of_chip.items():
            if chip.has_e4m3 or "fp8" not in name:
                found.append((capability, name, shared_bytes(for_gpu(case, chip), capability)))
    return found


def machine_code() -> list[tuple[int, str]]:
    """Compile the cases of WHOLE down to machine code; return those that have some."""
    both = variants() | small_cases()
    return [
        (capability, name)
        for capability, names in WHOLE.items()
        for name in names
        if compiled_for(for_gpu(both[name], GPUS[capability]), capability).asm["cubin"]
    ]


def bytes_on_each_alike() -> dict[str, list[int]]:
    """Return shared memory of some of attention on each GPU without products of shared memory, by name."""
    both = variants()
    return {
        name: [shared_bytes(both[name].on_older_gpu(), capability) for capability in ALIKE]
        for name in ("decode_16", "prefill_16", "prefill_16_fp12", "shared_prefix", "shared_prefix_fp12")
    }


def variants() -> dict[str, Case]:
    both = plain_variants() | few_tokens_variants() | hopper_decode_variants()
    return both | few_quantised_variants() | few_quantised_experts_variants()


def alike_to(likeness: int) -> list[int]:
    return [capability for capability in GPUS if ALIKE.get(capability, capability) == likeness]


def other_kernels() -> dict[str, Any]:
    """Return all that is compiled beside attention of every format."""
    return {"bytes": small_bytes(), "machine code": machine_code(), "alike": bytes_on_each_alike()}


def compiled_apart(function: Callable[..., Any], *arguments: int) -> str:
    """Return as JSON what one of the functions above does outside the interpreter, in a process of its own.

    So several tests share what takes minutes in all.
    """
    return run_apart(__file__, function.__name__, *map(str, arguments))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = made_once(
        tmp_path_factory, "compiled_for_gpus", partial(compiled_apart, other_kernels)
    )
    return found


@pytest.mark.parametrize("likeness", sorted({ALIKE.get(capability, capability) for capability in GPUS}))
def test_attention_of_every_format_fits_each_gpu(likeness: int) -> None:
    found = json.loads(compiled_apart(attention_bytes, likeness))
    assert {capability for capability, *_ in found} == set(alike_to(likeness))
    for capability, kind, shared in found:
        assert shared <= GPUS[capability].shared_memory, (capability, kind)


def test_all_others_fit_any_gpu(others: dict[str, Any]) -> None:
    for capability, name, shared in others["bytes"]:
        few = 48 * 1024 if "hopper" not in name else GPUS[capability].shared_memory
        assert shared <= few, (capability, name)


def test_machine_code_is_made_for_each(others: dict[str, Any]) -> None:
    made = [(capability, name) for capability, names in WHOLE.items() for name in names]
    assert others["machine code"] == [list(each) for each in made]


def test_gpus_without_products_of_shared_memory_allot_alike(others: dict[str, Any]) -> None:
    """So what is compiled for one of them stands for all."""
    for name, measured in others["alike"].items():
        assert len(measured) == len(ALIKE) and len(set(measured)) == 1, name


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*map(int, sys.argv[2:]))))
