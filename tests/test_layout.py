"""The repository's shape: which module may import which, what a wheel holds, what the README promises."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from dataclasses import fields
from pathlib import Path

import networkx as nx
import pytest

import fusion_compiler as fc

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fusion_compiler"
# The folders of the package and its files beside them, and whom each may know, for types as well.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "support": {"errors"},
    "ops": {"errors"},
    "ir": {"errors", "ops"},
    "options": {"errors", "ir", "ops"},
    "patterns": {"errors", "ir", "ops"},
    "schedule": {"ir", "ops"},
    "codegen": {"ir", "ops", "schedule"},
    "stitch": {"errors", "ir", "ops"},
    "runtime": {"errors", "support", "ir", "ops", "codegen"},
    "capture": {"errors", "support", "ir", "ops", "runtime"},
    "passes.lower": {"ir", "ops"},
    "passes.patterns": {"errors", "ir", "ops", "patterns", "capture"},
    "passes.rewrites": {"errors", "ir", "ops", "patterns", "capture", "runtime", "passes.patterns"},
    "passes.chunks": {"ir", "ops", "capture"},
    "passes.nests": {
        "ir", "ops", "schedule", "capture", "passes.chunks", "passes.lower", "passes.rewrites",
    },
    "passes.fuse": {"errors", "ir", "ops", "patterns", "schedule", "passes.lower", "passes.patterns"},
    "compiler": {
        "errors", "support", "ir", "ops", "options", "patterns", "codegen", "stitch", "runtime", "capture",
        "passes.chunks", "passes.fuse", "passes.patterns", "passes.rewrites", "pipeline",
    },
    "api": {"errors", "options", "patterns", "runtime", "capture", "optimizer", "compiler", "report"},
    "pipeline": {"ir", "ops", "passes.chunks", "passes.fuse", "passes.nests", "passes.rewrites"},
    "optimizer": {
        "errors", "ir", "ops", "options", "schedule", "codegen", "runtime", "capture", "passes.lower",
    },
    "report": {
        "errors", "ir", "ops", "options", "patterns", "stitch", "runtime", "capture", "passes.fuse",
        "compiler",
    },
    "machines": {"errors", "ir", "ops", "capture", "passes.fuse", "runtime", "api"},
    "cli": {"errors", "support", "ir", "ops", "options", "pipeline", "runtime", "compiler", "report"},
    "__main__": {"cli"},
}  # fmt: skip


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module that the package installs."""
    files = (file for file in sorted(PACKAGE.rglob("*.py")) if "__pycache__" not in file.parts)
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in files
    }


def imports_of(name: str, file: Path) -> set[str]:
    """Every module that `file` imports when it is loaded or called, or for types."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *base.split(".")]).rstrip(".")
            imported |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return imported


def room(name: str) -> str:
    """fusion_compiler.passes.fuse.cost -> passes.fuse; fusion_compiler.ir.dag -> ir; others -> ''."""
    pieces = name.split(".")
    if pieces[0] != "fusion_compiler" or len(pieces) == 1:
        return ""
    return ".".join(pieces[1:3]) if pieces[1] == "passes" else pieces[1]


def test_the_links_at_the_top_are_links_to_the_package() -> None:
    for name in ("passes", "codegen"):
        assert (ROOT / name).is_symlink() and (ROOT / name).resolve() == PACKAGE / name
        assert not (PACKAGE / name).is_symlink()


def test_rooms_import_what_is_below_them() -> None:
    files = modules()
    wrong = [
        f"{name} imports {other}"
        for name, file in files.items()
        if room(name)
        for other in sorted(imports_of(name, file) & files.keys())
        if room(other) not in {"", "passes", room(name), *MAY_IMPORT.get(room(name), ())}
    ]
    assert not wrong
    assert {room(name) for name in files} - {"", "passes"} == MAY_IMPORT.keys()
    rooms = nx.DiGraph((here, below) for here, others in MAY_IMPORT.items() for below in others)
    assert nx.is_directed_acyclic_graph(rooms)


def test_imports_have_no_circle() -> None:
    files = modules()
    graph = nx.DiGraph(
        (name, other)
        for name, file in files.items()
        for other in imports_of(name, file)
        if other in files and other not in (name, "fusion_compiler")
    )
    circles = [sorted(c) for c in nx.strongly_connected_components(graph) if len(c) > 1]
    assert not circles


def test_what_is_imported_is_installed_with_the_package() -> None:
    text = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (text["optional-dependencies"][extra] for extra in ("rich", "dot"))
    named = {re.split(r"\W", line)[0] for lines in (text["dependencies"], *extras) for line in lines}
    ours = {"fusion_compiler", "", *sys.stdlib_module_names}
    imported = {i.split(".")[0] for name, file in modules().items() for i in imports_of(name, file)}
    assert imported - ours <= named


def test_short_names_are_never_imported() -> None:
    folders = ("fusion_compiler", "tests", "examples", "benchmarks")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*.py")]
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in sorted(imports_of("x", file))
        if name.split(".")[0] in ("passes", "codegen")
    ]
    assert not wrong


def copy_of_the_sources(to: Path) -> Path:
    """The tree as a build sees it, so that building leaves nothing behind in the repository."""
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, to / name)
    shutil.copytree(PACKAGE, to / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    return to


def build(source: Path, backend_call: str, to: Path) -> Path:
    """Runs setuptools' PEP 517 hook in `source`: no network, no isolated environment."""
    to.mkdir()
    code = f"from setuptools import build_meta as b; print(b.{backend_call}({str(to)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return to / done.stdout.strip().splitlines()[-1]


