"""Random programs over tensors, as text: what Hypothesis draws, shrinks and prints.

Values are chosen so that float64 tells right from wrong. Small integers and what is made of them by
exact operations (`exact`) may be compared, truncated and counted in any float dtype without a rounding
that decides; everything else only passes through functions that amplify errors little.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

NAMES: dict[str, Any] = {
    "torch": torch,
    "F": torch.nn.functional,
    **{
        name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64", "int64", "int32")
    },
    "boolean": torch.bool,
}
WIDE = {**NAMES, **dict.fromkeys(("float16", "bfloat16", "float32"), torch.float64)}
FLOATS = ("float32", "float16", "bfloat16", "float64")
LARGEST = 1 << 7  # of an exact value: all float dtypes hold integers and halves up to there
MOST = 4096  # elements


@dataclass(frozen=True)
class Dag:
    """inputs: (shape, dtype, how it is laid out); steps: expressions over v0, v1, ...; outputs: v numbers."""

    inputs: tuple[tuple[tuple[int, ...], str, str], ...]
    steps: tuple[str, ...]
    outputs: tuple[int, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        values = self.values(NAMES, *tensors)
        return tuple(values[i] for i in self.outputs)

    def function(self) -> Callable[..., tuple[Tensor, ...]]:
        """The program as a function that TorchDynamo can read."""
        names = [f"v{i}" for i in range(len(self.inputs))]
        lines = [f"    v{len(names) + i} = {step}" for i, step in enumerate(self.steps)]
        results = "".join(f"v{i}, " for i in self.outputs)
        text = "\n".join((f"def program({', '.join(names)}):", *lines, f"    return ({results})"))
        scope = dict(NAMES)
        exec(text, scope)
        return scope["program"]

    def values(self, names: Mapping[str, Any], *tensors: Tensor) -> list[Tensor]:
        values = list(tensors)
        for step in self.steps:
            values.append(eval(step, dict(names), {f"v{i}": v for i, v in enumerate(values)}))
        return values

    def behind(self, number: int) -> list[int]:
        """The values that one is made of, itself among them."""
        if number < len(self.inputs):
            return [number]
        read = variables(self.steps[number - len(self.inputs)])
        return sorted({number, *(b for r in read for b in self.behind(r))})

    def tensors(self) -> list[Tensor]:
        """Integers of both signs, halves among the floats; the same for the same DAG."""
        generator = torch.Generator().manual_seed(len(self.steps))
        return [tensor_of(shape, dtype, form, generator) for shape, dtype, form in self.inputs]


def tensor_of(shape: tuple[int, ...], dtype: str, form: str, generator: torch.Generator) -> Tensor:
    def numbers(sizes: tuple[int, ...]) -> Tensor:
        x = torch.randint(-6, 7, sizes, generator=generator)
        return (x / 2 if dtype in FLOATS else x).to(NAMES[dtype])

    if not shape or form == "plain":
        return numbers(shape)
    match form:
        case "transposed":
            return numbers(shape[::-1]).permute(*reversed(range(len(shape))))
        case "sliced":  # every other element of a larger tensor, from the second on
            return numbers(tuple(2 * s + 3 for s in shape))[tuple(slice(1, 1 + 2 * s, 2) for s in shape)]
        case "offset":  # a place that no vector load is aligned to
            return numbers((1 + _numel(shape),))[1:].view(shape)
        case "expanded":
            return numbers((1, *shape[1:])).expand(shape)
        case _:
            raise ValueError(form)


@dataclass(frozen=True)
class Value:
    shape: tuple[int, ...]
    dtype: torch.dtype
    exact: bool
    bound: float  # largest magnitude


class Values(list[Value]):
    """The values of a program so far. top: the largest magnitude allowed; most: the most elements allowed."""

    def __init__(self, values: Iterable[Value], top: float, most: int) -> None:
        super().__init__(values)
        self.top, self.most = top, most


@dataclass(frozen=True)
class Step:
    text: str
    exact: bool
    bound: float


POINTWISE = {  # expression, and the bound of its result given the operand's
    "torch.sin({})": 1, "torch.sigmoid({})": 1, "torch.tanh({})": 1, "torch.exp(-torch.abs({}))": 1,
    "torch.rsqrt(1 + {0} * {0})": 1, "torch.log1p(torch.abs({}))": 8,
}  # fmt: skip


@st.composite
def dags(
    draw: st.DrawFn, most_steps: int = 9, differentiable: bool = False, shapes: Sequence[tuple[int, ...]] = ()
) -> Dag:
    """shapes: of the first input, in float32; small ones of any dtype where there are none."""
    rank = draw(st.sampled_from((2, 3, 3, 2, 4, 1, 0)))
    sizes = st.sampled_from((1, 2, 3, 4, 5, 7, 8, 12, 17))
    shape = tuple(draw(sizes) for _ in range(rank))
    if not differentiable and shape and draw(st.integers(0, 11)) == 0:
        empty = draw(st.integers(0, rank - 1))
        shape = (*shape[:empty], 0, *shape[empty + 1 :])
    while _numel(shape) > MOST:
        shape = shape[1:]
    if shapes:
        shape = draw(st.sampled_from(shapes))
    inputs: list[tuple[tuple[int, ...], str, str]] = []
    floats = draw(st.sampled_from((("float32",), ("float32",), FLOATS if not shapes else ("float32",))))
    for number in range(draw(st.integers(1, 3))):
        input_shape = shape if number == 0 else draw(_broadcastable(shape))
        kinds = floats if differentiable or number == 0 else (*floats, *floats, "int64", "boolean")
        form = draw(st.sampled_from(("plain", "plain", "transposed", "sliced", "expanded", "offset")))
        inputs.append((input_shape, draw(st.sampled_from(kinds)), form))
    dag = Dag(tuple(inputs), (), ())
    real = dag.tensors()
    made_of = [Value(tuple(x.shape), x.dtype, True, 6) for x in real]
    values = Values(made_of, *((1e7, 1 << 18) if shapes else (1e4, MOST)))
    for _ in range(draw(st.sampled_from((*range(4, most_steps + 1), 1, 2, 3)))):
        step = draw(_step(values, floats))
        if step is None:
            continue
        dag = replace(dag, steps=(*dag.steps, step.text))
        result = eval(step.text, dict(NAMES), {f"v{i}": x for i, x in enumerate(real)})
        if result.numel() > values.most:
            dag = replace(dag, steps=dag.steps[:-1])
            continue
        real.append(result)
        exact = step.exact and step.bound <= LARGEST
        values.append(Value(tuple(result.shape), result.dtype, exact, step.bound))
    made_here = list(range(len(inputs), len(values)))
    unread = [i for i in made_here if not any(i in variables(s) for s in dag.steps)]
    more = draw(st.lists(st.sampled_from(made_here), max_size=2)) if made_here else []
    return replace(dag, outputs=tuple(dict.fromkeys((*unread, *more))))


def variables(text: str) -> set[int]:
    """The numbers of the values that an expression reads."""
    return {int(number) for number in re.findall(r"\bv(\d+)\b", text)}


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


@st.composite
def _broadcastable(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    kept = tuple(s if draw(st.booleans()) else 1 for s in shape)
    return kept[draw(st.integers(0, len(kept))) :]


@st.composite
def _step(draw: st.DrawFn, values: Values, floats: tuple[str, ...]) -> Step | None:
    # Late values are likelier: chains are longer than trees.
    number = (
        len(values) - 1 - min(draw(st.integers(0, len(values) - 1)), draw(st.integers(0, len(values) - 1)))
    )
    kind = draw(st.sampled_from(KINDS))
    return draw(_cast(number, values, floats) if kind is _cast else kind(number, values))


@st.composite
def _pointwise(draw: st.DrawFn, n: int, values: Values) -> Step | None:
    v = values[n]
    if not v.dtype.is_floating_point or draw(st.integers(0, 3)) == 0:
        if v.dtype is torch.bool:
            return Step(f"torch.logical_not(v{n})", True, 1)
        text = draw(st.sampled_from(("torch.abs(v{})", "-v{}", "torch.relu(v{})", "torch.clamp(v{}, -2, 3)")))
        return Step(text.format(n), v.exact, v.bound)
    text, bound = draw(st.sampled_from(list(POINTWISE.items())))
    return Step(text.format(f"v{n}"), False, bound)


@st.composite
def _binary(draw: st.DrawFn, n: int, values: Values) -> Step | None:
    v = values[n]
    if v.dtype is torch.bool:
        return None
    others = [i for i, o in enumerate(values) if o.dtype is not torch.bool and _fits(v.shape, o.shape)]
    m = draw(st.sampled_from(others))
    o = values[m]
    exact = v.exact and o.exact
    match draw(st.sampled_from("+-*mM1")):
        case "*":
            return Step(f"v{n} * v{m}", exact, v.bound * o.bound) if v.bound * o.bound < values.top else None
        case "m":
            return Step(f"torch.minimum(v{n}, v{m})", exact, max(v.bound, o.bound))
        case "M":
            return Step(f"torch.maximum(v{n}, v{m})", exact, max(v.bound, o.bound))
        case "1":
            return Step(f"v{n} * 2 - 1", v.exact, v.bound * 2 + 1)
        case sign:
            return Step(f"v{n} {sign} v{m}", exact, v.bound + o.bound)


def _fits(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(x == y or 1 in (x, y) for x, y in zip(reversed(a), reversed(b), strict=False))


@st.composite
def _reduction(draw: st.DrawFn, n: int, values: Values) -> Step | None:
    v = values[n]
    rank = len(v.shape)
    dims = tuple(sorted(draw(st.sets(st.integers(0, rank - 1), min_size=1)))) if rank else ()
    count = _numel(tuple(v.shape[d] for d in dims))
    keep = draw(st.booleans())
    dim = draw(st.sampled_from(dims)) if dims else 0
    if v.dtype is torch.bool:
        name = draw(st.sampled_from(("any", "all")))
        return Step(f"torch.{name}(v{n}, {dim}, {keep})" if rank else f"torch.{name}(v{n})", True, 1)
    choice = draw(
        st.sampled_from(
            (
                "sum", "sum", "sum", "mean", "amax", "amin", "softmax", "whole", "arg", "var", "centre",
                "scale", "logsumexp", "prod", "norm", "spread",
            )
        )
    )  # fmt: skip
    if choice not in ("amax", "amin", "arg", "prod", "whole") and not v.dtype.is_floating_point:
        choice = "sum"
    match choice:
        case "sum" if v.bound * count < values.top:
            return Step(f"torch.sum(v{n}, {dims}, {keep})", v.exact and count > 0, v.bound * max(count, 1))
        case "whole" if v.bound * _numel(v.shape) < values.top:
            return Step(f"torch.sum(v{n})", v.exact, v.bound * max(_numel(v.shape), 1))
        case "mean" if count:
            return Step(f"torch.mean(v{n}, {dims}, {keep})", False, v.bound)
        case "centre" if count:  # back over what it was reduced from
            return Step(f"v{n} - torch.mean(v{n}, {dims}, True)", False, 2 * v.bound)
        case "spread" if count and v.bound * _numel(v.shape) < values.top:  # of all, after sums of some
            text = f"torch.sum(torch.abs(v{n} - torch.mean(v{n}, {dims}, True)))"
            return Step(text, False, 2 * v.bound * _numel(v.shape))
        case "scale" if count and v.bound * count < values.top:
            return Step(f"v{n} / (1 + torch.sum(torch.abs(v{n}), {dims}, True))", False, 1)
        case "var" if count > 1 and _numel(v.shape):
            return Step(f"torch.var(v{n}, {dims}, correction=0, keepdim={keep})", False, v.bound**2)
        case ("amax" | "amin") as name if count:
            return Step(f"torch.{name}(v{n}, {dims}, {keep})", v.exact, v.bound)
        case "logsumexp" if count:
            return Step(f"torch.logsumexp(v{n}, {dims}, {keep})", False, v.bound + 6)
        case "norm" if count:
            return Step(f"torch.rsqrt(1 + torch.mean(v{n} * v{n}, {dims}, {keep})) * 2", False, 2)
        case "prod" if rank and 0 < max(v.bound, 1) ** v.shape[dim] < LARGEST:
            return Step(f"torch.prod(v{n}, {dim}, {keep})", v.exact, max(v.bound, 1) ** v.shape[dim])
        case "softmax" if rank:
            return Step(f"torch.softmax(v{n}, {dim})", False, 1)
        case "arg" if rank and v.exact and v.shape[dim]:
            name = draw(st.sampled_from(("argmax", "argmin")))
            return Step(f"torch.{name}(v{n}, {dim}, {keep})", v.shape[dim] <= LARGEST, v.shape[dim])
        case _:
            return None


@st.composite
def _view(draw: st.DrawFn, n: int, values: Values) -> Step | None:
    v = values[n]
    rank = len(v.shape)
    match draw(
        st.sampled_from(("permute", "reshape", "reshape", "unsqueeze", "slice", "select", "expand", "split"))
    ):
        case "permute" if rank > 1:
            return Step(f"v{n}.permute({tuple(draw(st.permutations(range(rank))))})", v.exact, v.bound)
        case "reshape":
            return Step(f"v{n}.reshape({draw(_factored(_numel(v.shape)))})", v.exact, v.bound)
        case "unsqueeze":
            return Step(f"v{n}.unsqueeze({draw(st.integers(0, rank))})", v.exact, v.bound)
        case "slice" if rank:
            dim = draw(st.integers(0, rank - 1))
            start, step = draw(st.integers(-v.shape[dim], v.shape[dim])), draw(st.integers(1, 3))
            stop = draw(st.sampled_from((None, v.shape[dim] - 1, -1)))
            text = f"v{n}[{':, ' * dim}{start}:{'' if stop is None else stop}:{step}]"
            return Step(text, v.exact, v.bound)
        case "select" if rank and 0 not in v.shape:
            dim = draw(st.integers(0, rank - 1))
            index = draw(st.integers(-v.shape[dim], v.shape[dim] - 1))
            return Step(f"v{n}.select({dim}, {index})", v.exact, v.bound)
        case "expand":
            sizes = [draw(st.sampled_from((1, 2, 3))) if s == 1 else s for s in v.shape]
            lead = draw(st.lists(st.sampled_from((2, 3)), max_size=1))
            return Step(f"v{n}.expand({(*lead, *sizes)})", v.exact, v.bound)
        case "split" if rank and v.shape[-1] > 1:
            at = draw(st.integers(1, v.shape[-1] - 1))
            part = draw(st.integers(0, 1))
            return Step(f"torch.split(v{n}, [{at}, {v.shape[-1] - at}], -1)[{part}]", v.exact, v.bound)
        case _:
            return None


@st.composite
def _factored(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    """A shape of `size` elements."""
    if size == 0:
        return (0, 2)
    shape: list[int] = []
    while size > 1 and len(shape) < 3:
        factor = draw(st.sampled_from([f for f in range(1, size + 1) if size % f == 0]))
        shape.append(factor)
        size //= factor
    return (*shape, size)


@st.composite
def _layout(draw: st.DrawFn, n: int, values: Values) -> Step | None:
    """Draw a step that moves data: cat, stack, pad, flip, roll, tril, contiguous copies, writes into a
    slice."""
    v = values[n]
    rank = len(v.shape)
    same = [i for i, o in enumerate(values) if o.shape == v.shape and o.dtype == v.dtype]
    m = draw(st.sampled_from(same))
    exact, bound = v.exact and values[m].exact, max(v.bound, values[m].bound)
    dim = draw(st.integers(0, max(rank - 1, 0)))
    match draw(
        st.sampled_from((
            "cat", "stack", "pad", "flip", "roll", "tril", "repeat", "write", "write", "clone", "like",
            "part",
        ))
    ):  # fmt: skip
        case "cat" if rank:
            return Step(f"torch.cat([v{n}, v{m}], {dim})", exact, bound)
        case "stack":
            return Step(f"torch.stack([v{n}, v{m}], {draw(st.integers(0, rank))})", exact, bound)
        case "pad" if rank:
            pads = [draw(st.integers(-1 if s > 2 else 0, 3)) for s in v.shape[::-1] for _ in range(2)]
            pads = pads[: 2 * draw(st.integers(1, rank))]
            return Step(f"F.pad(v{n}, {pads}, value={draw(st.sampled_from((0, 1)))})", v.exact, v.bound + 1)
        case "flip" if rank:
            return Step(
                f"torch.flip(v{n}, {draw(st.lists(st.integers(0, rank - 1), unique=True))})", v.exact, v.bound
            )
        case "roll" if rank:
            return Step(f"torch.roll(v{n}, {draw(st.integers(-3, 3))}, {dim})", v.exact, v.bound)
        case "tril" if rank > 1:
            return Step(f"torch.tril(v{n}, {draw(st.integers(-2, 2))})", v.exact, v.bound)
        case "repeat" if rank:
            times = [draw(st.sampled_from((1, 1, 2))) for _ in range(rank)]
            return Step(f"v{n}.repeat({times})", v.exact, v.bound)
        case "write" if rank and v.shape[dim] > 1:
            start, step = draw(st.integers(0, v.shape[dim] - 1)), draw(st.integers(1, 3))
            part = f"v{m}[{':, ' * dim}{start}::{step}]"
            return Step(f"torch.slice_scatter(v{n}, {part} * 1, {dim}, {start}, None, {step})", exact, bound)
        case "like":  # of the operand the form alone
            return Step(f"torch.ones_like(v{n})", True, 1)
        case "part" if rank and v.shape[dim]:  # nothing of the second operand is left
            text = f"torch.cat([v{n}, v{m}], {dim}).narrow({dim}, 0, {draw(st.integers(1, v.shape[dim]))})"
            return Step(text, v.exact, v.bound)
        case "clone":
            return Step(f"v{n}.clone(memory_format=torch.contiguous_format)", v.exact, v.bound)
        case _:
            return None


@st.composite
def _cast(draw: st.DrawFn, n: int, values: Values, floats: tuple[str, ...]) -> Step | None:
    v = values[n]
    to = draw(st.sampled_from((*floats, "int64", "int32", "boolean")))
    if to not in FLOATS and not v.exact:
        return None
    return Step(f"v{n}.to({to})", v.exact, v.bound)


@st.composite
def _choice(draw: st.DrawFn, n: int, values: Values) -> Step | None:
    """Comparisons, and choices by them."""
    v = values[n]
    masks = [i for i, o in enumerate(values) if o.dtype is torch.bool and _fits(v.shape, o.shape)]
    if masks and v.dtype is not torch.bool:
        m = draw(st.sampled_from(masks))
        if draw(st.booleans()):
            return Step(f"v{n}.masked_fill(v{m}, {draw(st.sampled_from((0, -3)))})", v.exact, v.bound + 3)
        others = [i for i, o in enumerate(values) if o.shape == v.shape and o.dtype == v.dtype]
        o = draw(st.sampled_from(others))
        return Step(
            f"torch.where(v{m}, v{n}, v{o})", v.exact and values[o].exact, max(v.bound, values[o].bound)
        )
    if not v.exact or v.dtype is torch.bool:
        return None
    others = [
        i for i, o in enumerate(values) if o.exact and o.dtype is not torch.bool and _fits(v.shape, o.shape)
    ]
    sign = draw(st.sampled_from(("<", ">=", "==", "!=")))
    return Step(f"v{n} {sign} {draw(st.sampled_from(['0', *(f'v{i}' for i in others)]))}", True, 1)


@st.composite
def _gather(draw: st.DrawFn, n: int, values: Values) -> Step | None:
    v = values[n]
    rank = len(v.shape)
    if not rank or 0 in v.shape:
        return None
    dim = draw(st.integers(0, rank - 1))
    size = v.shape[dim]
    indices = [
        i for i, o in enumerate(values) if o.dtype is torch.int64 and o.exact and len(o.shape) in (1, rank)
    ]
    if not indices:
        return None
    m = draw(st.sampled_from(indices))
    index = f"torch.remainder(v{m}, {size})"
    if len(values[m].shape) == 1:
        text = draw(
            st.sampled_from(
                ("torch.index_select(v{n}, {d}, {i})", "v{n}[{before}{i}]", "v{n}[{before}{i} - {s}]")
            )
        )
        return Step(text.format(n=n, d=dim, i=index, s=size, before=":, " * dim), v.exact, v.bound)
    if all(a <= b for d, (a, b) in enumerate(zip(values[m].shape, v.shape, strict=True)) if d != dim):
        return Step(f"torch.gather(v{n}, {dim}, {index})", v.exact, v.bound)
    return None


@st.composite
def _call(draw: st.DrawFn, n: int, values: Values) -> Step | None:
    """Draw a step that no cluster holds: a product, which is a library call, or a running sum."""
    v = values[n]
    if not v.dtype.is_floating_point or len(v.shape) < 2 or 0 in v.shape:
        return None
    dim = draw(st.integers(0, len(v.shape) - 1))
    bound = v.bound**2 * max(v.shape[-2:])
    match draw(st.sampled_from(("product", "gram", "running"))):
        case "product" if bound < values.top and _numel(v.shape[:-1]) * v.shape[-2] <= values.most:
            return Step(f"v{n} @ v{n}.mT", False, bound)
        case "gram" if bound < values.top and _numel(v.shape) // v.shape[-2] * v.shape[-1] <= values.most:
            return Step(f"v{n}.mT @ v{n}", False, bound)
        case "running" if v.bound * v.shape[dim] < values.top:
            return Step(f"torch.cumsum(v{n}, {dim})", v.exact, v.bound * v.shape[dim])
        case _:
            return None


KINDS = (
    _pointwise, _binary, _binary, _reduction, _reduction, _view, _view, _layout, _cast, _choice, _gather,
    _call,
)  # fmt: skip
