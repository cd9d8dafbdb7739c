"""Products by weights in few bits as they are launched: for scripts outside Triton's interpreter."""

from __future__ import annotations

import torch
from compiled import Case

from quire.kernels.experts import quantised_few, quantised_stream
from quire.kernels.quantised import expand, few, stream
from quire.kernels.quantised.weight import WeightFormat

FLOATS = WeightFormat("float8", 0, False, torch.bfloat16)
BLOCKS = WeightFormat("float8", 128, False, torch.bfloat16)
INTEGERS = WeightFormat("int4", 128, True, torch.bfloat16)
SMALL_GROUPS = WeightFormat("int4", 64, False, torch.bfloat16)


def of_format(form: WeightFormat, columns: int, dtype: str) -> tuple[dict[str, object], dict[str, str]]:
    """Return constants and types of a kernel's arguments that tell of the weight."""
    constants: dict[str, object] = {
        "COLUMNS": columns,
        "GROUP": form.group or columns,
        "FORM": form.codes,
    }
    types = {"scales": "*bf16", "out": f"*{dtype}"}
    if form.zero_points:
        return constants, types | {"zeros": "*u8"}
    return constants | {"zeros": None}, types


def few_quantised_variants() -> dict[str, Case]:
    """Return those of a few tokens, and the expansion, with widths of Llama-3.1-8B and of Qwen2.5-7B."""
    from triton.experimental.gluon._runtime import GluonASTSource

    # (format, outputs, columns, tokens, gated, added, normed, dtype)
    layers = {
        "norm": (FLOATS, 6144, 4096, 8, False, False, True, "bf16"),
        "gate": (BLOCKS, 14336, 4096, 8, True, False, True, "bf16"),
        "add": (INTEGERS, 3584, 18944, 16, False, True, False, "bf16"),
        "add_fp16": (FLOATS, 3584, 18944, 8, False, True, False, "fp16"),
        "gate_int4": (SMALL_GROUPS, 14336, 4096, 16, True, False, False, "fp16"),
    }
    found = {}
    for name, (form, outputs, columns, tokens, gated, added, normed, dtype) in layers.items():
        constants, types = of_format(form, columns, dtype)
        constants |= {
            "OUTPUTS": outputs,
            "TOKENS": tokens,
            "ROWS": few.ROWS,
            "X_AHEAD": few.tokens_ahead(tokens),
        }
        constants |= {"AHEAD": few.lines_ahead(form, gated=gated), "GATED": gated, "ADDED": added}
        constants |= {"DEPENDENT": True, "bias": None} | ({} if normed else {"norm": None})
        types |= {"x": f"*{dtype}", "codes": "*u8", "eps": "fp32"} | ({"norm": f"*{dtype}"} if normed else {})
        pointers = [argument for argument, kind in types.items() if kind[0] == "*"]
        options = {"num_warps": few.warps_of(gated=gated, normed=normed)}
        found[f"few_quantised_{name}"] = Case(
            GluonASTSource, few._kernel, constants, types, pointers, options
        )
    for name, form in {"floats": BLOCKS, "int4": INTEGERS, "small_groups": SMALL_GROUPS}.items():
        constants, types = of_format(form, 4096, "bf16")
        constants |= {"OUTPUTS": 6144, "ROWS": expand.ROWS}
        types |= {"codes": "*u8"}
        found[f"expand_{name}"] = Case(
            GluonASTSource, expand._kernel, constants, types, list(types), {"num_warps": 4}
        )
    return found


