"""Checks that this machine can compile and run kernels, each with what to do if it fails.

Nothing here needs torch or Triton to be importable: if one is missing, a check fails.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion_compiler.errors import FusionError, FusionWarning, first_line

if TYPE_CHECKING:
    from fusion_compiler.runtime.stored import Entry

OK, WARN, FAIL = "ok", "warn", "fail"
PYTHON, TORCH, TRITON = (3, 11), (2, 11), (3, 6)  # the oldest that are supported, as in pyproject.toml
SMOKE_TARGET = "sm_90"


@dataclass(frozen=True)
class Check:
    """A check has one result. status: "ok", "warn" (works, but not as well as it could) or "fail". todo: the
    next step, "" if ok."""

    name: str
    status: str
    text: str
    todo: str = ""


def checks() -> Iterator[Check]:
    """Yield every check as it is done; a check that raises an exception has failed."""
    for name, check in ALL:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield check()
        except ImportError as error:
            yield Check(name, FAIL, f"not tried: {error}", "see what failed above first")
        except Exception as error:
            yield Check(name, FAIL, f"{type(error).__name__}: {error}", "report it with this text")


def check_python() -> Check:
    text = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    if sys.version_info[:2] < PYTHON:
        return Check("python", FAIL, text, f"use Python {_dotted(PYTHON)} or newer")
    if platform.system() != "Linux":
        return Check("python", WARN, text, "Triton runs on Linux alone: elsewhere use backend='eager'")
    return Check("python", OK, text)


def check_torch() -> Check:
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return Check("torch", FAIL, f"cannot be imported: {error}", f"pip install 'torch>={_dotted(TORCH)}'")
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    built = f"ROCm {torch.version.hip}" if torch.version.hip else built
    text = f"{torch.__version__}, built for {built}"
    if _numbers(torch.__version__) < TORCH:
        return Check("torch", FAIL, text, f"pip install --upgrade 'torch>={_dotted(TORCH)}'")
    return Check("torch", OK, text)


def check_triton() -> Check:
    install = f"pip install 'triton>={_dotted(TRITON)}', or compile(..., backend='eager')"
    try:
        triton = importlib.import_module("triton")
    except (ImportError, OSError) as error:
        return Check("triton", FAIL, f"cannot be imported: {error}", install)
    if _numbers(triton.__version__) < TRITON:
        return Check("triton", FAIL, triton.__version__, install)
    try:
        wanted = wanted_triton(importlib.metadata.requires("torch") or [])
    except importlib.metadata.PackageNotFoundError:  # built from source, without pip
        wanted = ""
    if wanted and not triton.__version__.startswith(wanted):
        todo = f"pip install triton=={wanted} where torch.compile's own backend is used too"
        return Check("triton", WARN, f"{triton.__version__}, where this torch asks for {wanted}", todo)
    return Check("triton", OK, triton.__version__)


def wanted_triton(requirements: list[str]) -> str:
    """Return the version of Triton among torch's requirements, or "" if there is none."""
    matches = [re.match(r"triton==([\d.]+)", requirement.replace(" ", "")) for requirement in requirements]
    return next((match[1] for match in matches if match), "")


def check_gpu() -> Check:
    import torch

    driver = driver_version(Path("/proc/driver/nvidia/version"))
    if torch.cuda.is_available():
        properties: Any = torch.cuda.get_device_properties(0)
        number = torch.cuda.device_count()
        text = f"{number} x {properties.name}, compute capability {properties.major}.{properties.minor}"
        return Check("gpu", OK, text + (f", driver {driver}" if driver else ""))
    interpreted = "kernels run in the interpreter alone"
    if not torch.version.cuda and not torch.version.hip:
        todo = "for a GPU install a torch that is built for it (https://pytorch.org/get-started/locally)"
        return Check("gpu", WARN, f"this torch is built for CPUs: {interpreted}", todo)
    if not driver:
        return Check("gpu", WARN, f"no driver: {interpreted}", "on a machine with a GPU install its driver")
    try:
        torch.cuda.init()
        reason = "it reports no device"
    except Exception as error:
        reason = first_line(error)
    todo = f"see that the driver supports CUDA {torch.version.cuda}, and what CUDA_VISIBLE_DEVICES hides"
    return Check("gpu", FAIL, f"driver {driver} is there, but CUDA does not start: {reason}", todo)


def driver_version(file: Path) -> str:
    """Return the version of NVIDIA's driver from its file, or "" if there is no driver."""
    try:
        match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", file.read_text())
    except OSError:
        return ""
    return match[1] if match else "of unknown version"


def check_device() -> Check:
    import torch

    from fusion_compiler.ir.device import DEFAULT, DEVICES, device_spec

    if not torch.cuda.is_available():
        names = ", ".join(spec.name for spec in DEVICES)
        return Check("device row", OK, f"plans are made for {DEFAULT}; --device takes {names}")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        spec = device_spec("cuda")
    text = f"{spec.name}: {spec.target}, {spec.sms} multiprocessors"
    text += f", copies {spec.copy_bandwidth / 1e12:.2f} TB/s"
    if any(issubclass(warning.category, FusionWarning) for warning in said):
        return Check("device row", WARN, f"{text}, estimated", "add a row to fusion_compiler/ir/device.py")
    return Check("device row", OK, text)


