"""Times a layer's experts by weights in few bits: `python -m quire.loadtest.gpu_quantised_experts`.

Needs a CUDA device. As `gpu_experts` does it, beside the same experts in bf16: which experts are chosen, and
their products, in CUDA graphs. The bound is reading the codes and scales of the experts that are asked, or
the products' arithmetic in bf16 where that takes longer. `--tilings` tries other divisions, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.kernels.experts.experts import experts
from quire.kernels.experts.quantised import QuantisedExperts
from quire.kernels.experts.quantised_experts import quantised_experts
from quire.kernels.experts.quantised_few import few_quantised_experts, tiled_quantised_experts
from quire.kernels.experts.quantised_stream import Tiling, streamed_quantised_experts, tiling
from quire.kernels.experts.routing import Divisor, Routing, route
from quire.kernels.quantised.weight import LINE, QuantisedWeight, WeightFormat
from quire.loadtest.command import command_parser, parse_for_cuda, write_json
from quire.loadtest.device_time import capture, replay_seconds
from quire.loadtest.gpu_experts import SHAPES, Shape, random_experts
from quire.loadtest.offline.roofline import Ceilings, measure_ceilings

TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 8192)
ROUNDS = 7
MOST_BYTES = 4e9  # of layers with weights of their own, more than the cache holds many times
FORMATS = {
    "float4": WeightFormat("float4", 32, False, torch.uint8),
    "float8": WeightFormat("float8", 128, False, torch.bfloat16),
    "int4": WeightFormat("int4", 128, True, torch.bfloat16),
}
CASES = (
    ("gpt-oss-20b", "float4"),
    ("gpt-oss-120b", "float4"),
    ("qwen3-30b-a3b", "float8"),
    ("qwen3-30b-a3b", "int4"),
    ("mixtral-8x7b", "int4"),
)
OF_CASES = SHAPES | {"gpt-oss-120b": replace(SHAPES["gpt-oss-20b"], count=128)}


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of a layer; of bf16 None where that was not timed."""

    model: str
    format: str
    tokens: int
    microseconds: float
    few_microseconds: float | None
    tiled_microseconds: float | None
    streamed_microseconds: float
    bf16_microseconds: float | None
    bound_microseconds: float
    share: float


def random_weight(form: WeightFormat, outputs: int, inputs: int) -> QuantisedWeight:
    weight = QuantisedWeight.empty(form, outputs, inputs, torch.device("cuda"))
    weight.codes.random_(0, 120)  # no 8-bit float that is no number
    if form.codes == "float4":
        weight.scales.fill_(0x78787878)
    else:
        weight.scales.fill_(1 / 256)
    if weight.zeros is not None:
        weight.zeros.random_(0, 16)
    return weight


def random_layer(shape: Shape, form: WeightFormat) -> QuantisedExperts:
    found = QuantisedExperts(
        random_weight(form, shape.count * 2 * shape.inner, shape.hidden),
        random_weight(form, shape.count * shape.hidden, shape.inner),
        shape.count,
    )
    if not shape.clamped:
        return found
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    biases = (
        torch.randn(shape.count, 2 * shape.inner, **options),
        torch.randn(shape.count, shape.hidden, **options),
    )
    return replace(
        found, gate_up_bias=biases[0], down_bias=biases[1], activation="clamped", alpha=1.702, limit=7.0
    )


def bound(shape: Shape, form: WeightFormat, index: Tensor, ceilings: Ceilings) -> float:
    """Return the seconds that reading what is asked takes, or computing it if that is longer."""
    of_expert = form.num_bytes(2 * shape.inner, shape.hidden) + form.num_bytes(shape.hidden, shape.inner)
    flops = 6 * index.numel() * shape.hidden * shape.inner
    return max(len(index.unique()) * of_expert / ceilings.bandwidth, flops / ceilings.flops)


def timed_by(shape: Shape, tokens: int, layers: list[Any]) -> tuple[Callable[..., float], list[Any]]:
    """Return what times a function's share of a graph of all layers, and which experts they choose."""
    x = torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
    logits = [torch.randn(tokens, shape.count, device="cuda", dtype=torch.bfloat16) for _ in layers]
    routing = Routing(shape.top, divisor=Divisor())

    def seconds(compute: Callable[..., Tensor]) -> float:
        def one(layer: int) -> Tensor:
            weights, index = route(logits[layer], routing, None, x.dtype)
            return compute(x, index, weights, layers[layer])

        graph = capture([partial(one, layer) for layer in range(len(layers))])
        return statistics.median(replay_seconds(graph, ROUNDS)) / len(layers)

    return seconds, [route(each, routing, None, x.dtype)[1] for each in logits]


