"""doctor: each check where all is well, and what it says where it is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fusion_compiler as fc
from fusion_compiler.cli import doctor
from fusion_compiler.cli.commands import DONE, FAILED, main
from fusion_compiler.cli.doctor import FAIL, OK, WARN, Check
from fusion_compiler.support import store as store_module
from fusion_compiler.support.store import PLAN, TUNING, Store, read_record
from tests import ROOT


def test_this_machine_is_well_and_every_warning_has_a_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "-"]) == DONE
    checks = [Check(**check) for check in json.loads(capsys.readouterr().out)]
    assert [check.name for check in checks] == [name for name, _ in doctor.ALL]
    assert [check for check in checks if check.status == FAIL] == []
    assert all(bool(check.todo) == (check.status != OK) for check in checks)
    smoke = checks[-1]
    assert smoke.status == OK and "right" in smoke.text
    if not torch.cuda.is_available():
        registers = re.search(r"for sm_90 (\d+) registers", smoke.text)
        assert registers is not None and int(registers[1]) > 0


def test_a_failure_is_printed_with_what_to_do_and_the_code_is_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def breaks() -> Check:
        raise RuntimeError("unexpected")

    def absent() -> Check:
        raise ModuleNotFoundError("No module named 'torch'")

    monkeypatch.setattr(doctor, "ALL", (("a", breaks), ("b", absent), ("c", lambda: Check("c", OK, "fine"))))
    assert main(["doctor", "--json", str(tmp_path / "found.json")]) == FAILED
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["fail", "a", "RuntimeError:", "unexpected"] and "what to do" in lines[1]
    assert "No module named 'torch'" in lines[2] and "above" in lines[3]
    assert lines[4].split() == ["ok", "c", "fine"]
    statuses = [check["status"] for check in json.loads((tmp_path / "found.json").read_text())]
    assert statuses == [FAIL, FAIL, OK]


def test_without_torch_it_says_so_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "fusion_compiler", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == FAILED and not done.stderr
    assert re.search(r"^fail  torch +cannot be imported: no torch here$", done.stdout, re.MULTILINE)
    assert "pip install 'torch>=2.11'" in done.stdout
    assert [name for name, _ in doctor.ALL if name not in done.stdout] == []


def test_oldest_versions_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={".".join(map(str, doctor.PYTHON))}"' in text
    assert f'"torch>={".".join(map(str, doctor.TORCH))},' in text
    assert f'"triton>={".".join(map(str, doctor.TRITON))},' in text


@pytest.mark.parametrize(
    ("version", "status"), [("2.10.1", FAIL), ("2.9.0+cu126", FAIL), ("2.11.0", OK), ("3.0.0a1", OK)]
)
def test_versions_of_torch(monkeypatch: pytest.MonkeyPatch, version: str, status: str) -> None:
    built = SimpleNamespace(cuda="12.8", hip=None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=version, version=built))  # type: ignore[arg-type]
    check = doctor.check_torch()
    assert check.status == status and "CUDA 12.8" in check.text


def test_triton_that_does_not_fit_torch_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ['triton==3.6.0; platform_system == "Linux"', "sympy"]
    assert doctor.wanted_triton(asked) == "3.6.0" and doctor.wanted_triton(["sympy"]) == ""
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _: ["triton==2.1.0"])  # pyright: ignore[reportUnknownLambdaType]
    check = doctor.check_triton()
    assert check.status == WARN and "asks for 2.1.0" in check.text
    monkeypatch.setitem(sys.modules, "triton", None)
    check = doctor.check_triton()
    assert check.status == FAIL and "backend='eager'" in check.todo


def test_a_driver_that_cuda_cannot_use_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar\n")
    assert doctor.driver_version(file) == "550.54.15"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n")
    assert doctor.driver_version(file) == "580.95.05"
    assert doctor.driver_version(tmp_path / "none") == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(doctor, "driver_version", lambda _: "")  # pyright: ignore[reportUnknownLambdaType]
    assert (doctor.check_gpu().status, doctor.check_gpu().text[:9]) == (WARN, "no driver")
    monkeypatch.setattr(doctor, "driver_version", lambda _: "470.1")  # pyright: ignore[reportUnknownLambdaType]

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr(torch.cuda, "init", init)
    check = doctor.check_gpu()
    assert check.status == FAIL and "470.1" in check.text and "too old" in check.text
    assert "CUDA 12.8" in check.todo


def test_an_unknown_gpu_is_planned_for_by_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="Some GPU 9000", multi_processor_count=50, major=9, minor=0, max_threads_per_multi_processor=2048
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)  # pyright: ignore[reportUnknownLambdaType]
    check = doctor.check_device()
    assert check.status == WARN and "some gpu 9000" in check.text and "device.py" in check.todo


def test_a_missing_compiler_counts_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for gpu, status in ((False, WARN), (True, FAIL)):
        monkeypatch.setattr(doctor, "_has_gpu", lambda gpu=gpu: gpu)
        check = doctor.check_toolchain()
        assert check.status == status and "no C compiler" in check.text and "apt install" in check.todo


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo 'probe.c:1: fatal error: Python.h: No such file' >&2; exit 1", "Python.h"),
        ("exit 0", "headers in"),
    ],
)
def test_a_compiler_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, text: str) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    check = doctor.check_toolchain()
    assert text in check.text and (check.status == OK) == (script == "exit 0")


def test_caches_are_counted_and_damage_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))
    store = Store()
    store.put(TUNING.key(device="gpu", kernels="1"), {"cluster": "a", "candidate": 0})
    check = doctor.check_cache()
    assert check.status == OK and f"{store.path}: 1 entry" in check.text
    (store.folder(TUNING) / f"{'0' * 64}.json").write_text("damaged")
    check = doctor.check_cache()
    assert check.status == WARN and "2 entries" in check.text and "1 of them damaged" in check.text


def test_damaged_plans_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))
    model = fc.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), backend="interpret")
    with torch.no_grad():
        model(torch.ones(2, 8))
    assert doctor.check_cache().status == OK
    (file,) = Store().files(PLAN)
    record = read_record(file)
    assert record is not None
    record["value"]["values"] = record["value"]["values"][1:]  # a whole record, and no plan
    file.write_text(store_module._seal(record))
    check = doctor.check_cache()
    assert check.status == WARN and "1 of them damaged" in check.text
    file.write_bytes(file.read_bytes()[:100])
    check = doctor.check_cache()
    assert check.status == WARN and "1 of them damaged" in check.text


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "file"))
    check = doctor.check_cache()
    assert check.status == WARN and "cannot be written" in check.text and "FUSION_CACHE_DIR" in check.todo


def test_a_kernel_that_is_wrong_or_does_not_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusion_compiler.errors import KernelError
    from fusion_compiler.runtime import launch

    original = launch.interpret
    monkeypatch.setattr(launch, "interpret", lambda *a: tuple(y + 1e-3 for y in original(*a)))  # pyright: ignore[reportUnknownLambdaType]
    check = doctor.check_smoke()
    assert check.status == FAIL and "differs from eager by 1.0e-03" in check.text

    def broken(*_: Any) -> Any:
        raise KernelError(kernel="k", action="run", detail="no")

    torch._dynamo.reset()
    monkeypatch.setattr(launch, "interpret", broken)
    check = doctor.check_smoke()
    assert check.status == FAIL and "kernel k failed to run: no" in check.text and check.todo


def test_nothing_is_imported_before_it_is_checked() -> None:
    code = "import fusion_compiler.cli.doctor, sys; print('torch' in sys.modules, 'triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["False", "False"], done.stderr
