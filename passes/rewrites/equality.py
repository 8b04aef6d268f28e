"""Whether the two sides of a rewrite are equal: float64, random inputs, other sizes, gradients too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_compiler.errors import InvalidPatternError, RewriteNotEqualError
from fusion_compiler.passes.trace import apart
from fusion_compiler.pattern_text import parameter_names
from fusion_compiler.patterns import Rewrite

TOLERANCE = 1e-8  # of the largest result; float64 keeps sixteen digits
SEEDS = 3


class InFloat64(TorchDispatchMode):
    """Casts to narrower floats stay in float64: what is compared is the maths, not its rounding."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in (torch.float16, torch.bfloat16, torch.float32):
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def check_equal(rule: Rewrite) -> None:
    """Raises RewriteNotEqualError with the inputs that show the difference, or InvalidPatternError where
    a side does not run on the example. The global random state is left as it is."""
    with apart(), torch.random.fork_rng(devices=[]):
        for number, (label, inputs) in enumerate(_trials(rule)):
            try:
                before = _results(rule.code, inputs)
            except Exception as error:
                if number < SEEDS:
                    raise InvalidPatternError(pattern=rule.name, detail=f"its code fails: {error}") from error
                continue  # the code takes the example's sizes only, and so does the match
            try:
                after = _results(rule.after, inputs)
            except Exception as error:
                if number < SEEDS:
                    detail = f"its replacement fails: {error}"
                    raise InvalidPatternError(pattern=rule.name, detail=detail) from error
                raise RewriteNotEqualError(
                    pattern=rule.name,
                    what="the replacement",
                    error=f"an error ({error})",
                    counterexample=label,
                ) from error
            if differences := _compare(rule, inputs, before, after):
                raise _not_equal(rule, label, differences)


def _trials(rule: Rewrite) -> Iterator[tuple[str, list[Any]]]:
    """Inputs: the example's sizes first, then others, unless integer tensors depend on them."""
    fixed = any(isinstance(v, Tensor) and not v.is_floating_point() for v in rule.example)
    for grown in (1,) if fixed else (1, 3):
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            inputs = [_fresh(v, grown, seed) for v in rule.example]
            shapes = ", ".join(str(list(v.shape)) if isinstance(v, Tensor) else f"{v:.6g}" for v in inputs)
            kind = "uniform in (0.1, 1.1)" if seed == SEEDS - 1 else "normal"
            yield f"{kind} inputs of {shapes}, torch.manual_seed({seed})", inputs


def _fresh(value: Any, grown: int, seed: int) -> Any:
    if isinstance(value, float):
        return value * (1 + 0.7 * seed)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    shape = [size if size == 1 else size * grown for size in value.shape]
    draw = torch.rand if seed == SEEDS - 1 else torch.randn  # positive too: for logarithms and roots
    made = draw(shape, dtype=torch.float64)
    return made + 0.1 if draw is torch.rand else made


Results = tuple[list[Tensor], list[Tensor | None]]


def _results(code: Any, inputs: Sequence[Any], tangent: Any = torch.randn_like) -> Results:
    """Outputs, and gradients of a projection of them, by `tangent` a random one."""
    fresh = [v.detach().clone().requires_grad_() if _is_float(v) else v for v in inputs]
    state = torch.get_rng_state()
    with InFloat64():
        found = code(*fresh)
        outputs: list[Tensor] = list(found) if isinstance(found, tuple | list) else [found]
        torch.set_rng_state(state)
        live = [o for o in outputs if o.requires_grad]
        tangents = [tangent(o.detach().double()).to(o.dtype) for o in live]
        sources = [v for v in fresh if _is_float(v)]
        gradients = torch.autograd.grad(live, sources, tangents, allow_unused=True) if live else ()
    torch.set_rng_state(state)
    return [o.detach() for o in outputs], list(gradients)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@dataclass(frozen=True)
class _Difference:
    """what: which result. error: by how much. where: the element that is worst. before, after: all of it."""

    what: str
    error: str
    where: str
    before: Tensor
    after: Tensor


