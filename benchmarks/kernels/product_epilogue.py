"""python -m benchmarks product-epilogue: whether a product with its epilogue beats cuBLAS and a kernel.

gelu(x @ w.T + b), with x @ w.T + b kept (as training does) or not, in bfloat16: cuBLAS's product, that and a
kernel for the GELU, and a Triton product whose epilogue is the GELU, over tile sizes, with pointers or tensor
descriptors, with and without specialized warps. Median microseconds. Needs a GPU; with --quick and
TRITON_INTERPRET=1 it tries itself.
"""

# ruff: noqa: N803
# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.harness.timing import device_time

SHAPES = {
    "ViT-B, 64 images": (12608, 3072, 768),
    "Whisper, 8 x 1500": (12000, 3072, 768),
    "BERT-large, 16 x 512": (8192, 4096, 1024),
    "Llama-1B up, 4 x 2048": (8192, 8192, 2048),
}
Tile = tuple[int, int, int, int, int]  # rows, columns, depth, warps, stages
TILES = (
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 4, 4), (256, 128, 64, 8, 3),
    (64, 256, 64, 4, 4),
)  # fmt: skip
QUICK_TILES = ((16, 16, 16, 4, 1),)
FORMS = ("pointers", "descriptors", "specialized warps")
GROUP = 8  # blocks of rows that programs take side by side


@triton.jit
def gelu(v):
    return 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))


@triton.jit
def only_gelu(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    tl.store(out_ptr + i, gelu(v).to(out_ptr.dtype.element_ty), mask=i < n)


@triton.jit
def block_of(tile, high, wide, GROUP: tl.constexpr):
    """Row and column of a tile, neighbours in groups of rows."""
    first = tile // (GROUP * wide) * GROUP
    rows = min(high - first, GROUP)
    within = tile % (GROUP * wide)
    return first + within % rows, within // rows


@triton.jit
def by_pointers(
    a, b, bias, out, kept, m, n, k, KEEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    row, col = block_of(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    rows, cols, depth = row * BM + tl.arange(0, BM), col * BN + tl.arange(0, BN), tl.arange(0, BK)
    a_ptrs = a + (rows % m)[:, None] * k + depth[None, :]
    b_ptrs = b + cols[None, :] * k + depth[:, None]
    total = tl.zeros([BM, BN], tl.float32)
    for _ in range(0, k, BK):
        total = tl.dot(tl.load(a_ptrs), tl.load(b_ptrs), total)
        a_ptrs += BK
        b_ptrs += BK
    v = (total + tl.load(bias + cols)[None, :].to(tl.float32)).to(bias.dtype.element_ty)
    inside, at = (rows < m)[:, None], rows[:, None] * n + cols[None, :]
    if KEEP:
        tl.store(kept + at, v, mask=inside)
    tl.store(out + at, gelu(v.to(tl.float32)).to(bias.dtype.element_ty), mask=inside)


@triton.jit
def by_descriptors(
    a, b, bias, out, kept, m, n, k, KEEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    high, wide = tl.cdiv(m, BM), tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), high * wide, PROGRAMS, flatten=True, warp_specialize=SPECIALIZED):
        row, col = block_of(tile, high, wide, GROUP)
        total = tl.zeros([BM, BN], tl.float32)
        for i in range(tl.cdiv(k, BK)):
            total = tl.dot(a.load([row * BM, i * BK]), b.load([col * BN, i * BK]).T, total)
        cols = col * BN + tl.arange(0, BN)
        v = (total + tl.load(bias + cols)[None, :].to(tl.float32)).to(bias.dtype.element_ty)
        if KEEP:
            kept.store([row * BM, col * BN], v)
        out.store([row * BM, col * BN], gelu(v.to(tl.float32)).to(bias.dtype.element_ty))


def calls(
    x: Tensor, w: Tensor, bias: Tensor, out: Tensor, kept: Tensor, keep: bool, tiles: Sequence[Tile]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each form of the fused product, by name."""
    (m, k), n = x.shape, w.shape[0]
    cuda = x.device.type == "cuda"
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count if cuda else 1
    for (bm, bn, bk, warps, stages), form in itertools.product(tiles, FORMS):
        blocks, options = triton.cdiv(m, bm) * triton.cdiv(n, bn), {"num_warps": warps, "num_stages": stages}
        name = f"{form} {bm} x {bn} x {bk}, {warps} warps, {stages} stages"
        sizes = (m, n, k, keep, bm, bn, bk, GROUP)
        if form == "pointers":
            yield name, functools.partial(by_pointers[(blocks,)], x, w, bias, out, kept, *sizes, **options)
            continue
        inputs = [TensorDescriptor.from_tensor(t, [rows, bk]) for t, rows in ((x, bm), (w, bn))]
        results = [TensorDescriptor.from_tensor(t, [bm, bn]) for t in (out, kept)]
        programs = min(sms, blocks)
        arguments = (*inputs, bias, *results, *sizes, programs, form != "descriptors")
        yield name, functools.partial(by_descriptors[(programs,)], *arguments, **options)


def fastest(
    forms: Iterator[tuple[str, Callable[[], Any]]], out: Tensor, want: Tensor, repetitions: int
) -> tuple[float, str]:
    """Of those that compile and are right."""
    times: list[tuple[float, str]] = []
    for name, call in forms:
        out.zero_()
        try:
            call()
        except Exception as error:  # a form that this Triton or device does not have
            print(f"    {name}: {type(error).__name__}")
            continue
        if (out.float() - want.float()).abs().max() <= 0.1:
            times.append((device_time(call, out.device, repetitions).seconds, name))
    return min(times)


def main(options: argparse.Namespace) -> None:
    device, quick, repetitions = torch.device(options.device), options.quick, options.repetitions
    dtype = torch.float32 if quick else torch.bfloat16  # the interpreter multiplies no bfloat16
    for name, (m, n, k) in {"quick": (48, 32, 32)}.items() if quick else SHAPES.items():
        x, w = (torch.randn(s, device=device, dtype=dtype) / 8 for s in ((m, k), (n, k)))
        bias = torch.randn(n, device=device, dtype=dtype)
        out, kept = (torch.empty(m, n, device=device, dtype=dtype) for _ in range(2))

        def product(x: Tensor = x, w: Tensor = w, bias: Tensor = bias, kept: Tensor = kept) -> None:
            torch.addmm(bias, x, w.t(), out=kept)

        def both(product: Any = product, out: Tensor = out, kept: Tensor = kept) -> None:
            product()
            only_gelu[(triton.cdiv(out.numel(), 2048),)](kept, out, out.numel(), 2048, num_warps=4)

        alone, apart = (1e6 * device_time(call, device, repetitions).seconds for call in (product, both))
        want = out.clone()
        print(f"{name}: cuBLAS {alone:.0f}, with a GELU kernel {apart:.0f}")
        for keep in (False, True):
            forms = calls(x, w, bias, out, kept, keep, QUICK_TILES if quick else TILES)
            seconds, form = fastest(forms, out, want, repetitions)
            print(f"  one kernel{', x @ w.T + b kept' if keep else ''}: {1e6 * seconds:.0f} ({form})")
