"""The lines of a program: each function writes one over what a draft holds, or None where nothing fits.

A line is an expression, which becomes a value, or what `Write` says: a statement that writes in place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

import torch

from tests.random_programs.program import Shape


@dataclass(frozen=True)
class Value:
    """A tensor that a draft holds. exact: no rounding had a part in it so far."""

    name: str
    shapes: tuple[Shape, ...]
    dtype: torch.dtype
    exact: bool

    @property
    def rank(self) -> int:
        return len(self.shapes[0])

    @property
    def floating(self) -> bool:
        return self.dtype.is_floating_point

    def size(self, dim: int) -> int:
        """The smallest of all runs."""
        return min(shape[dim] for shape in self.shapes)


class Draft(Protocol):
    """A program that is being drawn. special: NaN and infinities are among its numbers."""

    rng: Random
    floats: tuple[str, ...]
    runs: int
    special: bool

    def pick(self, fits: Callable[[Value], bool] = ...) -> Value | None:
        """A value that fits; late ones are likelier."""
        ...

    def fresh(
        self,
        shapes: Sequence[Shape],
        dtype: str | torch.dtype | None = None,
        values: str | None = None,
        limits: Sequence[int] = (),
    ) -> Value:
        """A new argument."""
        ...


class Write(str):
    """A statement, not an expression."""


Maker = Callable[[Draft], str | None]


def _texts(table: str) -> tuple[str, ...]:
    return tuple(t.strip() for t in re.split(r"\n| ; ", table) if t.strip())


SMOOTH = _texts("""
    torch.sin({x}) ; torch.cos({x}) ; torch.tanh({x}) ; torch.sigmoid({x}) ; torch.exp(-{x}.abs())
    torch.log1p({x}.abs()) ; torch.sqrt({x}.abs() + 0.5) ; torch.rsqrt({x} * {x} + 1) ; torch.erf({x})
    F.gelu({x}) ; F.gelu({x}, approximate='tanh') ; F.silu({x}) ; F.softplus({x}) ; F.elu({x}) ; F.selu({x})
    F.celu({x}) ; F.hardswish({x}) ; F.leaky_relu({x}, 0.1) ; F.mish({x}) ; F.softsign({x})
    F.logsigmoid({x}) ; {x}.square() ; torch.reciprocal({x}.abs() + 1) ; torch.expm1({x}.clamp(-3, 3))
    torch.log({x}.abs() + 0.5) ; torch.atan({x}) ; {x} ** 2 ; {x} ** 3 ; {x}.abs() ** 1.5 ; {x} * 0.1
    {x} / 3 ; 1.7 - {x} ; torch.log2({x}.abs() + 1) ; {x} * 1.3 + 0.7 ; torch.exp2({x}.clamp(-4, 4))
    F.tanhshrink({x}) ; torch.sinc({x}) ; torch.asinh({x}) ; {x}.mul(0.3).exp()
""")
# Exact where the operand is; their gradients jump.
CORNERED = _texts("""
    {x}.abs() ; -{x} ; torch.relu({x}) ; F.relu6({x}) ; {x}.clamp(-1.5, 2) ; {x}.clamp(min=0)
    F.hardtanh({x}) ; F.softshrink({x}, 1.0) ; {x} * 2 ; {x} + 1 ; {x} - 2 ; {x} * 0.5 ; {x} * -1
    torch.nan_to_num({x}) ; {x}.positive() ; {x}.clamp(max=1)
""")
JUMPING = _texts("""
    {x}.sign() ; {x}.floor() ; {x}.ceil() ; {x}.round() ; {x}.trunc() ; {x}.frac() ; {x} % 2
    torch.remainder({x}, -3) ; torch.fmod({x}, 2) ; torch.floor_divide({x}, 2) ; ({x} > 0).to({x}.dtype)
    torch.div({x}, 2, rounding_mode='trunc') ; torch.heaviside({x}, {x}.new_ones(()))
    torch.round({x} * 4) / 4 ; {x}.to(torch.int64) ; {x}.to(torch.int32) ; {x}.to(torch.bool)
    torch.where({x} > 0, {x}, {x} * 2) ; torch.where({x} == 0, 1, {x}) ; {x}.masked_fill({x} < 0, -1.0)
    torch.bucketize({x}, {x}.new_tensor([-1, 0, 2])) ; F.threshold({x}, 0.5, -1.0) ; F.hardshrink({x}, 1.0)
