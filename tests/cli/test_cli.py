"""The command line: what it prints, writes and returns; users' mistakes; the page about it."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_compiler import __version__
from fusion_compiler.cli import commands
from fusion_compiler.cli.commands import DONE, EXIT_CODES, FAILED, USAGE, main
from fusion_compiler.report import explanation
from fusion_compiler.runtime.loading import brief, load, user_line
from fusion_compiler.runtime.stored import entries_of, folder_of
from fusion_compiler.support.store import KINDS, PLAN, REWRITE, TUNING, Store, versions
from tests import ROOT
from tests.runtime.test_target import fresh_build

PAGE = ROOT / "docs" / "command-line.md"

MODEL = """\
import torch
from torch import nn

class Wrong(nn.Module):
    def forward(self, x):
        return (x + 1).reshape(3, 7)

def example():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()), (torch.randn(4, 8),)

def named():
    return (lambda x, scale: torch.softmax(x * scale, -1)), [torch.randn(4, 8)], {"scale": 2.0}

def wrong():
    return Wrong(), (torch.randn(4, 8),)

def fails():
    return {}["model"]

def needs(size):
    return nn.Linear(size, 8), (torch.randn(4, size),)

def unfit():
    return (lambda x: x @ torch.ones(8, 8)), (torch.randn(4, 7),)

def lone():
    return nn.Linear(8, 8)

number = 3
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of a user's; the import path and what is imported are put back."""
    file = tmp_path / "users_model.py"
    file.write_text(MODEL)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "users_model", raising=False)
    return str(file)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return call


# -- explain -----------------------------------------------------------------------------------------


def test_explain_prints_the_plans_for_a_device(run: Run, model: str) -> None:
    code, out, _ = run("explain", f"{model}:example", "--device", "a100")
    assert code == DONE
    assert "graph0.forward for a100" in out and "graph0.backward for a100" in out
    code, out, _ = run("explain", f"{model}:example", "--inference")
    assert code == DONE and "for h200" in out and "backward" not in out


def test_json_goes_to_stdout_alone_or_to_a_file(run: Run, model: str, tmp_path: Path) -> None:
    code, out, _ = run("explain", f"{model}:named", "--json", "-")
    expected = json.loads(out)
    assert code == DONE and expected
    file = tmp_path / "plan.json"
    code, out, _ = run("explain", f"{model}:named", "--json", str(file))
    assert code == DONE and "plan" in out
    assert "softmax" in file.read_text() and type(json.loads(file.read_text())) is type(expected)


@pytest.mark.parametrize("option", ["--json", "--html", "--dot", "--graphml"])
def test_a_file_that_cannot_be_written_is_said_before_anything_is_planned(
    option: str, run: Run, model: str, tmp_path: Path
) -> None:
    for file, reason in ((tmp_path / "no" / "plan", "there is no folder"), (tmp_path, "it is a folder")):
        code, out, err = run("explain", f"{model}:fails", option, str(file))  # fails() is not called
        assert code == USAGE and out == ""
        assert f"{file} cannot be written: {reason}" in err and "what to do: name a file in a folder" in err


