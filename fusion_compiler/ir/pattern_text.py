"""Write patterns as text: the torch code as it was written, in Python that makes an equal pattern again.

A function without source (one made by exec, a closure over an object, a module) is printed as the ATen
program that it traces to, on the sizes of its example.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import linecache
import math
import operator
import re
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

MARK = 0.61803398875  # floats among the arguments are traced as this plus their position
MOST_VALUES = 64  # of an integer tensor that is written out
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def written(
    sort: str, functions: Mapping[str, Any], example: Sequence[Any], options: Mapping[str, object]
) -> str:
    """Return Python that makes a pattern: definitions, then `pattern = fc.<sort>(...)`.

    functions: by what they are for, "code" first; "code" and "after" are torch code on `example`.
    options: further keywords, plain values.
    """
    names: dict[str, object] = {}
    definitions: list[str] = []
    shown: dict[str, str] = {}
    for role, function in functions.items():
        text, before = _function(role, function, example, names)
        definitions += before
        shown[role] = text
    positional = [shown.pop(role) for role in ("code", "after", "run") if role in shown]
    keywords = [f"{k}={_text(v)}" for k, v in options.items()] + [f"{k}={v}" for k, v in shown.items()]
    arguments = [*positional, *map(_value, example), *keywords]
    call = f"pattern = fc.{sort}({', '.join(arguments)})"
    if len(call) > 100 or "\n" in call:
        call = f"pattern = fc.{sort}(\n" + "".join(f"    {a},\n" for a in arguments) + ")"
    return "\n\n\n".join([*definitions, call])


def _function(
    role: str, function: Any, example: Sequence[Any], names: dict[str, object]
) -> tuple[str, list[str]]:
    """Return how a function is written in the call, and what has to be defined before."""
    torch_code = role in ("code", "after")
    outer = _closure(function, names)
    source = None if outer is None and torch_code else _source(function)
    before = [f"{name} = {value!r}" for name, value in (outer or {}).items() if name not in names]
    names |= outer or {}
    if source is None:
        name = _dotted(function)
        if not torch_code or name is not None:
            return name or getattr(function, "__qualname__", type(function).__qualname__), []
        name = _unique(_plain_name(function, role), role, names)
        return name, [_traced(name, function, example)]
    if source.startswith("lambda"):
        return source, ["\n".join(before)] if before else []
    name = _unique(function.__name__, role, names)
    renamed = re.sub(rf"\bdef {function.__name__}\b", f"def {name}", source, count=1)
    return name, ["\n".join([*before, renamed])]


def _closure(function: Any, names: Mapping[str, object]) -> dict[str, object] | None:
    """Return the variables that a function reads from the function around it; None if one is no plain value,
    or its name is taken."""
    if not isinstance(function, types.FunctionType):
        return {}
    try:
        held = {
            n: c.cell_contents
            for n, c in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        }
    except ValueError:  # a name that is not bound yet
        return None
    plain = all(isinstance(v, _PLAIN) and names.get(n, v) == v for n, v in held.items())
    return held if plain else None


def _source(function: Any) -> str | None:
    """Return the text of a function as its file has it, or None."""
    if not isinstance(function, types.FunctionType):
        return None
    if function.__name__ == "<lambda>":
        return _lambda(function.__code__)
    try:
        return textwrap.dedent(inspect.getsource(function)).rstrip()
    except (OSError, TypeError):
        return None


def _lambda(code: types.CodeType) -> str | None:
    """Return the lambda alone, from among all that stands on its lines, or None."""
    text = "".join(linecache.getlines(code.co_filename))
    try:
        nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Lambda)]
    except SyntaxError:
        return None
    spots = [(a, c, b, d) for a, b, c, d in code.co_positions() if a and b and c is not None and d]
    fitting = [
        n for n in nodes
        if n.lineno == code.co_firstlineno and _has_parameters(code, n)
        and (all(_within(s, n.body) for s in spots) if spots else _is_constant(code, n.body))
    ]  # fmt: skip
    if not fitting:
        return None
    smallest = min(fitting, key=lambda n: len(ast.get_source_segment(text, n) or text))
    segment = ast.get_source_segment(text, smallest)
    return segment and re.sub(r"\n\s*", " ", segment)


def _has_parameters(code: types.CodeType, node: ast.Lambda) -> bool:
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return names == list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def _is_constant(code: types.CodeType, body: ast.expr) -> bool:
    """True if a body may be that of code without places: Python 3.12 gives a constant none."""
    value = getattr(body, "value", None)
    same = any(type(c) is type(value) and c == value for c in code.co_consts)
    return isinstance(body, ast.Constant) and same


def _within(spot: tuple[int, int, int, int], body: ast.expr) -> bool:
    line, column, last_line, last_column = spot
    end = (body.end_lineno or body.lineno, body.end_col_offset or 0)
    return (body.lineno, body.col_offset) <= (line, column) and (last_line, last_column) <= end


def _dotted(function: Any) -> str | None:
    """Return the name of a function of torch's, or None for any other."""
    if isinstance(function, types.FunctionType) and not str(function.__module__).startswith("torch"):
        return None
    try:
        return resolve_name(function)
    except (AttributeError, TypeError):
        return None


