"""Print a digest of the PTX of every serving variant, to show that a change left the kernels as they were.

    python tests/kernels/ptx_digests.py [--front-end] > digests.json

The variants are those of test_compile_sm90.py and test_compile_gpus.py. Left out of a digest is what moving a
function changes: lines and files, symbols' names, comments. `--front-end` compiles a kernel no further than
Triton's first representation, in a twentieth of the time: where that is equal, equal PTX follows.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator

from compiled import Case, front_end, ptx_and_shared
from gpus import GPUS
from test_compile_gpus import ALIKE, WHOLE, attention_cases, for_gpu, small_cases
from test_compile_sm90 import (
    few_tokens_variants,
    hopper_decode_variants,
    hopper_linear_variants,
    hopper_matmul_variants,
    hopper_variants,
    plain_variants,
)


def variants() -> Iterator[tuple[str, Case, int]]:
    """Yield each variant's name, its case and the compute capability that it is compiled for."""
    both = plain_variants() | few_tokens_variants() | hopper_decode_variants()
    hopper = hopper_variants() | hopper_linear_variants() | hopper_matmul_variants()
    for name, case in (both | hopper).items():
        yield f"90 {name}", case, 90
    for capability, names in WHOLE.items():
        for name in names:
            yield f"{capability} {name}", for_gpu(both[name], GPUS[capability]), capability
    for capability in (80, 120):
        for name, case in small_cases().items():
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


def digest(case: Case, capability: int, *, whole: bool) -> str:
    """Return a digest of the case's PTX and shared memory, or of the front end's representation."""
    if whole:
        ptx, shared = ptx_and_shared(case, capability)
        text = f"{shared}\n{normalised(ptx)}"
    else:
        text = front_end(case, capability)
        names = re.findall(r"@(\"[^\"]+\"|[\w.$]+)", text)
        text = f"{sorted(case.options.items())}\n{renamed(text, names)}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    whole = "--front-end" not in sys.argv
    found = {name: digest(case, chip, whole=whole) for name, case, chip in variants()}
    json.dump(found, sys.stdout, indent=1)
