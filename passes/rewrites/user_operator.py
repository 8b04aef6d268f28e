"""A user's kernel as one PyTorch operator: opaque to the compiler, known to autograd."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fusion_compiler.errors import KernelError
from fusion_compiler.passes.trace import traced_whole
from fusion_compiler.patterns import USER_NAMESPACE, UserKernel


@functools.cache
def operator_of(kernel: UserKernel) -> OpOverload:
    """The operator that calls `kernel.run`: results are contiguous, in the dtypes that its code gives."""
    results = len(traced_whole(kernel).dag.outputs)
    types = [_type_of(value) for value in kernel.example]
    # The cache keeps `kernel` alive, so no other has its id.
    name = f"{USER_NAMESPACE}::{kernel.name}_{id(kernel):x}"
    own: Any = torch.library.custom_op(
        name, _checked(kernel), mutates_args=(), schema=_schema(types, ["Tensor"] * results)
    )

    def fake(*arguments: Any) -> Any:
        made = [
            torch.empty_like(r, memory_format=torch.contiguous_format)
            for r in _listed(kernel.code(*arguments))
        ]
        return made[0] if results == 1 else tuple(made)

    own.register_fake(fake)
    _register_gradient(own, kernel, types, results, name)
    return getattr(getattr(torch.ops, USER_NAMESPACE), name.partition("::")[2]).default


def _type_of(value: object) -> str:
    return "Tensor" if isinstance(value, Tensor) else type(value).__name__


def _schema(types: Sequence[str], results: Sequence[str]) -> str:
    taken = ", ".join(f"{t} x{i}" for i, t in enumerate(types))
    return f"({taken}) -> " + (results[0] if len(results) == 1 else f"({', '.join(results)})")


def _listed(values: Any) -> list[Tensor]:
    return list(values) if isinstance(values, tuple | list) else [values]


def _checked(kernel: UserKernel) -> Any:
    """`kernel.run` with results of the shapes and dtypes that the pattern's code gives."""

    @functools.lru_cache(maxsize=256)
    def expected(signature: tuple[Any, ...]) -> list[tuple[torch.Size, torch.dtype]]:
        # A tensor is described by (shape, dtype), anything else is itself.
        made = [
            torch.empty(s[0], dtype=s[1], device="meta") if isinstance(s, tuple) else s for s in signature
        ]
        with torch.no_grad():
            return [(r.shape, r.dtype) for r in _listed(kernel.code(*made))]

    def run(*arguments: Any) -> Any:
        results: list[Any] = _listed(kernel.run(*arguments))
        wanted = expected(tuple((a.shape, a.dtype) if isinstance(a, Tensor) else a for a in arguments))
        if len(results) != len(wanted):
            raise _wrong(kernel.name, f"it returned {len(results)} tensors, its pattern {len(wanted)}")
        fitting: list[Tensor] = []
        for i, (result, (shape, dtype)) in enumerate(zip(results, wanted, strict=True)):
            if not isinstance(result, Tensor) or result.shape != shape:
                found = list(getattr(result, "shape", ())) or type(result).__name__
                raise _wrong(kernel.name, f"result {i} is {found}, not {list(shape)}")
            fitting.append(_own(result.to(dtype).contiguous(), arguments))
        return fitting[0] if len(fitting) == 1 else tuple(fitting)

    return run


def _own(result: Tensor, arguments: Sequence[Any]) -> Tensor:
    """An operator's result must not be the memory of an argument."""
    shared = result.untyped_storage()._cdata
    same = any(isinstance(a, Tensor) and a.untyped_storage()._cdata == shared for a in arguments)
    return result.clone() if same else result


def _wrong(name: str, detail: str) -> KernelError:
    return KernelError(kernel=name, action="compute what its pattern computes", detail=detail)


def _floats(kernel: UserKernel) -> list[int]:
    """Positions of the arguments that have gradients."""
    return [i for i, v in enumerate(kernel.example) if isinstance(v, Tensor) and v.is_floating_point()]


def _own_backward(kernel: UserKernel, types: Sequence[str], results: int, name: str) -> Any:
    """The user's backward as an operator of its own; None where there is none."""
    given = kernel.backward
    if given is None:
        return None
    places = _floats(kernel)

    def run(*values: Any) -> Any:
        gradients = _listed(given(*values))
        if len(gradients) != len(places):
            detail = f"backward returned {len(gradients)} gradients for {len(places)} floating arguments"
            raise _wrong(kernel.name, detail)
        fitting = [
            _own(g.to(values[i].dtype).reshape(values[i].shape).contiguous(), values)
            for g, i in zip(gradients, places, strict=True)
        ]
        return fitting[0] if len(fitting) == 1 else tuple(fitting)

    def fake(*values: Any) -> Any:
        made = [torch.empty_like(values[i], memory_format=torch.contiguous_format) for i in places]
        return made[0] if len(made) == 1 else tuple(made)

    schema = _schema([*types, *["Tensor"] * (2 * results)], ["Tensor"] * len(places))
    backward: Any = torch.library.custom_op(f"{name}_backward", run, mutates_args=(), schema=schema)
    backward.register_fake(fake)
    return backward


def _register_gradient(own: Any, kernel: UserKernel, types: Sequence[str], results: int, name: str) -> None:
    """The gradient: the user's backward, or that of the pattern's code."""
    backward = _own_backward(kernel, types, results, name)

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
            found = _of_code(kernel, arguments, tangents)
        else:
            filled = [torch.zeros_like(o) if t is None else t for o, t in zip(saved, tangents, strict=True)]
            found = list(zip(_floats(kernel), _listed(backward(*arguments, *saved, *filled)), strict=True))
        gradients: list[Any] = [None] * len(arguments)
        for place, value in found:
            gradients[place] = value
        return tuple(gradients)

    own.register_autograd(gradient, setup_context=setup)


def _of_code(
    kernel: UserKernel, arguments: list[Any], tangents: Sequence[Any]
) -> list[tuple[int, Tensor | None]]:
    """Gradients of the pattern's code, recomputed."""
    places = [i for i, a in enumerate(arguments) if isinstance(a, Tensor) and a.is_floating_point()]
    with torch.enable_grad():
        fresh = [a.detach().requires_grad_() if i in places else a for i, a in enumerate(arguments)]
        results = _listed(kernel.code(*fresh))
        pairs = [(r, t) for r, t in zip(results, tangents, strict=True) if t is not None and r.requires_grad]
        found = torch.autograd.grad(
            [r for r, _ in pairs], [fresh[i] for i in places], [t for _, t in pairs], allow_unused=True
        )
    return list(zip(places, found, strict=True))
