"""Which kernels are chosen on six GPUs, none of which needs to be there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpus import GPUS

from quire.engine.models.decoder import Decoder
from quire.engine.models.layers import layer_shape
from quire.engine.models.loader import build_model
from quire.engine.models.native_config import read_native
from quire.engine.models.pre_norm import PreNormLayer
from quire.engine.models.weights import Weights
from quire.kernels.attention.decode import DecodeKernel
from quire.kernels.attention.hopper_decode import decode as hopper_decode
from quire.kernels.attention.prefill import PrefillKernel
from quire.kernels.attention.recipes import ATTEND, UNMERGED
from quire.kernels.backend import torch_backend
from quire.kernels.formats.cache_spec import CacheSpec
from quire.kernels.formats.kv_format import BF16, FP8, FP12, FP16, FP32, KVFormat
from quire.kernels.gpu import NO_GPU, Gpu
from quire.kernels.linear.alone import plan_add_normed_linear, plan_gated_linear, plan_linear
from quire.kernels.linear.linear import Matrix
from quire.kernels.linear.recipes import GATE, PROJECT_IN, PROJECT_OUT
from quire.kernels.linear.skinny import linear_of_few
from quire.kernels.plan import LayerOps, plan_attention, plan_layer
from quire.kernels.shapes import LayerShape, StepShape
from tests.models.tiny_models import MODELS


def gated(hidden: int, heads: int, kv_heads: int, inner: int, **changes: Any) -> LayerShape:
    """A layer with heads of 128 in bf16."""
    shape = LayerShape(
        torch.bfloat16, heads, CacheSpec(kv_heads, 128), Matrix((heads + 2 * kv_heads) * 128, hidden),
        Matrix(hidden, heads * 128), Matrix(2 * inner, hidden), Matrix(hidden, inner), gated=True,
    )  # fmt: skip
    return replace(shape, **changes)


QWEN3 = gated(1024, 16, 8, 3072)  # Qwen3-0.6B
LLAMA = gated(4096, 32, 8, 14336)  # Llama-3.1-8B


def decodes(rows: int, *, shared: bool = False) -> StepShape:
    return StepShape(rows, rows, None, 0, None, shared, 16, 4096)


def mixed(tokens: int, rows: int = 0, chunks: int = 1, newest: int | None = None) -> StepShape:
    return StepShape(tokens, rows, chunks, tokens - rows, newest, False, 16, 4096)


def names(ops: LayerOps) -> list[str]:
    return [ops.project_in.name, ops.attend.name, ops.project_out.name, ops.gate.name, ops.down.name]


def made(ops: LayerOps) -> dict[str, Any]:
    keywords: dict[str, Any] = getattr(ops.attend.run, "keywords", {})
    return keywords


each_gpu = pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
hopper = GPUS[90]


@each_gpu
def test_one_token_is_five_kernels_of_which_the_output_projection_merges(gpu: Gpu) -> None:
    ops = plan_layer(gpu, QWEN3, BF16, decodes(1))
    assert names(ops) == [
        "norm and skinny product (linear.skinny)",
        UNMERGED,
        "merging product and sum (linear.split_output)",
        "norm, skinny product and silu (linear.skinny)",
        "skinny product and sum (linear.skinny)",
    ]
    by = DecodeKernel.HOPPER_SMALL if gpu.has_dependent_launch else DecodeKernel.SPLIT_SMALL
    assert made(ops) == {"decode_by": by, "splits": 32}


def test_few_rows_are_split_in_little_shared_memory() -> None:
    """Where norms are fused or heads are small, until 256 programs fill the device, 512 of heads of 64."""
    small_heads = gated(2048, 32, 8, 8192, cache=CacheSpec(8, 64), output=Matrix(2048, 2048))
    for layer, counts in (
        (QWEN3, {2: 16, 4: 8, 8: 4}),
        (small_heads, {1: 32, 2: 16, 4: 16, 8: 8, 16: 4, 32: 2}),
    ):
        for tokens, splits in counts.items():
            chosen = made(plan_layer(hopper, layer, BF16, decodes(tokens)))
            assert chosen == {"decode_by": DecodeKernel.HOPPER_SMALL, "splits": splits}
    assert made(plan_layer(hopper, QWEN3, BF16, decodes(16))) == {"decode_by": DecodeKernel.HOPPER}
    few_heads = gated(896, 14, 2, 4864, cache=CacheSpec(2, 64), output=Matrix(896, 896))  # Qwen2.5-0.5B
    for tokens, splits in ((4, 32), (16, 16), (33, 7), (64, 4)):
        assert made(plan_layer(hopper, few_heads, BF16, decodes(tokens)))["splits"] == splits
    half_idle = gated(8192, 8, 1, 3584)  # a rank's of Llama-70B of eight
    assert made(plan_layer(hopper, half_idle, BF16, decodes(1)))["splits"] == 64
    wide = gated(4096, 64, 8, 14336, cache=CacheSpec(8, 64), output=Matrix(4096, 4096))
    assert made(plan_layer(GPUS[80], wide, BF16, decodes(4))) == {"decode_by": DecodeKernel.SPLIT}
    capped = replace(QWEN3, plain=False)
    assert made(plan_layer(hopper, capped, BF16, decodes(4)))["decode_by"] is DecodeKernel.SPLIT_SMALL


@each_gpu
def test_windows_decide_into_how_many_splits_a_row_is_divided(gpu: Gpu) -> None:
    """Heads of 256, one of keys, as Gemma 3 1B has them."""
    output = Matrix(1152, 1024)
    full = gated(1152, 4, 1, 6912, cache=CacheSpec(1, 256), output=output, up=None, down=None)
    for window, splits in ((0, 32), (512, 9), (1024, 17)):
        layer = replace(full, cache=CacheSpec(1, 256, window))
        attending = plan_attention(gpu, layer, BF16, decodes(1))
        assert attending.name == UNMERGED
        assert attending.run.keywords["splits"] == splits  # type: ignore[attr-defined]


@each_gpu
def test_one_token_of_a_wide_layer_is_multiplied_by_vectors(gpu: Gpu) -> None:
    held = "hopper_gemv" if gpu.has_warpgroup_products else "gemv"
    ops = plan_layer(gpu, LLAMA, BF16, decodes(1))
    assert names(ops) == [
        "norm and product of one token (linear.gemv)",
        "K, V and attention in one kernel in many splits, merged",
        f"product of one token and sum (linear.{held})",
        f"norm, product of one token and silu (linear.{held})",
        "product of one token and sum (linear.gemv)",
    ]


def test_one_token_of_a_middling_layer_is_multiplied_from_shared_memory_where_it_holds_the_weight() -> None:
    """Like Qwen3-1.7B's, whose gate and down projection are too large, and like Qwen2.5-1.5B's."""
    held = "product of one token (linear.hopper_gemv)", "product of one token and sum (linear.hopper_gemv)"
    gate = "norm, product of one token and silu (linear.{})"
    for layer, gate_by in (
        (gated(2048, 16, 8, 6144, output=Matrix(2048, 2048)), "gemv"),
        (gated(1536, 12, 2, 8960, output=Matrix(1536, 1536)), "hopper_gemv"),
    ):
        into, _, out, up, down = names(plan_layer(hopper, layer, BF16, decodes(1)))
        assert (into, out) == (f"norm and {held[0]}", held[1])
        assert (up, down) == (gate.format(gate_by), "product of one token and sum (linear.gemv)")
        assert "hopper_gemv" not in " ".join(names(plan_layer(GPUS[80], layer, BF16, decodes(1))))
        assert "hopper_gemv" not in " ".join(names(plan_layer(hopper, layer, BF16, decodes(2))))


@each_gpu
def test_few_tokens_are_fused_in_narrow_layers_only(gpu: Gpu) -> None:
    streams = gpu.has_warpgroup_products
    most = 8 if streams else 16
    for tokens in (2, most):
        narrow, wide = (plan_layer(gpu, layer, BF16, decodes(tokens)) for layer in (QWEN3, LLAMA))
        assert narrow.project_in.name == "norm and skinny product (linear.skinny)"
        assert narrow.project_in.run.keywords["by"] is linear_of_few  # type: ignore[attr-defined]
        assert "skinny" not in " ".join(names(wide)) and "gemv" not in " ".join(names(wide))
    assert "skinny" not in " ".join(names(plan_layer(gpu, QWEN3, BF16, decodes(most + 1))))
    between = gated(2048, 16, 8, 6144)  # Qwen3-1.7B
    assert ("skinny" in " ".join(names(plan_layer(gpu, between, BF16, decodes(2))))) != streams


@each_gpu
def test_products_of_many_tokens_are_ours_on_hopper(gpu: Gpu) -> None:
    few, many = plan_layer(gpu, LLAMA, BF16, decodes(64)), plan_layer(gpu, LLAMA, BF16, mixed(8448))
    if gpu is hopper:
        assert "hopper_stream" in few.project_in.name and "hopper_stream" in few.down.name
        assert all("hopper_matmul" in op.name for op in (many.project_in, many.gate, many.down))
    else:
        assert [few.project_in.name, few.gate.name, few.down.name] == [
            "cuBLAS", "cuBLAS, then silu", "cuBLAS, then sum and norm"
        ]  # fmt: skip
        assert few.down.name == many.down.name


def test_where_memory_is_quicker_a_few_layers_ask_for_weights_ahead_though_tokens_are_few() -> None:
    """One token of 2,048 columns, and eight of 1,024; what attends stays as it is, and so do other layers."""
    quick = replace(hopper, name="H200", memory=141 * 10**9)
    small = gated(2048, 16, 4, 8192)
    for layer, tokens in ((small, 1), (QWEN3, 8)):
        there, elsewhere = (plan_layer(gpu, layer, BF16, decodes(tokens)) for gpu in (quick, hopper))
        ahead, fused = (
            [op.name for op in (ops.project_in, ops.gate, ops.project_out, ops.down)]
            for ops in (there, elsewhere)
        )
        assert all("hopper_stream" in name for name in ahead)
        assert not any("hopper_stream" in name for name in fused)
        assert there.attend.name == elsewhere.attend.name
    others = [(QWEN3, 1), (QWEN3, 4), (gated(2560, 32, 8, 9728), 1), (LLAMA, 1)]
    others += [(replace(small, output=Matrix(2048, 1024, share="inputs")), 1)]
    others += [(replace(small, down=Matrix(2048, 4096, share="inputs")), 1)]
    for layer, tokens in others:
        there, elsewhere = (names(plan_layer(gpu, layer, BF16, decodes(tokens))) for gpu in (quick, hopper))
        assert there == elsewhere
    odd = replace(small, up=Matrix(2 * 8200, 2048), down=Matrix(2048, 8200))  # no whole tiles, or chunks
    ops = plan_layer(quick, odd, BF16, decodes(1))
    assert "linear.gemv" in ops.gate.name and "linear.gemv" in ops.down.name


def test_so_do_products_alone_of_one_token() -> None:
    """Into branches of LFM2-1.2B and Qwen3.5-4B, and out of those of the first; no small ones as routers."""
    quick = replace(hopper, name="H200", memory=141 * 10**9)

    def streamed(plan: Callable[..., Any], outputs: int, inputs: int, tokens: int = 1) -> list[bool]:
        weight = Matrix(outputs, inputs)
        chosen = [plan(gpu, torch.bfloat16, tokens, weight).name for gpu in (quick, hopper)]
        return ["hopper_stream" in name for name in chosen]

    for plan, outputs, inputs in (
        (plan_linear, 6144, 2048),
        (plan_gated_linear, 16384, 2048),
        (plan_add_normed_linear, 2048, 2048),
        (plan_add_normed_linear, 2048, 8192),
        (plan_linear, 12544, 2560),
        (plan_gated_linear, 18432, 2560),
    ):
        assert streamed(plan, outputs, inputs) == [True, False]
    for plan, outputs, inputs in (
        (plan_linear, 128, 2048),
        (plan_linear, 4608, 3072),
        (plan_add_normed_linear, 2560, 4096),
        (plan_add_normed_linear, 2048, 512),
        (plan_add_normed_linear, 1152, 6912),
    ):
        assert streamed(plan, outputs, inputs) == [False, False]


def test_half_a_models_long_sums_are_divided_among_programs() -> None:
    """A rank of two has half of the inputs, but all outputs, of which few tokens make too few programs."""
    output, down = Matrix(4096, 2048, share="inputs"), Matrix(4096, 7168, share="inputs")
    half = gated(4096, 16, 4, 7168, output=output, down=down)
    for tokens in (2, 8, 64):
        ops = plan_layer(hopper, half, BF16, decodes(tokens))
        assert "in parts" in ops.down.name and "over ranks" in ops.down.name
        assert ("in parts" in ops.project_out.name) == (tokens < 64)
        assert "hopper_stream" in ops.project_out.name and "hopper_stream" in ops.project_in.name
    assert "cuBLAS" in plan_layer(hopper, half, BF16, decodes(65)).down.name
    output, down = Matrix(5120, 2560, share="inputs"), Matrix(5120, 8704, share="inputs")
    half = gated(5120, 20, 4, 8704, output=output, down=down)  # whole sums are 160 programs
    for tokens in (8, 64):
        assert "in parts" in plan_layer(hopper, half, BF16, decodes(tokens)).project_out.name
    quarter = gated(5120, 10, 2, 4352, output=Matrix(5120, 1280, share="inputs"), down=down)
    for tokens in (8, 32, 48):  # more tokens' parts are too much beside a weight that is so short
        named = plan_layer(hopper, quarter, BF16, decodes(tokens)).project_out.name
        assert ("in parts" in named) == (tokens < 48)


@each_gpu
@pytest.mark.parametrize("held", [BF16, FP12, FP8], ids=lambda held: held.name)
def test_who_decodes(gpu: Gpu, held: KVFormat) -> None:
    by = made(plan_layer(gpu, LLAMA, held, decodes(256)))["decode_by"]
    assert by is (DecodeKernel.HOPPER if gpu.has_dependent_launch and held is not FP8 else DecodeKernel.SPLIT)
    rows_at_once = plan_layer(gpu, LLAMA, held, decodes(32)).attend.name
    assert ("in one kernel" in rows_at_once) == held.written_by_decode
    assert "in one kernel" not in plan_layer(gpu, LLAMA, held, decodes(64)).attend.name
    assert "in one kernel" not in plan_layer(gpu, LLAMA, held, decodes(32, shared=True)).attend.name


@pytest.mark.parametrize("held", [BF16, FP12], ids=lambda held: held.name)
@pytest.mark.parametrize(("heads", "by"), [(12, "HOPPER"), (16, "HOPPER"), (32, "HOPPER"), (33, "SPLIT")])
def test_hopper_decodes_groups_of_up_to_32(heads: int, by: str, held: KVFormat) -> None:
    layer = replace(LLAMA, num_heads=heads, cache=CacheSpec(1, 128))
    assert made(plan_layer(hopper, layer, held, decodes(512)))["decode_by"] is DecodeKernel[by]


@pytest.mark.parametrize(
    ("head_dim", "by"),
    [
        (32, "SPLIT"),
        (40, "HOPPER"),
        (64, "HOPPER"),
        (68, "SPLIT"),
        (72, "HOPPER"),
        (96, "HOPPER"),
        (136, "HOPPER"),
        (256, "HOPPER"),
        (264, "SPLIT"),
    ],
)
def test_hopper_decodes_heads_that_are_copied_in_whole_pieces(head_dim: int, by: str) -> None:
    """Up to 64 they are as small as those of 64, above as large as those of 128, then as those of 256."""
    layer = gated(4096, 32, 8, 14336, cache=CacheSpec(8, head_dim), output=Matrix(4096, 32 * head_dim))
    assert made(plan_layer(hopper, layer, BF16, decodes(512)))["decode_by"] is DecodeKernel[by]
    few = made(plan_layer(hopper, layer, BF16, decodes(4)))
    if by == "HOPPER":
        small = {"decode_by": DecodeKernel.HOPPER_SMALL, "splits": 16}
        assert few == (small if head_dim <= 64 else {"decode_by": DecodeKernel.HOPPER})
    ungrouped = gated(4096, 24, 24, 14336, cache=CacheSpec(24, head_dim), output=Matrix(4096, 24 * head_dim))
    one = made(plan_layer(hopper, ungrouped, BF16, decodes(1)))
    if by == "HOPPER":
        assert one["splits"] == (16 if head_dim <= 64 else 10 if head_dim <= 128 else 5)
        small = DecodeKernel.HOPPER_SMALL if head_dim <= 128 else DecodeKernel.HOPPER
        assert one["decode_by"] is small


@each_gpu
def test_programs_of_large_heads_have_the_stages_that_fit(gpu: Gpu) -> None:
    """A multiprocessor to themselves: two, if they have room. As many as the device holds have one."""
    two_fit = gpu.shared_memory >= 2 * (64 + 64) * 256 * 2 + 16 * 256 * 2  # keys, values and queries
    for programs, stages in ((1, 2), (128, 2), (129, 1), (512, 1)):
        wanted = stages if two_fit else 1
        assert hopper_decode.stages_of(gpu, 256, programs, small=False) == wanted
        assert hopper_decode.stages_of(gpu, 128, programs, small=False) == 2
        assert hopper_decode.stages_of(gpu, 128, programs, small=True) == 1


@each_gpu
@pytest.mark.parametrize("held", [BF16, FP12, FP8], ids=lambda held: held.name)
def test_who_attends_from_chunks(gpu: Gpu, held: KVFormat) -> None:
    def prefill_by(layer: LayerShape, step: StepShape) -> PrefillKernel:
        by: PrefillKernel = made(plan_layer(gpu, layer, held, step))["prefill_by"]
        return by

    ours = gpu is hopper and held is not FP8
    assert prefill_by(LLAMA, mixed(512)) is (PrefillKernel.HOPPER if ours else PrefillKernel.TRITON)
    assert prefill_by(LLAMA, mixed(16)) is PrefillKernel.TRITON  # no more queries than one narrow tile
    seven, six = (replace(LLAMA, num_heads=heads, cache=CacheSpec(1, 128)) for heads in (7, 6))
    assert prefill_by(seven, mixed(512)) is (PrefillKernel.HOPPER if ours else PrefillKernel.TRITON)
    quick = gpu is hopper and held is FP12  # which need not be made anew, whereas a quarter of lanes is idle
    assert prefill_by(six, mixed(512)) is (PrefillKernel.HOPPER if quick else PrefillKernel.TRITON)
    windowed = replace(LLAMA, cache=CacheSpec(8, 128, window=1024))
    assert prefill_by(windowed, mixed(512)) is PrefillKernel.TRITON


@each_gpu
def test_the_last_layer_computes_newest_tokens_only(gpu: Gpu) -> None:
    ops = plan_layer(gpu, QWEN3, BF16, mixed(512, rows=2, newest=3))
    assert ops.attend.name == "K and V, then attention of newest tokens"
    # Three tokens, of a step of too many to be fused.
    assert "skinny" not in " ".join(names(ops))
    assert ops.project_in == plan_layer(gpu, QWEN3, BF16, mixed(512, rows=2)).project_in or gpu is hopper


@pytest.mark.parametrize("held", [FP32, FP16, BF16, FP8, FP12], ids=lambda held: held.name)
@pytest.mark.parametrize("step", [decodes(1), decodes(40), mixed(300, newest=2)], ids=str)
def test_torch_computes_everything_without_a_gpu(held: KVFormat, step: StepShape) -> None:
    assert {name.split(",")[0] for name in names(plan_layer(NO_GPU, QWEN3, held, step))} == {"torch"}


def test_the_last_recipe_of_each_table_takes_anything() -> None:
    for table in (PROJECT_IN, ATTEND, PROJECT_OUT, GATE):
        last: Any = table[-1]
        assert last.name == "torch" and last.supports(None) and last.prefers(None)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_layers_that_the_choice_is_told_of(
    name: str, model_folder: Callable[[str], Path]
) -> None:
    config = read_native(model_folder(name))
    model = build_model(config, torch_backend(), Weights(torch.device("meta"), torch.bfloat16), 16)
    for number, layer in enumerate(model.layers):
        shape = layer_shape(config, number, torch.bfloat16)
        mlp = layer.mlp.matrices if isinstance(layer, PreNormLayer) else (layer.up.matrix, layer.down.matrix)
        matrices = [layer.qkv.matrix, layer.output.matrix, *mlp]
        assert matrices == [shape.qkv, shape.output, shape.up, shape.down]
        assert shape.gated == isinstance(model, Decoder)
        assert shape.cache.window == layer.attention.window


def test_a_choice_is_made_once() -> None:
    """And is looked up the next time: a step without a graph asks for it, for each kind of layer."""
    first = plan_layer(hopper, LLAMA, BF16, mixed(777))
    chosen = plan_layer.cache_info().misses
    assert plan_layer(hopper, replace(LLAMA), BF16, mixed(777)) is first
    assert plan_layer.cache_info().misses == chosen
