"""Times the fused kernels at serving shapes on a CUDA device.

`python -m quire.loadtest.gpu_kernels [--json PATH]`

Each kernel is captured in a CUDA graph over copies of its input that together do not fit the L2 cache, as in
a step, where weights and KV cache pass through it between two calls. Its bytes are those that must be read
or written, once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention.write_kv import qkv_to_cache
from quire.kernels.linear.fused import add_linear, norm_linear, norm_silu_linear
from quire.kernels.linear.linear import wide_linear
from quire.kernels.pointwise.activation import silu_mul
from quire.kernels.pointwise.block_copy import copy_blocks
from quire.kernels.pointwise.norm import add_rms_norm, rms_norm
from quire.kernels.sampling.sample import sample
from quire.kernels.sampling.state import SamplingState
from quire.loadtest.provenance import Provenance

COPY_BANDWIDTH = 3.03e12  # bytes per second of a device copy on an H100 80GB HBM3
COLD_BYTES = 128 << 20  # more than twice the L2 cache
TOKENS = (1, 32, 256, 8192)
FEW_TOKENS = (1, 8, 16)


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
    """The kernels of one layer."""
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

    def to_cache() -> Callable[[], object]:
        qkv = random(tokens, heads * head_dim)
        kv = torch.empty(blocks, 2, model.kv_heads, 16, head_dim, device="cuda", dtype=torch.bfloat16)
        return lambda: qkv_to_cache(qkv, positions, slots, kv, model.q_heads, rope, q_norm, k_norm, 1e-6)

    yield Case("rms_norm", model.name, tokens, 4 * tokens * hidden, norm)
    yield Case("add_rms_norm", model.name, tokens, 8 * tokens * hidden, add_norm)
    yield Case("silu_mul", model.name, tokens, 6 * tokens * model.intermediate, activation)
    yield Case("qkv_to_cache", model.name, tokens, 4 * tokens * heads * head_dim, to_cache)


def linear_cases(model: Model, tokens: int) -> Iterator[Case]:
    """The linear layers of a few tokens as they are fused, each beside cuBLAS's bare product."""
    hidden, inner = model.hidden, model.intermediate
    attended = model.q_heads * model.head_dim
    norm = random(hidden)

    def norm_of(weight: Tensor, x: Tensor) -> object:
        return norm_linear(x, norm, 1e-6, weight, None)

    def norm_silu_of(weight: Tensor, x: Tensor) -> object:
        return norm_silu_linear(x, norm, 1e-6, weight, None)

    def add_to(residual: Tensor) -> Callable[[Tensor, Tensor], object]:
        return lambda weight, x: add_linear(residual, x, weight, None)

    def product(weight: Tensor, x: Tensor) -> object:
        return F.linear(x, weight)

    add = add_to(random(tokens, hidden))
    layers: list[tuple[str, int, int, Callable[[Tensor, Tensor], object]]] = [
        ("norm_linear, qkv", attended + 2 * model.kv_heads * model.head_dim, hidden, norm_of),
        ("add_linear, output", hidden, attended, add),
        ("norm_silu_linear", 2 * inner, hidden, norm_silu_of),
        ("add_linear, down", hidden, inner, add),
        ("wide_linear", model.vocabulary, hidden, lambda weight, x: wide_linear(x, weight)),
    ]
    for name, outputs, columns, fused in layers:
        for kernel, function in ((name, fused), (f"cuBLAS for {name}", product)):

            def make(
                function: Callable[[Tensor, Tensor], object] = function,
                outputs: int = outputs,
                columns: int = columns,
            ) -> Callable[[], object]:
                weight, x = random(outputs, columns), random(tokens, columns)
                return lambda: function(weight, x)

            yield Case(kernel, model.name, tokens, 2 * outputs * columns, make)


SAMPLERS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "min-p": {"temperature": 0.8, "min_p": 0.05},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-k + top-p": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
}


def step_cases(model: Model, samples: int) -> Iterator[Case]:
    """Sampling and block copies, once a step."""
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
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    replays = 5
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    seconds = start.elapsed_time(end) / 1e3 / (replays * copies)
    rate = case.bytes / seconds
    return Timing(case.kernel, case.model, case.tokens, seconds * 1e6, rate / 1e9, rate / COPY_BANDWIDTH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="also write the timings to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures GPU kernels, and torch sees no CUDA device")

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
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            head = {"device": torch.cuda.get_device_name(), **asdict(Provenance.here())}
            json.dump({**head, "timings": [asdict(timing) for timing in timings]}, file, indent=1)


if __name__ == "__main__":
    main()
