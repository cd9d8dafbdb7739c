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
from quire.kernels.quantised import recipes as quantised
from quire.kernels.recipes import Chosen, choose
from quire.kernels.shapes import LayerShape, StepShape
from quire.kernels.tuning import Tuning, streams, tuning_of


def most_fused_tokens(gpu: Gpu, layer: LayerShape, tuning: Tuning | None = None) -> int:
    """Return up to how many tokens the layer is quicker with norms and sums in the products' kernels.

    tuning: here and below, None: the GPU's.
    """
    if not layer.gated or not gpu.has_kernels:
        return 0
    matrices = ((layer.qkv, False), (layer.output, False), (layer.up, True), (layer.down, False))
    if any(matrix is not None and matrix.format != "dense" for matrix, _ in matrices):
        return quantised.most_fused_tokens(gpu, layer.dtype)
    fit = all(
        matrix is None or skinny.supports(gpu, layer.dtype, 1, matrix, gated=gated)
        for matrix, gated in matrices
    )
    tuning = tuning or tuning_of(gpu)
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
    gpu: Gpu, layer: LayerShape, held: KVFormat, step: StepShape, tuning: Tuning | None = None
) -> Chosen[Attend]:
    """Return how a layer attends in a step, with its cache held in a format."""
    tuning = tuning or tuning_of(gpu)
    # By a weight in few bits nothing merges what splits of attention leave.
    fused = step.tokens <= most_fused_tokens(gpu, layer, tuning) and layer.output.format == "dense"
    table = LATENT if layer.cache.latent else ATTEND
    return choose(table, Attending(gpu, layer, held, step, tuning, fused))


@lru_cache(maxsize=4096)
def plan_layer(
    gpu: Gpu, layer: LayerShape, held: KVFormat, step: StepShape, tuning: Tuning | None = None
) -> LayerOps:
    """Return what computes a gated layer in a step, with its cache held in a format."""
    tuning = tuning or tuning_of(gpu)
    attending = plan_attention(gpu, layer, held, step, tuning)
    fused = step.tokens <= most_fused_tokens(gpu, layer, tuning)
    whole = all(each is None or each.share == "whole" for each in (layer.output, layer.down))
    streamed = whole and streams(tuning.streamed, step.tokens, layer.qkv.inputs)

    def product(tokens: int, weight: Matrix, *, unmerged: bool = False) -> Product:
        return Product(gpu, layer.dtype, tokens, weight, tuning, fused, unmerged, streamed)

    wanted, unmerged = step.wanted, attending.name == UNMERGED
    return LayerOps(
        project_in=_choose_in(product(step.tokens, layer.qkv), gated=False),
        attend=attending,
        project_out=_choose_out(product(wanted, layer.output, unmerged=unmerged)),
        gate=None if layer.up is None else _choose_in(product(wanted, layer.up), gated=True),
        down=None if layer.down is None else _choose_out(product(wanted, layer.down)),
    )


def _choose_in(case: Product, *, gated: bool) -> Chosen[ProjectIn]:
    if case.weight.format == "dense":
        return choose(GATE if gated else PROJECT_IN, case)
    return choose(quantised.QUANTISED_GATE if gated else quantised.QUANTISED_IN, case)


def _choose_out(case: Product) -> Chosen[ProjectOut]:
    whole = case.weight.share == "whole"
    if case.weight.format == "dense":
        return choose(PROJECT_OUT if whole else PROJECT_OUT_OF_RANKS, case)
    return choose(quantised.QUANTISED_OUT if whole else quantised.QUANTISED_OUT_OF_RANKS, case)