""")
# Their gradient at NaN is another in the vectors of eager's loop than in the elements left over.
UNEVEN = frozenset(
    _texts("""
    F.elu({x}) ; F.selu({x}) ; F.celu({x}) ; F.hardswish({x}) ; F.relu6({x}) ; F.hardtanh({x})
    F.softshrink({x}, 1.0) ; F.hardshrink({x}, 1.0)
""")
)
WHOLE = _texts("""
    {x} + 1 ; {x} * 2 ; -{x} ; {x}.abs() ; {x} // 2 ; {x} % 3 ; {x} & 3 ; {x} | 1 ; {x} ^ 5 ; ~{x} ; {x} << 1
    {x} >> 1 ; {x}.clamp(-2, 3) ; {x}.sign() ; {x} / 2 ; {x}.to(torch.int32) ; {x}.to(torch.int64)
    {x} == 0 ; {x}.to(torch.float32) * 0.5 ; torch.div({x}, 3, rounding_mode='floor') ; torch.fmod({x}, 3)
    {x}.to(torch.bool) ; torch.div({x}, -2, rounding_mode='trunc') ; {x}.square() ; torch.bitwise_not({x})
""")
LOGICAL = _texts("""
    ~{x} ; {x}.logical_not() ; {x}.to(torch.float32) ; {x}.to(torch.int64) ; {x} * 3 ; {x} ^ True
""")
BINARY = _texts("""
    {x} + {y} ; {x} - {y} ; {x} * {y} ; {x} * {y} ; {y} - {x} ; torch.maximum({x}, {y})
    {x} / ({y}.abs() + 1) ; torch.add({x}, {y}, alpha=2) ; torch.sub({x}, {y}, alpha=0.5)
    torch.hypot({x}, {y}) ; torch.atan2({x}, {y}.abs() + 1) ; torch.logaddexp({x}, {y}) ; torch.fmin({x}, {y})
    torch.clamp({x}, max={y}) ; torch.clamp({x}, {y} - 1, {y} + 1) ; torch.addcmul({x}, {y}, {y}, value=2)
    torch.lerp({x}, {y}, 0.3) ; torch.addcdiv({x}, {x}, {y}.abs() + 1) ; torch.xlogy({x}, {y}.abs() + 1)
    torch.copysign({x}, {y}) ; {x}.mul({y}).add(1) ; F.smooth_l1_loss({x}, {y}, reduction='none')
    torch.where({y} > 0, {x}, {y}) ; F.mse_loss({x}, {y}) ; torch.fmax({x}, {y})
    F.huber_loss({x}, {y}.to({x}.dtype), reduction='sum')
    torch.rsub({x}, {y}) ; torch.pow({x}.abs() + 0.5, {y}.clamp(-2, 2)) ; torch.minimum({x}, {y})
""")
EXACT_BINARY = _texts("""
    {x} < {y} ; {x} == {y} ; {x} >= {y} ; {x} != {y} ; torch.fmod({x}, {y}.abs() + 1) ; {x} > {y} ; {x} <= {y}
    torch.remainder({x}, {y}.abs() + 1) ; torch.floor_divide({x}, {y}.abs() + 1) ; torch.isclose({x}, {y})
    torch.where({x} < {y}, {x}, {y}) ; torch.div({x}, {y}.abs() + 1, rounding_mode='floor')
