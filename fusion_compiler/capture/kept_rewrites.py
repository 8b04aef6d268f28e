"""Keep on disk what the rewrites made of a graph of Dynamo's: the next process neither traces nor rewrites
it.

A record is found by Dynamo's own graph and holds under which key autograd's cache keeps the graphs of the
rewritten one (`autograd_cache`), and what the rewrites noted. The key (`support.store.REWRITE`) has all that
the trace above autograd depends on: the graph with its targets, numbers and lines, what is known of its
inputs, the options, the patterns, and the state of the process that decides which operators are recorded. A
graph is left alone if one of these has no text: if it calls a function that is not PyTorch's, or somebody has
replaced functions of PyTorch's.
"""

from __future__ import annotations

import functools
import operator
import sys
import sysconfig
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.backends import opt_einsum
from torch.utils import _pytree as pytree

from fusion_compiler.capture.autograd_cache import about_inputs, ambient
from fusion_compiler.capture.graph_text import Writer, target_name
from fusion_compiler.ir import record
from fusion_compiler.ir.decision import Decisions
from fusion_compiler.ir.record import NotWritable
from fusion_compiler.support.store import REWRITE, Key, Store


def read_rewritten(store: Store, key: Key) -> tuple[str, Decisions] | None:
    """Return the rewritten graph's key in autograd's cache, and the notes, or None without a whole record."""
    written = store.get(key)
    try:
        return str(written["autograd"]), record.read(written["notes"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def write_rewritten(store: Store, key: Key, autograd: str, notes: Decisions) -> None:
    store.put(key, {"autograd": autograd, "notes": record.write(notes)})


def key_of(gm: fx.GraphModule, inputs: Sequence[Any], options: Any, patterns: Any = None) -> Key:
    """Return the key of the graph that rewrites with these `options` and `patterns` make of Dynamo's graph.

    Raises NotWritable if something on which it depends has no text.
    """
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        raise NotWritable("a mode is set that sees every operator")
    if strange := next(replaced(), None):
        raise NotWritable(f"{strange} is not PyTorch's own")
    state, arguments = [*ambient(), *_state_of_functions()], about_inputs(inputs)
    graph = _Above().graph(gm)
    return REWRITE.key(options=options, patterns=patterns, state=state, arguments=arguments, graph=graph)


def _state_of_functions() -> list[Any]:
    """Return the state that PyTorch's functions in Python read, beside `ambient`."""
    einsum = [opt_einsum.is_available(), opt_einsum.enabled, opt_einsum.strategy]  # type: ignore[attr-defined]
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return [*einsum, filled, str(torch.get_default_device())]


class _Above(Writer):
    """Write a graph as Dynamo makes it: functions and methods of PyTorch's, and what rewrites see of a
    node."""

    ops = (*Writer.ops, "call_method")

    def target(self, node: fx.Node) -> str:
        return _name(node.target) if node.op == "call_function" else str(node.target)

    def value(self, value: Any) -> Any:
        return {"ellipsis": 0} if value is ... else super().value(value)

    def meta(self, node: fx.Node) -> dict[str, Any]:
        if node.meta.get("unbacked_bindings"):
            raise NotWritable(f"the size of {node.name} depends on data")
        for value in pytree.tree_leaves(node.meta.get("example_value")):
            symbolic = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
            if symbolic or (isinstance(value, torch.Tensor) and value._has_symbolic_sizes_strides):  # type: ignore[attr-defined]
                raise NotWritable("its sizes differ from call to call")
        static = "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})
        meta: dict[str, Any] = {"custom": str(node.meta.get("custom")), "static": static}
        if trace := node.meta.get("stack_trace"):
            meta["stack_trace"] = self.text(trace)
        if stack := node.meta.get("nn_module_stack"):
            meta["nn_module_stack"] = self.text("\n".join(path for path, _ in stack.values()))
        return meta


# Where Dynamo's graphs have functions from, and those look up others.
_NAMESPACES: dict[str, Any] = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch._C._nn": torch._C._nn,  # type: ignore[attr-defined]
    "torch.Tensor": torch.Tensor,
    "torch.functional": torch.functional,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch._C": torch._C,
    "torch._VF": torch._VF,
    "operator": operator,
}


def _name(target: Any) -> str:
    """Return the name by which a function of PyTorch's is found. Raise NotWritable for any other function."""
    if isinstance(target, OpOverload):
        return target_name(target)
    name = getattr(target, "__name__", "")
    plain = isinstance(target, types.FunctionType | types.BuiltinFunctionType)
    if plain:
        for space, module in _NAMESPACES.items():
            if getattr(module, name, None) is target:
                return f"{space}.{name}"
    return target_name(target)


def replaced() -> Iterator[str]:
    """Yield functions in PyTorch's namespaces that are somebody else's. A graph that calls another function
    of PyTorch's may reach them without showing it."""
    for space, module in _NAMESPACES.items():
        for name, value in vars(module).items():
            if callable(value) and not isinstance(value, type) and not _is_pytorchs(value):
                yield f"{space}.{name}"


_OWN = (str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"))
_OWNERS = frozenset(
    {"torch", "typing", "typing_extensions", *sys.builtin_module_names, *sys.stdlib_module_names}
)


def _is_pytorchs(value: Any) -> bool:
    value = getattr(value, "__func__", value)
    if isinstance(value, functools._lru_cache_wrapper):
        value = value.__wrapped__
    if isinstance(value, types.FunctionType):
        file = value.__code__.co_filename
        return file.startswith(_OWN) or Path(file).stem == "typing_extensions"
    if isinstance(value, functools.partial):
        return False
    owner = getattr(value, "__module__", None) if isinstance(value, types.BuiltinFunctionType) else None
    return str(owner or type(value).__module__).partition(".")[0] in _OWNERS
