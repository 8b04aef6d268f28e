"""Device functions that convert numbers faster than the compilers' own conversions.

Kernels import them through `math.py`.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportMissingParameterType=false
# pyright: reportAssignmentType=false, reportFunctionMemberAccess=false
# The bodies are Triton, which reuses Python's syntax and not its types.

from typing import Any

import triton
import triton.language as tl


def compiles_to_ptx(_semantic: Any = None) -> tl.constexpr:
    """Return whether the target accepts any PTX. The interpreter only knows some instructions."""
    return tl.constexpr(_semantic is not None and _semantic.builder.options.backend_name == "cuda")


compiles_to_ptx.__triton_builtin__ = True


@triton.jit
def to_bfloat16(x):
    """Return x rounded to bfloat16, in float32. It converts pairs, which LLVM does not do before sums."""
    if compiles_to_ptx():
        if x.numel % 2 == 0:
            return tl.inline_asm_elementwise(
                """{ .reg .b32 both;
                     cvt.rn.bf16x2.f32 both, $3, $2;
                     shl.b32 $0, both, 16;
                     and.b32 $1, both, 0xffff0000; }""",
                "=r,=r,r,r",
                [x],
                dtype=tl.float32,
                is_pure=True,
                pack=2,
            )
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def from_byte(x):
    """Return int8 or uint8 as float32, exactly: insert the byte as the last digits of 2^23, and subtract
    2^23. A multiprocessor executes 64 and 128 of these instructions per cycle, but only 16 conversions."""
    if compiles_to_ptx():
        if x.numel % 4 == 0:
            flip: tl.constexpr = "0x80808080" if x.dtype == tl.int8 else "0"
            offset: tl.constexpr = "0fCB000080" if x.dtype == tl.int8 else "0fCB000000"
            return tl.inline_asm_elementwise(
                "{ .reg .b32 bytes; xor.b32 bytes, $4, " + flip + ";"
                "  prmt.b32 $0, bytes, 0x4B000000, 0x7440; add.f32 $0, $0, " + offset + ";"
                "  prmt.b32 $1, bytes, 0x4B000000, 0x7441; add.f32 $1, $1, " + offset + ";"
                "  prmt.b32 $2, bytes, 0x4B000000, 0x7442; add.f32 $2, $2, " + offset + ";"
                "  prmt.b32 $3, bytes, 0x4B000000, 0x7443; add.f32 $3, $3, " + offset + "; }",
                "=r,=r,=r,=r,r",
                [x],
                dtype=tl.float32,
                is_pure=True,
                pack=4,
            )
    return x.to(tl.float32)


@triton.jit
def from_bits(x, mask: tl.constexpr, shift: tl.constexpr, less: tl.constexpr, signed: tl.constexpr):
    """Return ((x & mask) >> shift) - less as float32, exactly, for integers that have a register each.

    signed: x are signed bytes and mask is 255. It works as `from_byte`, with one instruction to insert the
        bits, and one to shift and subtract.
    """
    digits: tl.constexpr = 0x4B000080 if signed else 0x4B000000
    bits = x.to(tl.int32)
    if compiles_to_ptx():  # the compiler itself would use two instructions
        inserted = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0x6A;",  # ($1 & $2) ^ $3
            "=r,r,r,r",
            [bits, mask, digits],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        inserted = (bits & mask) ^ digits
    offset: tl.constexpr = (1 << (23 - shift)) + less + (128 if signed else 0)
    return inserted.to(tl.float32, bitcast=True) * (1.0 / (1 << shift)) - offset