def _plain_name(function: Any, role: str) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return name if str(name).isidentifier() else role


def _unique(name: str, role: str, names: dict[str, object]) -> str:
    chosen = name if name not in names else f"{name}_{role}"
    names[chosen] = role
    return chosen


def _value(value: Any) -> str:
    """Return an example argument as text. The values of floats do not count; integers may be indices."""
    if not isinstance(value, Tensor):
        return _text(value)
    dtype = "" if value.dtype is torch.float32 else f", dtype={value.dtype}"
    shape = ", ".join(map(str, value.shape)) if value.dim() else "()"
    if value.is_floating_point() or value.is_complex():
        return f"torch.ones({shape}{dtype})"
    if value.numel() <= MOST_VALUES and bool(value.any()):
        return f"torch.tensor({value.tolist()}{dtype})"
    return f"torch.zeros({shape}{dtype})"


def _text(value: Any) -> str:
    """Return an option of a pattern, or an argument of a call, as Python."""
    if isinstance(value, _Name):
        return value
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' * (len(value) == 1)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, torch.device):
        return f"torch.{value!r}"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _traced(name: str, function: Callable[..., Any], example: Sequence[Any]) -> str:
    """Return the ATen program of a function, as Python. Floats that it hands on as they are stay
    parameters."""
    marks = {i: MARK + i for i, v in enumerate(example) if isinstance(v, float)}
    graph = _graph(function, example)
    marked = _graph(function, [marks.get(i, v) for i, v in enumerate(example)]) if marks else graph
    names = parameter_names(function, len(example))
    numbers = {mark: names[i] for i, mark in marks.items()}
    tensors = iter([n for n, v in zip(names, example, strict=True) if isinstance(v, Tensor)])
    lines = [f"def {name}({', '.join(names)}):"]
    node_names: dict[fx.Node, str] = {}
    twins = list(marked.nodes) if len(marked.nodes) == len(graph.nodes) else []
    for node, twin in itertools.zip_longest(graph.nodes, twins):
        node_names[node] = next(tensors) if node.op == "placeholder" else node.name
        args, kwargs = _with_names(node, twin, node_names, numbers)
        if node.op == "get_attr":
            lines.append(f"    {node.name} = {_constant(getattr(graph.owning_module, str(node.target)))}")
        elif node.op == "call_function":
            lines.append(f"    {node.name} = {_call(node.target, args, kwargs)}")
        elif node.op == "output":
            lines.append(f"    return {_text(args[0])}")
    return "\n".join(lines)


class _Name(str):
    """The text stands for itself, not for a string."""


def _with_names(
    node: fx.Node, twin: fx.Node | None, node_names: Mapping[fx.Node, str], numbers: Mapping[float, str]
) -> tuple[Any, Any]:
    """Return a call's arguments with names for other calls, and for numbers that are marks in the twin's."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    others = leaves if twin is None else pytree.tree_leaves((twin.args, twin.kwargs))
    named = [
        _Name(node_names[v]) if isinstance(v, fx.Node)
        else _Name(numbers[m]) if isinstance(m, float) and m in numbers
        else v
        for v, m in zip(leaves, others, strict=True)
    ]  # fmt: skip
    return pytree.tree_unflatten(named, spec)


def _constant(value: Tensor) -> str:
    """Return a tensor that the function holds as text: its values, if there are few."""
    if value.numel() <= MOST_VALUES:
        return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
    return f"{_value(value)}  # a tensor of the function's own, not its values"


def _graph(function: Callable[..., Any], example: Sequence[Any]) -> fx.Graph:
    places = [i for i, v in enumerate(example) if isinstance(v, Tensor)]

    def run(*tensors: Tensor) -> Any:
        arguments = list(example)
        for place, tensor in zip(places, tensors, strict=True):
            arguments[place] = tensor
        return function(*arguments)

    with unset_fake_temporarily():
        traced = make_fx(run, pre_dispatch=True)(*(example[i].detach() for i in places))
    traced.graph.eliminate_dead_code()
    return traced.graph


def parameter_names(function: Callable[..., Any], count: int) -> list[str]:
    """Return the names of a function's first `count` parameters; x0, x1, ... if it does not say."""
    try:
        names = [p.name for p in inspect.signature(function).parameters.values() if p.kind < p.VAR_POSITIONAL]
    except (TypeError, ValueError):
        names = []
    return names[:count] if len(names) >= count else [f"x{i}" for i in range(count)]


def _call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    if target is operator.getitem:
        return f"{args[0]}[{args[1]}]"
    named = [f"{k}={_text(v)}" for k, v in kwargs.items()]
    return f"torch.ops.{target}({', '.join([*map(_text, args), *named])})"
