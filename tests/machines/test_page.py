"""docs/machines.md: its first example runs, and prints what stands below it.

python -m pytest tests/machines/test_page.py --update-golden writes that.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent.parent / "docs" / "machines.md"


def test_the_example_prints_what_the_page_shows(request: pytest.FixtureRequest) -> None:
    page = PAGE.read_text()
    code, shown = re.findall(r"```(?:python|text)\n(.*?)```", page, re.DOTALL)[:2]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})
    if request.config.getoption("--update-golden"):
        PAGE.write_text(page.replace(f"```text\n{shown}```", f"```text\n{printed.getvalue()}```", 1))
    else:
        assert printed.getvalue() == shown
