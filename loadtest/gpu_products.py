"""Times a layer without its attention, at many tokens: `python -m quire.loadtest.gpu_products [--json PATH]`.

Needs a CUDA device. Products, norms, activation and residual sums as quire.kernels.plan chooses them,
and with cuBLAS's products alone, in turn in CUDA graphs. Layers have weights of their own, as in a step. The
bound is the products' arithmetic at the rate of a large product, measured in the same process: it depends on
the GPU's power.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.engine.models.config import ModelConfig
from quire.engine.models.native_config import read_native
from quire.kernels.gpu import gpu_of
from quire.kernels.linear.linear import Linear
from quire.kernels.linear.operations import Hidden
from quire.kernels.linear.recipes import GATE, PROJECT_IN, PROJECT_OUT, Product
from quire.kernels.pointwise.activation import silu_mul
from quire.kernels.pointwise.norm import add_rms_norm
from quire.kernels.recipes import choose
from quire.loadtest.command import command_parser, parse_for_cuda, write_json
from quire.loadtest.gpu_layer import MODELS, graph_seconds
from quire.loadtest.model_configs import write_model_folders
from quire.loadtest.offline.roofline import measure_ceilings

TOKENS = (264, 528, 1056, 2112, 3168, 4224, 6336, 8448)
LAYERS, ROUNDS, EPS = 4, 3, 1e-6


@dataclass(frozen=True, slots=True)
class Layer:
    """The matrices between one attention and the next, and a norm."""

    output: Linear
    gate_up: Linear
    down: Linear
    qkv: Linear
    norm: Tensor


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds are a layer's."""

    model: str
    tokens: int
    microseconds: float
    cublas_microseconds: float
    bound_microseconds: float


def random_layer(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Layer:
    """Draw weights [N, K] of a layer of the model, such that products are about as large as their inputs."""

    def product(outputs: int, inputs: int) -> Linear:
        return Linear(torch.randn(outputs, inputs, device=device, dtype=dtype) / math.sqrt(inputs), None)

    heads = config.num_heads + 2 * config.num_kv_heads
    return Layer(
        output=product(config.hidden_size, config.num_heads * config.head_dim),
        gate_up=product(2 * config.intermediate_size, config.hidden_size),
        down=product(config.hidden_size, config.intermediate_size),
        qkv=product(heads * config.head_dim, config.hidden_size),
        norm=torch.ones(config.hidden_size, device=device, dtype=dtype),
    )


def run_fused(layer: Layer, attended: Tensor, residual: Tensor) -> Tensor:
    """Run a layer's products as models do it, [T, Hq D] → [T, (Hq + 2 Hkv) D]; add to `residual` [T, H]."""

    def case(product: Linear) -> Product:
        return Product(gpu_of(residual.device), residual.dtype, len(residual), product.matrix)

    project_out, gate, down, project_in = (
        choose(PROJECT_OUT, case(layer.output)).run,
        choose(GATE, case(layer.gate_up)).run,
        choose(PROJECT_OUT, case(layer.down)).run,
        choose(PROJECT_IN, case(layer.qkv)).run,
    )
    hidden: Hidden = project_out(residual, attended, layer.output, layer.norm, EPS)
    inner = gate(hidden, layer.norm, EPS, layer.gate_up)
    hidden = down(hidden.residual, inner, layer.down, layer.norm, EPS)
    return project_in(hidden, layer.norm, EPS, layer.qkv)


def run_cublas(layer: Layer, attended: Tensor, residual: Tensor) -> Tensor:
    """Run the same with products by cuBLAS."""
    x, residual = add_rms_norm(layer.output(attended), residual, layer.norm, EPS)
    x, residual = add_rms_norm(layer.down(silu_mul(layer.gate_up(x))), residual, layer.norm, EPS)
    return layer.qkv(x)


def measure(name: str, config: ModelConfig, tokens: int, layers: list[Layer], flops: float) -> Timing:
    """Time both ways in turn, the best of a few rounds each; the bound is for `flops` FLOP/s."""

    def microseconds(run: Callable[[Layer, Tensor, Tensor], Tensor]) -> float:
        residual = torch.randn(tokens, config.hidden_size, device="cuda", dtype=torch.bfloat16)
        attended = torch.randn(
            tokens, config.num_heads * config.head_dim, device="cuda", dtype=torch.bfloat16
        )
        seconds = graph_seconds(lambda: [run(layer, attended, residual) for layer in layers])
        return 1e6 * seconds / len(layers)

    rounds = [(microseconds(run_fused), microseconds(run_cublas)) for _ in range(ROUNDS)]
    ours, cublas = (min(times) for times in zip(*rounds, strict=True))
    return Timing(name, tokens, ours, cublas, 2e6 * config.layer_weights * tokens / flops)


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--json", type=Path, help="also write the timings to this file")
    arguments = parse_for_cuda(parser)
    flops = measure_ceilings(torch.device("cuda"), torch.bfloat16).flops
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {flops / 1e12:.0f} TFLOP/s")
    print(f"{'model':12}{'tokens':>8}{'µs a layer':>12}{'cuBLAS':>10}{'bound':>10}{'reached':>9}")
    timings = []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        write_model_folders(Path(folder))
        for name in MODELS:
            config = read_native(Path(folder, name))
            layers = [random_layer(config, torch.device("cuda"), torch.bfloat16) for _ in range(LAYERS)]
            for tokens in TOKENS:
                timing = measure(name, config, tokens, layers, flops)
                timings.append(timing)
                reached = timing.bound_microseconds / timing.microseconds
                print(
                    f"{name:12}{tokens:8}{timing.microseconds:12.1f}{timing.cublas_microseconds:10.1f}"
                    f"{timing.bound_microseconds:10.1f}{reached:9.0%}",
                    flush=True,
                )
            del layers
    timed = {"flops": flops, "timings": [asdict(timing) for timing in timings]}
    write_json(arguments.json, torch.cuda.get_device_name(), timed)


if __name__ == "__main__":
    main()
