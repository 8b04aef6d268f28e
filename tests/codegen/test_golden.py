"""Plans and kernels do not change unseen: golden files hold them, and --update-golden rewrites those.

A refactoring leaves the files as they are. After a change of what is fused, or of what a kernel looks
like, run `python -m pytest tests/codegen/test_golden.py --update-golden` and read the difference.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import golden_cases
from tests.golden_cases import FOLDER, MAKERS, kernels_text, parse_kernels, plan_text, programs_of
from tests.models import NAMES

TEXTS: dict[str, Callable[[str], str]] = {"plan": plan_text, "kernels": kernels_text}
PINNED = re.search(r"^torch==([\d.]+)", (FOLDER.parents[1] / "constraints.txt").read_text(), re.MULTILINE)
of_pinned_versions = pytest.mark.skipif(
    PINNED is None or torch.__version__.split("+")[0] != PINNED[1],
    reason="other versions decompose and trace models into other graphs: goldens are of constraints.txt's",
)


@of_pinned_versions
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", MAKERS)
def test_plan_and_kernels_are_the_golden_ones(name: str, text: str, request: pytest.FixtureRequest) -> None:
    file = FOLDER / f"{name}.{text}.txt"
    now = TEXTS[text](name)
    if request.config.getoption("--update-golden"):
        file.write_text(now, encoding="utf-8")
    assert without_line_numbers(now) == without_line_numbers(file.read_text(encoding="utf-8"))


def without_line_numbers(text: str) -> str:
    """A kernel says which line of a model it computes, and an edit above that line moves it."""
    return re.sub(r"\b(\w+\.py):\d+", r"\1", text)


def test_every_golden_file_has_its_case() -> None:
    expected = {f"{name}.{text}.txt" for name in MAKERS for text in TEXTS}
    files = {file.name for file in FOLDER.iterdir()}
    assert files == expected | {f"{name}.eager.txt" for name in NAMES}


def test_goldens_name_no_machine() -> None:
    root, home = str(Path(golden_cases.__file__).parents[1]), str(Path.home())
    for file in FOLDER.iterdir():
        text = file.read_text(encoding="utf-8")
        assert root not in text and home + os.sep not in text and sys.prefix not in text, file


def test_random_numbers_are_made_again_where_they_are_needed() -> None:
    texts = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.kernels.txt")}
    assert any("fm.words_block" in text for text in texts.values())
    for name, text in texts.items():
        assert not re.search(r"tl\.store\(.*, (uniform|word)\w*[,)]", text), name


def test_kernels_survive_the_way_through_text() -> None:
    """Kernels that test_sass compiles from their text are the kernels that the emitter returned."""
    emitted = [kernel for program in programs_of("layer_norm") for kernel in program.kernels]
    read = parse_kernels(kernels_text("layer_norm"))
    assert len(read) == len(emitted) > 2
    for ours, theirs in zip(read, emitted, strict=True):
        assert (ours.name, ours.source, ours.num_warps, ours.num_stages) == (
            theirs.name,
            theirs.source,
            theirs.num_warps,
            theirs.num_stages,
        )
        assert [(a.name, a.role, a.dtype, a.aligned) for a in ours.arguments] == [
            (a.name, a.role, a.dtype, a.aligned) for a in theirs.arguments
        ]


@pytest.mark.parametrize("name", ["encoder_layer"])
def test_the_same_in_every_process(name: str) -> None:
    """Sets and hashes order nothing."""
    code = f"from tests.golden_cases import *; print(plan_text({name!r}) + kernels_text({name!r}), end='')"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1"},  # this process has another, drawn at its start
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == plan_text(name) + kernels_text(name)