def test_the_report_is_there_where_writing_it_fails(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    code, out, err = run("explain", f"{model}:named", "--json", str(tmp_path / "plan.json"))
    assert code == FAILED and "plan graph0.inference" in out and "No space left" in err


def test_a_shape_that_does_not_fit_is_told_in_three_lines(run: Run, model: str) -> None:
    records: list[logging.LogRecord] = []
    keeping = logging.Handler()
    keeping.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(keeping)
    try:
        code, out, err = run("explain", f"{model}:unfit")
    finally:
        log.removeHandler(keeping)
    assert code == FAILED and not records and not out
    assert [line.split()[0] for line in err.splitlines()] == ["fusion-compiler:", "at", "what"]


class Report:
    """A report that keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def show(self) -> None:
        print("the text")

    def json(self) -> dict[str, object]:
        return {"schema": 2}

    def dot(self) -> str:
        return "digraph {}"

    def html(self, path: str) -> None:
        self.asked.append(("html", path))

    def graphml(self, path: str) -> None:
        self.asked.append(("graphml", path))

    def why(self, a: str, b: str) -> list[str]:
        return [f"{a} and {b}: contraction", "and in the backward"]


def test_every_format_is_written(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, calls = Report(), list[Any]()

    def explain(target: Any, *args: Any, **kwargs: Any) -> Report:
        calls.append((args[0].shape, kwargs))
        return report

    monkeypatch.setattr(explanation, "explain", explain)
    dot = tmp_path / "plan.dot"
    options = ["--html", "p.html", "--graphml", "p.graphml", "--dot", str(dot)]
    code, out, _ = run("explain", f"{model}:named", *options)
    assert (code, out) == (DONE, "the text\n")
    assert report.asked == [("html", "p.html"), ("graphml", "p.graphml")]
    assert dot.read_text() == "digraph {}\n"
    assert calls == [(torch.Size([4, 8]), {"device": "h200", "scale": 2.0})]
    assert run("explain", f"{model}:named", "--dot", "-") == (DONE, "digraph {}\n", "")
    asked = run("explain", f"{model}:named", "--why", "mm", "add_4")
    assert asked == (DONE, "mm and add_4: contraction\n\nand in the backward\n", "")


def test_every_format_of_a_real_report(run: Run, model: str, tmp_path: Path) -> None:
    page, graph = tmp_path / "plan.html", tmp_path / "plan.graphml"
    code, out, _ = run("explain", f"{model}:example", "--html", str(page), "--graphml", str(graph))
    assert code == DONE and "Sequential on h200" in out
    assert "layer_norm" in page.read_text() and "<graphml" in graph.read_text()
    code, out, _ = run("explain", f"{model}:example", "--json", "-")
    assert json.loads(out)["schema"] == 2
    code, out, _ = run("explain", f"{model}:example", "--why", "addmm", "layer_norm_gelu")
    assert code == DONE and "library call" in out
    code, _, err = run("explain", f"{model}:example", "--why", "addmm", "layer_nrm_gelu")
    assert code == USAGE and "layer_nrm_gelu" in err and "what to do" in err


# -- mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "code", "texts"),
    [
        ("{}:fails", FAILED, ["fails() failed: KeyError: 'model'", 'users_model.py:18: return {}["model"]']),
        ("{}:wrong", FAILED, ["shape '[3, 7]' is invalid", "users_model.py:6: return (x + 1).reshape(3, 7)"]),
        ("{}:exampl", USAGE, ["has no 'exampl'; did you mean 'example'?"]),
        ("{}:number", USAGE, ["number is a int, not a function"]),
        ("{}:needs", USAGE, ["needs(size) takes arguments", "a function without arguments"]),
        ("{}:lone", USAGE, ["it returns (Linear)", "(model, args) or"]),
        ("{}", USAGE, ["no colon"]),
        ("nowhere/model.py:example", USAGE, ["there is no file nowhere/model.py"]),
        ("no.such.module:example", USAGE, ["there is no module no.such.module"]),
    ],
)
@pytest.mark.parametrize("command", ["explain", "profile"])
def test_mistakes_name_the_users_line_and_a_next_step(
    run: Run, model: str, command: str, target: str, code: int, texts: list[str]
) -> None:
    got, out, err = run(command, target.format(model))
    assert (got, out) == (code, "")
    assert [text for text in texts if text not in err] == []
    assert "what to do:" in err and "Traceback" not in err and err.startswith("fusion-compiler: ")
    assert len(err.splitlines()) <= 4


@pytest.mark.parametrize("text", ["def broken(:\n", "import no_such_package\n", "1 / 0\n"])
def test_a_file_that_cannot_be_imported(run: Run, tmp_path: Path, text: str) -> None:
    file = tmp_path / "broken_model.py"
    file.write_text(f"\n{text}")
    code, _, err = run("explain", f"{file}:example")
    assert code == FAILED and f"broken_model.py:2: {text.strip()}" in err


def test_the_traceback_is_there_on_request(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_DEBUG", "1")
    code, _, err = run("explain", f"{model}:fails")
    assert code == FAILED and "Traceback (most recent call last)" in err and "what to do" in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "COMMAND"),
        (["explain"], "FILE:callable"),
        (["explode"], "invalid choice"),
        (["cache", "burn"], "invalid choice"),
        (["profile", "m.py:f", "--repetitions", "0"], "no number of at least 1"),
    ],
)
def test_wrong_usage(run: Run, arguments: list[str], text: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (USAGE, "") and text in err


def test_an_unknown_device_is_wrong_usage_before_anything_is_loaded(run: Run) -> None:
    for command in ("explain", "profile"):
        code, _, err = run(command, "nowhere.py:f", "--device", "h2000")
        assert code == USAGE and "'h2000'" in err and "mi300x" in err


def test_the_innermost_line_of_the_user_is_found_through_causes() -> None:
    def inner() -> None:
        torch.ones(2).reshape(7)

    try:
        try:
            inner()
        except RuntimeError as error:
            raise ValueError("outer") from error
    except ValueError as error:
        line = user_line(error)
    assert line is not None and line.code == "torch.ones(2).reshape(7)" and line.file == __file__
    assert brief(ValueError("a\nb")) == "ValueError: a" and brief(ValueError()) == "ValueError"
    assert user_line(ValueError("never raised")) is None


def test_a_module_is_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "users_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "deep.py").write_text("def example():\n    return len, ([1, 2],)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    example = load("users_package.deep:example")
    assert example.model is len and example.args == ([1, 2],) and example.kwargs == {}


# -- profile -----------------------------------------------------------------------------------------


def test_profile_prints_and_writes(run: Run, model: str, tmp_path: Path) -> None:
    files = [tmp_path / "times.json", tmp_path / "trace.json"]
    options = ["--backend", "eager", "--repetitions", "2", "--json", str(files[0]), "--trace", str(files[1])]
    code, out, _ = run("profile", f"{model}:example", *options)
    assert code == DONE and "profile of Sequential" in out and "2 repetitions" in out
    data = json.loads(files[0].read_text())
    assert set(data["units"]) == {"graph0.forward", "graph0.backward"}
    names = [event["name"] for event in json.loads(files[1].read_text())["traceEvents"]]
    assert any(name.startswith("graph0.backward/") for name in names)


def test_profile_of_inference_as_data_alone(run: Run, model: str) -> None:
    options = ["--backend", "interpret", "--repetitions", "1", "--inference", "--json", "-"]
    code, out, _ = run("profile", f"{model}:named", *options)
    assert code == DONE and set(json.loads(out)["units"]) == {"graph0.inference"}


# -- cache -------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Store, Path]:
    """A tuning result, a damaged one, a kernel of ours, one that is damaged, and one of somebody else's."""
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "tuning"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    from fusion_compiler.runtime.builds import compile_build

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "graphs"))
    store = Store()
    store.put(TUNING.key(device="NVIDIA H200", kernels="12"), {"cluster": "softmax_2", "candidate": 1})
    (store.folder(TUNING) / f"{'0' * 64}.json").write_text("{")
    compile_build(fresh_build(1))
    damaged = compile_build(fresh_build(2))
    Path(damaged.metadata_group["row_softmax.cubin"]).write_bytes(b"no cubin")
    (tmp_path / "kernels" / "OTHER").mkdir()
    for name in ("theirs.json", "theirs.sha256"):
        (tmp_path / "kernels" / "OTHER" / name).write_text("{}")
    Path(damaged.metadata_group["row_softmax.cubin"]).with_name("theirs.json").write_text("{}")
    for name in (f"a{'1' * 64}", "atheirs"):  # autograd's graphs: ours, and one of torch.compile's
        (tmp_path / "graphs" / "aotautograd" / name).mkdir(parents=True)
        (tmp_path / "graphs" / "aotautograd" / name / "entry").write_text("0123")
    return store, tmp_path / "kernels"


