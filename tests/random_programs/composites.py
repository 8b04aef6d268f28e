"""Lines of larger operators, of sizes, and of tensors made inside."""

from __future__ import annotations

from tests.random_programs.statements import Draft, dim_of


def made_inside(g: Draft) -> str | None:
    """Positions, constants and masks of a value's size."""
    x = g.pick(lambda v: v.rank > 0)
    if x is None:
        return None
    n, d = x.name, dim_of(g, x)
    size, last = f"{n}.shape[{d}]", f"{n}.shape[-1]"
    texts = [
        f"torch.arange({size})", f"torch.arange(1, {size} + 1)", f"torch.arange({size}) * 2 - 3",
        f"torch.full(({size},), 1.5)", f"torch.full(({size}, 2), 2)", f"torch.zeros({size}, 3)",
        f"torch.ones({n}.shape)", f"torch.eye({size})", f"torch.tril(torch.ones({last}, {last}))",
        f"torch.triu(torch.full(({last}, {last}), float('-inf')), 1).exp()", f"{n}.new_full(({size},), 3)",
        f"torch.arange({last})[None, :] <= torch.arange({size})[:, None]", f"torch.linspace(0, 1, {size})",
        "torch.scalar_tensor(2.5)", f"torch.empty_like({n}).fill_(2)", "torch.tensor([1, -1, 2])",
    ]  # fmt: skip
    return g.rng.choice(texts)


def sized(g: Draft) -> str | None:
    """Numbers that are sizes, and operands of other dtypes."""
    x = g.pick(lambda v: v.rank > 0)
    if x is None:
        return None
    n, d = x.name, dim_of(g, x)
    size = f"{n}.shape[{d}]"
    texts = [
        f"{n} * {size}", f"{n} / {size}", f"{n} * {n}.shape[-1] ** -0.5", f"{n} + ({size} // 2)",
        f"{n} / max({size}, 3)", f"{n}.sum() / {n}.numel()", f"{n}[..., : ({n}.shape[-1] + 1) // 2]",
        f"{n} * 1.5", f"{n} + 0.5", f"torch.where({n} == {n}, {n}, 0.5)", f"{n}.detach()",
        f"{n}.detach() * {n}",
        f"{n}.view({n}.shape[0], 1, *{n}.shape[1:])", f"{n}.reshape(-1, {n}.shape[-1])",
        f"torch.cat([{n}, torch.ones({n}.shape)], {d})", f"torch.cat([{n}, {n}.to(torch.float32)], {d})",
        f"{n}.expand(2, *{n}.shape).reshape(-1)", f"torch.split({n}, ({size} + 1) // 2, {d})[0]",
    ]  # fmt: skip
    return g.rng.choice(texts)


def attention(g: Draft) -> str | None:
    # The scores are rows by rows: with thousands of them the interpreter would take minutes.
    x = g.pick(lambda v: v.floating and v.rank in (3, 4) and all(min(s) > 0 and s[-2] < 99 for s in v.shapes))
    if x is None:
        return None
    n = x.name
    y = g.fresh(x.shapes, x.dtype).name
    call = "F.scaled_dot_product_attention"
    rows = f"torch.arange({n}.shape[-2])"
    mask = f"{rows}[None, :] <= {rows}[:, None]"
    bias = f"torch.triu({n}.new_full(({n}.shape[-2], {n}.shape[-2]), float('-inf')), 1)"
    texts = [
        f"{call}({n}, {y}, {n})", f"{call}({n}, {y}, {y}, is_causal=True)",
        f"{call}({n}, {n}, {y}, attn_mask={mask})", f"{call}({n}, {y}, {y}, attn_mask={bias})",
    ]  # fmt: skip
    written = [
        f"torch.softmax({n} @ {y}.mT * {n}.shape[-1] ** -0.5, -1) @ {y}",
        f"torch.softmax(({n} @ {n}.mT).masked_fill(~({mask}), float('-inf')), -1) @ {y}",
        f"torch.einsum('...ij,...kj->...ik', {n}, {y})",
    ]  # fmt: skip
    # The call that masks and softmaxes become may give zeros for infinite queries and NaN (docs/numerics.md).
    return g.rng.choice(texts[:2] if g.special else [*texts, *written])


def convolution(g: Draft) -> str | None:
    x = g.pick(lambda v: v.floating and v.rank in (3, 4) and all(0 not in s for s in v.shapes))
    if x is None:
        return None
    kernel = tuple(min(3, x.size(d)) for d in range(2, x.rank))
    out = g.rng.choice((1, 2, 5))
    w = g.fresh([(out, s[1], *kernel) for s in x.shapes], x.dtype).name
    b = g.fresh([(out,) for _ in x.shapes], x.dtype).name
    name = f"F.conv{x.rank - 2}d"
    return g.rng.choice((f"{name}({x.name}, {w})", f"{name}({x.name}, {w}, {b}, padding=1)"))


def batch_norm(g: Draft) -> str | None:
    """In training it writes into two arguments."""
    x = g.pick(lambda v: v.floating and v.rank in (2, 3, 4) and v.size(0) > 1 and v.size(1) > 0)
    if x is None:
        return None
    channels = [s[1:2] for s in x.shapes]
    mean = g.fresh(channels, x.dtype).name
    # An infinite one gives NaN where a processor's kernel multiplies the mean by it (docs/numerics.md).
    weight = g.fresh(channels, x.dtype, *(("positive",) if g.special else ())).name
    var = g.fresh(channels, x.dtype, "positive").name
    train = g.rng.choice((True, False))
    return f"F.batch_norm({x.name}, {mean}, {var}, {weight}, None, {train}, 0.25, 0.1)"
