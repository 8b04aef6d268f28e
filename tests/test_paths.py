"""Whatever the pages, docstrings and comments call by the name of a file, module or function is there."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import fusion_compiler as fc
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.report.report import Report

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fusion_compiler"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *PACKAGE.rglob("*.md"), ROOT / "Makefile"]
FOLDERS = ("fusion_compiler", "benchmarks", "examples", "tests")
SOURCES = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
PATH = re.compile(r"(?<![\w/.<-])[\w.-]+(?:/[\w.-]+)*(?:\.(?:py|md|toml)\b(?!:\d)|/(?=`))")
NAME = re.compile(r"`([a-z_]\w*(?:\.(?!(?:py|md|js|css|csv|html|json|txt|toml)`)\w+)+)(?:\(\))?`")
# Files of a user's in examples, and PyTorch's.
FOREIGN = {"model.py", "file.py", "FILE.py", "encoder_layer.py", "torch/_inductor/pattern_matcher.py"}
# What the pages speak of by the name of a variable.
OBJECTS = {"fc": fc, "fused": fc.FusedOptimizer, "plan": FusionPlan, "report": Report}


def modules() -> dict[str, Path]:
    """Dotted name -> file, of packages too."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    names = {file: ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    return {name.removesuffix(".__init__"): file for file, name in names.items()}


MODULES = modules()


@functools.cache
def defined(file: Path) -> frozenset[str]:
    """Return the names that a module defines at its top, and "Class.attribute" of its classes."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        names |= set(names_of(node))
        if isinstance(node, ast.ClassDef):
            inner = [n for n in ast.walk(node) if isinstance(n, ast.stmt)]
            names |= {f"{node.name}.{name}" for n in inner for name in names_of(n)}
    return frozenset(names)


def names_of(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    for target in targets:
        for name in ast.walk(target) if isinstance(target, ast.AST) else ():
            if isinstance(name, ast.Name | ast.Attribute):
                yield name.id if isinstance(name, ast.Name) else name.attr


def is_file(name: str, named_in: Path) -> bool:
    """From the repository's root, the package's, or the folder of the file that names it."""
    above = [folder for folder in (named_in, *named_in.parents) if folder.is_relative_to(ROOT)]
    return any((folder / name).exists() for folder in (PACKAGE, *above[1:]))


def is_there(name: str, named_in: Path) -> bool:
    """Whether a dotted name is that of a module, or of what a module defines; one that begins with no module
    of ours, or with a variable of the file, is none that could be wrong."""
    head, *rest = name.split(".")
    if named_in.suffix == ".py" and head in variables(named_in):
        return True
    if named_in.suffix != ".py" and head in OBJECTS:
        owner = OBJECTS[head]
        return hasattr(owner, rest[0]) or rest[0] in getattr(owner, "__dataclass_fields__", ())
    ours = [module.split(".") for module in MODULES if f".{head}." in f".{module}."]
    return not ours or any(is_in(module, name.split(".")) for module in ours)


def is_in(module: list[str], name: list[str]) -> bool:
    """Whether `name`, which begins with any piece of the module's own, is the module's or of a part of it."""
    shared = len(module) - module.index(name[0])
    left = ".".join(name[shared:])
    return name[:shared] == module[-shared:] and (not left or left in defined(MODULES[".".join(module)]))


@functools.cache
def variables(file: Path) -> frozenset[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return frozenset(stored | {n.arg for n in nodes if isinstance(n, ast.arg)})


def texts(file: Path) -> str:
    """A page; of a source its docstrings and comments."""
    text = file.read_text()
    if file.suffix != ".py":
        return text
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds))
    docstrings = [ast.get_docstring(node) or "" for node in nodes]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join([*docstrings, *(t.string for t in tokens if t.type == tokenize.COMMENT)])


@pytest.mark.parametrize("file", [*PAGES, *SOURCES], ids=lambda f: str(f.relative_to(ROOT)))
def test_what_is_named_exists(file: Path) -> None:
    text = texts(file)
    paths = {p.group().rstrip(".") for p in PATH.finditer(text)} - FOREIGN
    assert not sorted(p for p in paths if not is_file(p, file))
    assert not sorted(n for n in set(NAME.findall(text)) if not is_there(n, file))


def test_messages_name_files_that_exist() -> None:
    """Text that users read: what a warning tells them to change."""
    named = re.compile(r"\b(?:fusion_compiler|docs|benchmarks|examples)/[\w/]+\.\w+")
    wrong = {
        (file.name, path)
        for file in PACKAGE.rglob("*.py")
        for path in named.findall(file.read_text())
        if not (ROOT / path).exists()
    }
    assert not wrong


def test_imports_in_strings_and_pages_are_of_modules() -> None:
    """Code that another process runs, and the examples of the pages."""
    imported = re.compile(r"(?:from|import) (fusion_compiler(?:\.\w+)*)")
    named = {(file.name, name) for file in (*SOURCES, *PAGES) for name in imported.findall(file.read_text())}
    assert not sorted((file, name) for file, name in named if name not in MODULES)
