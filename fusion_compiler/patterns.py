"""Patterns: torch code that is recognised in a model, and the treatment of each match.

    ClusterHint   the matched ops are tried as one cluster, and the cluster is named after the pattern
    Rewrite       the matched ops become other torch code, which is checked to be equal first
    UserKernel    the matched ops become one call of a function of yours, a Triton kernel for example

Patterns are values in an ordered tuple: `compile(model, patterns=(mine, *DEFAULT_PATTERNS))`. Where two
match the same op, the first wins. A pattern is the torch code that it matches, traced like the model
itself on example arguments: tensors, whose *rank* counts (equal sizes among them stand for equal sizes in
the model, a size of 1 for 1), and Python floats, which stand for any number there. Other literals in the
code, and integers among the arguments, match themselves.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_compiler.errors import InvalidPatternError
from fusion_compiler.ir.pattern_text import parameter_names, written
from fusion_compiler.ir.record import NotWritable
from fusion_compiler.ir.stable_text import stable_text

Code = Callable[..., Any]
Where = Callable[..., bool | str]
Interval = tuple[float, float]
Domain = str | Interval | Mapping[str, str | Interval]
FINITE = "finite"
USER_NAMESPACE = "fusion_compiler_user"  # the namespace of the operators that call users' kernels


@dataclass(frozen=True, slots=True)
class MatchedTensor:
    """A `MatchedTensor` describes a matched tensor to a `where=`.

    shape, stride: in elements. A symbolic size is a torch.SymInt: a condition on it becomes a guard, as in
        the model's own code, so that for other sizes the code is compiled, and `where=` called, again.
    origin: "parameter", "buffer", "input" (another argument of the graph) or "computed"; a cast has the
        origin of its operand. requires_grad: whether the tensor is, or is computed from (`detach` apart), a
        tensor that requires a gradient; in a backward graph, only of the forward's own arguments.
    """

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: str
    origin: str
    requires_grad: bool


@dataclass(frozen=True, eq=False)
class Pattern:
    """The base class of all sorts of patterns has these fields.

    code: tensors (and floats) -> tensor or tuple of tensors.
    example: one tensor or number per parameter of `code`; only ranks, dtypes and equal sizes count.
    where: called with a `MatchedTensor` for each matched tensor and the number for each matched number; if it
        returns False, or the reason as a string, the ops are left alone. If it raises, the call that compiles
        the graph raises PredicateError.
    """

    sort: ClassVar[str] = ""  # the name of the function that creates it

    name: str
    code: Code
    example: tuple[Any, ...]
    where: Where | None = None

    def __post_init__(self) -> None:
        if not str(self.name).isidentifier():
            raise InvalidPatternError(pattern=self.name, detail="its name must be a Python identifier")
        for field, function in self.functions().items():
            if not callable(function):
                raise InvalidPatternError(
                    pattern=self.name, detail=f"{field} is {type(function).__name__}, not a function"
                )
        if not any(isinstance(value, torch.Tensor) for value in self.example):
            raise InvalidPatternError(pattern=self.name, detail="no example argument is a tensor")
        for value in self.example:
            if not isinstance(value, torch.Tensor | bool | int | float):
                raise InvalidPatternError(
                    pattern=self.name, detail=f"an example argument is {type(value).__name__}"
                )
        try:
            inspect.signature(self.code).bind(*self.example)
        except TypeError as error:
            raise InvalidPatternError(
                pattern=self.name, detail=f"the example does not fit its code: {error}"
            ) from error
        except ValueError:  # a builtin without a signature: the trace will tell
            pass

    def functions(self) -> dict[str, object]:
        """Return the fields that must be callable, without optional ones that are None."""
        functions: dict[str, object] = {"code": self.code}
        return functions if self.where is None else {**functions, "where": self.where}

    def options(self) -> dict[str, object]:
        """Return the other keywords of the function that creates this pattern."""
        return {"name": self.name}

    def stable_text(self) -> Any:
        """Return text for keys on disk that is equal in another process if the pattern does the same there.

        The numbers in the example's tensors do not count. Raises NotWritable.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["example"] = tuple(
            (v.dtype, v.device, *v.shape, v.stride(), v.requires_grad) if isinstance(v, Tensor) else v
            for v in self.example
        )
        try:
            return [type(self).__name__, stable_text(values)]
        except NotWritable as reason:
            raise NotWritable(f"pattern {self.name} has no stable hash: {reason}") from None

    def __str__(self) -> str:
        """Return Python that creates an equal pattern: the torch code as it was written, and the call."""
        return written(self.sort, self.functions(), self.example, self.options())