COMPUTED = {"source", "versions"}  # inputs of keys that the store adds


def sums(run: Run) -> dict[str, Any]:
    code, out, _ = run("cache", "--json", "-")
    assert code == DONE
    return json.loads(out)


def test_what_is_kept_is_listed_and_summed_up_by_kind(run: Run, kept: tuple[Store, Path]) -> None:
    store, kernels = kept
    plan, rewrite = (kind.key(**dict.fromkeys(set(kind.inputs) - COMPUTED, "x")) for kind in (PLAN, REWRITE))
    store.put(plan, {"cluster": "graph0.forward"})
    store.put(rewrite, {"autograd": ""})
    code, out, _ = run("cache", "list")
    rows = [re.split(r"\s{2,}", line) for line in out.splitlines()]
    assert code == DONE and rows[0][:4] == ["sort", "kernel", "device", "versions"]
    assert rows[1][:4] == ["tuning", "softmax_2", "NVIDIA H200", versions()] and rows[1][4] == "just now"
    assert rows[2][0] == "tuning" and rows[2][-1] == "not a whole record"
    assert rows[3][:2] == ["plan", "graph0.forward"] and rows[4][:3] == ["rewrite", "a graph", versions()]
    assert rows[5][:2] == ["graph", f"a{'1' * 11}"]
    assert rows[6][:3] == ["kernel", "row_softmax", "sm_90"] and rows[6][-1].endswith("B")
    assert rows[7][:2] == ["kernel", "row_softmax"] and rows[7][-1] == "damaged"
    assert len(rows) == 8, "entries of other programs are not ours to list"

    by_kind, (code, out, _) = sums(run), run("cache")
    assert run("cache", "size") == (code, out, "")
    assert {name: d["entries"] for name, d in by_kind.items()} == {
        "tuning": 2, "plan": 1, "rewrite": 1, "graph": 1, "kernel": 2
    }  # fmt: skip
    lines = out.splitlines()
    for kind, line, sentence in zip(KINDS, lines[::2], lines[1::2], strict=True):
        size = by_kind[kind.name]
        assert line.startswith(f"{kind.name}:") and line.endswith(size["path"])
        assert sentence.strip() == size["holds"] == kind.holds and f" {size['entries']} entries " in line
        if kind.cache == "ours":
            assert size["bytes"] == sum(file.stat().st_size for file in store.files(kind)) > 0
            assert size["path"] == str(store.folder(kind))
    assert by_kind["graph"]["bytes"] == 4 and by_kind["kernel"]["path"] == str(kernels)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_clear_removes_from_the_store_and_from_other_caches_only_if_they_are_named(
    run: Run, kept: tuple[Store, Path]
) -> None:
    store, kernels = kept
    (store.path / "mine.json").write_text("{}")
    graphs, folders = kernels.parent / "graphs", [str(store.folder(k)) for k in KINDS if k.cache == "ours"]
    foreign = contents(graphs) | contents(kernels) | {store.path / "mine.json": b"{}"}
    before, by_kind = contents(kernels.parent), sums(run)

    code, out, _ = run("cache", "clear", "--dry-run")
    first, *lines = out.splitlines()
    assert code == DONE and first == "would remove" and [line.split()[-1] for line in lines] == folders
    assert contents(kernels.parent) == before
    data = json.loads(run("cache", "clear", "--dry-run", "--json", "-")[1])
    assert data == {"removed": 2, "bytes": by_kind["tuning"]["bytes"], "folders": folders, "dry_run": True}

    data = json.loads(run("cache", "clear", "--json", "-")[1])
    assert data == {"removed": 2, "bytes": by_kind["tuning"]["bytes"], "folders": folders, "dry_run": False}
    assert contents(kernels.parent) == foreign

    code, out, _ = run("cache", "clear", "--also", "pytorch")
    assert out.splitlines()[-1].endswith(str(graphs / "aotautograd")) and "would" not in out
    assert [p.parent.name for p in contents(graphs)] == ["atheirs"]
    assert {p for p in foreign if p.is_relative_to(kernels)} == contents(kernels).keys()

    data = json.loads(run("cache", "clear", "--also", "triton", "pytorch", "--json", "-")[1])
    assert data["removed"] == 2 and data["bytes"] == by_kind["kernel"]["bytes"]
    left = sorted(path.name for path in contents(kernels))
    assert left == ["theirs.json", "theirs.json", "theirs.sha256"]
    assert run("cache", "list") == (DONE, "nothing is kept\n", "")
    assert run("cache", "clear", "--also", "everything")[0] == USAGE


