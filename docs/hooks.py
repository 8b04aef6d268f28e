"""What `make docs` adds to the pages of docs/: hooks of MkDocs, and an extension of Griffe for docstrings.

README.md becomes the first page of the site. Pages and files that are beside docs/ keep their paths, so that
a link `../examples/demo.py` of a page in docs/ becomes `examples/demo.py`. Each page names the versions.
"""

from __future__ import annotations

import inspect
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?(?=\))")
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the version of the package, and those of PyTorch that it supports, at the end of each page."""
    source = (ROOT / "fusion_compiler" / "__init__.py").read_text()
    version = re.findall(r'^__version__ = "(.*)"', source, re.MULTILINE)[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    supported = next(name for name in project["dependencies"] if name.startswith("torch"))
    config.copyright = f"fusion_compiler {version}, for {supported} and Python {project['requires-python']}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files beside docs/: each page of PAGES, the examples, and the results that pages link to."""
    linked = {path for page in ROOT.glob("docs/**/*.md") for path in outside(page)}
    for path in sorted({*PAGES, *linked, *(f"examples/{f.name}" for f in ROOT.glob("examples/*.*"))}):
        files.append(File.generated(config, PAGES.get(path, path), abs_src_path=str(ROOT / path)))
    return files


def outside(page: Path) -> set[str]:
    """Return the files beside docs/ that a page links to, by their paths from the repository's root."""
    targets = [(page.parent / target).resolve() for target, _ in LINK.findall(CODE.sub("", page.read_text()))]
    return {str(t.relative_to(ROOT)) for t in targets if t.is_file() and not t.is_relative_to(ROOT / "docs")}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn each relative link between files of the repository into one between pages of the site."""
    place = page.file.src_uri
    source = next((old for old, new in PAGES.items() if new == place), None)
    if source is None:
        source = place if place.startswith("examples/") else f"docs/{place}"

    def moved(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        path = PAGES.get(path, path.removeprefix("docs/"))
        return posixpath.relpath(path, posixpath.dirname(place) or ".") + (match[2] or "")

    return LINK.sub(moved, markdown)


class Parameters(griffe.Extension):
    """Show paragraphs `name: text` of docstrings, which describe parameters or fields, as lists."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        if func.docstring:
            func.docstring.value = listed(func.docstring.value, "Args", {p.name for p in func.parameters})

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if cls.docstring:
            cls.docstring.value = listed(cls.docstring.value, "Attributes", set(cls.members))


def listed(text: str, title: str, names: set[str]) -> str:
    """Return a docstring with each run of lines `name: text` as a section of Google's style."""
    lines: list[str] = []
    others: list[str] = []  # of `first, second: text`, which describes both, the second
    inside = False
    for line in inspect.cleandoc(text).splitlines():
        described = re.match(r"((?:\w+, )*\w+): ", line)
        if described and set(described[1].split(", ")) <= names:
            first, *rest = described[1].split(", ")
            lines += others if inside else ["", f"{title}:"]
            lines.append(f"    {first}: {line[described.end() :]}")
            inside, others = True, [f"    {other}: see `{first}`" for other in rest]
        elif inside and line.startswith("    "):
            lines.append(f"    {line}")
        else:
            lines += [*([*others, ""] if inside else []), line]
            inside, others = False, []
    return "\n".join([*lines, *others])
