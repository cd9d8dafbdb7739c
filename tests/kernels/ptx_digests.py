"""Digests of every serving variant's PTX, which show that a change left the kernels as they were.

    python tests/kernels/ptx_digests.py [--write] [NAME…]

compiles them all, or those whose names begin so, and compares them with ptx_digests.json beside this file;
with --write it writes there what it found. The variants are those of test_compile_sm90.py and
test_compile_gpus.py: a kernel, as it is launched for a GPU and a format. Left out of a digest is what moving
a function changes: lines and files, symbols' names, comments.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import triton
from compiled import Case, ptx_and_shared
from gpus import GPUS
from quantised_variants import (
    few_quantised_experts_variants,
    few_quantised_variants,
    stream_quantised_experts_variants,
    stream_quantised_variants,
)
from test_compile_gpus import ALIKE, WHOLE, attention_cases, for_gpu, small_cases
from test_compile_sm90 import (
    experts_variants,
    few_tokens_variants,
    hopper_decode_variants,
    hopper_gemv_variants,
    hopper_linear_variants,
    hopper_matmul_variants,
    hopper_variants,
    plain_variants,
)

FILE = Path(__file__).with_suffix(".json")


def variants() -> Iterator[tuple[str, Case, int]]:
    """Yield each variant's name, its case and the compute capability that it is compiled for."""
    both = plain_variants() | few_tokens_variants() | hopper_decode_variants() | few_quantised_variants()
    hopper = hopper_variants() | hopper_linear_variants() | hopper_matmul_variants()
    both |= few_quantised_experts_variants()
    hopper |= hopper_gemv_variants() | experts_variants() | stream_quantised_variants()
    hopper |= stream_quantised_experts_variants()
    small = small_cases()
    for name, case in (both | hopper).items():
        yield f"90 {name}", case, 90
    for capability, names in WHOLE.items():
        for name in names:
            yield f"{capability} {name}", for_gpu((both | small)[name], GPUS[capability]), capability
    for capability in (80, 120):
        for name, case in small.items():
            yield f"{capability} {name}", for_gpu(case, GPUS[capability]), capability
    seen = set()
    for capability, gpu in GPUS.items():
        for kind, case in attention_cases(gpu):
            key = (ALIKE.get(capability, capability), *kind)
            if key not in seen:
                seen.add(key)
                yield " ".join(map(str, (capability, *kind))), case, capability


def normalised(ptx: str) -> str:
    """Return the PTX without debug information and comments, its functions named in their order."""
    code = ptx.split(".section", maxsplit=1)[0]
    lines = [re.sub(r"\s*//.*", "", line) for line in code.splitlines()]
    kept = [line for line in lines if line.strip() and not re.match(r"\s*\.(loc|file)\b|\$L__tmp", line)]
    text = "\n".join(kept)
    return renamed(text, re.findall(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", text))


def renamed(text: str, names: list[str]) -> str:
    """Return the text with its functions' names replaced by their places in `names`."""
    places = {name: f"function{i}" for i, name in enumerate(dict.fromkeys(names))}
    for name, place in sorted(places.items(), key=lambda pair: -len(pair[0])):
        text = text.replace(name, place)
    return text


@cache
def cases() -> dict[str, tuple[Case, int]]:
    return {name: (case, capability) for name, case, capability in variants()}


def digest(name: str) -> str:
    """Return a digest of a variant's PTX and shared memory."""
    ptx, shared = ptx_and_shared(*cases()[name])
    return hashlib.sha256(f"{shared}\n{normalised(ptx)}".encode()).hexdigest()[:16]


def digests(names: list[str]) -> dict[str, str]:
    """Return the digests of variants, compiled by as many processes as there are cores."""
    cases()
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        return dict(zip(names, pool.imap(digest, names), strict=True))


def main() -> int:
    """Return 1 if a kernel has changed or is gone, or the file is of another Triton."""
    parser = argparse.ArgumentParser(description="Compare kernels' PTX with ptx_digests.json.")
    parser.add_argument("--write", action="store_true", help="write what is found instead")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only those whose names begin so")
    arguments = parser.parse_args()
    written = json.loads(FILE.read_text()) if FILE.exists() else {"triton": triton.__version__, "ptx": {}}
    if written["triton"] != triton.__version__ and not (arguments.write and not arguments.names):
        print(f"{FILE.name} is of Triton {written['triton']}, and here is {triton.__version__}")
        return 1
    chosen = tuple(arguments.names) or ("",)
    found = digests([name for name in cases() if name.startswith(chosen)])
    before = {name: digest for name, digest in written["ptx"].items() if name.startswith(chosen)}
    changed = sorted(name for name, digest in before.items() if found.get(name) != digest)
    for name in changed:
        print(f"{'gone' if name not in found else 'changed'}: {name}")
    if changed and not arguments.write:
        print("is this meant? then: make ptx WRITE=--write")
    unknown = len(found.keys() - before.keys())
    print(f"{len(found)} compiled, {len(changed)} not as in {FILE.name}, {unknown} not there")
    if not arguments.write:
        return 1 if changed else 0
    others = {name: digest for name, digest in written["ptx"].items() if not name.startswith(chosen)}
    FILE.write_text(
        json.dumps({"triton": triton.__version__, "ptx": others | found}, indent=1, sort_keys=True) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
