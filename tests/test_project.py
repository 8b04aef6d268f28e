"""The files of a project beside its code: metadata, citation, templates, changelog, release notes."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

import fusion_compiler as fc
from tests import ROOT

SECTIONS = ("Added", "Changed", "Changed in detail", "Deprecated", "Removed", "Fixed", "Security")
MOST_LINES = 45  # of the sections that a user skims


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_metadata_say_for_whom_it_is_and_bound_what_it_needs() -> None:
    metadata = project()
    kinds = {classifier.partition(" :: ")[0] for classifier in metadata["classifiers"]}
    assert {"Development Status", "Operating System", "Programming Language", "Topic", "Typing"} <= kinds
    assert not any(classifier.startswith("License") for classifier in metadata["classifiers"])
    bounded = [line for line in metadata["dependencies"] if re.match("(torch|triton)>=", line)]
    assert len(bounded) == 2 and all(",<" in line for line in bounded)
    extras = metadata["optional-dependencies"]
    assert set(extras["all"]) == {*extras["rich"], *extras["dot"]}


def test_no_licence_is_claimed() -> None:
    assert not [file.name for file in ROOT.iterdir() if file.name.upper().startswith(("LICEN", "COPYING"))]
    assert "No licence is chosen yet" in (ROOT / f"docs/release-notes-{fc.__version__}.md").read_text()


def test_templates_and_citation_are_whole() -> None:
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == fc.__version__ and cited["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= cited.keys() and len(cited["references"]) >= 6
    for reference in cited["references"]:
        assert {"type", "title", "authors", "year"} <= reference.keys(), reference
    forms = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) == 4
    for form in (yaml.safe_load(file.read_text()) for file in forms if file.name != "config.yml"):
        assert {"name", "description", "body"} <= form.keys()
        ids = [part["id"] for part in form["body"]]
        assert len(ids) == len(set(ids)) and all(part["attributes"]["label"] for part in form["body"])
    assert "- [ ]" in (ROOT / ".github/pull_request_template.md").read_text()
    assert "Reporting a vulnerability" in (ROOT / "SECURITY.md").read_text()


def test_the_changelog_has_the_usual_form() -> None:
    versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    assert versions[0].startswith(fc.__version__)
    for version in versions:
        headings = re.findall(r"^### (.+)$", version, re.MULTILINE)
        assert headings[0] == "Added" and set(headings) <= set(SECTIONS)
        assert len(headings) == len(set(headings))
    skimmed = versions[0].partition("### Fixed")[0]
    assert len(skimmed.splitlines()) <= MOST_LINES


def test_the_block_of_the_release_notes_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / f"docs/release-notes-{fc.__version__}.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(block, "release notes", "exec"), {"__name__": "notes"})
    printed = capsys.readouterr().out
    assert "plan graph0" in printed and "on h100" in printed
