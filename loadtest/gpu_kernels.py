"""Times the fused kernels at serving shapes on a CUDA device.

`python -m quire.loadtest.gpu_kernels [--json PATH]`

Each kernel is captured in a CUDA graph over copies of its input that together do not fit the L2 cache, as in
a step, where weights and KV cache pass through it between two calls. Its bytes are those that must be read
or written, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention.batch import AttentionLayer
from quire.kernels.attention.write_kv import write_kv
from quire.kernels.formats.kv_format import BF16
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.gpu import gpu_of
from quire.kernels.linear.linear import Linear
from quire.kernels.linear.operations import Hidden, wide_linear
from quire.kernels.linear.recipes import GATE, PROJECT_IN, PROJECT_OUT, Product
from quire.kernels.pointwise.activation import silu_mul
from quire.kernels.pointwise.block_copy import copy_blocks
from quire.kernels.pointwise.norm import add_rms_norm, rms_norm
from quire.kernels.recipes import choose
from quire.kernels.sampling.sample import sample
from quire.kernels.sampling.state import SamplingState
from quire.loadtest.command import command_parser, parse_for_cuda, write_json
from quire.loadtest.device_time import capture, replay_seconds

COPY_BANDWIDTH = 3.03e12  # bytes per second of a device copy on an H100 80GB HBM3
COLD_BYTES = 128 << 20  # more than twice the L2 cache
TOKENS = (1, 32, 256, 8192)
FEW_TOKENS = (1, 8)
REPLAYS = 5


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    hidden: int
    q_heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    layers: int
    qk_norm: bool
    head_dim: int = 128


MODELS = (
    Model("Qwen3-0.6B", 1024, 16, 8, 3072, 151936, 28, True),
    Model("Llama-3.1-8B", 4096, 32, 8, 14336, 128256, 32, False),
)


@dataclass(frozen=True, slots=True)
class Case:
    kernel: str
    model: str
    tokens: int
    bytes: int
    make: Callable[[], Callable[[], object]]  # a call on inputs of its own


@dataclass(frozen=True, slots=True)
class Timing:
    kernel: str
    model: str
    tokens: int
    microseconds: float
    gigabytes_per_second: float
    copy_share: float


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def layer_cases(model: Model, tokens: int) -> Iterator[Case]:
    """Yield the kernels of one layer."""
    hidden, head_dim = model.hidden, model.head_dim
    weight = random(hidden)

    def norm() -> Callable[[], object]:
        x = random(tokens, hidden)
        return lambda: rms_norm(x, weight, 1e-6)

    def add_norm() -> Callable[[], object]:
        x, residual = random(tokens, hidden), random(tokens, hidden)
        return lambda: add_rms_norm(x, residual, weight, 1e-6)

    def activation() -> Callable[[], object]:
        gate_up = random(tokens, 2 * model.intermediate)
        return lambda: silu_mul(gate_up)

    heads = model.q_heads + 2 * model.kv_heads
    blocks = tokens // 16 + 1
    rope = torch.rand(tokens, head_dim, device="cuda")
    positions = torch.arange(tokens, device="cuda", dtype=torch.int32)
    slots = torch.randperm(blocks * 16, device="cuda")[:tokens]
    q_norm, k_norm = (random(head_dim), random(head_dim)) if model.qk_norm else (None, None)

    layer = AttentionLayer(
        model.q_heads, model.kv_heads, head_dim, head_dim**-0.5, 0, rope, q_norm, k_norm, 1e-6
    )

    def to_cache() -> Callable[[], object]:
        qkv = random(tokens, heads * head_dim)
        kv = torch.empty(blocks, 2, model.kv_heads, 16, head_dim, device="cuda", dtype=torch.bfloat16)
        return lambda: write_kv(qkv, positions, slots, layer, LayerCache(kv, BF16))

    yield Case("rms_norm", model.name, tokens, 4 * tokens * hidden, norm)
    yield Case("add_rms_norm", model.name, tokens, 8 * tokens * hidden, add_norm)
    yield Case("silu_mul", model.name, tokens, 6 * tokens * model.intermediate, activation)
    yield Case("qkv_to_cache", model.name, tokens, 4 * tokens * heads * head_dim, to_cache)


def fused_case(layer: Linear, x: Tensor) -> Product:
    """Return the case of few tokens x, whose norms and sums are part of the products' kernels."""
    return Product(gpu_of(x.device), x.dtype, len(x), layer.matrix, fused=True)


