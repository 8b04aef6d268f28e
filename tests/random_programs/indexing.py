"""Lines that read and write by index, and those that write in place."""

from __future__ import annotations

import torch

from tests.random_programs.program import Shape
from tests.random_programs.statements import Draft, Value, Write, broadcastable, dim_of, partner


def index_into(g: Draft, x: Value, dim: int, shapes: list[Shape] | None = None) -> str:
    """An index below the size of a dimension: an argument, or any integers of the program, wrapped.

    shapes: of the index in each run; one dimension of any length where there are none.
    """

    def fits(v: Value) -> bool:
        return v.dtype is torch.int64 and (v.rank == 1 if shapes is None else v.shapes == tuple(shapes))

    y = g.pick(fits)
    if y is not None and g.rng.random() < 0.6:
        return f"torch.remainder({y.name}, {x.name}.shape[{dim}])"
    length = g.rng.choice((1, 2, 3, 5, 8))
    shapes = shapes or [(length,) for _ in x.shapes]
    return g.fresh(shapes, "int64", "index", [shape[dim] for shape in x.shapes]).name


def order_of(g: Draft, x: Value, dim: int) -> str:
    """Every position of a dimension once."""
    sizes = [shape[dim] for shape in x.shapes]
    return g.fresh([(s,) for s in sizes], "int64", "order", sizes).name


def indexable(v: Value) -> bool:
    return v.rank > 0 and all(0 not in shape for shape in v.shapes)


def index_read(g: Draft) -> str | None:
    x = g.pick(indexable)
    if x is None:
        return None
    n, d = x.name, dim_of(g, x)
    form = g.rng.randrange(11)
    match form:
        case 0 | 1:
            return f"{n}.index_select({d}, {index_into(g, x, d)})"
        case 2 | 3:
            return f"{n}[{index_into(g, x, 0)}]"
        case 4:
            return f"torch.gather({n}, {d}, {index_into(g, x, d, list(x.shapes))})"
        case 5 if x.rank > 1:
            return f"{n}[:, {index_into(g, x, 1)}]"
        case 6 if x.rank > 1:
            i = index_into(g, x, 0, [(4,) for _ in x.shapes])
            j = index_into(g, x, 1, [(4,) for _ in x.shapes])
            return f"{n}[{i}, {j}]"
        case 7 if x.rank == 2 and x.floating:
            i = index_into(g, x, 0, [(2, 3) for _ in x.shapes])
            return f"F.embedding({i}, {n})"
        case 8:
            cut = [tuple(1 if k == d % x.rank else s for k, s in enumerate(shape)) for shape in x.shapes]
            return f"torch.take_along_dim({n}, {index_into(g, x, d, cut)}, {d})"
        case 9 if x.exact and x.rank:
            return f"torch.take_along_dim({n}, torch.argsort({n}, {d}, stable=True), {d})"
        case 10:
            return f"{n}[[{g.rng.randrange(x.size(0))}, -1]]"
        case _:
            return f"{n}[{order_of(g, x, 0)}]"


def index_write(g: Draft) -> str | None:
    """Functional scatters."""
    x = g.pick(lambda v: indexable(v) and v.dtype is not torch.bool)
    if x is None:
        return None
    n, d = x.name, dim_of(g, x)
    y = partner(g, x, alike=True).name
    match g.rng.randrange(10):
        case 0:
            return f"{n}.index_add({d}, {order_of(g, x, d)}, {y})"
        case 1:
            return f"{n}.index_copy({d}, {order_of(g, x, d)}, {y})"
        case 2:
            return f"{n}.index_fill({d}, {index_into(g, x, d)}, 2)"
        case 3:
            return f"{n}.scatter({d}, {index_into(g, x, d, list(x.shapes))}, 1)"
        case 4 if x.exact:
            return f"{n}.scatter_add({d}, {index_into(g, x, d, list(x.shapes))}, {y})"
        case 5 if x.rank == 1:
            return f"{n}.scatter({d}, {order_of(g, x, d)}, {y})"
        case 6:
            return f"torch.index_put({n}, ({index_into(g, x, 0)},), {n}.new_tensor(0.5))"
        case 7:
            return f"torch.slice_scatter({n}, {y}[1:], 0, 1)"
        case 8 if x.floating:
            kind = g.rng.choice(("amax", "amin", "sum"))
            return f"{n}.scatter_reduce({d}, {index_into(g, x, d, list(x.shapes))}, {y}, '{kind}')"
        case _:
            return f"torch.select_scatter({n}, {y}.select({d}, 0), {d}, -1)"


