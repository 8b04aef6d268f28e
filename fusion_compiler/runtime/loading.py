"""Load FILE:callable, as the command line takes it: a model and its example arguments from the user's own
code.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion_compiler.errors import TargetError, UserCodeError, closest

_STDLIB = sysconfig.get_path("stdlib")
_OURS = str(Path(__file__).parent.parent)


@dataclass(frozen=True)
class Example:
    """An example is what a target returned: `model(*args, **kwargs)` is the call to look at."""

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Line:
    """A line names a place in the user's code."""

    file: str
    line: int
    code: str
    module: str = ""


def load(target: str) -> Example:
    """Import FILE.py or a module by its dotted path, and call the function after the colon.

    A file's folder is on the import path from then on, as for `python FILE.py`; for a module the present
    folder is. Raises TargetError if the target names nothing or returns something else, and UserCodeError if
    the user's code fails.
    """
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise TargetError(target=target, detail="it has no colon between file and function")
    module = _imported(target, where)
    function = getattr(module, name, None)
    if function is None:
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise TargetError(target=target, detail=f"{where} has no {name!r}{closest(name, names)}")
    if not callable(function):
        raise TargetError(target=target, detail=f"{name} is a {type(function).__name__}, not a function")
    _check_takes_nothing(target, name, function)
    return _example(target, _run(f"{name}()", function))


def _imported(target: str, where: str) -> Any:
    if where.endswith(".py"):
        file = Path(where).resolve()
        if not file.is_file():
            raise TargetError(target=target, detail=f"there is no file {where}")
        sys.path.insert(0, str(file.parent))
        name = f"{file.stem}_" if file.stem in sys.modules else file.stem
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None  # a .py file has both
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # pickling and dataclasses look their module up
        _run(f"importing {where}", lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
        return module
    sys.path.insert(0, os.getcwd())
    try:
        exists = importlib.util.find_spec(where) is not None
    except (ImportError, ValueError):
        exists = False
    if not exists:
        raise TargetError(target=target, detail=f"there is no module {where}")
    return _run(f"importing {where}", lambda: importlib.import_module(where))


def _check_takes_nothing(target: str, name: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin: the call will tell
        return
    try:
        signature.bind()
    except TypeError as error:
        raise TargetError(target=target, detail=f"{name}{signature} takes arguments") from error


def _run(what: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        where = user_line(error)
        todo = "correct the line above" if where is not None else "correct the reported error"
        raise UserCodeError(where, what=what, detail=brief(error), todo=todo) from error


def _example(target: str, result: Any) -> Example:
    if isinstance(result, tuple) and len(result) in (2, 3):
        model, args, kwargs = result if len(result) == 3 else (*result, {})
        if callable(model) and isinstance(args, tuple | list) and isinstance(kwargs, dict):
            return Example(model, tuple(args), kwargs)
    kinds = [type(v).__name__ for v in result] if isinstance(result, tuple) else [type(result).__name__]
    raise TargetError(target=target, detail=f"it returns ({', '.join(kinds)})")


def brief(error: BaseException) -> str:
    """Return "KeyError: 'x'", the first line alone; for TorchDynamo's errors, what the operator said."""
    if inner := re.search(r"got (\w+)\((.*)\)$", str(error), re.MULTILINE):
        return f"{inner[1]}: {inner[2]}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def user_line(error: BaseException) -> Line | None:
    """Return the user's innermost line that an error, or an error from which it was raised, comes from, or
    None.

    TorchDynamo's errors have it in their text.
    """
    from fusion_compiler.ir.sources import FRAME, is_library

    for each in reversed(list(_chain(error))):
        if isinstance(each, SyntaxError) and each.filename and each.lineno:
            return Line(each.filename, each.lineno, (each.text or "").strip())
        frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(each.__traceback__)]
        quoted = [(f["file"], int(f["line"])) for f in FRAME.finditer(str(each))]
        for file, line in (*reversed(quoted), *reversed(frames)):
            if not (is_library(file) or file.startswith(("<", _OURS)) or _is_stdlib(file)):
                return Line(file, line, linecache.getline(file, line).strip())
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_stdlib(file: str) -> bool:
    return file.startswith(_STDLIB) and "-packages" not in file
