"""Trace a whole model as one ATen graph above autograd: its code runs on FakeTensors under make_fx, not in
Dynamo.

make_fx rather than torch.fx.symbolic_trace, whose proxies have neither sizes nor truth values: code that
asks for a shape, as that of every Hugging Face model does, stops it. Python decides in a trace as it does
in a call, so what a trace cannot hold is looked for and refused: control flow that depends on data,
checkpointed regions, gradients of the model's own, tensors that it leaves elsewhere than in its results.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import LocalSource
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusion_compiler.capture.graphs import unregister_constants
from fusion_compiler.capture.pre_autograd import AUTOGRAD_METHODS, UntraceableError, check_constants
from fusion_compiler.errors import first_line
from fusion_compiler.ir.sources import is_library, marked
from fusion_compiler.ir.walk import reached
from fusion_compiler.ops.decompositions.traced_gradients import traced_gradients

_C: Any = torch._C
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
_WITH_FAST_PATH = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def symbolic_trace(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: FakeTensorMode
) -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    """Return `model(*args, **kwargs)` as one graph, and its inputs: the parameters, buffers and arguments
    that it reads, in the order of their first use. They are FakeTensors of `mode`.

    The graph is pre-autograd ATen, and returns the tensors among the results. A module's own Python code
    runs, and may change its attributes. Raises UntraceableError.
    """
    module = model if isinstance(model, nn.Module) else None
    if module is not None:
        _check_module(module)
    state = [*module.parameters(), *module.buffers()] if module is not None else []
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    _check_plain(leaves, "an argument")
    inputs = tuple({id(t): t for t in (*state, *leaves) if isinstance(t, Tensor)}.values())
    results: list[Tensor] = []

    def run(*handles: Tensor) -> list[Tensor]:
        by_identity = {id(t): handle for t, handle in zip(inputs, handles, strict=True)}
        args, kwargs = pytree.tree_unflatten([by_identity.get(id(x), x) for x in leaves], spec)
        watch = _Watch()
        with _holding(module, by_identity), watch:
            results.extend(_tensors(_forward(model)(*args, **kwargs)))
        if watch.refused is not None:
            raise watch.refused
        return results

    handles = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
    try:
        # Models ask whether they are being compiled, to leave out what a graph could not hold.
        with (
            mode,
            traced_gradients(),
            patch.object(torch.compiler, "_is_compiling_flag", True),
            fx_traceback.preserve_node_meta(),
        ):
            traced = make_fx(run, pre_dispatch=True)(*handles)
    except UntraceableError:
        raise
    except Exception as error:  # whatever it is, TorchDynamo may do better, or say it better
        raise UntraceableError(f"{type(error).__name__}: {first_line(error)}") from error
    _check_gradients(results)
    _check_graph(traced)
    unregister_constants(traced)
    used = _by_first_use(traced, inputs)
    _annotate(traced, used, [any(t is held for held in state) for t in used])
    return traced, used


def _check_module(module: nn.Module) -> None:
    """Refuse a module whose call does things that a trace would not show."""
    if any(getattr(module, hooks) for hooks in _HOOKS):
        raise UntraceableError("the module has hooks of its own, which are not part of it")
    for m in module.modules():
        if isinstance(m, _WITH_FAST_PATH) and not m.training and torch.backends.mha.get_fastpath_enabled():
            raise UntraceableError(
                f"it holds a {type(m).__name__}, which may be one operator when not training"
            )


def _forward(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return what compile() compiles of a module: its forward, without the hooks around it."""
    return model.forward if isinstance(model, nn.Module) else model


