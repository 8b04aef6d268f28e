"""Write the text of a stitched graph: one line a call, results unpacked, each value freed at its last use.

def forward(self, args_list):
    x, weight, = args_list
    args_list.clear()
    y, mean, = rms_norm(x, weight)
    flat = view(y, (64, 4096), (4096, 1), 0);  del y
    out = mm(flat, weight);  del flat
    return (out, mean)

While a profiler is active a second version of it runs, with a range around every kernel and library call:

    with record_function("graph0.forward/rms_norm [norm1:12]"): y, mean, = rms_norm(x, weight)
"""

from __future__ import annotations

import linecache
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.autograd import profiler
from torch.fx.graph import CodeGen, PythonCode

from fusion_compiler.ops.own import depthwise

# Matrix products by torch's own bindings: two thirds of the host time of an ATen overload's call.
_QUICK = depthwise.CALLS | {
    getattr(torch.ops.aten, name).default: getattr(torch, name) for name in ("mm", "addmm", "bmm", "baddbmm")
}


def quick(target: Any) -> Any:
    """Return the cheapest callable that does the same as an operator's overload."""
    return _QUICK.get(target, target)


class GraphSource(CodeGen):
    """The generated function takes the arguments as one list and empties it, so that each is freed at its
    last use.

    bound: the generated code's global names and what they stand for.
    ranges: gives node name -> text of its range, asked when a profiler is first active; without it there is
        no second version, and no check for a profiler at every call.
    """

    def __init__(self, ranges: Callable[[], Mapping[str, str]] | None = None) -> None:
        super().__init__()
        self.bound: dict[str, Any] = {}
        self.ranges = ranges

    def _gen_python_code(self, nodes: Any, root_module: str, namespace: Any, **_: Any) -> PythonCode:
        printer = _Printer(root_module, namespace)
        lines = printer.lines(list(nodes))
        body = [text for _, text in lines]
        head = f"def forward({root_module}, args_list):"
        if self.ranges is not None:
            # A flag of torch's, read in 12 ns; to ask the profiler itself takes 80.
            flag = f"{printer.name(profiler)}._is_profiler_enabled"
            opened = printer.name(profiler.record_function)
            other = printer.name(Ranged(head, lines, dict(printer.bound), opened, self.ranges))
            body.insert(0, f"if {flag}: return {other}({root_module}, args_list)")
        self.bound = printer.bound
        return PythonCode(f"\n\n{_function(head, body)}", dict(printer.bound), None)


def _function(head: str, body: Sequence[str]) -> str:
    return "\n    ".join([head, *body]) + "\n"


class Ranged:
    """Run the version of a graph's source whose units have ranges with their names; it is written when first
    called.

    lines: (node name, "" for none; statement). bound: what global names stand for. opened: the name among
    them of what opens a range.
    """

    __name__ = "ranged"

    def __init__(
        self,
        head: str,
        lines: Sequence[tuple[str, str]],
        bound: dict[str, Any],
        opened: str,
        ranges: Callable[[], Mapping[str, str]],
    ) -> None:
        self._head, self._lines, self._bound, self._opened, self._ranges = head, lines, bound, opened, ranges

    def __call__(self, module: Any, arguments: list[Any]) -> Any:
        return self._function(module, arguments)

    @cached_property
    def text(self) -> str:
        ranges = self._ranges()
        body = [
            f"with {self._opened}({ranges[name]!r}): {text}" if name in ranges else text
            for name, text in self._lines
        ]
        return _function(self._head, body)

    @cached_property
    def _function(self) -> Callable[[Any, list[Any]], Any]:
        file = f"<fusion_compiler ranges {id(self):x}>"
        linecache.cache[file] = (len(self.text), None, self.text.splitlines(keepends=True), file)
        module = {**self._bound}
        exec(compile(self.text, file, "exec"), module)
        return module["forward"]


