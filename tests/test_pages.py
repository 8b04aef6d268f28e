"""The pages of the documentation: their programs run, their links lead somewhere, and their site builds."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import fusion_compiler as fc
from benchmarks.pages.programs import BLOCK, module_of, programs, run
from fusion_compiler.errors import FusionWarning
from tests import ROOT

DOCS = ROOT / "docs"
# docs/hooks.py adds these.
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")
PAGES = [*(ROOT / name for name in OUTSIDE), *sorted(DOCS.rglob("*.md"))]
# Pages whose blocks of Python another test runs or compares with what is generated.
ELSEWHERE = {
    "README.md": "tests/test_benchmarks.py::test_the_program_of_the_readme_prints_the_plan_of_the_readme",
    "CONTRIBUTING.md": "tests/test_pages.py::test_the_rows_and_passes_of_contributing",
    "docs/architecture.md": "tests/test_architecture.py::test_the_kernel_of_the_page_is_the_one_that_is_made",
    "docs/command-line.md": "tests/cli/test_cli.py::test_every_command_of_the_page_parses_and_its_model_runs",
    "docs/hugging-face.md": "tests/capture/test_hugging_face.py::test_the_page",
    # The second block needs several processes: `examples/machines.py` is that program, and a test runs it.
    "docs/machines.md": "tests/machines/test_page.py::test_the_example_prints_what_the_page_shows",
    "docs/patterns.md": "tests/passes/test_pattern_notes.py::test_the_page_on_patterns_does_what_it_says",
    "docs/techniques.md": "tests/codegen/test_techniques.py::test_the_excerpt_is_part_of_a_generated_kernel",
}
NEEDS = re.compile(r"^<!-- needs: (.*) -->$", re.MULTILINE)
OUTPUT = re.compile(r"^```output\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


RUN_HERE = [p for p in PAGES if BLOCK.search(p.read_text()) and name_of(p) not in ELSEWHERE]


@pytest.mark.parametrize("page", RUN_HERE, ids=name_of)
def test_the_programs_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the blocks of a page in order, as one module. An `output` block shows lines that they print."""
    text = page.read_text()
    for need in NEEDS.findall(text):
        if need == "a GPU":
            if not torch.cuda.is_available():
                pytest.skip(f"{name_of(page)} needs a GPU")
        else:
            pytest.importorskip(need, reason=f"{name_of(page)} needs {need}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for processes that a page starts
    with module_of(f"page_of_{page.stem.replace('-', '_')}", {}) as module, warnings.catch_warnings():
        warnings.simplefilter("ignore", FusionWarning)  # CPU tensors: no kernel runs
        warnings.simplefilter("ignore", FutureWarning)  # of libraries that use each other's older names
        warnings.filterwarnings("ignore", category=UserWarning, module="(torch|accelerate|lightning).*")
        printed = run(programs(text), page.name, module)
    for shown in OUTPUT.findall(text):
        left = printed
        for line in (line.strip() for line in shown.splitlines() if line.strip() != "..."):
            assert line in left, f"{line}\nis not printed, or not in this order:\n{printed}"
            left = left.partition(line)[2]


def test_the_rows_and_passes_of_contributing() -> None:
    """The blocks of CONTRIBUTING.md are parts of modules, whose names they use."""
    from fusion_compiler import pipeline
    from fusion_compiler.ops import table
    from fusion_compiler.passes.rewrites import engine

    scope = {**vars(table), **vars(pipeline), **vars(engine), "torch": torch}
    row, rewrite = programs((ROOT / "CONTRIBUTING.md").read_text())
    with module_of("page_of_contributing", scope) as module:
        (spec,) = eval(row.strip(), vars(module))
        run([rewrite], "CONTRIBUTING.md", module)
        assert spec.target is torch.ops.aten.exp2.default and spec.expr is not None
        assert vars(module)["SCALED_SUMS"].name == "scaled sums"


def test_every_program_is_run_by_a_test() -> None:
    for page, test in ELSEWHERE.items():
        file, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(), f"{page}: {test}"
        assert BLOCK.search((ROOT / page).read_text()), f"{page} has no program any more"


def slug(heading: str) -> str:
    """Return the anchor of a heading, as MkDocs and GitHub form it."""
    plain = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).strip()
    return re.sub(r"\s", "-", plain)


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for path, anchor in LINK.findall(text):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{path} does not exist"
        assert not anchor or anchor in anchors(target), f"{path} has no heading #{anchor}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=name_of)
def test_decimals_have_a_leading_zero(page: Path) -> None:
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert not re.findall(r"(?:^|[ (|])\.\d.*", prose, re.MULTILINE)


def test_what_a_kernel_shows_leads_to_its_technique() -> None:
    """The first table of docs/techniques.md: what stands in a kernel is in an example of that technique."""
    table, *sections = re.split(r"^### ", (DOCS / "techniques.md").read_text(), flags=re.MULTILINE)
    examples = {section.partition("\n")[0]: section.partition("# after")[2] for section in sections}
    rows = re.findall(r"^\| (.*`.*) \| ([A-Z].*) \|$", table, re.MULTILINE)
    assert len(rows) > 10
    for shown, techniques in rows:
        text = "".join(examples[name] for name in techniques.split(", "))
        for code in re.findall(r"`([\w.]+)", shown):
            assert code in text, f"{code} is in no example of {techniques}"


def leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [leaf for part in (nav.values() if isinstance(nav, dict) else nav) for leaf in leaves(part)]


def test_every_page_is_in_the_navigation() -> None:
    listed = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    pages = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")}
    assert sorted(listed) == sorted({"index.md", *OUTSIDE, *pages} - {"README.md"})


def test_the_api_page_has_every_public_name() -> None:
    shown = re.findall(r"^::: fusion_compiler\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert set(fc.__all__) <= set(shown)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """`make docs` does so in an environment of its own, which has MkDocs."""
    python = next(p for p in (ROOT / ".venv-docs/bin/python", Path(sys.executable)) if p.exists())
    if python == Path(sys.executable) and importlib.util.find_spec("mkdocs") is None:
        pytest.skip("MkDocs is not installed: make docs installs it into .venv-docs")
    command = [python, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "FeedForward" in (tmp_path / "site" / "index.html").read_text()
    assert "NotCallableError" in (tmp_path / "site" / "api.html").read_text()