def linear_cases(model: Model, tokens: int) -> Iterator[Case]:
    """Yield linear layers of a few tokens as they are fused, each beside cuBLAS's bare product."""
    hidden, inner = model.hidden, model.intermediate
    attended = model.q_heads * model.head_dim
    norm = random(hidden)

    def norm_of(layer: Linear, x: Tensor) -> object:
        return choose(PROJECT_IN, fused_case(layer, x)).run(Hidden(x), norm, 1e-6, layer)

    def norm_silu_of(layer: Linear, x: Tensor) -> object:
        return choose(GATE, fused_case(layer, x)).run(Hidden(x), norm, 1e-6, layer)

    residual = random(tokens, hidden)

    def add(layer: Linear, x: Tensor) -> object:
        return choose(PROJECT_OUT, fused_case(layer, x)).run(residual, x, layer, norm, 1e-6)

    def product(layer: Linear, x: Tensor) -> object:
        return F.linear(x, layer.weight)

    layers: list[tuple[str, int, int, Callable[[Linear, Tensor], object]]] = [
        ("norm_linear, qkv", attended + 2 * model.kv_heads * model.head_dim, hidden, norm_of),
        ("add_linear, output", hidden, attended, add),
        ("norm_silu_linear", 2 * inner, hidden, norm_silu_of),
        ("add_linear, down", hidden, inner, add),
        ("wide_linear", model.vocabulary, hidden, lambda layer, x: wide_linear(x, layer.weight)),
    ]
    for name, outputs, columns, fused in layers:
        for kernel, function in ((name, fused), (f"cuBLAS for {name}", product)):

            def make(
                function: Callable[[Linear, Tensor], object] = function,
                outputs: int = outputs,
                columns: int = columns,
            ) -> Callable[[], object]:
                layer, x = Linear(random(outputs, columns), None), random(tokens, columns)
                return lambda: function(layer, x)

            yield Case(kernel, model.name, tokens, 2 * outputs * columns, make)


SAMPLERS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "min-p": {"temperature": 0.8, "min_p": 0.05},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-k + top-p": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
}


def step_cases(model: Model, samples: int) -> Iterator[Case]:
    """Yield sampling and block copies, once a step."""
    rows = torch.arange(samples, device="cuda", dtype=torch.int32)
    last_tokens = torch.empty_like(rows)
    for name, values in SAMPLERS.items():
        state = SamplingState.allocate(samples, "cuda")
        for field, value in values.items():
            getattr(state, field).fill_(value)

        def sampler(state: SamplingState = state) -> Callable[[], object]:
            logits = 3 * random(samples, model.vocabulary)
            return lambda: sample(logits, rows, rows, state, last_tokens)

        yield Case(f"sample, {name}", model.name, samples, 2 * samples * model.vocabulary, sampler)

    block = (model.layers, 2, model.kv_heads, 16, model.head_dim)
    pairs = torch.randperm(2 * samples, device="cuda").view(-1, 2)

    def copies() -> Callable[[], object]:
        cache = torch.zeros(2 * samples, *block, device="cuda", dtype=torch.bfloat16)
        return lambda: copy_blocks(cache, pairs)

    size = 2 * model.layers * 2 * model.kv_heads * 16 * model.head_dim
    yield Case("copy_blocks", model.name, samples, 2 * samples * size, copies)


def measure(case: Case) -> Timing:
    copies = max(2, min(64, COLD_BYTES // case.bytes))
    calls = [case.make() for _ in range(copies)]
    seconds = replay_seconds(capture(calls), rounds=1, replays=REPLAYS)[0] / copies
    rate = case.bytes / seconds
    return Timing(case.kernel, case.model, case.tokens, seconds * 1e6, rate / 1e9, rate / COPY_BANDWIDTH)


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--json", type=Path, help="also write the timings to this file")
    arguments = parse_for_cuda(parser)
    timings = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
    print(f"{'kernel':32}{'model':14}{'tokens':>7}{'µs':>9}{'GB/s':>8}{'of copy':>9}")
    for model in MODELS:
        cases = [case for tokens in TOKENS for case in layer_cases(model, tokens)]
        cases += [case for samples in TOKENS[:3] for case in step_cases(model, samples)]
        cases += [case for tokens in FEW_TOKENS for case in linear_cases(model, tokens)]
        for case in sorted(cases, key=lambda case: case.kernel):
            timing = measure(case)
            timings.append(timing)
            print(
                f"{timing.kernel:32}{timing.model:14}{timing.tokens:7}{timing.microseconds:9.1f}"
                f"{timing.gigabytes_per_second:8.0f}{timing.copy_share:9.0%}",
                flush=True,
            )
    timed = {"timings": [asdict(timing) for timing in timings]}
    write_json(arguments.json, torch.cuda.get_device_name(), timed)


if __name__ == "__main__":
    main()