def _compare(rule: Rewrite, inputs: Sequence[Any], before: Results, after: Results) -> list[_Difference]:
    """The results that differ, outputs first. Raises InvalidPatternError where they are not as many."""
    if len(before[0]) != len(after[0]):
        detail = f"its code returns {len(before[0])} tensors, its replacement {len(after[0])}"
        raise InvalidPatternError(pattern=rule.name, detail=detail)
    pairs = [(f"output {i}", a, b) for i, (a, b) in enumerate(zip(before[0], after[0], strict=True))]
    sources = [i for i, v in enumerate(inputs) if _is_float(v)]
    none: list[Tensor | None] = [None] * len(sources)
    for i, a, b in zip(sources, before[1] or none, after[1] or none, strict=True):
        zero = torch.zeros_like(inputs[i])
        what = f"the gradient of argument {i}"
        pairs.append((what, zero if a is None else a, zero if b is None else b))
    found = (_difference(what, a, b) for what, a, b in pairs)
    return [d for d in found if d is not None]


def _difference(what: str, a: Tensor, b: Tensor) -> _Difference | None:
    if a.shape != b.shape or a.dtype != b.dtype:
        error = f"its form ({a.dtype} {list(a.shape)}, then {b.dtype} {list(b.shape)})"
        return _Difference(what, error, "", a, b)
    ours, theirs = a.double().flatten(), b.double().flatten()
    wrong = (ours - theirs).abs()
    wrong[(ours == theirs) | (ours.isnan() & theirs.isnan())] = 0  # equal infinities too
    finite = ours[ours.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    bad = ~(wrong <= TOLERANCE * max(scale, 1e-6))
    if not bool(bad.any()):
        return None
    at = int(torch.where(bad, wrong.nan_to_num(torch.inf), -1.0).argmax())
    where = f": element {at} is {float(ours[at]):.6g}, then {float(theirs[at]):.6g}"
    return _Difference(what, f"{float(wrong[at]):.1e}", where, a, b)


def _not_equal(rule: Rewrite, label: str, differences: Sequence[_Difference]) -> RewriteNotEqualError:
    """With numbers small enough to read, where such inputs differ too."""
    first = differences[0]
    lines = _small_counterexample(rule)
    found = [f"{label}{first.where}"] if not lines else [*lines, f"found with {label}{first.where}"]
    others = [f"{d.what} differs by {d.error} too" for d in differences[1:]]
    text = "\n    ".join([*found, *others])
    return RewriteNotEqualError(pattern=rule.name, what=first.what, error=first.error, counterexample=text)


def _small_counterexample(rule: Rewrite) -> list[str]:
    """Inputs of two to four elements a side, in quarters, and what differs for them; none where the sides
    agree there, or take no such sizes."""
    sizes = sorted({s for v in rule.example if isinstance(v, Tensor) for s in v.shape if s > 1})
    twos = dict.fromkeys(sizes, 2)
    apart = {size: min(2 + i, 4) for i, size in enumerate(sizes)}
    for small, seed, (tangent, of) in itertools.product((twos, apart), range(SEEDS), TANGENTS.items()):
        torch.manual_seed(seed)
        inputs = [_small(v, small, seed) for v in rule.example]
        try:
            both = [_results(code, inputs, tangent) for code in (rule.code, rule.after)]
            differences = _compare(rule, inputs, *both)
        except Exception:  # other sizes than the example's are not for this code
            continue
        if differences:
            names = parameter_names(rule.code, len(inputs))
            given = ", ".join(f"{n} = {_text(v)}" for n, v in zip(names, inputs, strict=True))
            shown = [
                f"{d.what}{of if 'gradient' in d.what else ''} is {_told_apart(d.before, d.after)}"
                for d in _first_of_each(differences)
            ]
            return [given, *shown]
    return []


def _first_of_each(differences: Sequence[_Difference]) -> list[_Difference]:
    """The first output and the first gradient that differ."""
    return list({"gradient" in d.what: d for d in reversed(differences)}.values())[::-1]


TANGENTS = {torch.ones_like: " of the sum", torch.randn_like: " of a random combination"}


def _small(value: Any, sizes: Mapping[int, int], seed: int) -> Any:
    if not _is_float(value):
        return value
    made = _fresh(torch.empty([sizes.get(s, s) for s in value.shape]), 1, seed)
    return (made * 4).round() / 4 if seed < SEEDS - 1 else (made * 4).ceil() / 4


def _told_apart(before: Tensor, after: Tensor) -> str:
    """Both, with as many digits as it takes to see that they differ."""
    texts = [(_text(before, digits), _text(after, digits)) for digits in (4, 8, 16)]
    a, b = next(((a, b) for a, b in texts if a != b), texts[-1])
    return f"{a}, then {b}"


def _text(value: Any, digits: int = 4) -> str:
    """Tensors as lists, rounded."""
    if isinstance(value, Tensor):
        return _text(value.tolist(), digits)
    if isinstance(value, list):
        return "[" + ", ".join(_text(v, digits) for v in value) + "]"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)
