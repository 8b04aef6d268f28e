"""The effects of calling a program, and how close they are to those that it should have."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tests.random_programs.program import Program
from tests.random_programs.rounding import TERMS


@dataclass(frozen=True)
class Outcome:
    """values: (name, tensor) of results, of arguments after the call and of gradients.

    strides: of the results.
    facts: which results share memory with each other and with arguments, and which require a gradient.
    """

    values: tuple[tuple[str, Tensor], ...]
    strides: tuple[tuple[int, ...], ...]
    facts: tuple[tuple[str, object], ...]


def called(
    fn: Callable[..., Sequence[Tensor]],
    program: Program,
    run: int = 0,
    wide: bool = False,
    mode: AbstractContextManager[Any] = nullcontext(),  # noqa: B008  it holds nothing
) -> Outcome:
    """Calls `fn` with the arguments of a run, and goes back through what it returns.

    wide: with float64 in the place of all floats. mode: in force meanwhile.
    """
    leaves = program.arguments(run)
    if wide:
        leaves = [widened(x) for x in leaves]
    # A leaf may not be written into.
    arguments = [x.clone() if i in program.mutated and x.requires_grad else x for i, x in enumerate(leaves)]
    with default_dtype(torch.float64 if wide else torch.float32), mode:
        results = fn(*arguments)
    values: list[tuple[str, Tensor]] = []
    for name, x in zip(program.results, results, strict=True):
        values.append((name, x.detach().clone()))
    for spec, x in zip(program.inputs, arguments, strict=True):
        values.append((f"{spec.name} after the call", x.detach().clone()))
    facts = _facts(program, arguments, results)
    asked = [(s.name, x) for s, x in zip(program.inputs, leaves, strict=True) if x.requires_grad]
    left = [x for i, x in enumerate(arguments) if i in program.mutated]
    roots = [r for r in dict.fromkeys((*results, *left)) if r.requires_grad]
    if asked and roots:
        along = [cotangent(r, i) for i, r in enumerate(roots)]
        with mode:
            gradients = torch.autograd.grad(roots, [x for _, x in asked], along, allow_unused=True)
        for (name, x), g in zip(asked, cast("Sequence[Tensor | None]", gradients), strict=True):
            values.append((f"gradient of {name}", torch.zeros_like(x).detach() if g is None else g))
    return Outcome(tuple(values), tuple(map(steps, results)), facts)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    """Set the dtype of quotients of integers and the like."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def steps(x: Tensor) -> tuple[int, ...]:
    """Strides, but for the dimensions that nobody steps along."""
    return tuple(st for size, st in zip(x.shape, x.stride(), strict=True) if size > 1) if x.numel() else ()


def widened(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x


def cotangent(x: Tensor, number: int) -> Tensor:
    """Halves of both signs, so that what is exact stays exact."""
    generator = torch.Generator().manual_seed(number)
    return (torch.randint(-4, 5, x.shape, generator=generator) / 2).to(x.dtype)


def _facts(
    program: Program, arguments: Sequence[Tensor], results: Sequence[Tensor]
) -> tuple[tuple[str, object], ...]:
    held = [*arguments, *results]
    labels = [*(i.name for i in program.inputs), *(f"result {i}" for i in range(len(results)))]
    facts: list[tuple[str, object]] = []
    for i, x in enumerate(results):
        here = labels[len(arguments) + i]
        facts.append((f"{here} requires a gradient", x.requires_grad))
        others = held[: len(arguments) + i]
        if x.numel():
            facts.append((f"{here} is", _same(labels, others, lambda y, x=x: y is x)))
            facts.append((f"{here} shares memory with", _same(labels, others, _sharing(x))))
    return tuple(facts)


def _same(labels: Sequence[str], others: Sequence[Tensor], test: Callable[[Tensor], bool]) -> tuple[str, ...]:
    return tuple(label for label, y in zip(labels, others, strict=False) if test(y))


def _sharing(x: Tensor) -> Callable[[Tensor], bool]:
    place: Any = x.untyped_storage().data_ptr()
    return lambda y: y.numel() > 0 and y.untyped_storage().data_ptr() == place


def differences(
    ours: Outcome, eager: Outcome, truth: Outcome, members: Sequence[Outcome]
) -> list[tuple[str, str]]:
    """(name, what is wrong) of everything in `ours` that no correct program has.

    members: outcomes of eager with other roundings.
    """
    facts = zip(ours.facts, eager.facts, strict=True)
    problems = [(name, f"{a}, eager has {b}") for (name, a), (_, b) in facts if a != b]
    for i, (mine, theirs) in enumerate(zip(ours.strides, eager.strides, strict=True)):
        if mine != theirs:
            problems.append((f"strides of result {i}", f"{mine}, eager has {theirs}"))
    for i, (name, value) in enumerate(ours.values):
        others = [m.values[i][1] for m in members]
        problem = difference(value, eager.values[i][1], truth.values[i][1], others)
        if problem:
            problems.append((name, problem))
    return problems


def difference(ours: Tensor, eager: Tensor, truth: Tensor, members: Sequence[Tensor]) -> str | None:
    """None where every element of `ours` could be that of a correct program.

    Integers and bools: as in eager or one of `members`. Floats: at most four times as far from the float64
    truth as the farthest of them, or four units in the last place, or four times what a term of the largest
    element may be off by, as terms may cancel (docs/numerics.md); NaN and infinities where one of them or the
    truth has them. The sign of a zero is not asked for: where terms cancel, it is that of their order.
    """
    if ours.dtype != eager.dtype or ours.shape != eager.shape:
        return f"{ours.dtype} {list(ours.shape)}, eager has {eager.dtype} {list(eager.shape)}"
    references = torch.stack([eager, *members])
    if not ours.is_floating_point():
        return _told(ours, eager, truth, (references == ours).any(0))
    x = ours.double()
    every = torch.cat([references.double(), truth.to(ours.dtype).double()[None], truth[None].double()])
    same = ((every == x) | (every.isnan() & x.isnan())).any(0)
    away = torch.where(every.isfinite(), every - truth, 0.0).nan_to_num(0, 0, 0).abs().amax(0)
    info = torch.finfo(ours.dtype)
    largest = truth[truth.isfinite()].abs().amax() if truth.isfinite().any() else 0.0
    allowed = 4 * (away + info.eps * truth.abs() + TERMS[ours.dtype] * largest + info.tiny * info.eps)
    finite = torch.where(truth.isfinite(), truth, eager.double())
    close = x.isfinite() & ((x - finite).abs() <= allowed) & every.isfinite().any(0)
    return _told(ours, eager, truth, same | close)


def _told(ours: Tensor, eager: Tensor, truth: Tensor, right: Tensor) -> str | None:
    if bool(right.all()):
        return None
    wrong = (~right).nonzero()
    at = tuple(wrong[0].tolist())
    numbers = f"{ours[at].item()}, eager has {eager[at].item()}, float64 {truth[at].item()}"
    return f"{len(wrong)} of {right.numel()} wrong, {list(at)}: {numbers}"
