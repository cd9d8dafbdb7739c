"""The choice of kernels for a decoder layer: the first recipe that is right and quick wins.

A layer is five operations: project in, attend, project out, gate, and project out again (down). `plan_layer`
is a pure function of descriptions, so that it can be asked about any GPU anywhere: see `quire doctor --plan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from quire.kernels.attention.attend import Attend
from quire.kernels.attention.recipes import ATTEND, LATENT, UNMERGED, Attending
from quire.kernels.formats.kv_format import KVFormat
from quire.kernels.gpu import Gpu
from quire.kernels.linear import skinny
from quire.kernels.linear.linear import Matrix
from quire.kernels.linear.operations import ProjectIn, ProjectOut
from quire.kernels.linear.recipes import GATE, PROJECT_IN, PROJECT_OUT, PROJECT_OUT_OF_RANKS, Product
from quire.kernels.recipes import Chosen, choose
from quire.kernels.shapes import LayerShape, StepShape
from quire.kernels.tuning import H100, Tuning


def most_fused_tokens(gpu: Gpu, layer: LayerShape, tuning: Tuning = H100) -> int:
    """Return up to how many tokens the layer is quicker with norms and sums in the products' kernels."""
    if not layer.gated or not gpu.has_kernels:
        return 0
    matrices = ((layer.qkv, False), (layer.output, False), (layer.up, True), (layer.down, False))
    fit = all(
        matrix is None or skinny.supports(gpu, layer.dtype, 1, matrix, gated=gated)
        for matrix, gated in matrices
    )
    return skinny.most_tokens(gpu, layer.dtype, layer.qkv.inputs, tuning) if fit else 1


@dataclass(frozen=True, slots=True)
class LayerOps:
    """The five operations of a layer in a step; gate and down are None where an MLP computes itself."""

    project_in: Chosen[ProjectIn]
    attend: Chosen[Attend]
    project_out: Chosen[ProjectOut]
    gate: Chosen[ProjectIn] | None
    down: Chosen[ProjectOut] | None


@lru_cache(maxsize=4096)  # steps without a graph have any number of tokens
def plan_attention(
    gpu: Gpu, layer: LayerShape, held: KVFormat, step: StepShape, tuning: Tuning = H100
) -> Chosen[Attend]:
    """Return how a layer attends in a step, with its cache held in a format."""
    fused = step.tokens <= most_fused_tokens(gpu, layer, tuning)
    table = LATENT if layer.cache.latent else ATTEND
    return choose(table, Attending(gpu, layer, held, step, tuning, fused))


@lru_cache(maxsize=4096)
def plan_layer(
    gpu: Gpu, layer: LayerShape, held: KVFormat, step: StepShape, tuning: Tuning = H100
) -> LayerOps:
    """Return what computes a gated layer in a step, with its cache held in a format."""
    attending = plan_attention(gpu, layer, held, step, tuning)
    fused = step.tokens <= most_fused_tokens(gpu, layer, tuning)

    def product(tokens: int, weight: Matrix, *, unmerged: bool = False) -> Product:
        return Product(gpu, layer.dtype, tokens, weight, tuning, fused, unmerged)

    wanted = step.wanted
    project_out = PROJECT_OUT if layer.output.share == "whole" else PROJECT_OUT_OF_RANKS
    return LayerOps(
        project_in=choose(PROJECT_IN, product(step.tokens, layer.qkv)),
        attend=attending,
        project_out=choose(project_out, product(wanted, layer.output, unmerged=attending.name == UNMERGED)),
        gate=None if layer.up is None else choose(GATE, product(wanted, layer.up)),
        down=None if layer.down is None else choose(project_out, product(wanted, layer.down)),
    )
