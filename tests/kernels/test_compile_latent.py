"""Attention to latents of 512 + 64 numbers, and to heads made of them, and scores of indexers, compile for
every GPU, and fit.

Compiling needs the kernels outside the interpreter, so it has a process of its own: this file as a script.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from apart import run_apart
from compiled import Case, shared_bytes, ttgir_of
from gpus import GPUS
from made_once import made_once

from quire.kernels.attention.index import rotation, scores
from quire.kernels.attention.latent import decode, expanded, prefill
from quire.kernels.attention.latent.tile import latent_tiles
from quire.kernels.gpu import Gpu

WIDTH, LATENT = 576, 512
HEADS = (16, 128)
INDEX_HEADS = (64, scores.MOST_HEADS)
SIZES = ((128, 64, 128), (192, 64, 256))  # of DeepSeek's heads, and of GLM-4.7 Flash's
KERNELS = (
    ("decodes", decode._decode_kernel, 1),
    ("few decodes", decode._decode_kernel, 1),
    ("chunks", prefill._prefill_kernel, 64),
    ("what was before chunks", prefill._prefill_kernel, 64),
)
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def cases(gpu: Gpu) -> Iterator[tuple[str, Case]]:
    from triton.compiler import ASTSource

    for dtype, name in NAMES.items():
        types = dict.fromkeys(("block_tables", "rows", "query_starts", "context_lens", "order"), "*i32")
        types |= dict.fromkeys(("partials", "lse"), "*fp32") | dict.fromkeys(("q", "kv", "out"), f"*{name}")
        for label, kernel, rows in KERNELS:
            for heads in HEADS:
                tiles = latent_tiles(gpu, heads, rows, WIDTH, LATENT, dtype, few=label == "few decodes")
                constants = {
                    "HEADS": heads, "GROUP": tiles.group, "LANES": tiles.lanes, "BLOCK_SIZE": 16,
                    "LATENT": LATENT, "WIDTH": WIDTH, "DIM": tiles.dim, "REST_DIM": tiles.rest_dim,
                    "TILE": tiles.keys, "CHUNKED": False, "softcap_log2": None, "sinks": None, "slopes": None,
                }  # fmt: skip
                if label == "chunks":
                    constants["lse"] = None
                aligned = [each for each, kind in types.items() if kind[0] == "*"]
                aligned += [each for each in kernel.arg_names if each.endswith("_stride")]
                options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
                case = Case(ASTSource, kernel, constants, types | {"scale_log2": "fp32"}, aligned, options)
                yield f"{label}, {heads} heads in {name}", case
        for sizes in SIZES:
            yield f"heads of {sizes} in {name}", expanded_case(gpu, sizes, dtype)
        yield from index_cases(dtype, name)


def index_cases(dtype: torch.dtype, name: str) -> Iterator[tuple[str, Case]]:
    """Yield what scores with an indexer's heads, as many as models have and as many as are allowed."""
    from triton.compiler import ASTSource

    types = dict.fromkeys(("block_tables", "rows", "positions"), "*i32") | {"scale": "fp32"}
    types |= dict.fromkeys(("scores", "weights"), "*fp32") | dict.fromkeys(("q", "kv"), f"*{name}")
    kernel = scores._scores_kernel
    aligned = [each for each, kind in types.items() if kind[0] == "*"] + ["block_stride", "slot_stride"]
    given = dict.fromkeys(("out", "x", "cos", "sin"), f"*{name}")
    turned = {"HEADS": 64, "GROUP": 32, "WIDTH": 128, "DIM": 128, "ROTATED": 64, "BEGIN": 0}
    for interleaved in (False, True):
        wide = interleaved or name == "fp32"
        angles = dict.fromkeys(("cos", "sin"), "*fp32") if wide else {}
        constants = {**turned, "INTERLEAVED": interleaved, "WIDE": wide}
        case = Case(ASTSource, rotation._rotate_kernel, constants, given | angles, given, {"num_warps": 4})
        yield f"_rotate_kernel {interleaved} in {name}", case
    for heads in INDEX_HEADS:
        sizes, options = scores.program(heads, 128, dtype)
        case = Case(ASTSource, kernel, {**sizes, "BLOCK_SIZE": 16}, types, aligned, options)
        yield f"_scores_kernel of {heads} in {name}", case


def expanded_case(gpu: Gpu, sizes: tuple[int, int, int], dtype: torch.dtype) -> Case:
    from triton.compiler import ASTSource

    tiles = expanded.expanded_tiles(gpu, *sizes, dtype)
    assert tiles is not None
    types = {"query_starts": "*i32", "lse": "*fp32"}
    types |= dict.fromkeys(("out", "q", "heads", "rotated"), f"*{NAMES[dtype]}")
    constants = {"HEADS": 16, "QUERIES": tiles.queries, "TILE": tiles.keys, "key_starts": None}
    for name, size in zip(("PLAIN", "REST", "VALUE"), sizes, strict=True):
        constants |= {name: size, f"{name}_DIM": expanded.padded(size)}
    aligned = [*types, "q_head_stride", "q_stride", "rotated_stride"]
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return Case(ASTSource, expanded._kernel, constants, types | {"scale_log2": "fp32"}, aligned, options)


def bytes_on_each() -> dict[str, dict[str, int]]:
    """Return shared memory of each case, by GPU."""
    return {
        str(capability): {name: shared_bytes(case, capability) for name, case in cases(gpu)}
        for capability, gpu in GPUS.items()
    }


def instructions() -> dict[str, str]:
    """Return by what the cases in bf16 multiply on Hopper."""
    found = {}
    for name, case in cases(GPUS[90]):
        if "bf16" in name and "rotate" not in name:
            ttgir = ttgir_of(case, 90)
            found[name] = "wgmma" if "warp_group_dot " in ttgir else "mma" if "tt.dot " in ttgir else "none"
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = made_once(tmp_path_factory, "compiled_latent", partial(run_apart, __file__))
    return found


def test_they_fit_each_gpu(compiled: dict[str, Any]) -> None:
    for capability, found in compiled["bytes_on_each"].items():
        for name, shared in found.items():
            assert shared <= GPUS[int(capability)].shared_memory, (capability, name)


def test_by_matrix_products(compiled: dict[str, Any]) -> None:
    """Of few lanes by a warp's, of others by those of four together."""
    found = compiled["instructions"]
    few = [name for name in found if name.endswith("decodes, 16 heads in bf16")]
    assert len(few) == 2 and len(found) == len(KERNELS) * len(HEADS) + len(SIZES) + len(INDEX_HEADS)
    assert found == {name: "mma" if name in few else "wgmma" for name in found}


if __name__ == "__main__":
    print(json.dumps({"bytes_on_each": bytes_on_each(), "instructions": instructions()}))
