"""The public types, as a type checker and `help()` show them."""

from __future__ import annotations

import json
import os
import pydoc
import re
import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import fusion_compiler as fc
from fusion_compiler import api, options

ROOT = Path(__file__).parent.parent
PYRIGHT = Path(sys.executable).with_name("pyright")
SCREEN = 45  # lines
# Classes that public functions return, and those from which public classes inherit their fields.
RETURNED = (
    "capture.module.CompiledFunction",
    "capture.module.Plans",
    "ir.plan.FusionPlan",
    "ir.plan_data.PlanData",
    "optimizer.clip.Clip",
    "report.profile_data.ProfileData",
    "report.report_data.ReportData",
)
USE = """\
import torch
from torch import Tensor, nn
import fusion_compiler as fc

class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x

def double(x: Tensor, times: int = 2) -> Tensor:
    return x * times

@fc.compile(mode="max-autotune")
def third(x: Tensor) -> Tensor:
    return x / 3

@fc.compile
class Deep(nn.Module):
    depth: int = 1

reveal_type(fc.compile(Net()))  # Net
reveal_type(fc.compile(Net))  # type[Net]
reveal_type(fc.compile(double)(torch.ones(3), times=3))  # Tensor
reveal_type(third(torch.ones(3)))  # Tensor
reveal_type(third.plan)  # Plans
reveal_type(Deep().depth)  # int
reveal_type(fc.explain(Net(), 1))  # Report
fc.compile(Net(), memory=0.5, disable=("fused attention",), patterns=fc.DEFAULT_PATTERNS)
fc.compile(Net(), bakend="interpret")  # error
fc.compile(Net(), backend="inductor")  # error
fc.compile(double)(torch.ones(3), tims=3)  # error
"""


def pyright(*arguments: str, cwd: Path) -> dict[str, Any]:
    if not PYRIGHT.exists():
        pytest.skip("pyright is not installed")
    command = [str(PYRIGHT), "--outputjson", "--pythonpath", sys.executable, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_a_type_checker_knows_what_compile_returns_and_takes(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(USE)
    messages = pyright("use.py", cwd=tmp_path)["generalDiagnostics"]
    lines = USE.splitlines()
    shown: dict[str, str] = {}
    for message in messages:
        revealed = re.findall(r'is "(.+)"$', message["message"])
        line = lines[message["range"]["start"]["line"]].partition("  # ")[0]
        shown[line] = revealed[0] if revealed else message["severity"]
    assert shown == dict(re.findall(r"^(.+)  # (.+)$", USE, re.MULTILINE))


def test_the_typed_arguments_are_the_options() -> None:
    hints = typing.get_type_hints(options.OptionArguments)
    assert hints == typing.get_type_hints(fc.Options)
    assert list(hints) == [field.name for field in fields(fc.Options)]
    assert {name for name in options.MODES if name} == set(typing.get_args(options.Mode))
    parameters = typing.get_type_hints(fc.compile)
    for name, hint in typing.get_type_hints(api.Arguments).items():
        assert name in hints or hint == parameters[name], name


def test_every_public_type_is_known_to_type_checkers(tmp_path: Path) -> None:
    """`py.typed` promises it."""
    report = pyright("--verifytypes", "fusion_compiler", "--ignoreexternal", cwd=tmp_path)
    homes = {f"fusion_compiler.{fc._HOMES[name]}.{name}" for name in fc.__all__}
    homes |= {f"fusion_compiler.{name}" for name in RETURNED}
    symbols = report["typeCompleteness"]["symbols"]
    names = {symbol["name"] for symbol in symbols}
    assert homes <= names, homes - names
    public = re.compile("|".join(f"{re.escape(home)}(\\.[a-z]\\w*)?" for home in homes))
    unknown = [
        (symbol["name"], [message["message"] for message in symbol["diagnostics"]])
        for symbol in symbols
        if public.fullmatch(symbol["name"]) and (not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"])
    ]
    assert not unknown


@pytest.mark.parametrize("name", ["compile", "explain", "profile"])
def test_help_fits_on_a_screen(name: str) -> None:
    text = pydoc.plain(pydoc.render_doc(getattr(fc, name)))
    assert len(text.splitlines()) <= SCREEN
    signature = text.splitlines()[2]
    assert len(signature) < 450 and "ClusterHint(" not in signature
