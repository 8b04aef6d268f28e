"""Makes a program that fails smaller, as long as it fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from tests.random_programs.generate import execute
from tests.random_programs.judge import Verdict
from tests.random_programs.program import Input, Program, assigned, names


def shrunk(
    program: Program, verdict: Verdict, judge: Callable[[Program], Verdict], most: int = 300
) -> Program:
    """The smallest program found with a verdict like `verdict`. most: programs that are tried."""
    tried: set[Program] = {program}
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(program):
            if smaller in tried or len(tried) > most:
                continue
            tried.add(smaller)
            if _valid(smaller) and alike(judge(smaller), verdict):
                program, progress = smaller, True
                break
    return program


def alike(a: Verdict, b: Verdict) -> bool:
    """Whether two verdicts speak of the same thing: the names and numbers in them aside."""
    return a.kind == b.kind and (a.kind == "wrong" or _bare(a.what) == _bare(b.what))


def _bare(text: str) -> str:
    return " ".join(re.sub(r"\w*\d\w*", "", text).split()[:8])


def _valid(program: Program) -> bool:
    """Whether eager runs it."""
    try:
        for run in range(program.runs):
            program.function(*(x.clone() for x in program.arguments(run)))
    except Exception:
        return False
    return True


def _smaller(program: Program) -> Iterator[Program]:
    """Simpler programs, the boldest first."""
    if program.dynamic:
        inputs = tuple(replace(i, shapes=i.shapes[:1], limits=i.limits[:1]) for i in program.inputs)
        yield replace(program, inputs=inputs, dynamic=False)
    for i in range(len(program.results)):
        if len(program.results) > 1:
            yield _trimmed(replace(program, results=program.results[:i] + program.results[i + 1 :]))
    for i in range(len(program.lines)):
        yield from _without(program, i)
    for i, line in enumerate(program.lines):
        yield from _cut(program, i, line)
    for i, spec in enumerate(program.inputs):
        for change in ({"gradient": False}, {"layout": "plain"}, {"values": "halves"}, {"dtype": "float32"}):
            if spec.values in ("index", "order") and change.keys() & {"values", "dtype"}:
                continue
            if change == {"dtype": "float32"} and spec.dtype in ("int64", "int32", "bool"):
                continue
            changed = replace(spec, **change)  # type: ignore[arg-type]
            if changed != spec:
                yield replace(program, inputs=(*program.inputs[:i], changed, *program.inputs[i + 1 :]))
    yield from _narrower(program)


def _without(program: Program, i: int) -> Iterator[Program]:
    """Without a line: its value becomes an argument, or another value that it is made of."""
    line, rest = program.lines[i], (*program.lines[:i], *program.lines[i + 1 :])
    target = assigned(line)
    if target is None:
        yield _trimmed(replace(program, lines=rest))
        return
    for other in sorted(names([line.split(" = ", 1)[1]])):
        lines = tuple(_renamed(text, target, other) for text in rest)
        results = tuple(other if r == target else r for r in program.results)
        yield _trimmed(replace(program, lines=lines, results=results))


def _cut(program: Program, i: int, line: str) -> Iterator[Program]:
    """With an argument of the same shape in the place of a value."""
    target = assigned(line)
    if target is None:
        return
    try:
        values = [_traced(program, i, run)[target] for run in range(program.runs)]
    except Exception:
        return
    number = 1 + max((spec.number for spec in program.inputs), default=-1)
    dtype = str(values[0].dtype).removeprefix("torch.")
    gradient = values[0].dtype.is_floating_point and any(spec.gradient for spec in program.inputs)
    spec = Input(number, tuple(tuple(x.shape) for x in values), dtype, gradient=gradient)
    lines = tuple(_renamed(t, target, spec.name) for t in (*program.lines[:i], *program.lines[i + 1 :]))
    results = tuple(spec.name if r == target else r for r in program.results)
    yield _trimmed(replace(program, inputs=(*program.inputs, spec), lines=lines, results=results))


def _traced(program: Program, last: int, run: int) -> dict[str, torch.Tensor]:
    scope: dict[str, torch.Tensor] = {
        spec.name: x.detach() for spec, x in zip(program.inputs, program.arguments(run), strict=True)
    }
    for line in program.lines[: last + 1]:
        execute(line, scope)
    return scope


def _narrower(program: Program) -> Iterator[Program]:
    """With each of the sizes that arguments have made smaller everywhere."""
    sizes = sorted({s for spec in program.inputs for shape in spec.shapes for s in shape}, reverse=True)
    for size in sizes:
        for smaller in (2, 3, 5, size // 2):
            if smaller >= size:
                continue
            inputs = tuple(
                replace(
                    spec,
                    shapes=tuple(tuple(smaller if s == size else s for s in shape) for shape in spec.shapes),
                    limits=tuple(smaller if s == size else s for s in spec.limits),
                )
                for spec in program.inputs
            )
            yield replace(program, inputs=inputs)


def _trimmed(program: Program) -> Program:
    """Without values and arguments that nothing reads."""
    lines, results = list(program.lines), program.results
    while True:
        read = names((*(line.split(" = ", 1)[1] if assigned(line) else line for line in lines), *results))
        kept = [line for line in lines if assigned(line) is None or assigned(line) in read]
        if len(kept) == len(lines):
            break
        lines = kept
    inputs = tuple(spec for spec in program.inputs if spec.name in read) or program.inputs[:1]
    return replace(program, lines=tuple(lines), inputs=inputs)


def _renamed(text: str, old: str, new: str) -> str:
    return re.sub(rf"\b{old}\b", new, text)
