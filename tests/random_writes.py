"""Random programs that write into their arguments and into tensors of their own, as text."""

from __future__ import annotations

import itertools
import linecache
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

VIEWS = (
    "{}", "{}.t()", "{}.view(4, 16)", "{}.view(2, 4, 8)[1]", "{}[3]", "{}[2:]", "{}.flatten()", "{}[:, ::2]",
    "{}.view(2, 4, 8).transpose(0, 2)",
)  # fmt: skip
# Each shows as many elements of one tensor as of another: i and j are any places, p and q tensors of three.
PLACES = (
    "{}[{i}:{i} + 2]", "{}[:, {i}:{i} + 2]", "{}[{i}]", "{}.t()[{i}:{i} + 2]", "{}[p]", "{}[:, p]",
    "{}[p, q]", "{}.diagonal()[:]", "{}[2:, 1:][{j}]", "{}.view(2, 4, 8)[1][:, p]", "{}[{i}:{i} + 2, p]",
)  # fmt: skip
VALUES = ("{}", "{} * 2", "{}.sin()", "{}.clone()", "1.5")
WHOLE = (
    "{}.sin()", "{} * 2 + {}", "{}.t() - {}", "{}.flip(0)", "{} @ {} * 0.1", "{}.cumsum(0) * 0.1",
    "{}.roll(1, 0) + {}.mean(1, keepdim=True)", "{}.clone()",
)  # fmt: skip
UPDATES = (
    "{}.copy_({})", "{}.mul_(2).add_({})", "{}.t().copy_({})", "{}.index_add_(0, p, {}[:3])",
    "{}.scatter_(0, order, {})", "{}.index_put_((p * 0, p), {}[0, :3], accumulate=True)",
    "{}.masked_fill_({} > 0.3, 0.5)", "{}[mask] = {}.mean()",
)  # fmt: skip


def program(seed: int) -> tuple[Callable[..., Any], str]:
    """A function of what `drawn` gives, and its text."""
    r = random.Random(seed)
    names, count = ["a", "b"], itertools.count()
    lines: list[str] = []

    def of(forms: tuple[str, ...]) -> str:
        form = r.choice(forms)
        return form.format(
            *(r.choice(names) for _ in range(form.count("{}"))), i=r.randrange(6), j=r.randrange(4)
        )

    def write() -> str:
        place = r.choice(PLACES)
        one, other = (place.format(r.choice(names), i=r.randrange(6), j=r.randrange(4)) for _ in range(2))
        return f"{one} {r.choice(('=', '=', '+='))} {r.choice(VALUES).format(other)}"

    for _ in range(r.randint(2, 6)):
        kind = r.random()
        if kind < 0.5:
            lines.append(write())
        elif kind < 0.65:
            lines.append(of(UPDATES))
        elif kind < 0.85:
            lines.append(f"t{next(count)} = {of(WHOLE)}")
            names.append(lines[-1].split()[0])
        else:
            lines.append(f"results.append({of(VIEWS)}.sin())")
    lines.append(f"results.append({of(VIEWS)})")
    lines.append(f"results.append({r.choice(names)}.sum(0))")
    body = "\n    ".join(("results = []", *lines, "return results"))
    text = f"def written(a, b, p, q, order, mask):\n    {body}\n"
    scope: dict[str, Any] = {"torch": torch}
    name = f"<writes {seed}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), scope)
    return scope["written"], text


def drawn(seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(8, 8, dtype=torch.float64, generator=g) for _ in range(2))
    p, q = (torch.randperm(8, generator=g)[:3] for _ in range(2))
    order = torch.stack([torch.randperm(8, generator=g) for _ in range(8)], 1)
    return [a, b, p, q - 8, order, torch.rand(8, 8, generator=g) > 0.5]