@dataclass(frozen=True)
class _Line:
    """A line is one statement: `targets = text`, where text reads `operands`; it computes `node`."""

    node: str
    targets: tuple[str, ...]
    text: str
    operands: tuple[str, ...]
    unpacks: bool = False

    def __str__(self) -> str:
        return f"{', '.join(self.targets)}{',' if self.unpacks else ''} = {self.text}"


class _Printer:
    def __init__(self, root_module: str, namespace: Any) -> None:
        self.root_module = root_module
        self.namespace = namespace
        self.bound: dict[str, Any] = {}

    def lines(self, nodes: list[fx.Node]) -> list[tuple[str, str]]:
        """Return (node name or "", statement) of each line."""
        arguments = tuple(repr(node) for node in nodes if node.op == "placeholder")
        header = _Line("", arguments, "args_list", (), unpacks=True)
        body = [header] if arguments else []
        body += [
            self.line(node)
            for node in nodes
            if node.op in ("get_attr", "call_function") and not _is_part(node)
        ]
        output = nodes[-1]
        returned = {repr(node) for node in output.all_input_nodes}
        last = {name: i for i, line in enumerate(body) for name in (*line.targets, *line.operands)}
        dead: dict[int, list[str]] = {}
        for name, i in last.items():
            if name not in returned:
                dead.setdefault(i, []).append(name)
        out = [
            (line.node, f"{line};  del {', '.join(dead[i])}" if i in dead else str(line))
            for i, line in enumerate(body)
        ]
        out.insert(1 if arguments else 0, ("", "args_list.clear()"))
        return [*out, ("", f"return {self.text(output.args[0])}")]

    def line(self, node: fx.Node) -> _Line:
        if node.op == "get_attr":
            return _Line(node.name, (repr(node),), f"{self.root_module}.{node.target}", ())
        arguments = [self.text(a) for a in node.args] + [
            f"{k}={self.text(v)}" for k, v in node.kwargs.items()
        ]
        if node.target is operator.getitem:
            text = f"{arguments[0]}[{arguments[1]}]"
        else:
            text = f"{self.name(node.target)}({', '.join(arguments)})"
        operands = tuple(repr(operand) for operand in node.all_input_nodes)
        count = _unpacked(node)
        if count is None:
            return _Line(node.name, (repr(node),), text, operands)
        parts = {part.args[1]: repr(part) for part in node.users}
        targets = tuple(
            parts.get(i) or self.namespace.create_name(f"{node.name}_{i}", None) for i in range(count)
        )
        return _Line(node.name, targets, text, operands, unpacks=True)

    def name(self, value: Any) -> str:
        """Return a global name for something that has no text of its own."""
        hint = getattr(value, "_opname", None) or getattr(value, "__name__", None)
        hint = hint or str(value).rpartition(".")[2]
        name = self.namespace.create_name(re.sub(r"\W", "_", hint).lstrip("_") or "value", value)
        self.bound[name] = value
        return name

    def text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return repr(value)
        if isinstance(value, tuple):
            return f"({', '.join(self.text(v) for v in value)}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(self.text(v) for v in value)}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k!r}: {self.text(v)}' for k, v in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        if (
            value is None
            or isinstance(value, bool | int | str)
            or (isinstance(value, float) and math.isfinite(value))
        ):
            return repr(value)
        return self.name(value)


def _unpacked(node: fx.Node) -> int | None:
    """Return how many results a call has, if only its single results are read, or else None."""
    value = node.meta.get("val")
    parts = [user.args[1] for user in node.users if user.target is operator.getitem]
    distinct = {part for part in parts if isinstance(part, int)}
    if node.op != "call_function" or not isinstance(value, tuple | list) or not parts:
        return None
    return len(value) if len(parts) == len(node.users) == len(distinct) else None


def _is_part(node: fx.Node) -> bool:
    """True if the line of the call that computed a node already names it."""
    call = node.args[0] if node.target is operator.getitem else None
    return isinstance(call, fx.Node) and _unpacked(call) is not None
