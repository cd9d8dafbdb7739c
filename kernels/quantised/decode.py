"""Codes as kernels multiply by them: exact 16-bit floats, in the order of the tensor cores' first operand.

In Gluon, Triton's lower level. See `weight` for the order of codes; scales come after the products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Four 8-bit floats of a word: in bf16's bits they stand 2^120 too low, which a product makes good exactly,
# also of those below 2^-6.
_FLOAT8_TO_BF16 = gl.constexpr("""
{
    .reg .b32 sign, rest, raised, nothing;
    mov.b32 raised, 0x7b807b80;
    mov.b32 nothing, 0x80008000;
    shl.b32 sign, $2, 8;
    and.b32 sign, sign, 0x80008000;
    shl.b32 rest, $2, 4;
    and.b32 rest, rest, 0x07f007f0;
    or.b32 rest, rest, sign;
    fma.rn.bf16x2 $0, rest, raised, nothing;
    and.b32 sign, $2, 0x80008000;
    shr.b32 rest, $2, 4;
    and.b32 rest, rest, 0x07f007f0;
    or.b32 rest, rest, sign;
    fma.rn.bf16x2 $1, rest, raised, nothing;
}
""")
_FLOAT8_TO_FP16 = gl.constexpr(  # where they stand 2^8 too low
    _FLOAT8_TO_BF16.value.replace("0x7b807b80", "0x5c005c00")
    .replace("shl.b32 rest, $2, 4", "shl.b32 rest, $2, 7")
    .replace("shr.b32 rest, $2, 4", "shr.b32 rest, $2, 1")
    .replace("0x07f007f0", "0x3f803f80")
    .replace("bf16x2", "f16x2")
)
# Eight integers of a word: as the last bits of 128 or 1024, of which that and the zero point are subtracted.
_INT4_TO_BF16 = gl.constexpr("""
{
    .reg .b32 zero, one, high, some;
    mov.b32 one, 0x3f803f80;
    mov.b32 high, 0x43004300;
    and.b32 zero, $5, 0x000f000f;
    or.b32 zero, zero, 0xc300c300;
    lop3.b32 some, $4, 0x000f000f, high, 0xea;
    fma.rn.bf16x2 $0, some, one, zero;
    shr.b32 some, $4, 4;
    lop3.b32 some, some, 0x000f000f, high, 0xea;
    fma.rn.bf16x2 $1, some, one, zero;
    shr.b32 some, $4, 8;
    lop3.b32 some, some, 0x000f000f, high, 0xea;
    fma.rn.bf16x2 $2, some, one, zero;
    shr.b32 some, $4, 12;
    lop3.b32 some, some, 0x000f000f, high, 0xea;
    fma.rn.bf16x2 $3, some, one, zero;
}
""")
_INT4_TO_FP16 = gl.constexpr(
    _INT4_TO_BF16.value.replace("0x3f803f80", "0x3c003c00")
    .replace("0xc300c300", "0xe400e400")
    .replace("0x43004300", "0x64006400")
    .replace("bf16x2", "f16x2")
)

# Eight 4-bit floats of a word: in bf16's bits they stand 2^126 too low, which their scales make good exactly.
_FLOAT4_TO_BF16 = gl.constexpr("""
{
    .reg .b32 sign, rest, nothing;
    mov.b32 nothing, 0x80008000;
    shl.b32 sign, $4, 12;
    and.b32 sign, sign, 0x80008000;
    shl.b32 rest, $4, 6;
    lop3.b32 rest, rest, 0x01c001c0, sign, 0xea;
    fma.rn.bf16x2 $0, rest, $5, nothing;
    shl.b32 sign, $4, 8;
    and.b32 sign, sign, 0x80008000;
    shl.b32 rest, $4, 2;
    lop3.b32 rest, rest, 0x01c001c0, sign, 0xea;
    fma.rn.bf16x2 $1, rest, $5, nothing;
    shl.b32 sign, $4, 4;
    and.b32 sign, sign, 0x80008000;
    shr.b32 rest, $4, 2;
    lop3.b32 rest, rest, 0x01c001c0, sign, 0xea;
    fma.rn.bf16x2 $2, rest, $9, nothing;
    and.b32 sign, $4, 0x80008000;
    shr.b32 rest, $4, 6;
    lop3.b32 rest, rest, 0x01c001c0, sign, 0xea;
    fma.rn.bf16x2 $3, rest, $9, nothing;
}
""")


@gluon.jit
def in_columns(tile: gl.tensor) -> gl.tensor:
    """Put decoded numbers [.., rows, 64] where their columns are: no thread's go to another one's."""
    ROWS: gl.constexpr = tile.shape[-2]
    if len(tile.shape) == 3:
        PARTS: gl.constexpr = tile.shape[0]
        lines = tile.reshape([PARTS, ROWS, 4, 4, 2, 2]).permute((0, 1, 3, 4, 2, 5)).reshape([PARTS, ROWS, 64])
    else:
        lines = tile.reshape([ROWS, 4, 4, 2, 2]).permute((0, 2, 3, 1, 4)).reshape([ROWS, 64])
    return lines


@gluon.jit
def floats_of(codes: gl.tensor, dtype: gl.constexpr) -> gl.tensor:
    """Decode bytes [.., 64] of 64 columns, 8-bit floats."""
    if dtype == gl.bfloat16:
        tile = gl.inline_asm_elementwise(
            _FLOAT8_TO_BF16, "=r,=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=4
        )
    else:
        tile = gl.inline_asm_elementwise(
            _FLOAT8_TO_FP16, "=r,=r,r", [codes], dtype=gl.float16, is_pure=True, pack=4
        )
    return in_columns(tile)


@gluon.jit
def integers_of(codes: gl.tensor, zeros: gl.tensor, dtype: gl.constexpr) -> tuple[gl.tensor, gl.tensor]:
    """Decode bytes [.., 64] of 128 columns, 4-bit integers less zero points: two tensors of 64 columns."""
    if dtype == gl.bfloat16:
        first, second = gl.inline_asm_elementwise(
            _INT4_TO_BF16, "=r,=r,=r,=r,r,r", [codes, zeros], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True,
            pack=4,
        )  # fmt: skip
    else:
        first, second = gl.inline_asm_elementwise(
            _INT4_TO_FP16, "=r,=r,=r,=r,r,r", [codes, zeros], dtype=(gl.float16, gl.float16), is_pure=True,
            pack=4,
        )  # fmt: skip
    return in_columns(first), in_columns(second)


@gluon.jit
def fours_of(codes: gl.tensor, exponents: gl.tensor, CODES: gl.constexpr) -> tuple[gl.tensor, gl.tensor]:
    """Decode bytes [.., 64] of 128 columns, 4-bit floats: two bf16 tensors of 64 columns.

    exponents [.., 1]: those of a line's four groups of 32 columns in an i32. CODES: the bytes' layout.
    """
    # A thread's bytes are of steps of 16 columns in either half, four of each: two steps to a group.
    if len(codes.shape) == 3:
        place = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, CODES)))[None, None, :]
    else:
        place = gl.arange(0, 64, gl.SliceLayout(0, CODES))[None, :]
    of_step = exponents >> ((place >> 3 & 1) * 8)
    # In both halves of a word: an exponent in bf16's place, 126 higher.
    first = (of_step & 0xFF) * 0x00800080 + 0x3F003F00
    second = (of_step >> 16 & 0xFF) * 0x00800080 + 0x3F003F00
    both = gl.inline_asm_elementwise(
        _FLOAT4_TO_BF16, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [codes, first, second],
        dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4,
    )  # fmt: skip
    return in_columns(both[0]), in_columns(both[1])