def one_hot(g: Draft) -> str | None:
    x = g.pick(lambda v: v.dtype is torch.int64 and v.exact and v.rank < 4)
    if x is not None and g.rng.random() < 0.7:
        return f"F.one_hot(torch.remainder({x.name}, 5), 5)"
    y = g.pick(lambda v: v.exact and v.rank > 0 and v.dtype is not torch.bool and 0 not in v.shapes[0])
    if y is None:
        return None
    d = dim_of(g, y)
    size = max(shape[d] for shape in y.shapes)
    return f"F.one_hot({y.name}.argmax({d}), {size})"


def write(g: Draft) -> str | None:
    """A statement that writes into a value, a view of one, or an argument."""
    x = g.pick()
    if x is None:
        return None
    n = x.name
    y = g.pick(lambda v: v.name != n and not (v.floating and not x.floating) and fits_in(v, x))
    other = y.name if y is not None and (x.dtype is not torch.bool) else None
    if x.dtype is torch.bool:
        return Write(g.rng.choice((f"{n}.logical_not_()", f"{n}.fill_(True)", f"{n}[..., :1] = False")))
    number = g.rng.choice(("2", "-1", "0", "3"))
    calls = ["add_(" + number, "mul_(2", "fill_(" + number, "zero_(", "clamp_(-2, 3"]
    if x.floating:
        calls += ["sigmoid_(", "relu_(", "mul_(0.3", "tanh_(", "neg_(", "div_(3"]
    if other:
        calls += [f"add_({other}", f"mul_({other}", f"copy_({other}", f"sub_({other}, alpha=2"] * 2
    texts = [f"{n}.{call})" for call in calls]
    if other:
        texts += [f"{n} += {other}", f"{n}[...] = {other}"]
    if x.rank:
        lead = ":, " * g.rng.randrange(x.rank)
        part = g.rng.choice(("1:", ":-1", "::2", "0", "-1", ":1"))
        texts += [f"{n}[{lead}{part}] = {number}", f"{n}[{lead}{part}].mul_(2)", f"{n}[..., 1:].add_(1)"] * 2
        texts += [f"{n}[{lead}{part}].copy_({n}[{lead}{part}] * 2)", f"{n}.flatten()[0] = {number}"]
        texts += [f"{n}.view(-1)[::2] = {number}", f"{n}.T.mul_(2)" if x.rank == 2 else f"{n}[0].sub_(1)"]
    if indexable(x):
        d = dim_of(g, x)
        match g.rng.randrange(9):
            case 0:
                texts = [f"{n}[{index_into(g, x, 0)}] = {number}"]
            case 1:
                source = partner(g, x, alike=True).name
                texts = [f"{n}.index_copy_({d}, {order_of(g, x, d)}, {source})"]
            case 2:
                source = partner(g, x, alike=True).name
                texts = [f"{n}.index_add_({d}, {order_of(g, x, d)}, {source})"]
            case 3:
                texts = [f"{n}.scatter_({d}, {index_into(g, x, d, list(x.shapes))}, {number})"]
            case 4 if x.exact:
                texts = [f"{n}[{n} > 0] = {number}", f"{n}.masked_fill_({n} < 0, {number})"]
            case 5:
                texts = [f"{n}.index_fill_({d}, {index_into(g, x, d)}, {number})"]
            case 6 if x.rank > 1:
                texts = [f"{n}[:, {index_into(g, x, 1)}] = {number}"]
            case 7:
                source = partner(g, x, alike=True).name
                texts = [f"{n}.index_put_(({order_of(g, x, 0)},), {source}, accumulate=True)"]
            case _:
                pass
    return Write(g.rng.choice(texts))


def fits_in(y: Value, x: Value) -> bool:
    """Whether `y` broadcasts to the shape of `x`."""
    return all(len(b) <= len(a) and broadcastable(a, b) for a, b in zip(x.shapes, y.shapes, strict=True))


def view_of_parts(g: Draft) -> str | None:
    """A part of a value that a later statement may write into."""
    x = g.pick(lambda v: v.rank > 0 and 0 not in v.shapes[0])
    if x is None:
        return None
    n, d = x.name, dim_of(g, x)
    turned = f"{n}.permute({tuple(reversed(range(x.rank)))})"
    return g.rng.choice((f"{n}[1:]", f"{n}[..., ::2]", f"{n}.select({d}, 0)", turned))
