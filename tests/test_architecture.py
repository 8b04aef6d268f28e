"""docs/architecture.md shows one kernel in all stages, and two tables, as they are in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples import one_kernel
from fusion_compiler.support.store import KINDS
from tests.codegen.test_golden import of_pinned_versions
from tests.test_layout import MAY_IMPORT

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
# A comment names a stage, and the fence below it holds the text of that stage.
BLOCK = re.compile(r"^<!-- one_kernel: ([a-z ]+) -->\n(```\w+\n)(.*?)^```$", re.DOTALL | re.MULTILINE)


@of_pinned_versions
def test_the_kernel_of_the_page_is_the_one_that_is_made(request: pytest.FixtureRequest) -> None:
    """`--update-golden` writes the blocks of the page anew."""
    stages, page = one_kernel.walk(), PAGE.read_text()
    assert [stage for stage, _, _ in BLOCK.findall(page)] == [*stages]

    def block(match: re.Match[str]) -> str:
        stage, fence, _ = match.groups()
        return f"<!-- one_kernel: {stage} -->\n{fence}{stages[stage].strip()}\n```"

    expected = BLOCK.sub(block, page)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(expected)
    assert PAGE.read_text() == expected


def table(header: str) -> dict[str, set[str]]:
    """Return the first cell of each row of a table, and the words of the last one, which commas separate."""
    rows = PAGE.read_text().partition(f"| {header} |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows]
    return {first: {*last.split(", ")} - {"-"} for first, *_, last in cells}


def test_the_table_of_rooms_says_who_may_import_whom() -> None:
    rooms = {room.removesuffix(".py").rstrip("/"): below for room, below in table("room").items()}
    allowed = {
        room.replace(".", "/"): {other.replace(".", "/") for other in below}
        for room, below in MAY_IMPORT.items()
        if room != "__main__"
    }
    assert rooms == allowed


def test_the_table_of_the_cache_has_the_inputs_of_each_key() -> None:
    assert table("kind") == {kind.name: {*kind.inputs} for kind in KINDS if kind.inputs}
