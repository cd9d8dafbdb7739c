"""The attention kernels as served compile for sm_90, GPU or not, and fit its registers and shared memory.

Compiling needs the kernels outside the interpreter, so it has a process of its own: this file as a script.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SHARED_MEMORY_LIMIT = 227 * 1024


def compile_variants() -> dict[str, dict[str, int]]:
    """Shared memory and spilled bytes of each variant, with 16-bit inputs, head dim 128 and groups of 4."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels import decode_attention as decode
    from kernels import prefill_attention as prefill

    shape = {"GROUP": 4, "HEAD_DIM": 128, "DIM": 128, "TILE": 64, "BLOCK_SIZE": 16}
    variants = {
        "decode": (decode._decode_kernel, shape | {"BLOCK_M": 16}, 4, 3),
        "merge": (
            decode._merge_kernel,
            {"HEAD_DIM": 128, "DIM": 128, "TILE": 64, "SPLITS": decode.MAX_SPLITS},
            4,
            3,
        ),
        "prefill": (prefill._prefill_kernel, shape | {"BLOCK_M": 128}, 8, 2),
    }
    pointers = {"q": "*bf16", "kv": "*bf16", "out": "*bf16", "partials": "*fp32", "lse": "*fp32"}
    pointers |= dict.fromkeys(("block_tables", "rows", "query_starts", "context_lens"), "*i32")
    found = {}
    for name, (kernel, constants, warps, stages) in variants.items():
        signature = {
            argument: "constexpr"
            if argument in constants
            else pointers.get(argument, "fp32" if argument == "scale_log2" else "i32")
            for argument in kernel.arg_names
        }
        # Pointers and strides are multiples of 16, as the launcher finds them when serving.
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, argument in enumerate(kernel.arg_names)
            if argument in pointers or argument.endswith("_stride")
        }
        compiled = triton.compile(
            ASTSource(kernel, signature, constants, aligned),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": warps, "num_stages": stages},
        )
        found[name] = {"shared": compiled.metadata.shared, "spills": spilled_bytes(compiled.asm["ptx"])}
    return found


def spilled_bytes(ptx: str) -> int:
    """Bytes that Triton's own assembler spills to local memory."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.ptx").write_text(ptx)
        report = subprocess.run(
            [get_ptxas(90).path, "-v", "-arch=sm_90a", "kernel.ptx", "-o", "kernel.cubin"],
            check=True,
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
    return sum(int(count) for count in re.findall(r"(\d+) bytes spill", report.stderr))


def test_serving_variants_fit() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    script = subprocess.run(
        [sys.executable, __file__],
        check=True,
        stdout=subprocess.PIPE,
        cwd=root,
        env=environment | {"PYTHONPATH": str(root)},
    )
    found = json.loads(script.stdout)
    assert len(found) == 3
    for name, variant in found.items():
        assert variant["spills"] == 0, name
        assert variant["shared"] <= SHARED_MEMORY_LIMIT, name


if __name__ == "__main__":
    print(json.dumps(compile_variants()))