def measure(
    case: tuple[str, str], tokens: int, layers: list[QuantisedExperts], wide: list[Any], ceilings: Ceilings
) -> Timing:
    name, codes = case
    shape, form = OF_CASES[name], FORMATS[codes]
    seconds, asked = timed_by(shape, tokens, layers)
    few = seconds(few_quantised_experts) if tokens <= 16 else None
    tiled = seconds(tiled_quantised_experts) if 1 < tokens <= 256 else None
    streamed, ours = seconds(streamed_quantised_experts), seconds(quantised_experts)
    bf16 = timed_by(shape, tokens, wide)[0](experts) if wide else None
    least = sum(bound(shape, form, each, ceilings) for each in asked) / len(asked)

    def micro(value: float | None) -> float | None:
        return None if value is None else round(1e6 * value, 2)

    return Timing(
        name, codes, tokens, 1e6 * ours, micro(few), micro(tiled), 1e6 * streamed, micro(bf16), 1e6 * least,
        round(least / ours, 3),
    )  # fmt: skip


def try_tilings(case: tuple[str, str], tokens: int, layers: list[QuantisedExperts]) -> None:
    """Print the quickest divisions of each product, the other one's being as they are."""
    shape, form = OF_CASES[case[0]], FORMATS[case[1]]
    seconds, _ = timed_by(shape, tokens, layers)
    pairs = tokens * shape.top
    usual = tiling(form, pairs, shape.count, gates=True), tiling(form, pairs, shape.count, gates=False)
    for part in (0, 1):
        found = []
        for count in (8, 16, 32, 64, 128):
            if not pairs / shape.count / 4 <= count <= max(8 * pairs / shape.count, 8):
                continue
            for shared in (72, 108, 216):
                rows = usual[part].rows
                size = count * LINE * 2 + rows * (LINE if form.codes == "float8" else LINE // 2)
                stages = min(shared * 1024 // size, 12)
                for together in (1, 4, 8) if count >= 64 else (1,):
                    if stages < 2:
                        continue
                    one = Tiling(count, rows, stages, together)
                    both = (one, usual[1]) if part == 0 else (usual[0], one)
                    try:
                        found.append((seconds(partial(streamed_quantised_experts, tilings=both)), one))
                    except Exception as error:  # it may not fit
                        print(f"  {one}: {type(error).__name__}", flush=True)
        for time, one in sorted(found, key=lambda each: each[0])[:4]:
            print(f"  {'up' if part == 0 else 'down':5} {1e6 * time:9.1f} µs {one}", flush=True)


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--json", type=Path, help="also write the timings to this file")
    parser.add_argument("--tilings", action="store_true", help="try other divisions")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="how many tokens, with commas")
    parser.add_argument(
        "--cases", default=",".join(f"{name}:{codes}" for name, codes in CASES), help="models and formats"
    )
    arguments = parse_for_cuda(parser)
    ceilings = measure_ceilings(torch.device("cuda"), torch.bfloat16)
    print(f"{torch.cuda.get_device_name()}, {ceilings.bandwidth / 1e12:.2f} TB/s, "
          f"{ceilings.flops / 1e12:.0f} TFLOP/s")  # fmt: skip
    print(f"{'model':16}{'format':>8}{'tokens':>7}{'µs':>10}{'few':>10}{'tiled':>10}{'stream':>10}{'bf16':>10}"
          f"{'bound':>10}{'reached':>9}")  # fmt: skip
    timings = []
    with torch.inference_mode():
        for case in (tuple(each.split(":")) for each in arguments.cases.split(",")):
            shape, form = OF_CASES[case[0]], FORMATS[case[1]]
            layer_bytes = form.num_bytes(shape.count * 3 * shape.inner, shape.hidden)
            layers = [random_layer(shape, form) for _ in range(max(int(MOST_BYTES // layer_bytes), 2))]
            wide = [random_experts(shape) for _ in range(2)] if shape.count * shape.inner < 200_000 else []
            for tokens in map(int, arguments.tokens.split(",")):
                timing = measure(case, tokens, layers, wide, ceilings)
                timings.append(timing)
                others = (timing.few_microseconds, timing.tiled_microseconds, timing.streamed_microseconds)
                columns = (
                    "-" if each is None else f"{each:.1f}" for each in (*others, timing.bf16_microseconds)
                )
                print(
                    f"{case[0]:16}{case[1]:>8}{tokens:7}{timing.microseconds:10.1f}"
                    + "".join(f"{each:>10}" for each in columns)
                    + f"{timing.bound_microseconds:10.1f}{timing.share:9.0%}",
                    flush=True,
                )
                if arguments.tilings and tokens > 4:
                    try_tilings(case, tokens, layers)
            del layers, wide
    timed = {"ceilings": asdict(ceilings), "timings": [asdict(timing) for timing in timings]}
    write_json(arguments.json, torch.cuda.get_device_name(), timed)


if __name__ == "__main__":
    main()
