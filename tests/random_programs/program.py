"""A program: a function of tensors as lines of Python, and how to make its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]

# Of the text of a program.
HEADER = """\
import torch
import torch.nn.functional as F
import fusion_compiler as fc

def seeded(number):
    return torch.Generator().manual_seed(number)
"""
FOOTER = """\
compiled = fc.compile(program, {options})
for make in ARGUMENTS:
    for f in (program, compiled):
        arguments = make()
        results = f(*arguments)
        print(results, *arguments, sep="\\n")
        roots, leaves = ([x for x in xs if x.requires_grad] for xs in (results, arguments))
        if roots and leaves:
            ones = [torch.ones_like(r) for r in roots]
            print(torch.autograd.grad(roots, leaves, ones, allow_unused=True))
"""
# Attention as a program writes it out, and as one call.
WRITTEN_OUT = (
    (r"torch\.softmax\((\w+) @ (\w+)\.mT \* \1\.shape\[-1\] \*\* -0\.5, -1\) @ \2", r"attention(\1, \2, \2)"),
    (
        r"torch\.softmax\(\((\w+) @ \1\.mT\)\.masked_fill\(~\((.+)\), float\('-inf'\)\), -1\) @ (\w+)",
        r"attention(\1, \1, \3, \2, 1.0)",
    ),
)
FLOATS = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Input:
    """An argument of a program, made from its number.

    shapes: of each run; more than one where sizes are dynamic.
    values: "halves" (few bits, so that no order of exact operations matters), "normal", "special" (normal
        with NaN, infinities and zeros of both signs), "index" (integers below `limits`), "order" (a
        permutation of as many).
    layout: "plain", "transposed", "sliced" (every other element of a larger tensor), "offset" (a place
        that no vector load is aligned to) or "expanded".
    """

    number: int
    shapes: tuple[Shape, ...]
    dtype: str
    values: str = "halves"
    layout: str = "plain"
    gradient: bool = False
    limits: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"a{self.number}"

    def text(self, run: int = 0) -> str:
        """An expression for the argument of a run."""
        tensor = self._laid_out(self.shapes[run], run)
        return f"{tensor}.requires_grad_()" if self.gradient else tensor

    def tensor(self, run: int = 0) -> Tensor:
        return eval(self.text(run), {"torch": torch, "seeded": seeded})

    def _laid_out(self, shape: Shape, run: int) -> str:
        if not shape or self.layout == "plain":
            return self._filled(shape, run)
        match self.layout:
            case "transposed":
                return f"{self._filled(shape[::-1], run)}.permute({tuple(reversed(range(len(shape))))})"
            case "sliced":
                cut = ", ".join(f"1:{1 + 2 * s}:2" for s in shape)
                return f"{self._filled(tuple(2 * s + 3 for s in shape), run)}[{cut}]"
            case "offset":
                return f"{self._filled((1 + torch.Size(shape).numel(),), run)}[1:].view({shape})"
            case "expanded":
                return f"{self._filled((1, *shape[1:]), run)}.expand({shape})"
            case _:
                raise ValueError(self.layout)

    def _filled(self, shape: Shape, run: int) -> str:
        generator = f"generator=seeded({self.number})"
        to = f".to(torch.{self.dtype})"
        match self.values:
            case "index":
                return f"torch.randint(0, {self.limits[run]}, {shape}, {generator}){to}"
            case "order":
                return f"torch.randperm({self.limits[run]}, {generator})"
            case "normal":
                return f"torch.randn({shape}, {generator}){to}"
            case "positive":
                return f"(torch.rand({shape}, {generator}) + 0.5){to}"
            case "special":
                odd = "torch.tensor([float('nan'), float('inf'), -float('inf'), 0.0, -0.0, 1.5, -2.0, 0.25])"
                return f"{odd}[torch.randint(0, 8, {shape}, {generator})]{to}"
            case "halves":
                integers = f"torch.randint({0 if self.dtype == 'uint8' else -6}, 7, {shape}, {generator})"
                return f"({integers} / 2){to}" if self.dtype in FLOATS else f"{integers}{to}"
            case _:
                raise ValueError(self.values)


@dataclass(frozen=True)
class Program:
    """lines: statements over a0, a1, ... (arguments) and v0, v1, ..., each of which is assigned once."""

    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]
    dynamic: bool = False

    @property
    def runs(self) -> int:
        return len(self.inputs[0].shapes) if self.inputs else 1

    @cached_property
    def body(self) -> str:
        returned = "".join(f"{name}, " for name in self.results)
        lines = (*self.lines, f"return ({returned})")
        return "\n".join(
            (f"def program({', '.join(i.name for i in self.inputs)}):", *(f"    {s}" for s in lines))
        )

    @cached_property
    def function(self) -> Callable[..., tuple[Tensor, ...]]:
        return _function(self.body)

    @cached_property
    def wide_function(self) -> Callable[..., tuple[Tensor, ...]]:
        """The same in float64, whatever float it names."""
        return _function(re.sub(r"torch\.(bfloat16|float16|float32)\b", "torch.float64", self.body))

    @cached_property
    def fused_function(self) -> Callable[..., tuple[Tensor, ...]]:
        """The same with attention that is written out as a call of PyTorch's fused kernel."""
        body = self.body
        for written, call in WRITTEN_OUT:
            body = re.sub(written, call, body)
        return _function(body)

    def arguments(self, run: int = 0) -> list[Tensor]:
        return [i.tensor(run) for i in self.inputs]

    @cached_property
    def mutated(self) -> frozenset[int]:
        """The positions of the arguments that eager writes into."""
        arguments = [x.clone() if x.requires_grad else x for x in self.arguments()]
        before = [x._version for x in arguments]
        self.function(*arguments)
        return frozenset(i for i, x in enumerate(arguments) if x._version != before[i])

    def text(self) -> str:
        """A file that runs the program in eager and compiled, forward and backward."""
        runs = ""
        for run in range(self.runs):
            arguments = (
                f"{i.text(run)}{'.clone()' if n in self.mutated and i.gradient else ''}"
                for n, i in enumerate(self.inputs)
            )
            runs += "    lambda: [\n" + "".join(f"        {text},\n" for text in arguments) + "    ],\n"
        options = "backend='interpret', dynamic=True" if self.dynamic else "backend='interpret'"
        return f"{HEADER}\n{self.body}\n\nARGUMENTS = [\n{runs}]\n{FOOTER.format(options=options)}"


def names(texts: Iterable[str]) -> set[str]:
    """The values and arguments that texts speak of."""
    return {name for text in texts for name in re.findall(r"\b[av]\d+\b", text)}


def assigned(line: str) -> str | None:
    """The value that a line makes; None where it writes into one that exists."""
    match = re.match(r"(v\d+) = ", line)
    return match[1] if match else None


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Attend in three or four dimensions by the kernel that takes four with contiguous rows. The result is a
    copy, as the kernel keeps its own result."""
    missing = (1,) * (4 - query.dim())
    q, k, v = (x.contiguous().view(*missing, *x.shape) for x in (query, key, value))
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    return attended.clone().view(value.shape)


def _function(body: str) -> Callable[..., tuple[Tensor, ...]]:
    scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "attention": attention}
    exec(body, scope)
    return scope["program"]
