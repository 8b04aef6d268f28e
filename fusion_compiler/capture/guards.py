"""Add guards that TorchDynamo leaves out: forward-mode differentiation, and hooks that are registered later.

TorchDynamo compares the level of forward-mode differentiation only for code that uses it, so a graph compiled
outside of `torch.autograd.forward_ad.dual_level()` would be called with dual tensors.

TorchDynamo traces through a module without hooks and does not look at its hooks again, unless
`torch._dynamo.config.skip_nnmodule_hook_guards` is off. Then every call compares the lengths of six
dictionaries for every module, and a call of a model of 200 modules takes 180 us instead of 90. Here one guard
compares the number that PyTorch gives to the next hook of any kind (0.2 us), and looks at the modules only
when that has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource, GlobalStateSource
from torch._guards import TracingContext
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

_GLOBAL = (
    *("_global_backward_pre_hooks", "_global_backward_hooks"),
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
)


def add_guards() -> None:
    """Add to the guards of the graph that TorchDynamo has just captured; to be called in its backend."""
    context = TracingContext.try_get()
    if context is None:
        return
    guards = context.guards_context.dynamo_guards
    empty = [g.originating_source for g in guards if g.create_fn is GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT]
    hooks: dict[str, list[str]] = {}  # names of dictionaries without hooks, by the expression of the module
    for source in empty:
        if isinstance(source, AttrSource):
            hooks.setdefault(source.base.name, []).append(source.member)

    if hooks:
        guards.add(GlobalStateSource().make_guard(_hooks_guard(hooks)))
    guards.add(GlobalStateSource().make_guard(GuardBuilder.DUAL_LEVEL))


def _hooks_guard(hooks: dict[str, list[str]]) -> Callable[[Any, Any], None]:
    """Return the function that adds the guard for the dictionaries `hooks` to TorchDynamo's guards."""

    def create(builder: Any, guard: Any) -> None:
        check = _Unchanged(hooks, builder.scope["G"])
        builder.add_python_lambda_leaf_guard_to_root(
            ["___unchanged_hooks(L)"],
            ["___unchanged_hooks(L)  # no hook was registered since the graph was compiled"],
            closure_vars={"___unchanged_hooks": check},
        )

    return create


class _Unchanged:
    """True when called with a frame's locals if its modules have the hooks that they were traced with."""

    def __init__(self, hooks: dict[str, list[str]], scope: dict[str, Any]) -> None:
        self._hooks, self._globals = hooks, scope
        self._modules: list[tuple[Any, list[str]]] | None = None
        self._everywhere = _lengths()
        self._next = RemovableHandle.next_id

    def __call__(self, local: dict[str, Any]) -> bool:
        following = RemovableHandle.next_id
        if following != self._next:
            if _lengths() != self._everywhere or self._any(local):
                return False
            self._next = following
        return True

    def _any(self, local: dict[str, Any]) -> bool:
        if self._modules is None:
            self._modules = [(compile(m, "<guard>", "eval"), names) for m, names in self._hooks.items()]
        scope = {"L": local, "G": self._globals}
        for expression, names in self._modules:
            try:
                module = eval(expression, scope)
            except Exception:  # another guard's business
                continue
            if any(getattr(module, name, None) for name in names):
                return True
        return False


def _lengths() -> list[int]:
    return [len(getattr(modules, name)) for name in _GLOBAL]