def check_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = next(archive.read(n).decode() for n in names if n.endswith("entry_points.txt"))
    assert wheel.name.split("-")[1] == fc.__version__
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"fusion_compiler"}
    expected = {name.replace(".", "/") for name in modules()}
    held = {n.removesuffix("/__init__.py").removesuffix(".py") for n in names if n.endswith(".py")}
    assert held == expected
    assert {"fusion_compiler/py.typed", "fusion_compiler/schedule/measured.csv"} <= set(names)
    assets = {f.relative_to(ROOT).as_posix() for f in (PACKAGE / "assets").rglob("*") if f.is_file()}
    assert {n for n in names if n.startswith("fusion_compiler/assets/")} == assets
    assert "[torch_dynamo_backends]" in entry_points
    assert "fusion-compiler = fusion_compiler.cli.commands:main" in entry_points


def test_wheel_holds_the_package_and_no_short_names(tmp_path: Path) -> None:
    source = copy_of_the_sources(tmp_path)
    check_wheel(build(source, "build_wheel", tmp_path / "wheel"))


def test_wheel_from_sdist_is_the_same(tmp_path: Path) -> None:
    source = copy_of_the_sources(tmp_path)
    sdist = build(source, "build_sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    check_wheel(build(unpacked, "build_wheel", tmp_path / "wheel"))


def run_installed(source: Path, to: Path, code: str) -> str:
    """Output of `code` where an editable install of `source` is on the path, and the repository is not."""
    wheel = build(source, "build_editable", to / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(to / "site")
    # This environment's own packages, but without its .pth files: the project may be installed in it too.
    others = sysconfig.get_path("purelib")
    code = f"import site, sys; site.addsitedir({str(to / 'site')!r}); sys.path.append({others!r})\n{code}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_editable_install_finds_passes_and_codegen(tmp_path: Path) -> None:
    source = copy_of_the_sources(tmp_path)
    code = (
        "import fusion_compiler.passes, fusion_compiler.codegen, importlib.util\n"
        "print(fusion_compiler.passes.__file__)\n"
        "assert not importlib.util.find_spec('passes') and not importlib.util.find_spec('codegen')\n"
    )
    assert Path(run_installed(source, tmp_path, code)).is_relative_to(source)


def test_torch_compile_finds_the_backend_of_an_installed_package(tmp_path: Path) -> None:
    source = copy_of_the_sources(tmp_path)
    code = (
        "import torch\n"
        "fast = torch.compile(lambda x: torch.tanh(x) * 2, backend='fusion_compiler',"
        " options={'backend': 'interpret', 'strict': True})\n"
        "x = torch.randn(3, 5)\n"
        "torch.testing.assert_close(fast(x), torch.tanh(x) * 2)\n"
        "print('equal')\n"
    )
    assert run_installed(source, tmp_path, code) == "equal"


@pytest.mark.parametrize("order", ["fusion_compiler, torch", "torch, fusion_compiler", "first"])
def test_importing_the_package_is_enough_for_torch_compile(tmp_path: Path, order: str) -> None:
    """It is not installed here, and PyTorch is imported and used before it or after it."""
    for item in Path(sysconfig.get_path("purelib")).iterdir():
        if "fusion_compiler" not in item.name:
            (tmp_path / item.name).symlink_to(item)
    code = (
        f"import sys; sys.path += [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
        "import importlib.metadata as metadata\n"
        "assert not metadata.entry_points(group='torch_dynamo_backends', name='fusion_compiler')\n"
        f"first = {order == 'first'}\n"
        "if first:\n"
        "    import torch\n"
        "    assert 'fusion_compiler' not in torch._dynamo.list_backends()\n"
        f"import {order.replace('first', 'fusion_compiler')}\n"
        "fast = torch.compile(lambda x: torch.tanh(x) * 2, backend='fusion_compiler',"
        " options={'backend': 'interpret', 'strict': True})\n"
        "x = torch.randn(3, 5)\n"
        "torch.testing.assert_close(fast(x), torch.tanh(x) * 2)\n"
        "assert 'fusion_compiler' in torch._dynamo.list_backends()\n"
        "print('equal')\n"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, fusion_compiler; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_readme_promises_what_there_is() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in set(re.findall(r"\bfc\.(\w+)", readme)):
        assert hasattr(fc, name), f"README.md speaks of fc.{name}"
    assert len(readme.splitlines()) <= 120


def test_the_page_of_options_has_every_option_with_its_default() -> None:
    table = (ROOT / "docs" / "options.md").read_text().split("## ")[0]
    shown = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", table, re.MULTILINE))
    parameters = inspect.signature(fc.compile).parameters.values()
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert set(shown) == {field.name for field in fields(fc.Options)} | set(keywords)
    for field in fields(fc.Options):
        assert ast.literal_eval(shown[field.name]) == field.default, field.name


def test_the_versions_that_are_supported_are_those_that_can_be_tested() -> None:
    pairs = []
    for name in ("-oldest", "", "-newest"):
        text = (ROOT / f"constraints{name}.txt").read_text()
        pinned = dict(re.findall(r"^(torch|triton)==([\d.]+)", text, re.MULTILINE))
        pairs.append((pinned["torch"], pinned["triton"]))
    said = " ".join((ROOT / "README.md").read_text().split())
    assert all(f"{torch} and {triton}" in said for torch, triton in pairs)
    (low, least), *_, (high, most) = ([v.rpartition(".")[0] for v in pair] for pair in pairs)
    assert f"PyTorch {low} to {high}" in said and f"({least} to {most})" in said
    required = (ROOT / "pyproject.toml").read_text()
    assert f'"torch>={low},<{following(high)}"' in required
    assert f'"triton>={least},<{following(most)};' in required


def following(version: str) -> str:
    """2.15 -> 2.16"""
    major, minor = version.split(".")
    return f"{major}.{int(minor) + 1}"