class _Watch(TorchFunctionMode):
    """Refuse calls that change autograd's work and are no operators, and note the user's line in the trace.

    It refuses only once, because the end of a transform on the way out may be a call as well (torch 2.11's
    vmap).
    """

    refused: UntraceableError | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fx_traceback.current_meta["stack_trace"] = _lines()
        name = getattr(func, "__name__", "")
        reason = "" if self.refused is not None else _unseen(name)
        if reason:
            self.refused = UntraceableError(reason)
            raise self.refused
        if name == "contiguous":  # recorded even where it is so already: after a rewrite it may not be
            return torch.ops.aten.contiguous.default(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _unseen(name: str) -> str:
    """Return what the trace would not show of a call of `name`, or around it; "" if it shows all."""
    if name in AUTOGRAD_METHODS:
        return f"it calls Tensor.{name}"
    if _C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return "it holds a checkpointed region, or hooks on the tensors saved for backward"
    if _C._functorch.peek_interpreter_stack() is not None:
        return "it holds a function transform (vmap, grad or jvp)"
    return ""


def _lines() -> str:
    """Return the lines of the model that are not torch's, the outermost first, as a traceback shows them."""
    lines: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != __file__:
        code = frame.f_code
        if not is_library(code.co_filename):
            text, span = _place(code, frame.f_lasti, frame.f_lineno)
            place = f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n'
            lines.append(place + marked(text, span))
        frame = frame.f_back
    return "".join(reversed(lines))


@functools.lru_cache(maxsize=65536)
def _place(code: CodeType, instruction: int, line: int) -> tuple[str, tuple[int, int] | None]:
    """Return a line without the blanks around it, and the columns of the call in it."""
    full = linecache.getline(code.co_filename, line).rstrip()
    text = full.lstrip()
    first, last, start, end = next(itertools.islice(code.co_positions(), instruction // 2, None))
    if first != line or start is None or end is None:
        return text, None
    indent = len(full) - len(text)
    start, end = (len(full.encode()[:i].decode()) for i in (start, end if last == line else None))
    return text, (start - indent, end - indent)


@contextmanager
def _holding(module: nn.Module | None, tensors: Mapping[int, Tensor]) -> Generator[None]:
    """Give `module` other tensors for its parameters and buffers, and name its submodules in the trace, while
    entered.

    Raises UntraceableError if its code leaves a tensor in an attribute.
    """
    if module is None:
        yield
        return
    paths = {m: name for name, m in module.named_modules()}
    homes = [home for m in paths for home in (m._parameters, m._buffers)]
    before = [(home, name, value) for home in homes for name, value in home.items() if value is not None]
    hooks = [hook for m, path in paths.items() for hook in _naming(m, path)]
    try:
        for home, name, value in before:
            home[name] = tensors[id(value)]  # type: ignore[assignment]
        before_call = dict(_kept(paths))
        yield
        for number, (name, _) in _kept(paths):
            if number not in before_call:
                raise UntraceableError(f"it keeps a tensor in {name}")
    finally:
        for hook in hooks:
            hook.remove()
        for home, name, value in before:
            home[name] = value  # type: ignore[assignment]


def _kept(modules: Iterable[nn.Module]) -> Iterator[tuple[int, tuple[str, Tensor]]]:
    """Yield the tensors in the attributes of modules, by identity: parameters, buffers and others."""
    for module in modules:
        for name, value in vars(module).items():
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor):
                    yield id(leaf), (f"{type(module).__name__}.{name}", leaf)


def _naming(module: nn.Module, path: str) -> tuple[Any, Any]:
    """Add hooks between which the trace's nodes belong to `module`, as Dynamo's do, and return them."""
    outer: list[Any] = []

    def enter(*_: Any) -> None:
        meta = fx_traceback.current_meta
        outer.append(meta.get("nn_module_stack", {}))
        meta["nn_module_stack"] = {**outer[-1], path: (path, type(module))}

    def leave(*_: Any) -> None:
        fx_traceback.current_meta["nn_module_stack"] = outer.pop()

    return module.register_forward_pre_hook(enter), module.register_forward_hook(leave)


def _check_plain(leaves: list[Any], what: str) -> None:
    """Raise UntraceableError for objects in which tensors may hide: all but tensors, numbers and containers
    that pytree knows."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and is_traceable_wrapper_subclass(leaf):
            raise UntraceableError(f"{what} is a {type(leaf).__name__}")
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise UntraceableError(f"{what} is a {type(leaf).__name__}, in which tensors may be")


def _tensors(results: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(results)
    _check_plain(leaves, "a result")
    return list({id(x): x for x in leaves if isinstance(x, Tensor)}.values())


def _check_gradients(results: list[Tensor]) -> None:
    """Raise UntraceableError for an autograd.Function, whose gradient is in autograd's graph and not in the
    trace. The gradient of a custom operator belongs to the operator, which the trace holds."""
    for node in autograd_nodes(results):
        name = type(node).__name__
        if isinstance(node, BackwardCFunction) and not name.startswith("GeneratedBackwardFor_"):
            raise UntraceableError(f"it holds an autograd.Function ({name.removesuffix('Backward')})")


def autograd_nodes(results: Iterable[Tensor]) -> set[Any]:
    """Return the nodes of autograd's graph behind some results."""
    starts: list[Any] = [t.grad_fn for t in results if t.grad_fn is not None]
    return reached(starts, lambda node: [after for after, _ in node.next_functions if after is not None])


def _check_graph(traced: fx.GraphModule) -> None:
    try:
        check_constants(traced)
    except UntraceableError as error:
        raise UntraceableError(
            "it reads a tensor that is no argument, parameter or buffer of its own"
        ) from error
    for node in traced.graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            raise UntraceableError(f"it holds the higher-order operator {node.target}")


def _by_first_use(traced: fx.GraphModule, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Order the placeholders by their first use, drop unused ones, and return the inputs in that order."""
    placeholders = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    used = [n for node in traced.graph.nodes for n in node.all_input_nodes if n in placeholders]
    order = list(dict.fromkeys(used))
    for node in reversed(order):
        first = next(iter(traced.graph.nodes))
        if node is not first:
            first.prepend(node)
    for node in placeholders:
        if not node.users:
            traced.graph.erase_node(node)
    traced.recompile()
    return tuple(placeholders[node] for node in order)


def _annotate(traced: fx.GraphModule, inputs: Sequence[Tensor], held: Sequence[bool]) -> None:
    """Annotate a graph as Dynamo does: which inputs the model holds, and backward need not save."""
    traced.meta["dynamo_compile_id"] = None
    traced._param_name_to_source = {}  # type: ignore[assignment]
    nodes = traced.graph.find_nodes(op="placeholder")
    for node, tensor, static in zip(nodes, inputs, held, strict=True):
        node.meta["example_value"] = tensor
        node._dynamo_source = LocalSource(node.name)  # type: ignore[attr-defined]
        if static:
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
