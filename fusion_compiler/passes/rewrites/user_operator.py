"""A user's kernel as one PyTorch operator: opaque to the compiler, known to autograd."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fusion_compiler.errors import UserKernelError
from fusion_compiler.passes.patterns.trace import traced_above_autograd
from fusion_compiler.passes.rewrites.equality import InFloat64
from fusion_compiler.passes.rewrites.trials import is_float
from fusion_compiler.patterns import USER_NAMESPACE, UserKernel

# (kernel, names of its results, results, the results of the pattern's code, and in float64) -> True if good
Check = Callable[[str, Sequence[str], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor] | None], bool]

Reference = Callable[[Sequence[Any]], list[Tensor]]
_KEYS: Any = torch._C.DispatchKey
_AUTOCAST = tuple(getattr(_KEYS, name) for name in dir(_KEYS) if name.startswith("Autocast"))


@functools.cache
def operator_of(kernel: UserKernel, check: Check | None = None) -> OpOverload:
    """Return the operator that calls `kernel.run`. Its results are contiguous, in the dtypes of the code's.

    check: called for the first call with each set of shapes; if it returns False, the code's results are
    returned, then and later. Each compilation has its own check, and the kernel is another operator for each.
    """
    results = len(traced_above_autograd(kernel).dag.outputs)
    types = ["Tensor" if isinstance(v, Tensor) else type(v).__name__ for v in kernel.example]
    # The cache keeps both alive, so no others have their ids.
    name = f"{USER_NAMESPACE}::{kernel.name}_{id(kernel):x}{f'{id(check):x}' if check else ''}"
    run = _checked(kernel, check)
    operator = _define(name, run, types, results, lambda arguments: _listed(kernel.code(*arguments)))
    _register_gradient(operator, kernel, _backward_operator(kernel, types, results, name, check))
    return getattr(getattr(torch.ops, USER_NAMESPACE), name.partition("::")[2]).default


def _define(name: str, run: Any, types: Sequence[str], results: int, like: Reference) -> Any:
    """Return a new operator. like: returns tensors of the shapes and dtypes that its results have."""
    taken = ", ".join(f"{t} x{i}" for i, t in enumerate(types))
    schema = f"({taken}) -> " + ("Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})")
    operator: Any = torch.library.custom_op(name, run, mutates_args=(), schema=schema)

    def fake(*arguments: Any) -> Any:
        return _one_or_all(
            [torch.empty_like(t, memory_format=torch.contiguous_format) for t in like(arguments)]
        )

    operator.register_fake(fake)
    return operator


def _one_or_all(results: list[Tensor]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


def _listed(values: Any) -> list[Tensor]:
    return list(values) if isinstance(values, tuple | list) else [values]


def _checked(kernel: UserKernel, check: Check | None) -> Any:
    """Return `kernel.run` with results of the shapes and dtypes of the pattern's code's results."""

    @functools.lru_cache(maxsize=256)
    def expected(signature: tuple[Any, ...]) -> list[tuple[torch.Size, torch.dtype]]:
        # A tensor is described by (shape, dtype), anything else is itself.
        values = [
            torch.empty(s[0], dtype=s[1], device="meta") if isinstance(s, tuple) else s for s in signature
        ]
        with torch.no_grad():
            return [(r.shape, r.dtype) for r in _listed(kernel.code(*values))]

    def reference(arguments: Sequence[Any]) -> list[Tensor]:
        return _listed(kernel.code(*arguments))

    first = None if check is None else _First(kernel, kernel.name, check, reference)

    def run(*arguments: Any) -> Any:
        detached = [a.detach() if isinstance(a, Tensor) and a.requires_grad else a for a in arguments]
        with _above(grad=False):
            results: list[Any] = _listed(kernel.run(*detached))
        wanted = expected(tuple((a.shape, a.dtype) if isinstance(a, Tensor) else a for a in arguments))
        if len(results) != len(wanted):
            raise _wrong(kernel.name, f"it returned {len(results)} tensors, its pattern {len(wanted)}")
        fitting: list[Tensor] = []
        for i, (result, (shape, dtype)) in enumerate(zip(results, wanted, strict=True)):
            if not isinstance(result, Tensor) or result.shape != shape:
                got = list(getattr(result, "shape", ())) or type(result).__name__
                raise _wrong(kernel.name, f"result {i} is {got}, not {list(shape)}")
            fitting.append(result.to(dtype).contiguous())
        return _settled(first, arguments, fitting, [f"output {i}" for i in range(len(fitting))])

    return run


class _First:
    """A comparison of a kernel's results with its pattern's code's, once for each set of shapes."""

    def __init__(self, kernel: UserKernel, name: str, check: Check, reference: Reference) -> None:
        self.kernel, self.name, self.check, self.reference = kernel, name, check, reference
        self.seen: set[tuple[object, ...]] = set()
        self.wrong = False

    def settled(self, arguments: Sequence[Any], got: list[Tensor], names: Sequence[str]) -> list[Tensor]:
        """Return `got`, or the code's results if the kernel's are wrong."""
        signature = tuple((a.shape, a.dtype) if isinstance(a, Tensor) else a for a in arguments)
        if signature in self.seen and not self.wrong:
            return got
        self.seen.add(signature)
        with _above(grad=True):
            want = self.reference([a.detach() if isinstance(a, Tensor) else a for a in arguments])
        want = _apart([w.detach().contiguous() for w in want], arguments)
        if self.wrong:
            return want
        self.wrong = not self.check(self.name, names, got, want, self.exact(arguments))
        return want if self.wrong else got

    def exact(self, arguments: Sequence[Any]) -> list[Tensor] | None:
        """Return the code's results in float64, or None if it takes no float64."""
        wide = [a.detach().double() if is_float(a) else a for a in arguments]
        try:
            with _above(grad=True), InFloat64():
                return [r.detach() for r in self.reference(wide)]
        except Exception:  # the code takes no float64: it has an operator of float32 alone, for example
            return None