""")


def dim_of(g: Draft, x: Value) -> int:
    return g.rng.randrange(-x.rank, x.rank)


def dims_of(g: Draft, x: Value) -> tuple[int, ...]:
    return tuple(sorted(g.rng.sample(range(x.rank), g.rng.randint(1, x.rank))))


def pointwise(g: Draft) -> str | None:
    x = g.pick()
    if x is None:
        return None
    if x.dtype is torch.bool:
        table = LOGICAL
    elif not x.floating:
        table = WHOLE
    else:
        table = g.rng.choice((SMOOTH, SMOOTH, CORNERED))
        if (x.exact and g.rng.random() < 0.35) or g.rng.random() < 0.03:
            table = JUMPING
    text = g.rng.choice(table)
    return None if g.special and text in UNEVEN else text.format(x=x.name)


def broadcastable(a: Shape, b: Shape) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b), strict=False))


def partner(g: Draft, x: Value, alike: bool = False) -> Value:
    """A value that broadcasts with `x`; alike: of its dtype and shape."""

    def fits(y: Value) -> bool:
        if alike:
            return y.shapes == x.shapes and y.dtype is x.dtype
        return y.dtype is not torch.bool and all(map(broadcastable, x.shapes, y.shapes))

    other = g.pick(fits) if g.rng.random() < 0.7 else None
    if other is not None and other.name != x.name:
        return other
    if alike:
        return g.fresh(x.shapes, x.dtype)
    kept = [g.rng.random() < 0.7 for _ in range(x.rank)]
    start = g.rng.choice((0, 0, g.rng.randint(0, x.rank)))
    shapes = [tuple(s if k else 1 for s, k in zip(shape, kept, strict=True))[start:] for shape in x.shapes]
    dtype = x.dtype if g.rng.random() < 0.7 else g.rng.choice((*g.floats, "int64", "int32"))
    return g.fresh(shapes, dtype)


def binary(g: Draft) -> str | None:
    x = g.pick(lambda v: v.dtype is not torch.bool)
    if x is None:
        return None
    y = partner(g, x)
    if g.rng.random() < 0.5:
        x, y = y, x
    table = EXACT_BINARY if x.exact and y.exact and g.rng.random() < 0.4 else BINARY
    return g.rng.choice(table).format(x=x.name, y=y.name)


def masked(g: Draft) -> str | None:
    """Choices by a mask."""
    m = g.pick(lambda v: v.dtype is torch.bool)
    if m is None:
        return None
    x = g.pick(lambda v: v.dtype is not torch.bool and all(map(broadcastable, v.shapes, m.shapes)))
    if x is None:
        other = g.pick(lambda v: v.dtype is torch.bool and all(map(broadcastable, v.shapes, m.shapes)))
        return f"{m.name} {g.rng.choice('&|^')} {other.name}" if other else None
    y = partner(g, x)
    return g.rng.choice(
        (
            f"torch.where({m.name}, {x.name}, {y.name})",
            f"torch.where({m.name}, {x.name}, 0)",
            f"torch.where({m.name}, -1.5, {x.name})",
            f"{x.name}.masked_fill({m.name}, {g.rng.choice((0, -3))})",
            f"{x.name} * {m.name}",
            f"{x.name}.masked_fill({m.name}, float('-inf')).amax()",
            f"({x.name} * {m.name}).sum() / {m.name}.sum().clamp(min=1)",
        )
    )


def cast(g: Draft) -> str | None:
    x = g.pick(lambda v: v.floating or v.exact)
    if x is None:
        return None
    kinds = ("int64", "int32", "bool") if x.exact and g.rng.random() < 0.3 else g.floats
    kind = g.rng.choice((*kinds, "float32"))
    copied = x.floating and x.dtype != getattr(torch, kind)  # in float64, where nothing is converted, too
    return f"{x.name}.to(torch.{kind}{', copy=True' if copied else ''})"


def reduction(g: Draft) -> str | None:
    x = g.pick(lambda v: v.rank > 0)
    if x is None:
        return None
    n, d, ds = x.name, dim_of(g, x), dims_of(g, x)
    keep = g.rng.choice((True, False))
    if x.dtype is torch.bool:
        texts = [f"{n}.any({d}, {keep})", f"{n}.all({d}, {keep})", f"{n}.sum({ds}, {keep})", f"{n}.any()"]
        return g.rng.choice(texts)
    texts = [f"{n}.sum({ds}, {keep})", f"{n}.sum()", f"{n}.amax({ds}, {keep})", f"{n}.amin({ds}, {keep})"]
    texts += [f"{n}.max()", f"{n}.max({d}, {keep}).values", f"{n}.min({d}).values"]
    if x.exact:
        texts += [f"torch.count_nonzero({n}, {d})"]  # of others, one rounding more or less is a zero
        texts += [f"{n}.argmax({d}, {keep})", f"{n}.argmin({d})", f"{n}.max({d}).indices", f"{n}.any({d})"]
        texts += [f"{n}.argmax()", f"({n} > 0).all({d}, {keep})", f"{n}.clamp(-1, 1).prod({d})"]
    if not x.floating:
        return g.rng.choice(texts)
    k, norm = f"keepdim={keep}", "torch.linalg.vector_norm"
    texts += [
        f"{n}.mean({ds}, {keep})", f"{n}.var({ds}, correction=0, {k})", f"({n} + 2).mean()",
        f"torch.logsumexp({n}, {ds}, {keep})", f"{norm}({n}, 2, {ds}, {keep})",
        f"{norm}({n}, float('inf'), {ds}, {keep})", f"{norm}({n}, 1, {ds})",
        f"{n}.std({ds}, correction=0, {k}).add(0.1)", f"torch.var_mean({n}, {d}, correction=0)[0]",
        f"{n}.cumsum({d})", f"torch.aminmax({n}, dim={d}).max", f"{n} - {n}.mean({ds}, True)",
        f"{n} / (1 + {n}.abs().sum({ds}, True))", f"{n}.sigmoid().prod({d}, {keep})",
    ]  # fmt: skip
    return g.rng.choice(texts)


def normalization(g: Draft) -> str | None:
    x = g.pick(lambda v: v.rank > 0 and v.floating and 0 not in v.shapes[0])
    if x is None:
        return None
    n, d = x.name, dim_of(g, x)
    last = f"{n}.shape[-1:]"
    texts = [
        f"torch.softmax({n}, {d})", f"F.log_softmax({n}, {d})", f"F.layer_norm({n}, {last})",
        f"F.normalize({n} + 0.5, dim={d})", f"F.softmin({n}, {d})",
        f"{n} * torch.rsqrt({n}.square().mean(-1, True) + 1e-3)", f"F.rms_norm({n}, {last}, eps=1e-3)",
        f"{n} / {n}.abs().amax({d}, True).clamp(min=0.1)", f"{n} / ({n}.abs().max() + 0.5)",
        f"({n} - {n}.mean({d}, True)) / ({n}.var({d}, correction=0, keepdim=True) + 0.1).sqrt()",
    ]  # fmt: skip
    if g.rng.random() < 0.4:
        w = g.fresh([s[-1:] for s in x.shapes], x.dtype)
        b = g.fresh([s[-1:] for s in x.shapes], x.dtype)
        texts = [f"F.layer_norm({n}, {last}, {w.name}, {b.name})", f"F.rms_norm({n}, {last}, {w.name}, 1e-3)"]
    if x.rank > 2 and g.runs == 1 and g.rng.random() < 0.2:
        channels = x.shapes[0][1]
        groups = g.rng.choice([k for k in range(1, channels + 1) if channels % k == 0])
        return f"F.group_norm({n}, {groups})"
    if x.rank == 2 and g.rng.random() < 0.3:
        limit = [s[1] for s in x.shapes]
        target = g.fresh([s[:1] for s in x.shapes], "int64", "index", limit)
        kind = g.rng.choice(("mean", "sum", "none"))
        return f"F.cross_entropy({n}, {target.name}, reduction='{kind}')"
    return g.rng.choice(texts)


def own_extreme(g: Draft) -> str | None:
    """A value beside what was chosen of it: a mask of the largest, a threshold, a position."""
    x = g.pick(lambda v: v.rank > 0 and v.floating and 0 not in v.shapes[0])
    if x is None:
        return None
    n, d = x.name, dim_of(g, x)
    k = g.rng.randint(1, max(1, min(4, x.size(d))))
    largest = f"{n}.amax({d}, keepdim=True)"
    kth = f"torch.topk({n}, {k}, {d}).values.amin({d}, keepdim=True)"
    texts = [
        f"{n} == {largest}", f"({n} == {largest}).to({n}.dtype)", f"{n} >= {kth}", f"{n}.eq({n}.max())",
        f"{n}.masked_fill({n} < {kth}, float('-inf')).softmax({d})", f"torch.where({n} >= {largest}, {n}, 0)",
        f"{n}.gather({d}, {n}.argmax({d}, keepdim=True))", f"({n} == {largest}).sum({d})",
        f"{n} < {n}.amin()",
        f"({n} - {largest}) == 0", f"torch.where({n} == {n}.amin({d}, keepdim=True), 1.0, {n})",
        f"{n}.sort({d}).values", f"torch.topk({n}, {k}, {d}).values", f"{n}.sort({d}, descending=True)[0]",
    ]  # fmt: skip
    return g.rng.choice(texts)


def view(g: Draft) -> str | None:
    x = g.pick()
    if x is None:
        return None
    n, r = x.name, x.rank
    if r == 0:
        return g.rng.choice((f"{n}.unsqueeze(0)", f"{n}.expand(3, 2)", f"{n}.view(1, 1)", f"{n}.reshape(-1)"))
    d = dim_of(g, x)
    texts = [
        f"{n}.unsqueeze({g.rng.randint(-r - 1, r)})", f"{n}.permute({tuple(g.rng.sample(range(r), r))})",
        f"{n}.transpose({d}, {dim_of(g, x)})", f"{n}.flatten()", f"{n}.squeeze()", f"{n}.reshape(-1)",
        f"{n}[..., None]", f"{n}[None]", f"{n}.movedim({d}, {dim_of(g, x)})",
        f"{n}.reshape({n}.shape[0], -1)" if 0 not in x.shapes[0] else f"{n}.T",
        f"{n}.flatten({g.rng.randrange(r)}, -1)", f"{n}.expand(2, {', '.join(['-1'] * r)})", f"{n}[...]",
    ]  # fmt: skip
    at = g.rng.randrange(r)
    lead, size, most = ":, " * at, x.size(at), max(1, x.size(at) - 1)
    start, stop = g.rng.randint(-2, max(0, size - 1)), g.rng.choice(("", "-1", str(size)))
    cuts = [f"{n}[{lead}{start}:{stop}:{g.rng.randint(1, 3)}]", f"{n}[{lead}{start}:{stop}]"]
    if size:
        i, half = g.rng.randint(-size, size - 1), max(1, size // 2)
        cuts += [f"{n}[{lead}{i}]", f"{n}.select({at}, {i})", f"{n}.narrow({at}, 0, {most})"]
        cuts += [f"torch.chunk({n}, 2, {at})[0]", f"torch.split({n}, {half}, {at})[-1]"]
        cuts += [f"{n}.unbind({at})[{i}]", f"{n}.unfold({at}, {half}, 1)"]
    if r >= 2:
        cuts += [f"{n}.diagonal(0, {r - 2}, {r - 1})", f"{n}.mT", f"{n}[:, ::2]"]
    if g.runs == 1 and x.shapes[0] and 0 not in x.shapes[0]:
        cuts += [f"{n}.reshape({factored(g, math.prod(x.shapes[0]))})"] * 3
    return g.rng.choice(texts + cuts * 2)


def factored(g: Draft, size: int) -> Shape:
    """A shape of `size` elements."""
    shape: list[int] = []
    while size > 1 and len(shape) < 3:
        factor = g.rng.choice([f for f in range(1, size + 1) if size % f == 0])
        shape.append(factor)
        size //= factor
    return (*shape, size)


def movement(g: Draft) -> str | None:
    """Draw a statement that copies: a join, pad, flip or repeat."""
    x = g.pick()
    if x is None:
        return None
    n, r = x.name, x.rank
    y = partner(g, x, alike=True).name
    texts = [f"torch.stack([{n}, {y}], {g.rng.randint(-r - 1, r)})", f"{n}.clone()", f"{n}.contiguous()"]
    if r == 0:
        texts += [f"{n}.repeat(3)", f"torch.full_like({n}, 2)", f"torch.hstack([{n}, {y}])"]
        return g.rng.choice(texts)
    d = dim_of(g, x)
    pads = tuple(g.rng.randint(-1 if s > 2 else 0, 3) for s in (x.size(-1),) * 2)
    texts += [
        f"torch.cat([{n}, {y}], {d})", f"torch.cat([{n}, {y}, {n}], {d})", f"torch.hstack([{n}, {y}])",
        f"torch.flip({n}, {dims_of(g, x)})", f"torch.roll({n}, {g.rng.randint(-3, 3)}, {d})",
        f"F.pad({n}, {pads}, value={g.rng.choice((0, 1))})", f"{n}.repeat(2, {', '.join(['1'] * r)})",
        f"torch.repeat_interleave({n}, 2, {d})", f"torch.zeros_like({n})", f"torch.ones_like({n}) + {n}",
        f"torch.cat([{n}[1:], {n}[:1]])", f"F.pad({n}, (0, 1, 1, 0))" if r > 1 else f"F.pad({n}, (2, 1))",
    ]  # fmt: skip
    if r >= 2:
        texts += [f"torch.tril({n}, {g.rng.randint(-1, 1)})", f"torch.triu({n})", f"torch.rot90({n})"]
    if r == 3 and x.floating:
        texts += [f"F.pad({n}, (1, 1), mode='{g.rng.choice(('reflect', 'replicate', 'circular'))}')"]
    if r == 4 and x.floating:
        texts += [f"F.pixel_unshuffle({n}, 2)", f"F.avg_pool2d({n}, 2)"]
    if r == 4 and x.floating and not any(0 in shape for shape in x.shapes):
        texts += [f"F.interpolate({n}, scale_factor=2.0)"]  # PyTorch's meta kernel takes no empty batch
    return g.rng.choice(texts)


def contraction(g: Draft) -> str | None:
    x = g.pick(lambda v: v.floating and v.rank in (1, 2, 3))
    if x is None:
        return None
    width = g.rng.choice((1, 3, 5, 8))
    if g.rng.random() < 0.5:
        w = g.fresh([(s[-1], width) for s in x.shapes], x.dtype)
        return f"{x.name} @ {w.name}"
    w = g.fresh([(width, s[-1]) for s in x.shapes], x.dtype)
    b = g.fresh([(width,) for _ in x.shapes], x.dtype)
    return g.rng.choice((f"F.linear({x.name}, {w.name}, {b.name})", f"F.linear({x.name}, {w.name})"))
