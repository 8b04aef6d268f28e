"""Whether the two sides of a rewrite are equal: float64, random inputs, other sizes, gradients too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_compiler.errors import InvalidPatternError, RewriteNotEqualError
from fusion_compiler.passes.trace import apart
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
                before = _results(rule, rule.code, inputs)
            except Exception as error:
                if number < SEEDS:
                    raise InvalidPatternError(pattern=rule.name, detail=f"its code fails: {error}") from error
                continue  # the code takes the example's sizes only, and so does the match
            try:
                after = _results(rule, rule.after, inputs)
            except Exception as error:
                if number < SEEDS:
                    detail = f"its replacement fails: {error}"
                    raise InvalidPatternError(pattern=rule.name, detail=detail) from error
                raise _differs(rule, "the replacement", f"an error ({error})", label) from error
            _compare(rule, label, inputs, before, after)


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


def _results(rule: Rewrite, code: Any, inputs: Sequence[Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs, and gradients of a random projection of them."""
    fresh = [v.detach().clone().requires_grad_() if _is_float(v) else v for v in inputs]
    state = torch.get_rng_state()
    with InFloat64():
        found = code(*fresh)
        outputs: list[Tensor] = list(found) if isinstance(found, tuple | list) else [found]
        torch.set_rng_state(state)
        live = [o for o in outputs if o.requires_grad]
        tangents = [torch.randn(o.shape, dtype=o.dtype) for o in live]
        sources = [v for v in fresh if _is_float(v)]
        gradients = torch.autograd.grad(live, sources, tangents, allow_unused=True) if live else ()
    torch.set_rng_state(state)
    return [o.detach() for o in outputs], list(gradients)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _compare(rule: Rewrite, label: str, inputs: Sequence[Any], before: Any, after: Any) -> None:
    if len(before[0]) != len(after[0]):
        detail = f"its code returns {len(before[0])} tensors, its replacement {len(after[0])}"
        raise InvalidPatternError(pattern=rule.name, detail=detail)
    for i, (a, b) in enumerate(zip(before[0], after[0], strict=True)):
        _compare_one(rule, f"output {i}", label, a, b)
    sources = [i for i, v in enumerate(inputs) if _is_float(v)]
    for i, a, b in zip(
        sources, before[1] or [None] * len(sources), after[1] or [None] * len(sources), strict=True
    ):
        zero = torch.zeros_like(inputs[i])
        _compare_one(
            rule, f"the gradient of argument {i}", label, zero if a is None else a, zero if b is None else b
        )


def _compare_one(rule: Rewrite, what: str, label: str, a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape or a.dtype != b.dtype:
        error = f"its form ({a.dtype} {list(a.shape)}, then {b.dtype} {list(b.shape)})"
        raise _differs(rule, what, error, label)
    a, b = a.double().flatten(), b.double().flatten()
    wrong = (a - b).abs()
    wrong[(a == b) | (a.isnan() & b.isnan())] = 0  # equal infinities too
    finite = a[a.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    bad = ~(wrong <= TOLERANCE * max(scale, 1e-6))
    if bool(bad.any()):
        at = int(torch.where(bad, wrong.nan_to_num(torch.inf), -1.0).argmax())
        where = f"{label}: element {at} is {float(a[at]):.6g}, then {float(b[at]):.6g}"
        raise _differs(rule, what, f"{float(wrong[at]):.1e}", where)


def _differs(rule: Rewrite, what: str, error: str, where: str) -> RewriteNotEqualError:
    return RewriteNotEqualError(pattern=rule.name, what=what, error=error, counterexample=where)