def _settled(first: _First | None, arguments: Sequence[Any], got: list[Tensor], names: Sequence[str]) -> Any:
    """Return an operator's results in memory of their own: the code's if a check finds `got` wrong."""
    got = _apart(got, arguments)
    return _one_or_all(got if first is None else first.settled(arguments, got, names))


@contextlib.contextmanager
def _above(*, grad: bool) -> Generator[None]:
    """Run code inside an operator, which is below autograd and vmap, as if it were called above them."""
    now: Any = torch._C._dispatch_tls_local_exclude_set()
    excluded: Any = torch._C.DispatchKeySet(_KEYS.Undefined)
    for key in _AUTOCAST:  # off, unless the model turned it on
        excluded = excluded.add(key) if now.has(key) else excluded
    guard: Any = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
    with guard, torch.set_grad_enabled(grad):
        yield


def _apart(results: Sequence[Tensor], arguments: Sequence[Any]) -> list[Tensor]:
    """Return results, cloned if they share memory with an argument or one another, as operators' must not."""
    used = {a.untyped_storage()._cdata for a in arguments if isinstance(a, Tensor)}
    separate: list[Tensor] = []
    for result in results:
        free = result if result.untyped_storage()._cdata not in used else result.clone()
        used.add(free.untyped_storage()._cdata)
        separate.append(free)
    return separate


def _wrong(name: str, detail: str) -> UserKernelError:
    return UserKernelError(kernel=name, detail=detail)


def _floats(kernel: UserKernel) -> list[int]:
    """Return the positions of the arguments that have gradients."""
    return [i for i, v in enumerate(kernel.example) if is_float(v)]


def _backward_operator(
    kernel: UserKernel, types: Sequence[str], results: int, name: str, check: Check | None
) -> Any:
    """Return the user's backward as an operator, or None if there is none."""
    user_backward = kernel.backward
    if user_backward is None:
        return None
    places, count = _floats(kernel), len(types)

    def reference(values: Sequence[Any]) -> list[Tensor]:
        arguments, tangents = list(values[:count]), values[count + results :]
        grads = [g for _, g in _of_code(kernel, arguments, tangents)]
        return [torch.zeros_like(values[i]) if g is None else g for i, g in zip(places, grads, strict=True)]

    first = None if check is None else _First(kernel, f"{kernel.name}_backward", check, reference)

    def run(*values: Any) -> Any:
        with _above(grad=True):
            gradients: list[Any] = _listed(
                user_backward(*(v.detach() if isinstance(v, Tensor) else v for v in values))
            )
        if len(gradients) != len(places):
            detail = f"backward returned {len(gradients)} gradients for {len(places)} floating tensors"
            raise _wrong(kernel.name, detail)
        shaped: list[Tensor] = []
        for i, g in zip(places, gradients, strict=True):
            given_as = torch.zeros_like(values[i]) if g is None else g.detach()
            if given_as.shape != values[i].shape:
                detail = (
                    f"its gradient of argument {i} is {list(given_as.shape)}, not {list(values[i].shape)}"
                )
                raise _wrong(kernel.name, detail)
            shaped.append(given_as.to(values[i].dtype).contiguous())
        return _settled(first, values, shaped, [f"gradient of argument {i}" for i in places])

    types = [*types, *["Tensor"] * (2 * results)]
    return _define(f"{name}_backward", run, types, len(places), lambda values: [values[i] for i in places])


def _register_gradient(operator: Any, kernel: UserKernel, backward: Any) -> None:
    """Register the operator's gradient: the user's backward, an operator as well, or that of the code."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = [] if backward is None else _listed(output)
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.places = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)), *outputs)

    def gradient(ctx: Any, *tangents: Any) -> Any:
        saved = list(ctx.saved_tensors)
        arguments = list(ctx.others)
        for place in ctx.places:
            arguments[place] = saved.pop(0)
        if backward is None:
            pairs = _of_code(kernel, arguments, tangents)
        else:
            filled = [torch.zeros_like(o) if t is None else t for o, t in zip(saved, tangents, strict=True)]
            pairs = list(zip(_floats(kernel), _listed(backward(*arguments, *saved, *filled)), strict=True))
        gradients: list[Any] = [None] * len(arguments)
        for place, value in pairs:
            gradients[place] = value
        return tuple(gradients)

    operator.register_autograd(gradient, setup_context=setup)


def _of_code(
    kernel: UserKernel, arguments: list[Any], tangents: Sequence[Any]
) -> list[tuple[int, Tensor | None]]:
    """Return (position, gradient) of the floating arguments from the pattern's code, which runs again."""
    places = [i for i, a in enumerate(arguments) if is_float(a)]
    with torch.enable_grad():
        fresh = [a.detach().requires_grad_() if i in places else a for i, a in enumerate(arguments)]
        results = _listed(kernel.code(*fresh))
        pairs = [(r, t) for r, t in zip(results, tangents, strict=True) if t is not None and r.requires_grad]
        gradients = torch.autograd.grad(
            [r for r, _ in pairs], [fresh[i] for i in places], [t for _, t in pairs], allow_unused=True
        )
    return list(zip(places, gradients, strict=True))
