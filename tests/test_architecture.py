"""docs/architecture.md: its kernel is the one that is made, its rooms are those that there are."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from examples import one_kernel
from tests.codegen.test_golden import of_pinned_versions

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "--update-golden -->\n", "<!-- end of walk -->"
# Stage -> the sentence before its text, and the language of that.
SAID = {
    "code": ("The user's code.", "python"),
    "graph": (
        "`capture/`: functional ATen. A norm, a softmax or a GELU of PyTorch's own is decomposed into such "
        "operators as well, by `ops/decompositions/table.py`.",
        "python",
    ),
    "operators": (
        "`ir/dag.py`: the `OpDag`. Kinds come from the operator table (`ops/table.py`), shapes and dtypes "
        "from FakeTensors; nothing here says that this is a norm.",
        "text",
    ),
    "loop nest": (
        "`passes/fuse/` puts all of them into one cluster, which `passes/patterns/` has a name for. This is "
        "its `LoopNest` (`ir/loops.py`), made by `passes/lower/`; a node names its operands by number. "
        "The conversion to bfloat16 before the last product rounds nothing: numbers are float32 in a kernel, "
        "and what is not stored is not rounded (`passes/lower/rounding.py`).",
        "text",
    ),
    "schedules": (
        "`schedule/`: the ways to run it that are tried, best guess first: rows x columns of a tile, and how "
        "many programs walk over the rows in a loop, where it is not one program for each tile.",
        "text",
    ),
    "kernel": ("`codegen/`: the first of them as Triton.", "python"),
}


def walk_text() -> str:
    """Return the text between the page's marks."""
    stages = one_kernel.walk()
    assert stages.keys() == SAID.keys()
    blocks = [
        f"{textwrap.fill(SAID[stage][0], 110)}\n\n```{SAID[stage][1]}\n{text.strip()}\n```\n"
        for stage, text in stages.items()
    ]
    return "\n" + "\n".join(blocks) + "\n"


@of_pinned_versions
def test_the_kernel_of_the_page_is_the_one_that_is_made(request: pytest.FixtureRequest) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    now = f"{before}{BEGIN}{walk_text()}{END}{after}"
    if request.config.getoption("--update-golden"):
        PAGE.write_text(now)
    assert PAGE.read_text() == now


def test_every_room_has_its_sentence() -> None:
    table = PAGE.read_text().split("## The rooms")[1].split("## ")[0]
    named = set(re.findall(r"`([\w/]+(?:/|\.py))`", table))
    package = ROOT / "fusion_compiler"
    folders = {f.parent.relative_to(package) for f in package.rglob("*.py")}
    rooms = {f"{folder.as_posix()}/" for folder in folders if folder.parts and folder.parts != ("passes",)}
    files = {f.name for f in package.glob("*.py") if not f.name.startswith("__")}
    assert rooms | files <= named