def test_a_cache_that_is_not_there_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "nowhere"))
    store = Store(tmp_path / "nowhere")
    assert not any(entries_of(kind, store) for kind in KINDS)
    for module in ("torch._inductor.runtime.cache_dir_utils", "triton"):
        monkeypatch.setitem(sys.modules, module, None)  # neither is installed
    assert not any(entries_of(kind, store) for kind in KINDS)
    assert [folder_of(kind, store) is None for kind in KINDS] == [k.cache != "ours" for k in KINDS]


def test_a_reader_that_has_enough_is_no_failure(kept: tuple[Store, Path]) -> None:
    command = [sys.executable, "-m", "fusion_compiler", "cache", "list"]
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (DONE, "")


# -- help, and the page ------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", "explain", "profile", "cache", "doctor"])
def test_help_has_examples_that_parse_and_exit_codes(run: Run, command: str) -> None:
    code, out, _ = run(*([command] if command else []), "--help")
    assert code == DONE and EXIT_CODES in out
    assert max(map(len, out.splitlines())) <= 112
    shown = commands_in(out)
    assert len(shown) >= 2
    for words in shown:
        assert commands.parser().parse_args(words).command


def commands_in(text: str) -> list[list[str]]:
    """The arguments of each line that is a command."""
    lines = [line.strip() for line in text.splitlines() if line.startswith(("  fusion", "    fusion"))]
    plain = [re.split(r"\s{3,}|\s[|>#]\s", line)[0] for line in lines]
    return [shlex.split(line)[1:] for line in plain]


