"""The output of each debug level, and the files of a dump."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx
from torch._logging._internal import trace_log

import fusion_compiler as fc
from fusion_compiler.errors import FusionWarning, WarnOnce
from fusion_compiler.ir.plan_text import format_plan
from fusion_compiler.runtime.debug import Debug, DebugSettings
from tests.plans import layered_plan

KERNEL = "def add_tanh_mul(x):\n    pass\n"


def graph() -> fx.GraphModule:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    return fx.symbolic_trace(model)


def run(environment: dict[str, str]) -> str:
    """Everything that a compilation reports; what it printed."""
    stream = io.StringIO()
    debug = Debug(DebugSettings.of(environment), WarnOnce(), stream)
    debug.stage("graph0.forward", "captured", graph())
    debug.stage("graph0.forward", "clusters", "three clusters")
    debug.plan(layered_plan())
    debug.kernel("graph0.forward", "add_tanh_mul", KERNEL)
    return stream.getvalue()


def test_levels_add_up():
    plan, full = format_plan(layered_plan()), format_plan(layered_plan(), 2)
    kernel = f"# kernel add_tanh_mul of graph0.forward\n{KERNEL}\n"
    assert run({}) == run({"FUSION_DEBUG": "0"}) == run({"FUSION_DEBUG": " "}) == ""
    assert run({"FUSION_DEBUG": "1"}) == f"{plan}\n"
    assert run({"FUSION_DEBUG": "2"}) == f"{full}\n"
    assert run({"FUSION_DEBUG": "3"}) == f"{full}\n{kernel}"
    text = run({"FUSION_DEBUG": "4"})
    assert text.endswith(f"{full}\n{kernel}")
    assert "# graph0.forward after captured\n" in text and "torch.relu(x)" in text
    assert "# graph0.forward after clusters\nthree clusters\n" in text


def test_prints_to_stderr(capsys: pytest.CaptureFixture[str]):
    Debug(DebugSettings(1), WarnOnce()).plan(layered_plan())
    out, err = capsys.readouterr()
    assert out == "" and err == f"{layered_plan()}\n"


@pytest.mark.parametrize("value", ["half", "-1", "1.5"])
def test_a_wrong_level_warns_and_is_ignored(value: str):
    with pytest.warns(
        FusionWarning, match=f"FUSION_DEBUG='{value}' is ignored: set it to a level from 0 to 4, or to true"
    ):
        assert run({"FUSION_DEBUG": value}) == ""


def test_words_and_higher_levels_are_taken():
    for words, level in ((("true", "YES", "on"), "1"), (("False", "no", "off"), "0"), (("5", "99"), "4")):
        assert {run({"FUSION_DEBUG": word}) for word in words} == {run({"FUSION_DEBUG": level})}


def test_dump_writes_everything_and_prints_nothing(tmp_path: Path):
    assert run({"FUSION_DUMP": str(tmp_path / "new")}) == ""
    folder = tmp_path / "new" / "graph0.forward"
    files = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    assert files == {
        "plan.txt", "plan.json", "graph-captured.py", "graph-clusters.py", "kernels/add_tanh_mul.py",
    }  # fmt: skip
    plan = layered_plan()
    assert (folder / "plan.txt").read_text() == format_plan(plan, 2) + "\n"
    assert json.loads((folder / "plan.json").read_text()) == plan.json()
    assert (folder / "kernels/add_tanh_mul.py").read_text() == KERNEL
    ast.parse((folder / "graph-captured.py").read_text())


def test_a_dump_has_the_graphs_that_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FUSION_DUMP", str(tmp_path))
    monkeypatch.setattr(trace_log, "handlers", [])  # as TorchDynamo leaves it where no trace is asked for
    fast = fc.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), backend="eager")
    fast(torch.randn(3, 8, requires_grad=True)).sum().backward()
    for name in ("graph0.forward", "graph0.backward"):
        for stage in ("capture", "stitch"):
            assert "return" in (tmp_path / name / f"graph-{stage}.py").read_text()


class Written(torch.nn.Module):
    """Its kernels come from two lines."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.tanh(x) * 2
        return wide @ x.T


def line_of(text: str) -> str:
    return f"test_debug.py:{Path(__file__).read_text().splitlines().index(text) + 1}"