@dataclass(frozen=True, eq=False)
class ClusterHint(Pattern):
    """The ops belong together. fuse: try them as one cluster before the search; False only names them.

    backward: recognise the gradient with respect to the first argument too, as `<name>_backward`.
    """

    sort: ClassVar[str] = "cluster_hint"

    fuse: bool = True
    backward: bool = False

    def options(self) -> dict[str, object]:
        return {**super().options(), "fuse": self.fuse, "backward": self.backward}


@dataclass(frozen=True, eq=False)
class Rewrite(Pattern):
    """`code` becomes `after`, which takes the same arguments; gradients follow from `after`.

    domain: the numbers for which the two are equal, if these are not all numbers, infinities and NaN
        included: "finite", (low, high) for the finite numbers from low to high, or a dict of these by the
        names of parameters; parameters that it does not name may be any number. This is a promise that the
        model has no other numbers there: the two are compared on the domain alone, and the model's numbers
        are not checked.
    """

    sort: ClassVar[str] = "rewrite"

    after: Code = lambda: None
    domain: Domain | None = None

    def __post_init__(self) -> None:
        Pattern.__post_init__(self)
        for name, interval in (self._by_name() or {}).items():
            if name not in (names := parameter_names(self.code, len(self.example))):
                detail = f"domain names {name!r}, which is none of its parameters {', '.join(names)}"
                raise InvalidPatternError(pattern=self.name, detail=detail)
            if interval != FINITE and not _is_interval(interval):
                detail = f'domain is {interval!r}, neither "finite" nor (low, high)'
                raise InvalidPatternError(pattern=self.name, detail=detail)

    def _by_name(self) -> Mapping[str, str | Interval] | None:
        if self.domain is None or isinstance(self.domain, Mapping):
            return self.domain
        return dict.fromkeys(parameter_names(self.code, len(self.example)), self.domain)

    @property
    def intervals(self) -> tuple[Interval | None, ...]:
        """Return the interval of finite numbers that each argument may hold, or None for any number."""
        names, domain = parameter_names(self.code, len(self.example)), self._by_name() or {}
        domains = [domain.get(name) for name in names]
        return tuple((-math.inf, math.inf) if isinstance(d, str) else d for d in domains)

    @property
    def promise(self) -> str:
        """Return the domain's promise about the arguments as text, or "" if there is none."""
        if not isinstance(self.domain, Mapping):
            return "" if self.domain is None else f"where all numbers are {_interval_text(self.domain)}"
        return f"where {', '.join(f'{name} is {_interval_text(i)}' for name, i in self.domain.items())}"

    def functions(self) -> dict[str, object]:
        return {**super().functions(), "after": self.after}

    def options(self) -> dict[str, object]:
        return super().options() if self.domain is None else {**super().options(), "domain": self.domain}


@dataclass(frozen=True, eq=False)
class UserKernel(Pattern):
    """`code` becomes a call of `run`, which takes the same arguments and returns new tensors.

    backward: (*arguments, *outputs, *gradients of the outputs) -> the gradient of every floating
        tensor among the arguments, in order, each of that tensor's shape or None for zeros. Without it, the
        gradient of `code` is recomputed.
    """

    sort: ClassVar[str] = "user_kernel"

    run: Code = lambda: None
    backward: Code | None = None

    def functions(self) -> dict[str, object]:
        more = {} if self.backward is None else {"backward": self.backward}
        return {**super().functions(), "run": self.run, **more}


def cluster_hint(
    code: Code,
    *example: Any,
    name: str | None = None,
    where: Where | None = None,
    fuse: bool = True,
    backward: bool = False,
) -> ClusterHint:
    """Fuse ops like those of `code` where that is legal and pays, and name them. See ClusterHint.

    Raises InvalidPatternError.
    """
    return ClusterHint(_name(code, name), code, example, where, fuse, backward)


def rewrite(
    before: Code,
    after: Code,
    *example: Any,
    name: str | None = None,
    where: Where | None = None,
    domain: Domain | None = None,
) -> Rewrite:
    """Compile code like `before` as if it were `after`. See Rewrite.

    compile() compares both on numbers of every kind in the domain, their gradients too, in float64 and in the
    example's dtypes, and raises RewriteNotEqualError with a counterexample. Raises InvalidPatternError here.
    """
    return Rewrite(_name(before, name), before, example, where, after, domain)


