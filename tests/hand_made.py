"""Programs written by hand, as codegen would write them: what the runtime is tested on."""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch

from fusion_compiler.ir.kernel import Argument, Buffer, Dim, Kernel, Program, Role

HEADER = """\
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
"""


def argument(name: str, role: Role, index: int, dtype: torch.dtype, aligned: bool = True) -> Argument:
    return Argument(name, role, index, dtype, aligned)


def contiguous(name: str, shape: tuple[Dim, ...], dtype: torch.dtype, zeroed: bool = False) -> Buffer:
    stride: list[Dim] = []
    step: Dim = 1
    for extent in reversed(shape):
        stride.insert(0, step)
        step = step * extent
    return Buffer(name, shape, tuple(stride), dtype, zeroed)


def elementwise(
    expression: str, n: int, dtypes: tuple[torch.dtype, ...], to: torch.dtype, block: int = 128
) -> Program:
    """One kernel of `expression` over x0, x1, ... (as they are loaded), n elements each."""
    loads = "\n".join(
        f"    x{i} = tl.load(x{i}_ptr + i, mask=mask)"
        + (".to(tl.float32)" if dtype in (torch.float16, torch.bfloat16) else "")
        for i, dtype in enumerate(dtypes)
    )
    pointers = ", ".join([*(f"x{i}_ptr" for i in range(len(dtypes))), "y_ptr"])
    source = HEADER + (
        f"def elementwise({pointers}):\n"
        f"    i = tl.program_id(0) * {block} + tl.arange(0, {block})\n"
        f"    mask = i < {n}\n{loads}\n"
        f"    tl.store(y_ptr + i, {expression}, mask=mask)\n"
    )
    arguments = tuple(argument(f"x{i}_ptr", Role.INPUT, i, dtype) for i, dtype in enumerate(dtypes))
    output = argument("y_ptr", Role.OUTPUT, 0, to)
    kernel = Kernel("elementwise", source, (*arguments, output), (-(-n // block),))
    inputs = tuple(contiguous(f"x{i}", (n,), dtype) for i, dtype in enumerate(dtypes))
    return Program((kernel,), inputs, (contiguous("y", (n,), to),), schedule=f"flat: {block}")


def row_softmax(columns: int, dtype: torch.dtype = torch.bfloat16, warps: int = 4) -> Program:
    """softmax(x, -1) of a matrix with any number of rows: one symbol."""
    rows = sympy.Symbol("s0", integer=True, positive=True)
    block = 1 << (columns - 1).bit_length()
    source = HEADER + (
        f"def row_softmax(x_ptr, y_ptr, rows):\n"
        f"    row = tl.program_id(0).to(tl.int64)\n"
        f"    cols = tl.arange(0, {block})\n"
        f"    mask = cols < {columns}\n"
        f"    x = tl.load(x_ptr + row * {columns} + cols, mask=mask, other=float('-inf')).to(tl.float32)\n"
        f"    e = tl.exp(x - tl.max(x, axis=0))\n"
        f"    tl.store(y_ptr + row * {columns} + cols, e / tl.sum(e, axis=0), mask=mask)\n"
    )
    arguments = (
        argument("x_ptr", Role.INPUT, 0, dtype),
        argument("y_ptr", Role.OUTPUT, 0, dtype),
        argument("rows", Role.SIZE, 0, torch.int32, aligned=False),
    )
    kernel = Kernel("row_softmax", source, arguments, (rows,), num_warps=warps)
    buffers = (contiguous("x", (rows, columns), dtype),), (contiguous("y", (rows, columns), dtype),)
    return Program((kernel,), *buffers, sizes=(rows,), schedule=f"rows: {warps} warps")


def two_kernel_sum(rows: int, columns: int) -> Program:
    """Column sums of a float32 matrix: a partial sum for each of four programs, then their sum."""
    partial = HEADER + (
        f"def partial_sums(x_ptr, p_ptr):\n"
        f"    program = tl.program_id(0)\n"
        f"    cols = tl.arange(0, {columns})\n"
        f"    total = tl.zeros((1, {columns}), tl.float32)\n"
        f"    for row in tl.range(program, {rows}, 4, num_stages=2, flatten=True):\n"
        f"        total += tl.load(x_ptr + row * {columns} + cols, eviction_policy='evict_first')[None, :]\n"
        f"    tl.store(p_ptr + program * {columns} + cols[None, :], total)\n"
    )
    finish = HEADER + (
        f"def finish_sums(p_ptr, y_ptr):\n"
        f"    parts = tl.arange(0, 4)\n"
        f"    cols = tl.arange(0, {columns})\n"
        f"    p = tl.load(p_ptr + parts[:, None] * {columns} + cols[None, :])\n"
        f"    tl.store(y_ptr + cols, tl.sum(p, axis=0))\n"
    )
    x = argument("x_ptr", Role.INPUT, 0, torch.float32)
    p = argument("p_ptr", Role.SCRATCH, 0, torch.float32)
    y = argument("y_ptr", Role.OUTPUT, 0, torch.float32)
    kernels = (
        Kernel("partial_sums", partial, (x, p), (4,), num_warps=1),
        Kernel("finish_sums", finish, (p, y), (1,), num_warps=1),
    )
    return Program(
        kernels,
        (contiguous("x", (rows, columns), torch.float32),),
        (contiguous("y", (columns,), torch.float32),),
        scratch=(contiguous("partial", (4, columns), torch.float32),),
    )


def ticket_sum(rows: int, columns: int) -> Program:
    """Column sums in one kernel: the program that draws the last ticket finishes, and resets it."""
    source = HEADER + (
        f"def ticket_sum(x_ptr, p_ptr, ticket_ptr, y_ptr):\n"
        f"    program = tl.program_id(0)\n"
        f"    cols = tl.arange(0, {columns})\n"
        f"    total = tl.zeros((1, {columns}), tl.float32)\n"
        f"    for row in range(program, {rows}, 4):\n"
        f"        total += tl.load(x_ptr + row * {columns} + cols)[None, :]\n"
        f"    tl.store(p_ptr + program * {columns} + cols[None, :], total)\n"
        f"    tl.debug_barrier()\n"
        f"    ticket = tl.atomic_add(ticket_ptr, 1)\n"
        f"    if ticket == 3:\n"
        f"        parts = tl.arange(0, 4)[:, None]\n"
        f"        p = tl.load(p_ptr + parts * {columns} + cols[None, :], cache_modifier='.cg')\n"
        f"        tl.store(y_ptr + cols, tl.sum(p, axis=0))\n"
        f"        tl.store(ticket_ptr, 0)\n"
    )
    two = two_kernel_sum(rows, columns)
    arguments = (
        *two.kernels[0].arguments,
        argument("ticket_ptr", Role.SCRATCH, 1, torch.int32),
        argument("y_ptr", Role.OUTPUT, 0, torch.float32),
    )
    kernel = Kernel("ticket_sum", source, arguments, (4,), num_warps=1)
    ticket = contiguous("ticket", (1,), torch.int32, zeroed=True)
    return replace(two, kernels=(kernel,), scratch=(*two.scratch, ticket), schedule="last program finishes")
