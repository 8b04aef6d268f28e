"""The check that the two sides of a rewrite are equal, gradients too.

Their maths is compared in float64, and their results in the dtypes of the example, where the replacement must
be as close to the float64 truth as the code is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_compiler.errors import InvalidPatternError, RewriteNotEqualError
from fusion_compiler.ir.pattern_text import parameter_names
from fusion_compiler.passes.patterns.trace import apart
from fusion_compiler.passes.rewrites.trials import Trial, is_float, small, trials
from fusion_compiler.patterns import Code, Rewrite
from fusion_compiler.runtime.verify import ROUNDINGS, WORSE

TOLERANCE = 1e-8  # of the largest result; float64 keeps sixteen digits
SEEDS = 3  # to look for a short counterexample with


class InFloat64(TorchDispatchMode):
    """A mode in which casts to narrower floats stay in float64, to compare the maths and not its rounding."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in (torch.float16, torch.bfloat16, torch.float32):
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def check_equal(rule: Rewrite) -> None:
    """Raise RewriteNotEqualError with the inputs that show the difference, or InvalidPatternError if a side
    does not run on the example. The global random state is left as it is."""
    with apart(), torch.random.fork_rng(devices=[]):
        for number, trial in enumerate(trials(rule)):
            try:
                differences = _differences(rule, trial, torch.randn)
            except _SideError as failed:
                if number == 0:
                    detail = f"its {failed.side} fails: {failed.error}"
                    raise InvalidPatternError(pattern=rule.name, detail=detail) from failed.error
                if failed.side == "code":
                    continue  # the code does not take these sizes or numbers
                raise RewriteNotEqualError(
                    pattern=rule.name,
                    what="the replacement",
                    error=f"an error ({failed.error})",
                    counterexample=trial.label,
                ) from failed.error
            if differences:
                raise _not_equal(rule, trial, differences)


class _SideError(Exception):
    """One side fails: the "code", or the "replacement" where the code does not."""

    def __init__(self, side: str, error: Exception) -> None:
        self.side, self.error = side, error


@dataclass(frozen=True)
class _Difference:
    """A result in which the two sides differ.

    what: which result. error: by how much. where: the worst element. before, after: all elements.
    """

    what: str
    error: str
    where: str
    before: Tensor
    after: Tensor


@dataclass(frozen=True)
class _Pair:
    """One result of both sides.

    typical: for a gradient the size of the terms that it is a sum of, which may cancel out; 0 for an output.
    """

    what: str
    before: Tensor
    after: Tensor
    typical: float = 0.0


@dataclass(frozen=True)
class _Results:
    """The results of one side.

    outputs: the tensors that it returns. gradients: those of a projection of the outputs, in the order of the
    floating arguments; empty if they are not compared.
    """

    outputs: list[Tensor]
    gradients: list[Tensor]


Tangent = Callable[[torch.Size], Tensor]


def _differences(rule: Rewrite, trial: Trial, tangent: Tangent) -> list[_Difference]:
    """Return the results that differ on a trial, outputs first: in float64, or else in the example's dtypes.

    Raises _SideError.
    """
    exact, theirs = _both(rule, trial, tangent, wide=True)
    differences = [_difference(pair) for pair in _pairs(rule, trial, exact, theirs)]
    if not any(differences):
        pairs = _pairs(rule, trial, *_both(rule, trial, tangent, wide=False))
        truth = [*exact.outputs, *exact.gradients]
        differences = [_rounding(*row) for row in zip(pairs, truth, strict=True)]
    return [d for d in differences if d is not None]


def _both(rule: Rewrite, trial: Trial, tangent: Tangent, *, wide: bool) -> tuple[_Results, _Results]:
    """Return the results of the two sides. wide: compute in float64, also where the code casts to less."""
    inputs = [v.double() if wide and is_float(v) else v for v in trial.inputs]
    results: list[_Results] = []
    for side, code in (("code", rule.code), ("replacement", rule.after)):
        try:
            results.append(_results(code, inputs, trial.kind.generic, tangent, wide))
        except Exception as error:
            raise _SideError(side, error) from error
    return results[0], results[1]


