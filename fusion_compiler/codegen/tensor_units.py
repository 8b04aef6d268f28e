"""Device functions for products of a matrix with several vectors on tensor cores (`products.py`).

Kernels import them through `math.py`.
"""

# ruff: noqa: RET505 -- a static branch must end in else: Triton compiles what follows a return
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportMissingParameterType=false
# The bodies are Triton, which reuses Python's syntax and not its types.

import triton
import triton.language as tl

from fusion_compiler.codegen.conversions import compiles_to_ptx, to_bfloat16


@triton.jit
def stack(x, y):
    """Return two tiles stacked along the rows."""
    return tl.reshape(tl.permute(tl.join(x, y), (2, 0, 1)), [2 * x.shape[0], x.shape[1]])


@triton.jit
def in_parts(x, parts: tl.constexpr):
    """Return a tile's columns in equal parts: [parts, rows, columns of a part]."""
    return tl.permute(tl.reshape(x, [x.shape[0], parts, x.shape[1] // parts]), (1, 0, 2))


@triton.jit
def beyond_bfloat16(x):
    """Return the rest of x beyond its bfloat16 value; 0 if x is infinite."""
    left = x - to_bfloat16(x)
    return tl.where(left == left, left, 0.0)


@triton.jit
def in_terms(x, terms: tl.constexpr, parts: tl.constexpr, shift: tl.constexpr):
    """Return a float32 tile [n, k] as bfloat16 terms: [parts * n, k].

    The first part is x rounded to bfloat16, the second the rounded rest, and so on, followed by zeros.
    shift: insert a part of zeros first and omit the last part.
    """
    x_0 = x.to(tl.bfloat16)
    zero = tl.zeros_like(x_0)
    x_1, x_2 = zero, zero
    if terms > 1:
        left = beyond_bfloat16(x)
        x_1 = left.to(tl.bfloat16)
        if terms > 2:
            x_2 = beyond_bfloat16(left).to(tl.bfloat16)
    if shift:
        x_0, x_1, x_2 = zero, x_0, x_1
    if parts == 1:
        return x_0
    elif parts == 2:
        return stack(x_0, x_1)
    else:
        return stack(stack(x_0, x_1), stack(x_2, zero))


@triton.jit
def between_zeros(x):
    """Return a tile with a column of zeros after each column."""
    return tl.reshape(tl.join(x, tl.zeros_like(x)), [x.shape[0], 2 * x.shape[1]])


@triton.jit
def add_product(total, matrix, vectors, split: tl.constexpr):
    """Return `total` plus matrix @ vectors', in `split` parts of their columns.

    Triton up to 3.7 computes products of 16 columns wrong if an operand was computed from 8-bit numbers, such
    as a mask (https://github.com/triton-lang/triton/pull/11691), because a thread then has eight adjacent
    columns. Zeros between the columns make 32 of them.
    """
    if split == 1:
        if matrix.shape[1] < 32:
            return tl.dot(between_zeros(matrix), tl.trans(between_zeros(vectors)), total)
        else:
            return tl.dot(matrix, tl.trans(vectors), total)
    else:
        return tl.dot(in_parts(matrix, split), tl.permute(in_parts(vectors, split), (0, 2, 1)), total)


@triton.jit
def contract(
    matrix,
    vectors,
    total,
    matrix_terms: tl.constexpr,
    vector_terms: tl.constexpr,
    parts: tl.constexpr,
    split: tl.constexpr = 1,
):
    """Return `total` plus the products of a matrix [m, k] and n vectors [n, k]: [m, parts * n].

    With `split`, the result is [split, m, parts * n], for as many parts of k.
    terms: 1 for numbers that bfloat16 represents, 2 for numbers with 16 bits, 3 for float32. The first part
        is the product of both operands' bfloat16 values, the others are the products of the rests. All
        products in a kernel have the matrix on this side, because warps share the rows as in the first one.
    """
    rounded = matrix.to(tl.bfloat16)
    total = add_product(total, rounded, in_terms(vectors, vector_terms, parts, False), split)
    if matrix_terms > 1:
        left = beyond_bfloat16(matrix).to(tl.bfloat16)
        total = add_product(total, left, in_terms(vectors, vector_terms, parts, True), split)
    return total


@triton.jit
def contract_apart(
    matrix,
    vectors,
    main,
    rest,
    matrix_terms: tl.constexpr,
    vector_terms: tl.constexpr,
    split: tl.constexpr = 1,
):
    """Return (main, rest), each [m, n], plus the product of the bfloat16 values, and plus the products of
    the rests."""
    rounded, x_0 = matrix.to(tl.bfloat16), vectors.to(tl.bfloat16)
    left = beyond_bfloat16(vectors)
    x_1 = left.to(tl.bfloat16)
    main = add_product(main, rounded, x_0, split)
    if vector_terms > 1:
        rest = add_product(rest, rounded, x_1, split)
        if vector_terms > 2:
            rest = add_product(rest, rounded, beyond_bfloat16(left).to(tl.bfloat16), split)
    if matrix_terms > 1:
        rounded = beyond_bfloat16(matrix).to(tl.bfloat16)
        rest = add_product(rest, rounded, x_0, split)
        if vector_terms > 1:
            rest = add_product(rest, rounded, x_1, split)
    return main, rest


@triton.jit
def both(main, rest):
    """Return main + rest. If main is infinite, rest may be the opposite infinity or NaN and is ignored."""
    return main + tl.where(tl.abs(rest) < float("inf"), rest, 0.0)


@triton.jit
def contracted(total, parts: tl.constexpr):
    """Return the sum of the parts of a product [m, parts * n]. If the first part is infinite, the others
    are ignored."""
    if parts == 1:
        return total
    else:
        apart = tl.reshape(total, [total.shape[0], parts, total.shape[1] // parts])
        part = tl.arange(0, parts)[None, :, None]
        main = tl.sum(tl.where(part == 0, apart, 0.0), axis=1)
        rest = tl.sum(tl.where(part == 0, 0.0, apart), axis=1)
        return both(main, rest)


@triton.jit
def dot_float8(left, right, total):
    """Return `total` plus the product of two tiles of float8. The units of NVIDIA's devices keep about
    fourteen bits of a sum, and so add up 32 terms at most; elsewhere float16 represents the numbers."""
    if compiles_to_ptx():
        return tl.dot(left, right, total, max_num_imprecise_acc=32)
    else:
        return tl.dot(left.to(tl.float16), right.to(tl.float16), total)
