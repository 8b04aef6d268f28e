"""Write functions as what JSON holds, so that equal text means equal behaviour in another process.

A function is its compiled code, its defaults, and the values of its closure and of the globals that it reads.
The compiled code stands for the source text: the file may have been edited since it was imported, and code
that was never in a file has no other text. Modules and functions of PyTorch's and Python's are their names,
because the versions are part of every key that has patterns (`support.store`).
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch

from fusion_compiler.ir.record import NotWritable

_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(...), range, slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
_MODULES = frozenset({"torch", "math", "cmath", "operator", "_operator", "builtins"})
_NAMESPACES = frozenset({"aten", "prims"})  # of `torch.ops`; a user's operators may change
_IMPURE = frozenset({"__import__", "eval", "exec", "compile", "globals", "open", "input", "hash", "id"})


def stable_text(value: Any) -> Any:
    """Return a function, or a plain value that may contain functions, as lists and strings.

    Raises NotWritable for anything that has no such text, such as a tensor or an object of a user's class.
    """
    try:
        return _Writer().write(value)
    except RecursionError:
        raise NotWritable("it reads a value that holds itself") from None


class _Writer:
    """A writer has the number of each function that it has begun: functions may call each other."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def write(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return [kind.__name__, repr(value)]
        if kind in (tuple, list):
            return [kind.__name__, *map(self.write, value)]
        if kind in (set, frozenset):
            return [kind.__name__, *sorted(map(self.write, value), key=str)]
        if kind is dict:
            return ["dict", *map(self.write, value.items())]
        if kind is functools.partial:
            return ["partial", self.write((value.func, value.args, value.keywords))]
        if (name := _name(value)) is not None:
            return ["name", name]
        if kind is types.FunctionType:
            return ["function", self._function(value)]
        what = f"the module {value.__name__}" if kind is types.ModuleType else f"a {kind.__qualname__}"
        raise NotWritable(f"it reads {what}")

    def _function(self, function: types.FunctionType) -> Any:
        if id(function) in self._numbers:
            return self._numbers[id(function)]
        self._numbers[id(function)] = len(self._numbers)
        try:
            closure = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:
            raise NotWritable("it reads a variable that has no value yet") from None
        values = [function.__defaults__, function.__kwdefaults__, closure, vars(function)]
        return [self._code(function.__code__, function.__globals__), *map(self.write, values)]

    def _code(self, code: types.CodeType, values: Mapping[str, Any]) -> Any:
        """Return compiled code without its name and lines, with the values of the globals that it reads."""
        reads: dict[str, Any] = {}
        before = ""
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                reads[name] = self._global(name, values)
            elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                raise NotWritable(f"it changes the global {name}")
            elif instruction.opname == "IMPORT_NAME" and not _is_trusted(name):
                raise NotWritable(f"it imports {name}")
            elif before == "ops" and name not in _NAMESPACES:
                raise NotWritable(f"it reads torch.ops.{name}")
            before = name
        constants = [
            self._code(each, values) if isinstance(each, types.CodeType) else self.write(each)
            for each in code.co_consts
        ]
        counts = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
        names = [code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars]
        return [code.co_code.hex(), code.co_exceptiontable.hex(), counts, names, constants, reads]

    def _global(self, name: str, values: Mapping[str, Any]) -> Any:
        if name in values:
            return self.write(values[name])
        if name in _IMPURE or not hasattr(builtins, name):
            raise NotWritable(f"it reads {name}")
        return "builtin"


def _is_trusted(module: object) -> bool:
    return str(module).partition(".")[0] in _MODULES


def _name(value: Any) -> str | None:
    """Return the name by which every process finds a module, class or function of PyTorch's or Python's."""
    if isinstance(value, types.ModuleType):
        return value.__name__ if _is_trusted(value.__name__) else None
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not isinstance(value, _NAMED) or not _is_trusted(module) or name in _IMPURE:
        return None
    if isinstance(value, types.BuiltinFunctionType):
        owner: Any = value.__self__  # of a method of some object, that object
        return f"{module}.{name}" if isinstance(owner, types.ModuleType | type | None) else None
    try:
        named: Any = functools.reduce(getattr, name.split("."), sys.modules[str(module)])
    except (KeyError, AttributeError):
        return None
    return f"{module}.{name}" if named is value else None