def _results(code: Code, inputs: Sequence[Any], generic: bool, tangent: Tangent, wide: bool) -> _Results:
    fresh = [v.detach().clone().requires_grad_(generic) if is_float(v) else v for v in inputs]
    state = torch.get_rng_state()
    with InFloat64() if wide else nullcontext():
        returned = code(*fresh)
        outputs: list[Tensor] = list(returned) if isinstance(returned, tuple | list) else [returned]
        torch.set_rng_state(state)
        live = [o for o in outputs if o.requires_grad]
        tangents = [tangent(o.shape).to(o.dtype) for o in live]
        sources = [v for v in fresh if is_float(v) and generic]
        grads: Sequence[Tensor | None] = [None] * len(sources)
        if live:
            grads = torch.autograd.grad(live, sources, tangents, allow_unused=True)
    torch.set_rng_state(state)
    gradients = [torch.zeros_like(v) if g is None else g for v, g in zip(sources, grads, strict=True)]
    return _Results([o.detach() for o in outputs], gradients)


def _pairs(rule: Rewrite, trial: Trial, before: _Results, after: _Results) -> list[_Pair]:
    """Return pairs of results. Raises InvalidPatternError if the sides return different numbers of them."""
    if len(before.outputs) != len(after.outputs):
        detail = f"its code returns {len(before.outputs)} tensors, its replacement {len(after.outputs)}"
        raise InvalidPatternError(pattern=rule.name, detail=detail)
    outputs = zip(before.outputs, after.outputs, strict=True)
    gradients = zip(before.gradients, after.gradients, strict=True)
    sources = [i for i, v in enumerate(trial.inputs) if is_float(v)]
    typical = max(1.0, trial.kind.scale) ** 2
    return [
        *(_Pair(f"output {i}", a, b) for i, (a, b) in enumerate(outputs)),
        *(
            _Pair(f"the gradient of argument {i}", a, b, typical)
            for i, (a, b) in zip(sources, gradients, strict=False)
        ),
    ]


def _difference(pair: _Pair) -> _Difference | None:
    """Return the difference of a pair in float64, or None."""
    a, b = pair.before, pair.after
    if a.shape != b.shape:
        return _Difference(pair.what, f"its form ({_form(a)}, then {_form(b)})", "", a, b)
    ours, theirs = _numbers(a), _numbers(b)
    wrong = torch.where(_same(ours, theirs), 0.0, (ours - theirs).abs())
    bad = ~(wrong <= TOLERANCE * max(_scale(ours), 1e-4 * pair.typical, 1e-6))
    if not bool(bad.any()):
        return None
    error, where = _worst(ours, theirs, wrong, bad)
    return _Difference(pair.what, f"{error} (float64)", where, a, b)


def _rounding(pair: _Pair, exact: Tensor) -> _Difference | None:
    """Return the difference of a pair in the dtypes of the example, if the maths is the same, or None.

    A result may be off by four roundings of its dtype, by 64 of float32 (float64 for float64), or by four
    times the error of the code itself. The strides of gradients are not compared: they are autograd's.
    """
    a, b = pair.before, pair.after
    if _form(a) != _form(b) or (not pair.typical and _strides(a) != _strides(b)):
        forms = (f"{_form(x)} with strides {list(x.stride())}" for x in (a, b))
        return _Difference(pair.what, f"its form ({', then '.join(forms)})", "", a, b)
    ours, theirs = _numbers(a), _numbers(b)
    truth = _numbers(exact.to(a.dtype)) if exact.shape == a.shape else ours
    off = _no_nan(torch.where(_same(ours, truth), 0.0, (ours - truth).abs()))
    largest = float(off.max()) if off.numel() else 0.0
    wrong = torch.where(_same(ours, theirs) | _same(truth, theirs), 0.0, (theirs - truth).abs())
    inexact = a.dtype.is_floating_point or a.dtype.is_complex
    allowed = max(WORSE * largest, _roundings(a.dtype) * max(_scale(truth), pair.typical)) if inexact else 0.0
    bad = ~((wrong <= allowed) & wrong.isfinite())
    if not bool(bad.any()):
        return None
    error, where = _worst(ours, theirs, wrong, bad)
    dtype = str(a.dtype).removeprefix("torch.")
    return _Difference(pair.what, f"{error} ({dtype}; the code itself is off by {largest:.1e})", where, a, b)