def test_every_command_of_the_page_parses_and_its_model_runs(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGE.read_text()
    shown = commands_in(page)
    for words in shown:
        assert commands.parser().parse_args(words).command
    assert {words[0] for words in shown} == {"explain", "profile", "passes", "cache", "doctor"}
    options = set(re.findall(r"`(--[a-z]+)", page))
    documented = {o for _, sub in _commands().items() for o in re.findall(r"--[a-z]+", sub)}
    assert options - {"--help"} == documented, "the page has every option"
    for number, meaning in re.findall(r"^  (\d)  (.*)$", EXIT_CODES, re.MULTILINE):
        assert f"| {number} | {meaning} |" in page
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "model.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert run("explain", "model.py:example")[0] == DONE
    for target in {words[1] for words in shown if words[0] == "explain"} - {"model.py:example"}:
        code, out, _ = run("explain", str(ROOT / target))
        assert code == DONE and "iteration space" in out


def _commands() -> dict[str, str]:
    """Usage of each command."""
    choices = next(a.choices for a in commands.parser()._actions if a.choices)
    assert isinstance(choices, dict)
    return {str(name): sub.format_usage() for name, sub in choices.items()}


def test_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == DONE
    assert capsys.readouterr().out == f"fusion-compiler {__version__}\n"


def test_it_runs_as_a_module_without_torch_for_help(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('not here')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "fusion_compiler", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == DONE and "doctor" in done.stdout and not done.stderr
    entry = (ROOT / "pyproject.toml").read_text()
    assert 'fusion-compiler = "fusion_compiler.cli.commands:main"' in entry
