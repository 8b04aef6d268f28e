"""Draws a program from a seed: lines one by one, each tried in eager and in float64."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.random_programs import composites, indexing, statements
from tests.random_programs.outcome import called, default_dtype, widened
from tests.random_programs.program import FLOATS, Input, Program, Shape, names
from tests.random_programs.statements import Maker, Value, Write

MAKERS: tuple[tuple[Maker, float], ...] = (
    (statements.pointwise, 6),
    (statements.binary, 5),
    (statements.masked, 2),
    (statements.cast, 2),
    (statements.reduction, 4),
    (statements.normalization, 2),
    (statements.own_extreme, 3),
    (statements.view, 4),
    (statements.movement, 3),
    (statements.contraction, 0.7),
    (indexing.index_read, 3),
    (indexing.index_write, 2),
    (indexing.one_hot, 0.5),
    (indexing.write, 5),
    (indexing.view_of_parts, 1),
    (composites.made_inside, 1),
    (composites.sized, 1.5),
    (composites.attention, 0.5),
    (composites.convolution, 0.3),
    (composites.batch_norm, 0.4),
)
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 33)
MOST_LINES = 10
LARGEST = 1e4  # no value of a program is larger


def draw(seed: int, most_lines: int = MOST_LINES) -> Program:
    """The program of a seed; eager runs it, forward and backward."""
    rng = Random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of shapes that broadcast, and the like
        while True:
            program = _Draft(rng, rng.randint(2, most_lines)).program()
            if program is not None:
                return program


class _Draft:
    """A program that is being drawn: what the makers of lines see (`statements.Draft`)."""

    def __init__(self, rng: Random, lines: int) -> None:
        self.rng = rng
        self.lines_wanted = lines
        alone = [(name,) for name in ("float32", "bfloat16", *FLOATS)]
        self.floats: tuple[str, ...] = rng.choice([*alone, FLOATS])
        self.special = rng.random() < 0.04
        self.dynamic = rng.random() < 0.2
        self.runs = 2 if self.dynamic else 1
        self.most = 20_000 if rng.random() < 0.06 else 3_000
        self.differentiated = rng.random() < 0.65
        self.inputs: list[Input] = []
        self.pending: list[Input] = []
        self.lines: list[str] = []
        self.values: dict[str, Value] = {}
        self.number = 0  # of the next argument
        self.scopes = [dict[str, Any]() for _ in range(2 * self.runs)]  # eager and wide of each run

    def pick(self, fits: Callable[[Value], bool] = lambda v: True) -> Value | None:
        fitting = [v for v in self.values.values() if fits(v)]
        if not fitting:
            return None
        return fitting[max(self.rng.randrange(len(fitting)), self.rng.randrange(len(fitting)))]

    def fresh(
        self,
        shapes: Sequence[Shape],
        dtype: str | torch.dtype | None = None,
        values: str | None = None,
        limits: Sequence[int] = (),
    ) -> Value:
        kind = str(dtype or self.rng.choice(self.floats)).removeprefix("torch.")
        floating = kind in FLOATS
        if values is None:
            values = self.rng.choice(("halves", "halves", "normal")) if floating else "halves"
            if floating and self.special and self.rng.random() < 0.5:
                values = "special"
        layout = self.rng.choice(("plain",) * 5 + ("transposed", "sliced", "offset", "expanded"))
        if values == "order":
            layout = "plain"
        gradient = floating and self.differentiated and self.rng.random() < 0.7
        new = Input(self.number, tuple(map(tuple, shapes)), kind, values, layout, gradient, tuple(limits))
        self.number += 1
        self.pending.append(new)
        self._evaluate_input(new)
        return self._value(new.name)

    def program(self) -> Program | None:
        self._first()
        tries = 0
        while len(self.lines) < self.lines_wanted and tries < 8 * self.lines_wanted:
            tries += 1
            self.pending = []
            maker = self.rng.choices([m for m, _ in MAKERS], [w for _, w in MAKERS])[0]
            text = maker(self)
            if text is None or not self._accepted(text):
                self._discard()
        if not self.lines:
            return None
        return self._checked(Program(tuple(self.inputs), tuple(self.lines), self._results(), self.dynamic))

    def _first(self) -> None:
        """The arguments that there are before the first line."""
        rng = self.rng
        rank = rng.choice((2, 2, 3, 3, 1, 4, 0)) if not self.dynamic else rng.choice((2, 2, 3, 1))
        shape = [rng.choice(SIZES) for _ in range(rank)]
        if rank and self.most > 3000:
            shape = [rng.choice((1, 2, 3)) for _ in range(rank)]
            shape[rng.randrange(rank)] = rng.choice((300, 1000, 1025, 2047, 4096, 5001))
        elif rank and not self.dynamic and rng.random() < 0.04:
            shape[rng.randrange(rank)] = 0
        while torch.Size(shape).numel() > self.most:
            shape[shape.index(max(shape))] = rng.choice((2, 3))
        shapes = [tuple(shape)]
        if self.dynamic:  # a size of one is never symbolic
            shape = [max(2, s) for s in shape]
            shapes = [tuple(shape), tuple(s + rng.choice((0, 1, 3)) for s in shape)]
        for _ in range(rng.choice((1, 1, 2))):
            self.fresh(shapes)
        if rng.random() < 0.3:
            self.fresh(shapes, rng.choice(("int64", "int32", "bool") * 2 + ("int8", "uint8")))
        self._commit(f"{[i.name for i in self.pending]}")

    def _evaluate_input(self, argument: Input) -> None:
        for run in range(self.runs):
            self.scopes[2 * run][argument.name] = argument.tensor(run).detach()
            self.scopes[2 * run + 1][argument.name] = widened(argument.tensor(run)).detach()

    def _value(self, name: str) -> Value:
        eager = [scope[name] for scope in self.scopes[::2]]
        exact = all(map(_exact, eager, (scope[name] for scope in self.scopes[1::2])))
        return Value(name, tuple(tuple(x.shape) for x in eager), eager[0].dtype, exact)

    def _accepted(self, text: str) -> bool:
        target = None if isinstance(text, Write) else f"v{sum(map(_assigns, self.lines))}"
        line = str(text) if target is None else f"{target} = {text}"
        touched = [*self.values, *(i.name for i in self.pending), *([target] if target else [])]
        for number, scope in enumerate(self.scopes):
            try:
                execute(line, scope, wide=number % 2 == 1)
            except (RuntimeError, LookupError, TypeError, ValueError, ArithmeticError):
                return False
            if target and not isinstance(scope[target], Tensor):
                return False
            if not all(self._sane(scope[name]) for name in touched):
                return False
        self._commit(line)
        self.lines.append(line)
        self.values = {n: self._value(n) for n in touched if n in self.values or n == target}
        return True

    def _sane(self, x: Tensor) -> bool:
        if x.numel() > self.most or x.dim() > 5 or x.is_complex():
            return False
        if not x.numel() or x.dtype is torch.bool:
            return True
        largest = x.double().abs().nan_to_num(0, 0, 0).max().item()
        return largest <= LARGEST and (self.special or bool(x.isfinite().all()))

    def _commit(self, line: str) -> None:
        """The arguments that a line speaks of become the program's."""
        spoken = names([line])
        self.inputs += [i for i in self.pending if i.name in spoken]
        for argument in self.pending:
            if argument.name in spoken:
                self.values[argument.name] = self._value(argument.name)
        self.pending = []

    def _discard(self) -> None:
        """Back to what there was before a line: it may have written half of what it writes."""
        self.pending = []
        self.scopes = [{} for _ in self.scopes]
        for argument in self.inputs:
            self._evaluate_input(argument)
        for number, scope in enumerate(self.scopes):
            for line in self.lines:
                execute(line, scope, wide=number % 2 == 1)

    def _results(self) -> tuple[str, ...]:
        """Return the variables that no line reads, and now and then others: arguments, or values twice."""
        variables = [line.split(" ")[0] for line in self.lines if _assigns(line)]
        read = names(line.split(" = ", 1)[-1] for line in self.lines)
        results = [name for name in variables if name not in read]
        while self.rng.random() < 0.35 or not results:
            results.append(self.rng.choice((*variables, *variables, *self.values)))
        if self.rng.random() < 0.9:
            results = list(dict.fromkeys(results))
        return tuple(results)

    def _checked(self, program: Program) -> Program | None:
        """The program, without gradients where autograd refuses it."""
        plain = replace(program, inputs=tuple(replace(i, gradient=False) for i in program.inputs))
        for tried in (program, plain):
            try:
                for run in range(tried.runs):
                    called(tried.function, tried, run)
                    called(tried.wide_function, tried, run, wide=True)
                return tried
            except (RuntimeError, IndexError):
                continue
        return None


def _assigns(line: str) -> bool:
    return re.match(r"v\d+ = ", line) is not None


def execute(line: str, scope: dict[str, Any], wide: bool = False) -> None:
    scope |= {"torch": torch, "F": torch.nn.functional}
    if wide:
        line = re.sub(r"torch\.(bfloat16|float16|float32)\b", "torch.float64", line)
    with torch.no_grad(), default_dtype(torch.float64 if wide else torch.float32):
        exec(line, scope)


def _exact(eager: Tensor, wide: Tensor) -> bool:
    """Whether two dtypes agree on small numbers of few bits, with which exact operations stay exact."""
    if not eager.numel():
        return True
    if not torch.equal(eager.double().nan_to_num(), wide.double().nan_to_num()):
        return False
    small = eager.double().abs().nan_to_num(0, 0, 0)
    return bool(small.max() <= 1024) and bool((small * 16).frac().eq(0).all())