def _roundings(dtype: torch.dtype) -> float:
    eps = torch.finfo(dtype).eps
    return max(ROUNDINGS * min(eps, torch.finfo(torch.float32).eps), WORSE * eps)


def _numbers(values: Tensor) -> Tensor:
    return (torch.view_as_real(values) if values.is_complex() else values).double().flatten()


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Return where two tensors are equal, infinities and NaN included."""
    return (a == b) | (a.isnan() & b.isnan())


def _no_nan(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), torch.inf, values)


def _scale(values: Tensor) -> float:
    """Return the largest finite absolute value, or 0."""
    finite = values[values.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _worst(before: Tensor, after: Tensor, wrong: Tensor, bad: Tensor) -> tuple[str, str]:
    """Return (by how much, which element) for the worst element of two tensors that differ."""
    wrong = _no_nan(wrong)
    at = int(torch.where(bad, wrong, -1.0).argmax())
    where = f": element {at} is {float(before[at]):.6g}, then {float(after[at]):.6g}"
    return f"{float(wrong[at]):.1e}", where


def _form(value: Tensor) -> str:
    return f"{value.dtype} {list(value.shape)}"


def _strides(value: Tensor) -> tuple[int, ...]:
    """Return the strides of the dimensions of more than one element."""
    steps = zip(value.stride(), value.shape, strict=True)
    return tuple(s for s, n in steps if n > 1) if value.numel() else ()


def _not_equal(rule: Rewrite, trial: Trial, differences: Sequence[_Difference]) -> RewriteNotEqualError:
    """Return the error, with inputs small enough to read if the sides differ on such inputs too."""
    first = differences[0]
    example = f"{trial.label}{first.where}"
    lines = _small_counterexample(rule, trial)
    shown = [*lines, f"found with {example}"] if lines else [example]
    others = [f"{d.what} differs by {d.error} too" for d in differences[1:]]
    text = "\n    ".join([*shown, *others])
    return RewriteNotEqualError(pattern=rule.name, what=first.what, error=first.error, counterexample=text)


def _small_counterexample(rule: Rewrite, trial: Trial) -> list[str]:
    """Return lines with inputs of two to four elements a side, of few digits, and the results that differ.

    Return none if the sides agree on such inputs, or take no such sizes.
    """
    sizes = sorted({s for v in rule.example if isinstance(v, Tensor) for s in v.shape if s > 1})
    twos = dict.fromkeys(sizes, 2)
    apart = {size: min(2 + i, 4) for i, size in enumerate(sizes)}
    for each, seed, (tangent, of) in itertools.product((twos, apart), range(SEEDS), TANGENTS.items()):
        short = small(rule, trial, seed, each)
        try:
            differences = _differences(rule, short, tangent)
        except Exception:  # the code does not take these sizes
            continue
        if differences:
            names = parameter_names(rule.code, len(short.inputs))
            inputs = ", ".join(f"{n} = {_text(v)}" for n, v in zip(names, short.inputs, strict=True))
            shown = [
                f"{d.what}{of if 'gradient' in d.what else ''} is {_distinct_texts(d.before, d.after)}"
                for d in _first_of_each(differences)
            ]
            return [inputs, *shown]
    return []


def _first_of_each(differences: Sequence[_Difference]) -> list[_Difference]:
    """Return the first output and the first gradient that differ."""
    return list({"gradient" in d.what: d for d in reversed(differences)}.values())[::-1]


TANGENTS: dict[Tangent, str] = {torch.ones: " of the sum", torch.randn: " of a random combination"}


def _distinct_texts(before: Tensor, after: Tensor) -> str:
    """Return the text of both tensors, with as many digits as it takes to see that they differ."""
    texts = [(_text(before, digits), _text(after, digits)) for digits in (4, 8, 16)]
    a, b = next(((a, b) for a, b in texts if a != b), texts[-1])
    return f"{a}, then {b}"


def _text(value: Any, digits: int = 4) -> str:
    """Return a value as text, tensors as lists, rounded to some digits."""
    if isinstance(value, Tensor):
        return _text(value.tolist(), digits)
    if isinstance(value, list):
        return "[" + ", ".join(_text(v, digits) for v in value) + "]"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)
