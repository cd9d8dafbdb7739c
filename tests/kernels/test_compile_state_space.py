"""Mamba 2's scan compiles at models' sizes for every GPU, and fits; on Hopper it multiplies by wgmma.

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
from compiled import Case, compiled_for, shared_bytes, spilled_bytes
from early_reads import read_early
from gpus import GPUS
from made_once import made_once

from quire.kernels.recurrence import state_space, state_space_chunks

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Heads, rows and columns of a state, groups.
SIZES = {
    "Nemotron-H 8B": (128, 64, 128, 8),
    "Mamba 2 2.7B": (80, 64, 128, 1),
    "Granite 4 H-small on eight GPUs": (16, 64, 128, 1),
    "Falcon-H1 1.5B": (48, 64, 256, 1),
    "Falcon-H1 34B": (32, 128, 256, 2),
    "Zamba 2 7B": (112, 64, 64, 2),
}
# Bytes a thread, by columns: tokens are multiplied in fp32, for which registers hold a chunk's.
SPILLS_LIMIT = {64: 0, 128: 448, 256: 608}


def cases(dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> Iterator[tuple[str, Case]]:
    """Yield the two kernels as tokens of a dtype are launched, with states in fp32."""
    from triton.compiler import ASTSource

    heads, rows, columns, groups = sizes
    of_tokens = ("x_ptr", "dt_ptr", "b_ptr", "c_ptr", "d_ptr", "bias_ptr")
    types = dict.fromkeys(of_tokens, f"*{NAMES[dtype]}") | {"low": "fp32", "high": "fp32"}
    types |= dict.fromkeys(("a_ptr", "state_ptr", "steps_ptr", "out_ptr"), "*fp32")
    types |= dict.fromkeys(("chunks_ptr", "used_ptr", "before_ptr", "after_ptr"), "*i32")
    aligned = [name for name, kind in types.items() if kind[0] == "*"]
    aligned += ["x_stride", "b_stride", "c_stride", "state_stride"]
    shape = {"HEADS": heads, "SHARING": heads // groups, "ROWS": rows, "COLUMNS": columns}
    convolved = heads * rows + 2 * groups * columns
    strides = dict.fromkeys(("x_stride", "b_stride", "c_stride"), convolved)
    options: dict[str, object] = {**state_space_chunks.chunk_options(dtype)}
    launched = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    constants = shape | strides | state_space_chunks.chunk_tile(heads, rows, columns) | options
    yield "chunks", Case(ASTSource, state_space_chunks.chunk_kernel, constants, types, aligned, launched)
    constants = {**shape, **state_space.decode_tile(rows, columns), "DEPENDENT": True}
    launched = {"num_warps": state_space.DECODE_WARPS}
    yield "decodes", Case(ASTSource, state_space._decode_kernel, constants, types, aligned, launched)


def shared_on_each() -> dict[str, dict[str, int]]:
    """Return shared memory of programs, by GPU and name."""
    found: dict[str, dict[str, int]] = {}
    for capability, gpu in GPUS.items():
        for dtype, short in NAMES.items():
            for model, sizes in SIZES.items():
                for name, case in cases(dtype, sizes):
                    own = case if gpu.has_dependent_launch else case.on_older_gpu()
                    key = f"{name} of {model} in {short}"
                    found.setdefault(str(capability), {})[key] = shared_bytes(own, capability)
    return found


def on_hopper() -> dict[str, dict[str, Any]]:
    """Describe the kernels of bf16 tokens on Hopper."""
    found = {}
    for model, sizes in SIZES.items():
        for name, case in cases(torch.bfloat16, sizes):
            asm = compiled_for(case, 90).asm
            found[f"{name} of {model}"] = {
                "spills": spilled_bytes(asm["ptx"]),
                "wgmma": asm["ttgir"].count("warp_group_dot "),
                "others": asm["ttgir"].count("tt.dot "),
                "early": sorted(read_early(asm["ptx"], case)),
                "ahead": asm["ttgir"].count("async_copy_global_to_local"),
            }
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = made_once(tmp_path_factory, "compiled_state_space", partial(run_apart, __file__))
    return found


def test_they_fit_each_gpu(compiled: dict[str, Any]) -> None:
    assert {int(capability) for capability in compiled["shared"]} == set(GPUS)
    for capability, found in compiled["shared"].items():
        for name, shared in found.items():
            assert shared <= GPUS[int(capability)].shared_memory, (capability, name)


def test_on_hopper_they_keep_to_registers(compiled: dict[str, Any]) -> None:
    for name, found in compiled["hopper"].items():
        sort, model = name.split(" of ")
        limit = SPILLS_LIMIT[SIZES[model][2]] if sort == "chunks" else 0
        assert found["spills"] <= limit, name


def test_on_hopper_chunks_are_multiplied_by_warpgroups_and_loaded_ahead(compiled: dict[str, Any]) -> None:
    chunks = {name: each for name, each in compiled["hopper"].items() if name.startswith("chunks")}
    assert len(chunks) == len(SIZES)
    for name, found in chunks.items():
        heads, rows, columns, _ = SIZES[name.removeprefix("chunks of ")]
        parts = state_space_chunks.chunk_tile(heads, rows, columns)["PARTS"]
        assert found["wgmma"] == 3 * parts + 1 and not found["others"], name
        assert found["ahead"] >= 4 * parts + 2, name  # x and parts of B and C, ahead of the loop and in it


def test_decodes_read_nothing_before_they_wait(compiled: dict[str, Any]) -> None:
    """Kernels just ahead may make any of a layer's tensors: even A is made of a weight."""
    assert not any(found["early"] for found in compiled["hopper"].values())


if __name__ == "__main__":
    print(json.dumps({"shared": shared_on_each(), "hopper": on_hopper()}))