def check_toolchain() -> Check:
    """Check that a C compiler builds Python extensions, as Triton's launcher is one, built at first use."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    todo = f"install a C compiler and Python's headers (apt install gcc python{minor}-dev), or set CC"
    status = FAIL if _has_gpu() else WARN
    if compiler is None:
        return Check("toolchain", status, "no C compiler, which Triton's launcher needs on a GPU", todo)
    include = sysconfig.get_path("include")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.c"
        source.write_text("#include <Python.h>\nint probe(void) { return PY_MAJOR_VERSION; }\n")
        command = [compiler, str(source), "-shared", "-fPIC", f"-I{include}", "-o", f"{folder}/probe.so"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Check("toolchain", status, f"{compiler} cannot be run: {error}", todo)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr.strip()]
        return Check("toolchain", status, f"{compiler} cannot build an extension: {lines[0]}", todo)
    return Check("toolchain", OK, f"{compiler}, headers in {include}")


def check_cache() -> Check:
    from fusion_compiler.runtime.stored import entries_of
    from fusion_compiler.support.store import KINDS, Store

    store = Store()
    entries = [entry for kind in KINDS if kind.cache == "ours" for entry in entries_of(kind, store)]
    return _folder_check("cache", store.path, entries, "FUSION_CACHE_DIR")


def check_kernels() -> Check:
    from fusion_compiler.runtime.stored import entries_of, folder_of
    from fusion_compiler.support.store import KERNEL, Store

    folder = folder_of(KERNEL, Store())
    if folder is None:
        return Check("kernel cache", WARN, "Triton is not installed", "see triton above")
    return _folder_check("kernel cache", folder, entries_of(KERNEL, Store()), "TRITON_CACHE_DIR")


def _folder_check(name: str, folder: Path, entries: list[Entry], variable: str) -> Check:
    """Check that a folder can be written and its entries are undamaged. variable: the environment variable
    that names another folder."""
    number = f"{len(entries)} entr{'y' if len(entries) == 1 else 'ies'}"
    text = f"{folder}: {number}, {sum(entry.bytes for entry in entries) / 1e6:.1f} MB"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp"):
            pass
    except OSError as error:
        reason = error.strerror or error
        text = f"{text}; cannot be written ({reason}): every process starts anew"
        return Check(name, WARN, text, f"set {variable} to a writable directory")
    if damaged := sum(bool(entry.problem) for entry in entries):
        clear = "fusion-compiler cache clear --also triton"
        todo = f"each is made again when it is next needed; {clear} removes all"
        return Check(name, WARN, f"{text}, {damaged} of them damaged", todo)
    return Check(name, OK, text)


def check_smoke() -> Check:
    """Compile a cluster and compare it with eager: on the GPU, else in the interpreter and as far as SASS."""
    import torch

    from fusion_compiler.compiler.compiler import Compiler
    from fusion_compiler.options import Options
    from fusion_compiler.runtime.target import compile_for

    def smoke(x: Any) -> Any:
        return torch.nn.functional.gelu(torch.softmax(x * 2.0, -1))

    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = "auto" if device == "cuda" else "interpret"
    compiler = Compiler(Options.of(backend=backend, strict=True, tune=False, progress=False))
    x = torch.randn(37, 129, device=device)
    with torch.no_grad():
        try:
            got = torch.compile(smoke, backend=compiler.backend(), dynamic=False)(x)
        except Exception as error:
            cause = getattr(error, "inner_exception", error)
            todo = cause.next_step if isinstance(cause, FusionError) else "see the checks above first"
            return Check("smoke kernel", FAIL, f"does not run: {first_line(cause)}", todo)
        error = float((got - smoke(x)).abs().max())
    where = "on the GPU" if device == "cuda" else "in the interpreter"
    if not error <= 1e-5:
        todo = "report it with FUSION_DUMP=dir; verify=True finds the cluster in a model"
        return Check("smoke kernel", FAIL, f"wrong {where}: differs from eager by {error:.1e}", todo)
    text = f"right {where}, within {error:.0e} of eager"
    if device == "cuda":
        return Check("smoke kernel", OK, text)
    (runner,) = compiler.runners.values()
    try:
        binary = compile_for(runner.candidates[0].kernels[0], SMOKE_TARGET)
    except FusionError as failed:
        todo = "reinstall triton: it brings its own ptxas"
        return Check("smoke kernel", WARN, f"{text}; {first_line(failed)}", todo)
    return Check("smoke kernel", OK, f"{text}; for {SMOKE_TARGET} {binary.registers} registers")


ALL: tuple[tuple[str, Callable[[], Check]], ...] = (
    ("python", check_python),
    ("torch", check_torch),
    ("triton", check_triton),
    ("gpu", check_gpu),
    ("device row", check_device),
    ("toolchain", check_toolchain),
    ("cache", check_cache),
    ("kernel cache", check_kernels),
    ("smoke kernel", check_smoke),
)


def _has_gpu() -> bool:
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError):
        return False
    return torch.cuda.is_available()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
