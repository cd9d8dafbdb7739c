"""Time attention of large groups of query heads by either kernel: `python -m quire.loadtest.gpu_groups`.

Groups of 16, 24 and 32 query heads a KV head that decode, and of 7 and 12 that take in prompts, over a cache
in bf16 and in fp12: by the plain kernel and by Hopper's, one after the other over the same inputs, timed as
`gpu_attention` does. Prints microseconds, the rate of Hopper's, and the largest errors against fp64. Needs
one Hopper GPU.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from quire.kernels.attention.decode import DecodeKernel
from quire.kernels.attention.prefill import PrefillKernel
from quire.loadtest.command import command_parser, parse_for_cuda, write_json
from quire.loadtest.gpu_attention import Case, CaseInputs, graph_microseconds

BLOCK_SIZE = 16
CACHES = "bfloat16,fp12_e4m7"
# query heads, KV heads, rows, tokens of each
DECODES = (
    (64, 4, 1, 8192),
    (64, 4, 16, 2048),
    (64, 4, 64, 1024),
    (64, 2, 1, 8192),
    (64, 2, 16, 2048),
    (64, 2, 64, 1024),
    (48, 2, 16, 2048),
)
PROMPTS = ((28, 4, 8, 2048), (24, 2, 8, 2048))


@dataclass(frozen=True, slots=True)
class Timing:
    """A case by both kernels. hopper_rate: in `unit`, of keys and values, or of both products."""

    case: str
    heads: int
    kv_heads: int
    kv_cache_dtype: str
    plain_us: float
    hopper_us: float
    hopper_rate: float
    unit: str
    plain_error: float
    hopper_error: float


def cases() -> list[Case]:
    """Return rows that decode, then prompts; a case's name says the sequences alone."""
    decodes = [
        Case(f"decode B{rows} ctx {context}", [context] * rows, [1] * rows, None, heads, kv_heads)
        for heads, kv_heads, rows, context in DECODES
    ]
    prompts = [
        Case(f"prefill {rows}x{tokens}", [tokens] * rows, [tokens] * rows, None, heads, kv_heads)
        for heads, kv_heads, rows, tokens in PROMPTS
    ]
    return decodes + prompts


def compare(case: Case, kv_cache_dtype: str, device: str = "cuda") -> Timing:
    """Time the case by both kernels over the same inputs."""
    inputs = CaseInputs(case, BLOCK_SIZE, kv_cache_dtype, device)
    kernels = DecodeKernel if case.is_decode else PrefillKernel
    plain = DecodeKernel.SPLIT if case.is_decode else PrefillKernel.TRITON
    (plain_us, plain_error), (hopper_us, hopper_error) = (
        (graph_microseconds(partial(inputs.attention, by=by), inputs.num_sets), inputs.max_error(by))
        for by in (plain, kernels.HOPPER)
    )
    work = case.key_bytes(kv_cache_dtype) if case.is_decode else case.flops
    return Timing(
        case.name,
        case.num_q_heads,
        case.num_kv_heads,
        kv_cache_dtype,
        round(plain_us, 1),
        round(hopper_us, 1),
        round(work / hopper_us / 1e6, 2),
        "TB/s" if case.is_decode else "TFLOP/s",
        plain_error,
        hopper_error,
    )


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--kv-cache-dtypes", default=CACHES, help=f"formats of the cache ({CACHES})")
    parser.add_argument("--json", type=Path, help="where one JSON object goes, anew after each timing")
    arguments = parse_for_cuda(parser)
    if torch.cuda.get_device_capability()[0] != 9:
        parser.error(f"{torch.cuda.get_device_name()} is no Hopper GPU: it has one of the two kernels only")
    torch.manual_seed(0)
    timings = []
    print(
        f"{'case':22}{'heads':>7}{'cache':>11}{'plain µs':>10}{'Hopper µs':>11}{'rate':>8}  unit     errors"
    )
    for case in cases():
        for kv_cache_dtype in arguments.kv_cache_dtypes.split(","):
            timing = compare(case, kv_cache_dtype)
            timings.append(timing)
            print(
                f"{timing.case:20}{f'{timing.heads}/{timing.kv_heads}':>6}{kv_cache_dtype:>11}"
                f"{timing.plain_us:10.1f}{timing.hopper_us:11.1f}{timing.hopper_rate:8.2f}  {timing.unit:8} "
                f"{timing.plain_error:.1e} {timing.hopper_error:.1e}",
                flush=True,
            )
            figures = {"timings": [asdict(each) for each in timings]}
            write_json(arguments.json, torch.cuda.get_device_name(), figures)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
