"""Kernels compiled for chips that need not be there; for scripts outside Triton's interpreter.

What was found of one is kept in Triton's cache, as Triton keeps what it compiles: by all that it depends on.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Case(NamedTuple):
    """A kernel and its arguments: constants, types of the others (i32 if left out), multiples of 16."""

    source: Any  # ASTSource, or Gluon's
    kernel: Any
    constants: Mapping[str, object]
    types: Mapping[str, str]
    aligned: Iterable[str]
    options: Mapping[str, object]

    def on_older_gpu(self) -> Case:
        """Return the same for a GPU that begins kernels one after the other."""
        alone = {name: False for name in ("DEPENDENT", "DEPENDENTS") if name in self.constants}
        return self._replace(constants={**self.constants, **alone})


def compiled_for(case: Case, capability: int) -> Any:
    """Compile a case down to machine code."""
    import triton
    from triton.backends.compiler import GPUTarget

    return triton.compile(
        _source_of(case), target=GPUTarget("cuda", capability, 32), options=dict(case.options)
    )


def shared_bytes(case: Case, capability: int) -> int:
    """Return the shared memory of a program, as `compiled_for` gives it in `metadata.shared`.

    Compile only as far as shared memory is allotted, which takes a third of the time.
    """
    from triton.runtime.cache import get_cache_key

    _, backend, source, options = _target_of(case, capability)
    key = get_cache_key(source, backend, options, env_vars={"by": Path(__file__).read_text()})
    return _kept(key, lambda: _shared_bytes(case, capability))


def spilled_bytes(ptx: str) -> int:
    """Return the bytes that Triton's own assembler spills to local memory, for sm_90a."""
    from triton.backends.nvidia.compiler import get_ptxas

    assembler = get_ptxas(90)
    command = [assembler.path, "-v", "-arch=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]

    def assemble() -> int:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "kernel.ptx").write_text(ptx)
            report = subprocess.run(command, check=True, cwd=folder, stderr=subprocess.PIPE, text=True)
        return sum(int(count) for count in re.findall(r"(\d+) bytes spill stores", report.stderr))

    return _kept(f"{Path(__file__).read_text()}{assembler.version}{command}{ptx}", assemble)


def _kept(key: str, find: Callable[[], int]) -> int:
    from triton.runtime.cache import get_cache_manager

    cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    file = cache.get_file("found")
    if file is None:
        file = cache.put(str(find()), "found", binary=False)
    return int(Path(file).read_text())


def _shared_bytes(case: Case, capability: int) -> int:
    from triton._C.libtriton import ir, nvidia, passes
    from triton.backends.nvidia.compiler import get_ptx_version_from_options

    module, context, options, _ = _up_to(case, capability, ("ttir", "ttgir"))
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    version = get_ptx_version_from_options(options, capability)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, version)
    manager.run(module, "shared memory")
    shared: int = module.get_int_attr("ttg.shared")
    return shared


def ptx_and_shared(case: Case, capability: int) -> tuple[str, int]:
    """Compile a case down to PTX, without the assembler; return it and the shared memory of a program."""
    ptx, _, _, metadata = _up_to(case, capability, ("ttir", "ttgir", "llir", "ptx"))
    return ptx, metadata["shared"]


def ttgir_of(case: Case, capability: int) -> str:
    """Compile a case as far as Triton's own representation for GPUs, which says by what is multiplied."""
    module, *_ = _up_to(case, capability, ("ttir", "ttgir"))
    return str(module)


def _up_to(case: Case, capability: int, wanted: tuple[str, ...]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Run the compiler's stages that are `wanted`: their result, its context, the options, the metadata."""
    from triton._C.libtriton import ir

    target, backend, source, options = _target_of(case, capability)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    makers = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, *makers, context)
    metadata: dict[str, Any] = {"target": target, **options.__dict__}
    for name in wanted:
        if name in stages:
            module = stages[name](module, metadata)
    return module, context, options, metadata


def _target_of(case: Case, capability: int) -> tuple[Any, Any, Any, Any]:
    """Return the target, the compiler's backend for it, the source, and the options."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    target = GPUTarget("cuda", capability, 32)
    backend, source = CUDABackend(target), _source_of(case)
    return target, backend, source, backend.parse_options({**case.options, **source.parse_options()})


def _source_of(case: Case) -> Any:
    names, constants = case.kernel.arg_names, case.constants
    signature = {name: "constexpr" if name in constants else case.types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = set(case.aligned)
    multiples = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in aligned and name not in constants
    }
    return case.source(case.kernel, signature, values, multiples)