def test_a_dump_holds_the_kernels_and_the_users_lines_on_a_cpu_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FUSION_DUMP", str(tmp_path))
    fast = fc.compile(Written(), backend="eager")
    fast(torch.randn(8, 8))
    folder = tmp_path / "graph0.inference"
    (kernel,) = (folder / "kernels").iterdir()
    assert "@triton.jit" in kernel.read_text()
    line = line_of("        wide = torch.tanh(x) * 2")
    assert f"from {line}" in kernel.read_text()
    assert f"        at {line}\n" in (folder / "plan.txt").read_text()
    assert line in (folder / "graph-capture.py").read_text()
    assert " 512 B in mm" in (folder / "plan.txt").read_text()


def test_each_room_logs_under_its_name(caplog: pytest.LogCaptureFixture):
    fast = fc.compile(Written(), backend="eager")
    with caplog.at_level(logging.DEBUG, logger="fusion_compiler"):
        fast(torch.randn(8, 8))
    texts: dict[str, str] = {}
    for record in caplog.records:
        texts[record.name] = texts.get(record.name, "") + record.getMessage()
    assert "plan graph0.inference for" in texts["fusion_compiler.compiler"]
    assert "aten.tanh" in texts["fusion_compiler.capture"]
    assert "def forward" in texts["fusion_compiler.stitch"]
    assert "@triton.jit" in texts["fusion_compiler.codegen"]
    assert re.search(r"plan [0-9a-f]{12}: (read|not on disk)", texts["fusion_compiler.support"])
    assert {r.levelname for r in caplog.records if r.name == "fusion_compiler.compiler"} == {"INFO"}


SCRIPT = """
import torch, fusion_compiler as fc
fc.compile(lambda x: torch.tanh(x) * 2, backend="eager")(torch.randn(8, 8))
"""


def test_torch_logs_and_torch_trace_show_plans_and_kernels(tmp_path: Path):
    environment = os.environ | {"TORCH_LOGS": "+fusion_compiler", "TORCH_TRACE": str(tmp_path)}
    environment["PYTHONPATH"] = str(Path(fc.__file__).parent.parent)
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "plan graph0.inference for" in done.stderr and "@triton.jit" in done.stderr
    trace = "".join(file.read_text() for file in tmp_path.iterdir() if file.suffix == ".log")
    names = set(re.findall(r'"artifact": {"name": "fusion_compiler_([^"]+)", "encoding": "string"}', trace))
    assert {"graph0.inference_plan.txt", "graph0.inference_graph-capture.py"} <= names
    assert any("_kernels_" in name for name in names) and "plan graph0.inference for" in trace


def test_a_second_compilation_does_not_overwrite_the_first(tmp_path: Path):
    for _ in range(3):
        run({"FUSION_DUMP": str(tmp_path)})
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "graph0.forward",
        "graph0.forward-2",
        "graph0.forward-3",
    ]


def test_names_cannot_leave_the_dump(tmp_path: Path):
    debug = Debug(DebugSettings(dump=tmp_path / "dump"), WarnOnce())
    debug.kernel("../out", "../../k", KERNEL)
    debug.stage("a/b", "x y", "text")
    files = sorted(str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*.py"))
    assert files == ["dump/_out/kernels/_.._k.py", "dump/a_b/graph-x_y.py"]


@pytest.mark.parametrize("below", ["", "sub"])
def test_an_unwritable_dump_warns_once_and_compilation_goes_on(tmp_path: Path, below: str):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.warns(FusionWarning) as caught:
        assert run({"FUSION_DUMP": str(blocked / below), "FUSION_DEBUG": "1"}) == f"{layered_plan()}\n"
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "cannot be written" in text and "Set it to a writable directory" in text
    assert blocked.read_text() == "not a directory"


def test_a_graph_is_not_printed_when_nobody_reads_it(monkeypatch: pytest.MonkeyPatch):
    gm = graph()
    monkeypatch.setattr(type(gm), "print_readable", lambda *a, **k: pytest.fail("printed"))
    Debug(DebugSettings(3), WarnOnce(), io.StringIO()).stage("g", "s", gm)


def test_settings_are_data():
    assert DebugSettings.of({"FUSION_DEBUG": "3", "FUSION_DUMP": "/x"}) == DebugSettings(3, Path("/x"))
    assert DebugSettings.of({}) == DebugSettings()
