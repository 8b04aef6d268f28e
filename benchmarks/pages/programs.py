"""Run the Python programs of pages, as a reader runs them who pastes the blocks of a page into one file."""

from __future__ import annotations

import contextlib
import io
import linecache
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def programs(page: str) -> list[str]:
    """Return the Python blocks of a page, each behind empty lines that keep its line numbers."""
    return ["\n" * (page[: m.start(1)].count("\n")) + m[1] for m in BLOCK.finditer(page)]


@contextlib.contextmanager
def module_of(name: str, scope: Mapping[str, Any]) -> Iterator[types.ModuleType]:
    """Yield a module that holds `scope`, and can be imported by its name meanwhile, as TorchDynamo does."""
    module = types.ModuleType(name)
    vars(module).update(scope)
    sys.modules[name] = module
    try:
        yield module
    finally:
        del sys.modules[name]


def run(programs: Sequence[str], file: str, module: types.ModuleType) -> str:
    """Run the blocks of a page in a module, and return what they print.

    Errors and plans show lines of `file`, as they do of a file that holds all blocks.
    """
    lines: dict[int, str] = {}
    for program in programs:
        lines |= {i: line for i, line in enumerate(program.splitlines(keepends=True)) if line.strip()}
    source = [lines.get(i, "\n") for i in range(max(lines, default=-1) + 1)]
    linecache.cache[file] = (sum(map(len, source)), None, source, file)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for program in programs:
            exec(compile(program, file, "exec"), vars(module))
    return printed.getvalue()
