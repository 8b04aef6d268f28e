"""Inputs on which the two sides of a rewrite are compared: numbers of every kind that its domain holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion_compiler.patterns import Interval, Rewrite


@dataclass(frozen=True)
class Kind:
    """One kind of number. draw: a shape -> float64. scale: the factor of the draws.

    generic: True if no two numbers are equal and none is special, so that gradients are compared as well.
    finite: True if no number is infinite or NaN. round: applied to four times a number, to get multiples of a
    quarter where numbers are to be short.
    """

    name: str
    draw: Callable[[Sequence[int]], Tensor]
    scale: float = 1.0
    generic: bool = True
    finite: bool = True
    round: Callable[[Tensor], Tensor] = torch.round

    def numbers(self, shape: Sequence[int], interval: Interval | None, *, short: bool = False) -> Tensor:
        """Draw numbers, within an interval if there is one."""
        numbers = self.draw(shape)
        numbers = (self.round(numbers * 4) / 4 if short else numbers) * self.scale
        return numbers if interval is None else within(numbers, interval)


def _normal(shape: Sequence[int]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _positive(shape: Sequence[int]) -> Tensor:
    """Draw positive numbers, for logarithms and roots."""
    return torch.rand(shape, dtype=torch.float64) + 0.1


def _halves(shape: Sequence[int]) -> Tensor:
    """Draw numbers, many equal and many at points where rounding and comparisons change; zeros have
    either sign."""
    return torch.randint(0, 5, shape) / 2 * _signs(shape)


def _zeros(shape: Sequence[int]) -> Tensor:
    return 0.0 * _signs(shape)


def _infinite(shape: Sequence[int]) -> Tensor:
    return torch.where(_some(shape), torch.inf * _signs(shape), _normal(shape))


def _nan(shape: Sequence[int]) -> Tensor:
    return torch.where(_some(shape), torch.nan, _normal(shape))


def _signs(shape: Sequence[int]) -> Tensor:
    return torch.randint(0, 2, shape, dtype=torch.float64) * 2 - 1


def _some(shape: Sequence[int]) -> Tensor:
    """Choose about one element in eight, the first among them."""
    chosen = torch.rand(shape) < 0.125
    chosen.view(-1)[:1] = True
    return chosen


KINDS = (
    Kind("normal", _normal),
    Kind("normal", _normal),
    Kind("uniform in (0.1, 1.1)", _positive, round=torch.ceil),
    Kind("normal x 100", _normal, scale=100.0),
    Kind("normal / 1000", _normal, scale=1e-3),
    Kind("half-integer", _halves, generic=False),
    Kind("zero", _zeros, generic=False),
    Kind("infinite", _infinite, generic=False, finite=False),
    Kind("NaN", _nan, generic=False, finite=False),
)


@dataclass(frozen=True)
class Trial:
    """One set of arguments, floats in the example's dtypes.

    of: the arguments whose numbers are of the kind; the others have normal numbers.
    """

    kind: Kind
    seed: int
    of: tuple[int, ...]
    inputs: tuple[Any, ...]

    @property
    def label(self) -> str:
        shapes = (str(list(v.shape)) if isinstance(v, Tensor) else f"{v:.6g}" for v in self.inputs)
        return f"{self.kind.name} inputs of {', '.join(shapes)}, torch.manual_seed({self.seed})"


def trials(rule: Rewrite) -> Iterator[Trial]:
    """Yield trials of the example's sizes, then of others, unless integer tensors depend on sizes."""
    fixed = any(isinstance(v, Tensor) and not is_float(v) for v in rule.example)
    for grown in (1,) if fixed else (1, 3):
        shapes = [_grown(v, grown) for v in rule.example]
        for seed, kind in enumerate(KINDS):
            for of in _chosen(rule, kind):
                yield trial(rule, kind, seed, of, shapes)


def small(rule: Rewrite, like: Trial, seed: int, sizes: Mapping[int, int]) -> Trial:
    """Return a trial like another with rounded tensors that fit a line. sizes: of the example -> small."""
    shapes = [[sizes.get(s, s) for s in v.shape] if is_float(v) else [] for v in rule.example]
    return trial(rule, like.kind, seed, like.of, shapes, short=True)


def trial(
    rule: Rewrite,
    kind: Kind,
    seed: int,
    of: tuple[int, ...],
    shapes: Sequence[Sequence[int]],
    *,
    short: bool = False,
) -> Trial:
    torch.manual_seed(seed)
    inputs: list[Any] = []
    for i, (value, interval) in enumerate(zip(rule.example, rule.intervals, strict=True)):
        chosen = kind if i in of else KINDS[0]
        if is_float(value):
            inputs.append(chosen.numbers(shapes[i], interval, short=short).to(value.dtype))
        elif isinstance(value, float):
            number = value * (1 + 0.7 * (seed % 3))
            inputs.append(number if interval is None else float(within(torch.tensor(number), interval)))
        else:
            inputs.append(value)
    return Trial(kind, seed, of, tuple(inputs))


def _grown(value: Any, factor: int) -> list[int]:
    return [size if size == 1 else size * factor for size in value.shape] if is_float(value) else []


def _chosen(rule: Rewrite, kind: Kind) -> list[tuple[int, ...]]:
    """Return the arguments that a kind is tried for: all at once, and special numbers in each alone too."""
    floats = [i for i, v in enumerate(rule.example) if is_float(v)]
    if not kind.finite:
        floats = [i for i in floats if rule.intervals[i] is None]
    alone = [(i,) for i in floats] if len(floats) > 1 and not kind.generic else []
    return [tuple(floats), *alone] if floats else []


def within(numbers: Tensor, interval: Interval) -> Tensor:
    """Return finite numbers, reflected into an interval as often as needed if they lie outside."""
    low, high = interval
    reflected = numbers
    if math.isfinite(low) and math.isfinite(high):
        width = high - low
        reflected = low + width - ((numbers - low).remainder(2 * width) - width).abs()
    elif math.isfinite(low):
        reflected = low + (numbers - low).abs()
    elif math.isfinite(high):
        reflected = high - (high - numbers).abs()
    return torch.where((low <= numbers) & (numbers <= high), numbers, reflected.clamp(low, high))


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