def stream_quantised_variants() -> dict[str, Case]:
    """Return Hopper's products of more tokens, with widths of Llama-3.1-8B."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    # (format, tokens, outputs, columns, gated, divided, dtype)
    layers = {
        "8": (INTEGERS, 8, 6144, 4096, False, False, "bf16"),
        "gate_16": (FLOATS, 16, 14336, 4096, True, False, "bf16"),
        "gate_64": (INTEGERS, 64, 14336, 4096, True, False, "fp16"),
        "parts_64": (BLOCKS, 64, 4096, 14336, False, True, "bf16"),
        "parts_128": (INTEGERS, 128, 4096, 14336, False, True, "bf16"),
    }
    found = {}
    for name, (form, count, outputs, columns, gated, divided, dtype) in layers.items():
        tiles = stream.tiling(form, count, outputs, columns, gated=gated, divided=divided)
        assert tiles is not None
        constants, types = of_format(form, columns, dtype)
        constants |= {"OUTPUTS": outputs, "TOKENS": tiles.tokens, "ROWS": tiles.rows, "STAGES": tiles.stages}
        constants |= {"GATED": gated, "bias": None}
        of_line = 128 if form.codes == "float8" else 64
        layouts = gl.NVMMASharedLayout(128, 16, rank=2), gl.NVMMASharedLayout(of_line, 8, rank=2)
        types |= {
            "out": "*fp32" if divided else f"*{dtype}",
            "x_source": f"tensordesc<{dtype}[{tiles.tokens}, 64],{layouts[0]!r}>",
            "w_source": f"tensordesc<u8[{tiles.rows >> gated}, {of_line}],{layouts[1]!r}>",
        }
        pointers = [argument for argument, kind in types.items() if kind[0] == "*"]
        found[f"stream_quantised_{name}"] = Case(
            GluonASTSource, stream._kernel, constants, types, pointers, {"num_warps": stream.WARPS}
        )
    return found


FOURS = WeightFormat("float4", 32, False, torch.uint8)
# (count, chosen, hidden, inner, activation, format): gpt-oss-20b, Qwen3-30B-A3B, Mixtral-8x7B
LAYERS = {
    "fours": (32, 4, 2880, 2880, "clamped", FOURS),
    "float8": (128, 8, 2048, 768, "silu", BLOCKS),
    "int4": (8, 2, 4096, 14336, "silu", INTEGERS),
}


def of_layer(name: str, *, gates: bool) -> tuple[dict[str, object], dict[str, str], tuple[int, ...]]:
    """Return constants and types of a layer's experts; how many a token asks, of how many; and outputs."""
    count, top, hidden, inner, activation, form = LAYERS[name]
    outputs, columns = (inner, hidden) if gates else (hidden, inner)
    constants, types = of_format(form, columns, "bf16")
    if form.codes == "float4":
        constants |= {"GROUP": 128, "scales": None}
        del constants["zeros"]
        types = {"out": "*bf16", "zeros": "*i32", "bias": "*bf16"}
    else:
        constants["bias"] = None
    constants |= {"EXPERTS": count, "PADDED": count, "OUTPUTS": outputs}
    constants |= {"ACTIVATION": activation if gates else None}
    types |= {"shares": "*bf16", "alpha": "fp32", "limit": "fp32"}
    return constants, types, (top, count, outputs)


def few_quantised_experts_variants() -> dict[str, Case]:
    """Return those of experts whose pairs are multiplied alone, or in small tiles."""
    from triton.experimental.gluon._runtime import GluonASTSource

    found = {}
    for name, gates, tokens in (
        ("fours", True, quantised_few.ALONE),
        ("fours", False, quantised_few.ALONE),
        ("float8", True, quantised_few.ALONE),
        ("int4", False, quantised_few.ALONE),
        ("fours", True, quantised_few.TOGETHER),
        ("int4", True, quantised_few.TOGETHER),
    ):
        constants, types, (top, count, outputs) = of_layer(name, gates=gates)
        constants |= {"TOP": top, "TOKENS": tokens, "ROWS": quantised_few.ROWS, "DEPENDENT": True}
        constants |= {"AHEAD": few.lines_ahead(LAYERS[name][-1], gated=gates)}
        constants |= {"X_AHEAD": few.tokens_ahead(tokens)}
        types |= {"x": "*bf16", "codes": "*u8"}
        if tokens == quantised_few.ALONE:
            constants["counts"] = None
            types["index"] = "*i64"
        else:
            types |= {"index": "*i32", "counts": "*i32"}
        pointers = [argument for argument, kind in types.items() if kind[0] == "*"]
        pairs = top if tokens == quantised_few.ALONE else 16 * count
        programs = outputs // quantised_few.ROWS * pairs
        options = {"num_warps": quantised_few.warps_of(programs, gates=gates)}
        found[f"few_experts_{name}_{'up' if gates else 'down'}_{tokens}"] = Case(
            GluonASTSource, quantised_few._kernel, constants, types, pointers, options
        )
    return found


def stream_quantised_experts_variants() -> dict[str, Case]:
    """Return Hopper's of experts of more tokens, so many pairs of one expert."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    found = {}
    for name, gates, pairs in (
        ("fours", True, 1),
        ("fours", True, 100),
        ("fours", False, 100),
        ("float8", True, 50),
        ("int4", True, 16),
        ("int4", False, 100),
    ):
        constants, types, (_, count, _) = of_layer(name, gates=gates)
        form = LAYERS[name][-1]
        tiles = quantised_stream.tiling(form, pairs * count, count, gates=gates)
        constants |= {"TOKENS": tiles.tokens, "ROWS": tiles.rows, "STAGES": tiles.stages}
        constants["TOGETHER"] = tiles.together
        of_line = 128 if form.codes == "float8" else 64
        layouts = gl.NVMMASharedLayout(128, 16, rank=2), gl.NVMMASharedLayout(of_line, 8, rank=2)
        types |= {
            "pairs": "*i32",
            "counts": "*i32",
            "x_source": f"tensordesc<bf16[{tiles.tokens}, 64],{layouts[0]!r}>",
            "w_source": f"tensordesc<u8[{tiles.rows >> gates}, {of_line}],{layouts[1]!r}>",
        }
        pointers = [argument for argument, kind in types.items() if kind[0] == "*"]
        found[f"stream_experts_{name}_{'up' if gates else 'down'}_{tiles.tokens}"] = Case(
            GluonASTSource, quantised_stream._kernel, constants, types, pointers, {"num_warps": stream.WARPS}
        )
    return found