def user_kernel(
    code: Code,
    run: Code,
    *example: Any,
    backward: Code | None = None,
    name: str | None = None,
    where: Where | None = None,
) -> UserKernel:
    """Compute code like `code` by `run(*tensors)`. See UserKernel. Raises InvalidPatternError."""
    return UserKernel(_name(code, name), code, example, where, run, backward)


def _interval_text(interval: str | Interval) -> str:
    return interval if isinstance(interval, str) else f"from {interval[0]:g} to {interval[1]:g}"


def _is_interval(value: Any) -> bool:
    try:
        low, high = value
    except (TypeError, ValueError):
        return False
    return isinstance(low, int | float) and isinstance(high, int | float) and low < high


def _name(code: object, name: str | None) -> str:
    return name if name is not None else str(getattr(code, "__name__", "pattern")).strip("<>")


def checked(patterns: object) -> tuple[Pattern, ...]:
    """Return the option `patterns` as a tuple. Raises InvalidPatternError for anything but patterns."""
    if isinstance(patterns, Pattern) or not isinstance(patterns, Sequence):
        raise InvalidPatternError(
            pattern=getattr(patterns, "name", patterns),
            detail="give a tuple: patterns=(mine, *DEFAULT_PATTERNS)",
        )
    for pattern in patterns:
        if not isinstance(pattern, ClusterHint | Rewrite | UserKernel):
            raise InvalidPatternError(
                pattern=repr(pattern),
                detail=f"{type(pattern).__name__} is none of cluster_hint(), rewrite(), user_kernel()",
            )
    return tuple(patterns)


# Common building blocks of models. These only name clusters: the search fuses them by itself.


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def layer_norm_plain(x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def rms_norm_plain(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rms_norm_product(x: Tensor, eps: float) -> Tensor:
    """Compute RMS norm with the square written as x * x."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def gelu_new(x: Tensor) -> Tensor:
    """Compute GELU as GPT-2 does."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def silu(x: Tensor) -> Tensor:
    return F.silu(x)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos + torch.cat((-second, first), -1) * sin


def dropout(x: Tensor, noise: Tensor, p: float, scale: float) -> Tensor:
    return x * ((noise >= p) * scale)


def _defaults() -> tuple[Pattern, ...]:
    rows, row, four = torch.ones(6, 10), torch.ones(10), torch.ones(2, 3, 4, 10)

    def named(code: Code, *example: Any, name: str | None = None) -> ClusterHint:
        return cluster_hint(code, *example, name=name, fuse=False, backward=True)

    return (
        named(cross_entropy, rows, torch.zeros(6, dtype=torch.int64)),
        named(log_softmax, rows),
        named(softmax, rows),
        named(layer_norm, rows, row, row, 1e-5),
        named(layer_norm_plain, rows, 1e-5, name="layer_norm"),
        named(rms_norm, rows, row, 1e-5),
        named(rms_norm_plain, rows, 1e-5, name="rms_norm"),
        named(rms_norm_product, rows, 1e-5, name="rms_norm"),
        named(gelu, rows),
        named(gelu_tanh, rows, name="gelu"),
        named(gelu_new, rows, name="gelu"),
        named(swiglu, rows, rows),
        named(silu, rows),
        named(rope, four, four[:, :1], four[:, :1]),
        named(dropout, rows, rows, 0.5, 2.0),
    )


class _Defaults(tuple[Pattern, ...]):
    """The patterns that ship print as their name, as signatures show them; any part of them is a tuple."""

    def __repr__(self) -> str:
        return "DEFAULT_PATTERNS"


DEFAULT_PATTERNS: tuple[Pattern, ...] = _Defaults(_defaults())


def text_of_patterns(patterns: Sequence[Pattern]) -> list[Any]:
    """Return the stable text of patterns in their order; those of this module are numbers.

    Raises NotWritable, also if the text of a pattern is not what it was when this was first called.
    """
    texts: list[Any] = []
    for pattern in patterns:
        if pattern in DEFAULT_PATTERNS:
            texts.append(DEFAULT_PATTERNS.index(pattern))
            continue
        texts.append(pattern.stable_text())
        if texts[-1] != _first_text(pattern):
            raise NotWritable(f"pattern {pattern.name} reads a value that has changed since the first call")
    return texts


@functools.cache
def _first_text(pattern: Pattern) -> Any:
    return pattern.stable_text()
