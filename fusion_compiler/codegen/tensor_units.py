"""Device functions for products of a matrix with several vectors on tensor units (`contractions.py`).

Kernels find them in `math.py`.
"""

# ruff: noqa: RET505 -- a static branch must end in else: Triton compiles what follows a return
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportMissingParameterType=false
# The bodies are Triton, which reuses Python's syntax and not its types.

import triton
import triton.language as tl


@triton.jit
def stack(x, y):
    """Two tiles, one below the other."""
    return tl.reshape(tl.permute(tl.join(x, y), (2, 0, 1)), [2 * x.shape[0], x.shape[1]])


@triton.jit
def halves(x, axis: tl.constexpr):
    """A tile cut in two along an axis."""
    if axis == 0:
        return tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), (1, 2, 0)))
    else:
        return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def in_parts(x, parts: tl.constexpr):
    """A tile's columns in equal parts: [parts, rows, columns of a part]."""
    return tl.permute(tl.reshape(x, [x.shape[0], parts, x.shape[1] // parts]), (1, 0, 2))


@triton.jit
def beyond(x, part):
    """What bfloat16 leaves of a number, of which `part` is what it holds; nothing of infinity."""
    left = x - part.to(tl.float32)
    return tl.where(left == left, left, 0.0)


@triton.jit
def in_terms(x, terms: tl.constexpr, parts: tl.constexpr, shift: tl.constexpr):
    """A tile [n, k] of float32 as bfloat16: [parts * n, k], a part for what it holds of x, what it holds of
    the rest, and so on, zeros behind the last. shift: a part of zeros before them, and the last one left out.
    """
    x_0 = x.to(tl.bfloat16)
    zero = tl.zeros_like(x_0)
    x_1, x_2 = zero, zero
    if terms > 1:
        left = beyond(x, x_0)
        x_1 = left.to(tl.bfloat16)
        if terms > 2:
            x_2 = beyond(left, x_1).to(tl.bfloat16)
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
    """A tile with a column of zeros behind each of its columns."""
    return tl.reshape(tl.join(x, tl.zeros_like(x)), [x.shape[0], 2 * x.shape[1]])


@triton.jit
def add_product(total, matrix, vectors, split: tl.constexpr):
    """`total` and matrix @ vectors', in so many parts of their columns.

    Triton to 3.7 multiplies 16 columns wrong where either was made of numbers of 8 bits, a mask's for one
    (https://github.com/triton-lang/triton/pull/11691): a thread then holds eight columns side by side.
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
    """`total` with the products of a matrix [m, k] and n vectors [n, k] added: [m, parts * n]; with `split`
    [split, m, parts * n], of so many parts of k.

    terms: 1 of numbers that bfloat16 holds, 2 of those with 16 bits, 3 of float32. The first part is the
    product of what bfloat16 holds of both, the others are what that leaves. Of several products in a kernel
    warps share the rows as in the first, so that all have the matrix on this side.
    """
    held = matrix.to(tl.bfloat16)
    total = add_product(total, held, in_terms(vectors, vector_terms, parts, False), split)
    if matrix_terms > 1:
        left = beyond(matrix, held).to(tl.bfloat16)
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
    """`contract` with (main, rest), each [m, n]: of what bfloat16 holds of both, and of what that leaves."""
    held, x_0 = matrix.to(tl.bfloat16), vectors.to(tl.bfloat16)
    left = beyond(vectors, x_0)
    x_1 = left.to(tl.bfloat16)
    main = add_product(main, held, x_0, split)
    if vector_terms > 1:
        rest = add_product(rest, held, x_1, split)
        if vector_terms > 2:
            rest = add_product(rest, held, beyond(left, x_1).to(tl.bfloat16), split)
    if matrix_terms > 1:
        held = beyond(matrix, held).to(tl.bfloat16)
        rest = add_product(rest, held, x_0, split)
        if vector_terms > 1:
            rest = add_product(rest, held, x_1, split)
    return main, rest


@triton.jit
def both(main, rest):
    """The sum; where the first is infinite, the second may be the other infinity or no number."""
    return main + tl.where(tl.abs(rest) < float("inf"), rest, 0.0)


@triton.jit
def contracted(total, parts: tl.constexpr):
    """The sum of the parts of a product [m, parts * n]; where the first is infinite, the others count
    for nothing."""
    if parts == 1:
        return total
    else:
        apart = tl.reshape(total, [total.shape[0], parts, total.shape[1] // parts])
        part = tl.arange(0, parts)[None, :, None]
        main = tl.sum(tl.where(part == 0, apart, 0.0), axis=1)
        rest = tl.sum(tl.where(part == 0, 0.0, apart), axis=1)
        return both(main, rest)
