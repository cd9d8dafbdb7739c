"""The gated delta rule's kernels compile for sm_90, GPU or not, with the heads of Qwen3-Next and of others.

Compiling needs the kernels outside the interpreter, so it has a process of its own: this file as a script.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from apart import run_apart
from compiled import Case, compiled_for, shared_bytes, spilled_bytes
from gpus import GPUS
from made_once import made_once

from quire.kernels.recurrence import delta_chunks, delta_products, delta_rule
from quire.kernels.recurrence.step import CARRIED, CHUNK

HEADS = {"": (2, 128, 128), "_96": (1, 96, 192), "_256": (1, 256, 256)}  # of a key, its numbers, a value's


def cases() -> dict[str, Case]:
    """Return each kernel in bf16, with decays of a head and of each number of a key."""
    from triton.compiler import ASTSource

    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "beta_ptr", "out_ptr"), "*bf16")
    types |= dict.fromkeys(("queries_ptr", "keys_ptr", "reads_ptr", "scores_ptr"), "*bf16")
    types |= dict.fromkeys(("g_ptr", "state_ptr", "carried_ptr", "values_ptr", "decays_ptr"), "*fp32")
    types |= dict.fromkeys(("chunks_ptr", "used_ptr", "before_ptr", "after_ptr"), "*i32")
    aligned = (*types, "q_stride", "k_stride", "v_stride", "g_stride", "beta_stride", "state_stride")
    types |= dict.fromkeys(("scale", "most"), "fp32")
    found: dict[str, tuple[Any, dict[str, object], dict[str, object]]] = {}
    for name, (group, key_dim, value_dim) in HEADS.items():
        keys = 1 << (key_dim - 1).bit_length()
        dims: dict[str, object] = {"HEADS": 32, "GROUP": group, "KEY_DIM": key_dim, "VALUE_DIM": value_dim}
        dims |= {"KEYS": keys, "NORMALISED": True, "EPS": delta_products.EPS}
        dims |= {"COLUMNS": delta_products.COLUMNS, "LEVELS": CHUNK.bit_length() - 1}
        dims |= {"PRECISION": "tf32", "INVERSE_PRECISION": "tf32x3"}
        dims |= {"CHUNK": CHUNK, "CARRIED": CARRIED, "AHEAD": delta_chunks.AHEAD}
        for sort, by_key in (("", False), ("_by_key", True)):
            of_sort = dims | {"BY_KEY": by_key, "SLICE": delta_rule.SLICE, "DEPENDENT": True}
            of_sort |= {"a_log_ptr": None, "dt_bias_ptr": None}
            warps = delta_products.BY_KEY_WARPS if by_key else delta_products.WARPS
            products = {"num_warps": warps, "num_stages": 1}
            found[f"decode{sort}{name}"] = (
                delta_rule._decode_kernel, of_sort, {"num_warps": delta_rule.WARPS},
            )  # fmt: skip
            found[f"products{sort}{name}"] = (delta_products._products_kernel, of_sort, products)
        stages = delta_chunks.stages_of(keys, exact=False)
        found[f"scan{name}"] = (
            delta_chunks._scan_kernel, dims | {"SLICE": delta_chunks.slice_of(keys)},
            {"num_warps": delta_chunks.warps_of(keys), "num_stages": stages},
        )  # fmt: skip
    return {
        name: Case(
            ASTSource,
            kernel,
            {key: value for key, value in constants.items() if key in kernel.arg_names},
            {
                key: kind
                for key, kind in (types | {"scale": "fp32", "most": "fp32"}).items()
                if key in kernel.arg_names
            },
            [key for key in aligned if key in kernel.arg_names],
            options,
        )
        for name, (kernel, constants, options) in found.items()
    }


def described() -> dict[str, Any]:
    """Return what each kernel is once compiled."""
    found = {}
    for name, case in cases().items():
        ptx = compiled_for(case, 90).asm["ptx"]
        shared = {capability: shared_bytes(case, capability) for capability in GPUS}
        found[name] = {"shared": shared, "spills": spilled_bytes(ptx), "copies": ptx.count("cp.async.cg")}
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    compile_all = partial(run_apart, __file__)
    variants: dict[str, dict[str, Any]] = made_once(tmp_path_factory, "compiled_delta_rule", compile_all)
    return variants


def test_registers_are_enough(found: dict[str, dict[str, Any]]) -> None:
    assert {name: variant["spills"] for name, variant in found.items()} == dict.fromkeys(found, 0)


def test_all_fit_any_gpu(found: dict[str, dict[str, Any]]) -> None:
    for name, variant in found.items():
        for capability, shared in variant["shared"].items():
            assert shared <= GPUS[int(capability)].shared_memory, (capability, name)


def test_a_chunk_is_multiplied_while_the_next_one_comes(found: dict[str, dict[str, Any]]) -> None:
    for name in ("scan", "scan_96"):
        assert found[name]["copies"] > 0, name


if __name__ == "__main__":
    print(json.dumps(described()))
