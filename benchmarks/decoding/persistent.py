"""python -m benchmarks persistent: a Llama-1B shape's layers in one kernel that stays on the device.

What one persistent kernel for a block could save is what lies between launches. This one is written by hand,
without rotations and without writes into the cache, so that it has less to do than a model. One or two
programs of each multiprocessor go through every layer's six stages (norm and projections; attention of each
head in chunks of keys; chunks joined; output projection; norm, gate and up; down projection) and meet at a
barrier behind each. `ahead` loads a stage's first part of its matrix before the barrier, `double` the next
part while one is multiplied. The barrier is also timed by itself. Needs a GPU; --quick is one program, in
Triton's interpreter (TRITON_INTERPRET=1), and checks the result alone.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportMissingParameterType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportReturnType=false
# The kernels are Triton, which reuses Python's syntax and not its types.

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.harness.timing import event_time

ROUNDS = 30
BARRIERS = 1000


@dataclass(frozen=True)
class Shape:
    """programs: of the grid, heads of keys times `chunks` of the keys, and no fewer than heads."""

    layers: int = 16
    hidden: int = 2048
    inner: int = 8192
    heads: int = 32
    key_heads: int = 8
    head: int = 64
    keys: int = 1024
    programs: int = 256
    chunks: int = 32

    def one_each(self) -> Shape:
        """One program of each multiprocessor instead of two."""
        return replace(self, programs=self.programs // 2, chunks=self.chunks // 2)

    @property
    def rows(self) -> int:
        """Of the projections' matrix."""
        return self.hidden + 2 * self.key_heads * self.head


QUICK = Shape(2, hidden=32, inner=64, heads=1, key_heads=1, head=32, keys=16, programs=1, chunks=1)


@triton.jit
def barrier(arrived, wanted):
    """Waits until all programs have come here; what they stored is seen from here on."""
    tl.debug_barrier()
    seen = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") + 1
    while seen < wanted:
        seen = tl.atomic_add(arrived, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def barriers(arrived, count, programs: tl.constexpr):
    for i in range(count):
        barrier(arrived, (i + 1) * programs)


@triton.jit
def part(matrix, row, col, width, rows: tl.constexpr, cols: tl.constexpr):
    places = (row + tl.arange(0, rows))[:, None] * width + col + tl.arange(0, cols)[None, :]
    return tl.load(matrix + places, eviction_policy="evict_first")


@triton.jit
def product(tile, vector):
    return tl.sum(tile.to(tl.float32) * vector[None, :], 1)


@triton.jit
def near(pointer):
    """Of what other programs stored: past the first level of cache."""
    return tl.load(pointer, cache_modifier=".cg")


@triton.jit
def normed(x, hidden: tl.constexpr):
    values = near(x + tl.arange(0, hidden)).to(tl.float32)
    return values * tl.rsqrt(tl.sum(values * values) / hidden + 1e-5)


@triton.jit
def persistent(
    x, projected, parts, joined, gated, w_in, w_out, w_up, w_down, k_cache, v_cache, arrived, layers,
    hidden: tl.constexpr, inner: tl.constexpr, heads: tl.constexpr, key_heads: tl.constexpr,
    head: tl.constexpr, keys: tl.constexpr, programs: tl.constexpr, chunks: tl.constexpr,
    ahead: tl.constexpr, double: tl.constexpr,
):  # fmt: skip
    """x [hidden] is replaced by what the layers make of it. parts [heads, chunks, 2 * head]: of attention,
    its sums, then their largest score and total weight. Matrices are those of all layers, one behind the
    other."""
    program = tl.program_id(0)
    each_in: tl.constexpr = (hidden + 2 * key_heads * head) // programs
    each: tl.constexpr = hidden // programs
    each_up: tl.constexpr = inner // programs
    group: tl.constexpr = heads // key_heads
    own = program * each + tl.arange(0, each)
    four = tl.arange(0, 4)
    of_head = tl.arange(0, head)
    wanted = 0
    if ahead:
        first = part(w_in, program * each_in, 0, hidden, 4, hidden)
    for layer in range(layers):
        if not ahead:
            first = part(w_in, program * each_in, 0, hidden, 4, hidden)
        vector = normed(x, hidden)
        tl.store(projected + program * each_in + four, product(first, vector))
        for i in tl.static_range(1, each_in // 4):
            row = program * each_in + 4 * i
            tl.store(projected + row + four, product(part(w_in, row, 0, hidden, 4, hidden), vector))
        w_in += (hidden + 2 * key_heads * head) * hidden
        key_head, chunk = program // chunks, program % chunks
        some = chunk * (keys // chunks) + tl.arange(0, keys // chunks)
        places = (key_head * keys + some)[:, None] * head + of_head[None, :]
        if ahead:
            k, v = tl.load(k_cache + places), tl.load(v_cache + places)
        wanted += programs
        barrier(arrived, wanted)

        if not ahead:
            k, v = tl.load(k_cache + places), tl.load(v_cache + places)
        query_heads = key_head * group + tl.arange(0, group)
        q = near(projected + query_heads[:, None] * head + of_head[None, :])
        scores = tl.sum(q[:, None, :] * k.to(tl.float32)[None], 2) * head**-0.5
        largest = tl.max(scores, 1)
        weights = tl.exp(scores - largest[:, None])
        base = parts + (query_heads * chunks + chunk) * 2 * head
        tl.store(base[:, None] + of_head[None, :], tl.sum(weights[:, :, None] * v.to(tl.float32)[None], 1))
        tl.store(base + head, largest)
        tl.store(base + head + 1, tl.sum(weights, 1))
        wanted += programs
        barrier(arrived, wanted)

        if program < heads:
            of_chunk = parts + (program * chunks + tl.arange(0, chunks)) * 2 * head
            peaks = near(of_chunk + head)
            shares = tl.exp(peaks - tl.max(peaks))
            sums = tl.sum(near(of_chunk[:, None] + of_head[None, :]) * shares[:, None], 0)
            tl.store(joined + program * head + of_head, sums / tl.sum(near(of_chunk + head + 1) * shares))
        if ahead:
            out = part(w_out, program * each, 0, hidden, each, hidden)
        wanted += programs
        barrier(arrived, wanted)

        if not ahead:
            out = part(w_out, program * each, 0, hidden, each, hidden)
        w_out += hidden * hidden
        change = product(out, near(joined + tl.arange(0, hidden)))
        tl.store(x + own, (near(x + own) + change).to(x.dtype.element_ty))
        if ahead:
            gate = part(w_up, program * each_up, 0, hidden, 4, hidden)
            up = part(w_up + inner * hidden, program * each_up, 0, hidden, 4, hidden)
        wanted += programs
        barrier(arrived, wanted)

        if not ahead:
            gate = part(w_up, program * each_up, 0, hidden, 4, hidden)
            up = part(w_up + inner * hidden, program * each_up, 0, hidden, 4, hidden)
        vector = normed(x, hidden)
        for i in tl.static_range(each_up // 4):
            row = program * each_up + 4 * i
            if double and i + 1 < each_up // 4:
                next_gate = part(w_up, row + 4, 0, hidden, 4, hidden)
                next_up = part(w_up + inner * hidden, row + 4, 0, hidden, 4, hidden)
            a, b = product(gate, vector), product(up, vector)
            tl.store(gated + row + four, (a / (1 + tl.exp(-a)) * b).to(x.dtype.element_ty))
            if i + 1 < each_up // 4:
                if double:
                    gate, up = next_gate, next_up
                else:
                    gate = part(w_up, row + 4, 0, hidden, 4, hidden)
                    up = part(w_up + inner * hidden, row + 4, 0, hidden, 4, hidden)
        w_up += 2 * inner * hidden
        if ahead:
            down = part(w_down, program * each, 0, inner, each, hidden)
        wanted += programs
        barrier(arrived, wanted)

        if not ahead:
            down = part(w_down, program * each, 0, inner, each, hidden)
        change = tl.zeros([each], tl.float32)
        for i in tl.static_range(inner // hidden):
            col = i * hidden
            if double and i + 1 < inner // hidden:
                next_down = part(w_down, program * each, col + hidden, inner, each, hidden)
            change += product(down, near(gated + col + tl.arange(0, hidden)).to(tl.float32))
            if i + 1 < inner // hidden:
                if double:
                    down = next_down
                else:
                    down = part(w_down, program * each, col + hidden, inner, each, hidden)
        tl.store(x + own, (near(x + own) + change).to(x.dtype.element_ty))
        w_down += hidden * inner
        if ahead and layer + 1 < layers:
            first = part(w_in, program * each_in, 0, hidden, 4, hidden)
        wanted += programs
        barrier(arrived, wanted)


@dataclass(frozen=True)
class Model:
    """Weights of all layers, and a cache of keys and values that they share."""

    shape: Shape
    x: Tensor
    matrices: tuple[Tensor, ...]
    caches: tuple[Tensor, Tensor]

    @staticmethod
    def of(shape: Shape, device: str, dtype: torch.dtype) -> Model:
        def matrices(rows: int, width: int) -> Tensor:
            return torch.randn(shape.layers, rows, width, device=device, dtype=dtype) * width**-0.5

        hidden, inner = shape.hidden, shape.inner
        made = matrices(shape.rows, hidden), matrices(hidden, hidden), matrices(2 * inner, hidden)
        keys, values = torch.randn(
            2, shape.key_heads, shape.keys, shape.head, device=device, dtype=dtype
        ).unbind()
        x = torch.randn(hidden, device=device, dtype=dtype)
        return Model(shape, x, (*made, matrices(hidden, inner)), (keys, values))

    def truth(self) -> Tensor:
        """In float64."""
        s, x = self.shape, self.x.double()
        keys, values = (cache.double() for cache in self.caches)
        for w_in, w_out, w_up, w_down in zip(*self.matrices, strict=True):
            queries = (w_in.double() @ self._normed(x))[: s.hidden].view(s.key_heads, -1, s.head)
            weights = torch.softmax(queries @ keys.mT * s.head**-0.5, -1)
            x = x + w_out.double() @ (weights @ values).reshape(-1)
            gate, up = (w_up.double() @ self._normed(x)).chunk(2)
            x = x + w_down.double() @ (torch.nn.functional.silu(gate) * up)
        return x

    @staticmethod
    def _normed(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean() + 1e-5)

    def launcher(self, *, ahead: bool, double: bool) -> Callable[[], tuple[Tensor, Any]]:
        """What runs all layers and gives their result, and the kernel."""
        s, device = self.shape, self.x.device
        sizes = s.rows, s.hidden, s.heads * s.chunks * 2 * s.head
        projected, joined, parts = (torch.zeros(n, device=device) for n in sizes)
        gated = torch.zeros(s.inner, device=device, dtype=self.x.dtype)
        arrived = torch.zeros(1, device=device, dtype=torch.int32)

        def call() -> tuple[Tensor, Any]:
            arrived.zero_()
            x = self.x.clone()
            kernel = persistent[(s.programs,)](
                x, projected, parts, joined, gated, *self.matrices, *self.caches, arrived, s.layers,
                s.hidden, s.inner, s.heads, s.key_heads, s.head, s.keys, s.programs, s.chunks, ahead, double,
                **on_device(device, s),
            )  # fmt: skip
            return x, kernel

        return call


def on_device(device: torch.device, shape: Shape) -> dict[str, Any]:
    """Programs of 256 threads, all on the device at once."""
    if device.type != "cuda":
        return {}
    registers = 128 if shape.programs > Shape().one_each().programs else 255
    return {"num_warps": 8, "maxnreg": registers, "launch_cooperative_grid": True}


def main(options: argparse.Namespace) -> None:
    quick: bool = options.quick
    torch.manual_seed(0)
    made = Model.of(QUICK, "cpu", torch.float32) if quick else Model.of(Shape(), "cuda", torch.bfloat16)
    truth, s = made.truth(), made.shape
    shapes = (s,) if quick else (s, s.one_each())
    for shape, ahead, double in itertools.product(shapes, (False, True), (False, True)):
        call = replace(made, shape=shape).launcher(ahead=ahead, double=double)
        result, kernel = call()
        error = float((result.double() - truth).norm() / truth.norm())
        us = 0.0 if quick else 1e6 * event_time(call, ROUNDS) / s.layers
        took = "" if quick else f", {us:.1f} us a layer, {kernel.n_spills} spills"
        name = f"{shape.programs} programs, ahead {ahead}, double {double}"
        print(f"{name}: error {error:.1e}{took}", flush=True)
    for shape in () if quick else shapes:
        arrived = torch.zeros(1, device="cuda", dtype=torch.int32)

        def only(shape: Shape = shape, arrived: Tensor = arrived) -> None:
            arrived.zero_()
            barriers[(shape.programs,)](arrived, BARRIERS, shape.programs, **on_device(arrived.device, shape))

        print(f"a barrier of {shape.programs} programs: {1e6 * event_time(only, ROUNDS) / BARRIERS:.2f} us")

