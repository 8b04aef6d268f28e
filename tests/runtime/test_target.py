"""Compiling without a GPU: targets, resources, Triton's cache when damaged, many kernels at once."""

from __future__ import annotations

import errno
import os
import pickle
import random
import subprocess
import sys
import time
import traceback
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.runtime.cache import FileCacheManager

from fusion_compiler.errors import FusionWarning, KernelError
from fusion_compiler.ir.kernel import Kernel, Role
from fusion_compiler.runtime import builds, cuda
from fusion_compiler.runtime.builds import (
    Build,
    cache_entry,
    compile_build,
    compile_builds,
    forget,
    is_cached,
    load_kernel,
)
from fusion_compiler.runtime.target import _directive, argument_type, build_of, compile_for, parse_target
from tests.hand_made import HEADER, argument, elementwise, row_softmax, ticket_sum, two_kernel_sum

PROGRAMS = (two_kernel_sum(37, 64), ticket_sum(37, 64), row_softmax(100))
KERNELS = {kernel.name: kernel for program in PROGRAMS for kernel in program.kernels}
SM_90 = ("cuda", 90, 32)


@pytest.fixture
def triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "triton"


def spilling() -> Kernel:
    """Holds 16384 numbers in one warp across a reduction: 512 a thread, 256 on AMD."""
    source = HEADER + (
        "def spilling(x_ptr, y_ptr):\n"
        "    i = tl.arange(0, 16384)\n"
        "    x = tl.load(x_ptr + i)\n"
        "    tl.store(y_ptr + i, x / tl.sum(x, axis=0))\n"
    )
    arguments = (
        argument("x_ptr", Role.INPUT, 0, torch.float32),
        argument("y_ptr", Role.OUTPUT, 0, torch.float32),
    )
    return Kernel("spilling", source, arguments, (1,), num_warps=1)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_compiles_for_every_target(name: str, target: str) -> None:
    binary = compile_for(KERNELS[name], target)
    assert 0 < binary.registers <= 64 and binary.spills == 0
    assert set(binary.asm) >= {"ttir", "ttgir", "llir", "amdgcn" if target == "gfx942" else "ptx"}
    assert name in binary.asm["ttir"]


def test_registers_and_spills_are_seen() -> None:
    # 255 is the most that a thread has on NVIDIA; AMD's has 512.
    assert compile_for(spilling(), "sm_90").spills > 0
    on_amd = compile_for(spilling(), "gfx942")
    assert on_amd.registers > 256 and on_amd.spills == 0
    assert _directive("    .vgpr_count:     22\n    .vgpr_spill_count: 7\n", "vgpr_spill_count") == 7


def test_arrays_of_libdevices_sine_are_no_spills() -> None:
    program = elementwise("libdevice.sin(x0)", 1024, (torch.float32,), torch.float32, block=256)
    binary = compile_for(program.kernels[0], "sm_90")
    assert "__local_depot0[" in binary.asm["ptx"] and binary.spills == 0


def test_shared_memory_is_seen() -> None:
    assert compile_for(KERNELS["row_softmax"], "sm_90").shared_bytes > 0
    assert compile_for(KERNELS["finish_sums"], "sm_90").shared_bytes == 0


def test_alignment_reaches_the_load() -> None:
    program = elementwise("x0", 4096, (torch.float32,), torch.float32, block=1024)
    (kernel,) = program.kernels
    unaligned = replace(kernel, arguments=tuple(replace(a, aligned=False) for a in kernel.arguments))
    assert "ld.global.v4" in compile_for(kernel, "sm_90").asm["ptx"]
    assert "ld.global.v4" not in compile_for(unaligned, "sm_90").asm["ptx"]
    late = build_of(kernel, SM_90, loose=frozenset({"p0"}))
    assert late.divisible == (1,) and build_of(unaligned, SM_90).divisible == ()


def test_types_and_targets() -> None:
    assert argument_type(argument("p", Role.INPUT, 0, torch.bool)) == "*i1"
    assert argument_type(argument("p", Role.SCRATCH, 0, torch.bfloat16)) == "*bf16"
    assert argument_type(argument("n", Role.SIZE, 0, torch.int64)) == "i64"
    assert parse_target("sm_100") == ("cuda", 100, 32)
    assert parse_target("gfx942") == ("hip", "gfx942", 64)
    assert parse_target("gfx1100") == ("hip", "gfx1100", 32)
    with pytest.raises(ValueError, match="gfx942"):
        parse_target("cpu")


def test_a_kernel_that_does_not_compile_names_itself() -> None:
    kernel = KERNELS["row_softmax"]
    wrong = replace(kernel, source=kernel.source.replace("tl.exp", "tl.no_such"))
    with pytest.raises(KernelError, match=r"row_softmax failed to compile for sm_90[\s\S]*no_such"):
        compile_for(wrong, "sm_90")


def test_no_default_of_tritons_decides_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    metadata = compile_build(fresh_build(402)).metadata
    assert metadata.enable_fp_fusion and metadata.debug and not metadata.sanitize_overflow


def test_tracebacks_show_the_kernel() -> None:
    source = "def fails():\n    raise RuntimeError('here')  # this line\n"
    try:
        load_kernel(source, "fails")()  # type: ignore[operator]
    except RuntimeError:
        assert "# this line" in traceback.format_exc()
    else:
        raise AssertionError


# -- Triton's cache on disk ---------------------------------------------------------------------------


def fresh_build(columns: int = 100) -> Build:
    return build_of(row_softmax(columns).kernels[0], SM_90)


def test_compiled_once_then_loaded(triton_cache: Path) -> None:
    build = fresh_build()
    assert not is_cached(build)
    first = compile_build(build)
    assert is_cached(build) and cache_entry(build).parent == triton_cache
    written = {file: file.stat().st_mtime_ns for file in cache_entry(build).iterdir()}
    assert compile_build(build).kernel == first.kernel
    assert {file: file.stat().st_mtime_ns for file in cache_entry(build).iterdir()} == written
    forget(build)
    assert not is_cached(build)


@pytest.mark.parametrize("suffix", ["cubin", "json", "ptx", "ttir", "sha256", "source"])
def test_a_damaged_entry_is_compiled_again(triton_cache: Path, suffix: str) -> None:
    build = fresh_build()
    good = compile_build(build)
    files = [file for file in cache_entry(build).iterdir() if file.name.endswith(suffix)]
    rng = random.Random(time.time_ns())
    for file in files:  # the metadata and the list of files both end in .json
        content = file.read_bytes()
        position = rng.randrange(len(content))
        flipped = bytearray(content)
        flipped[position] ^= 1 << rng.randrange(8)
        for damaged in (content[:position], bytes(flipped), b"", b"\xff" * 64, None):
            if damaged is None:
                file.unlink()
            else:
                file.write_bytes(damaged)
            kernel = compile_build(build)
            assert kernel.kernel == good.kernel and kernel.metadata == good.metadata


def test_launchers_are_compiled_with_the_first_kernel_of_each_signature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to Triton 3.6; from then on it has one for all."""
    launchers: list[Any] = []
    driver = SimpleNamespace(make_launcher=None, CudaLauncher=lambda *a: launchers.append(a))
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", driver)
    kernel = SimpleNamespace(src="source", metadata=SimpleNamespace(target=SimpleNamespace(backend="cuda")))
    monkeypatch.setattr(builds, "compile_build", lambda build: kernel)

    class Server:
        def ask(self, asked: list[Any]) -> None:
            self.asked = iter(enumerate(asked))

        def answer(self) -> Any:
            return builds._numbered_attempt(next(self.asked))

    monkeypatch.setattr(builds._server, "running", lambda workers: Server())
    other = replace(fresh_build(303), signature=(*fresh_build(303).signature, ("n", "i32")))
    asked = [fresh_build(301), fresh_build(302), other]
    assert [reason for _, reason in builds._compile_served(asked, 2)] == [None] * 3
    assert launchers == [("source", kernel.metadata)] * 2
    del driver.make_launcher
    assert builds._attempt(asked[0], launched=True) is None and len(launchers) == 2


def test_a_killed_compiler_leaves_a_usable_cache(triton_cache: Path) -> None:
    build = fresh_build(300)
    for delay in (0.3, 0.45, 0.6, 0.8):
        server = subprocess.Popen(
            [sys.executable, "-P", builds.__file__, "2"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert server.stdin is not None
        pickle.dump([(astuple(b), True) for b in (build, fresh_build(301))], server.stdin)
        server.stdin.flush()
        time.sleep(delay)
        os.killpg(server.pid, 9)
        server.communicate()
    assert compile_build(build).metadata.name == "row_softmax"


def test_an_unwritable_cache_moves_with_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(occupied / "triton"))
    with triton.knobs.cache.scope():
        with pytest.warns(FusionWarning, match="TRITON_CACHE_DIR") as caught:
            cuda.make_cache_writable()
        cuda.make_cache_writable()
        assert len(caught) == 1
        compile_build(fresh_build())
        assert not str(triton.knobs.cache.dir).startswith(str(occupied))


def test_a_full_disk_moves_the_cache_too(triton_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may be written to, as far as its permissions tell."""
    put = FileCacheManager.put

    def put_where_there_is_room(self: FileCacheManager, *arguments: object, **named: object) -> str:
        if str(self.cache_dir).startswith(str(triton_cache)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return put(self, *arguments, **named)

    monkeypatch.setattr(FileCacheManager, "put", put_where_there_is_room)
    moved = triton.knobs.cache.scope()
    with moved, pytest.warns(FusionWarning, match="No space left.*TRITON_CACHE_DIR") as caught:
        assert cuda._compiled(fresh_build(400)).metadata.name == "row_softmax"
        cuda._compiled(fresh_build(401))
    assert len(caught) == 1


KEYS = """
import sys
from fusion_compiler.runtime.builds import Build, cache_entry
SOURCE = '''import triton
import triton.language as tl
from fusion_compiler.codegen import math as fm


@triton.jit
def NAME(mail_ptr):
    boxes = mail_ptr + tl.arange(0, 2)
    fm.send_pair(boxes, 1.0, 2.0, boxes != 0)
'''
target, signature = ("cuda", 90, 32), (("mail_ptr", "*i64"),)
builds = [Build(SOURCE.replace("NAME", name), name, signature, (), target) for name in sys.argv[1:]]
print(sorted(cache_entry(build).name for build in builds))
"""


def test_keys_do_not_depend_on_which_kernel_had_the_first() -> None:
    """Else what one process has compiled, another would not find."""
    orders = (("first", "second"), ("second", "first"))
    runs = [[sys.executable, "-c", KEYS, *names] for names in orders]
    keys = {subprocess.run(run, capture_output=True, text=True, check=True).stdout for run in runs}
    assert len(keys) == 1


LEAVING = """
from fusion_compiler.runtime import builds
from fusion_compiler.runtime.background import BackgroundBuilds
from fusion_compiler.runtime.progress import Progress
from tests.runtime.test_target import fresh_build

builds.prepare()
background = BackgroundBuilds([fresh_build(1000 + i) for i in range(1000)], Progress(enabled=False))
assert background.is_needed
print(background._thread.is_alive())
"""


def test_a_process_ends_whatever_is_being_compiled(triton_cache: Path) -> None:
    """It ends within the seconds of a few of the thousand kernels, says nothing and leaves no server."""
    settings = os.environ | {"TRITON_CACHE_DIR": str(triton_cache)}
    run = [sys.executable, "-c", LEAVING]
    left = subprocess.run(run, capture_output=True, text=True, env=settings, timeout=60)
    assert (left.returncode, left.stdout, left.stderr) == (0, "True\n", "")
    compiled = len(list(triton_cache.glob("*/__grp__row_softmax.json")))
    time.sleep(1.0)
    assert len(list(triton_cache.glob("*/__grp__row_softmax.json"))) == compiled < 1000


def test_a_launcher_that_does_not_load_is_removed_and_nothing_else(
    triton_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ImportError names the file of any package."""
    monkeypatch.setattr(cuda, "compile_build", lambda build: SimpleNamespace(run=None))
    monkeypatch.setattr(cuda, "forget", lambda build: None)
    entry = triton_cache / ("A2" * 26)
    others = triton_cache / "package", triton_cache.parent / entry.name
    for folder, gone in ((entry, True), *((other, False) for other in others)):
        folder.mkdir(parents=True)
        (folder / "launcher.so").write_text("")
        cuda._reload(fresh_build(), ImportError("cannot import name", path=str(folder / "launcher.so")))
        assert folder.exists() != gone


def test_an_entry_removed_while_it_is_written(triton_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, compile_kernel, calls = fresh_build(), triton.compile, list[int]()

    def once_removed(**arguments: object) -> object:
        calls.append(1)
        if len(calls) == 1:
            raise FileNotFoundError("removed by another process")
        return compile_kernel(**arguments)

    monkeypatch.setattr(triton, "compile", once_removed)
    assert compile_build(build).metadata.name == "row_softmax" and len(calls) == 2


# -- many at once -------------------------------------------------------------------------------------


def test_many_kernels_are_compiled_in_processes(triton_cache: Path) -> None:
    wrong = replace(fresh_build(7), source=fresh_build(7).source.replace("tl.exp", "tl.no_such"))
    many = [fresh_build(90 + i) for i in range(12)] + [fresh_build(91), wrong]
    reasons = compile_builds(many, workers=2)
    assert set(reasons) == {wrong} and "no_such" in reasons[wrong]
    assert all(is_cached(build) for build in many if build != wrong)
    served = builds._server._process
    assert served is not None
    assert compile_builds([fresh_build(7), fresh_build(8)], workers=2) == {}
    assert builds._server._process is served, "a server that runs is asked again, also for few"
    served.kill()
    served.wait()
    later = [fresh_build(60 + i) for i in range(12)]
    assert compile_builds(later, workers=2) == {} and all(map(is_cached, later))
    builds._server.stop()


def test_a_server_is_started_ahead_and_ends_with_its_input(triton_cache: Path) -> None:
    if builds._cores() < 2:
        pytest.skip("one core")
    builds.prepare()
    server = builds._server._process
    assert server is not None and builds._server.is_ready(builds._cores())
    assert server.stdin is not None
    server.stdin.close()
    assert server.wait(30) == 0
    assert not builds._server.is_ready(builds._cores())
    builds._server.stop()


def test_few_kernels_are_compiled_here(triton_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "_compile_served", None)
    few = [fresh_build(90 + i) for i in range(2)]
    assert compile_builds(few) == {} and all(map(is_cached, few))
    many = [fresh_build(90 + i) for i in range(2) for _ in range(9)]
    assert compile_builds(many, workers=4) == {}


def test_a_server_that_dies_is_made_good(triton_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds.sys, "executable", "/bin/false")
    many = [fresh_build(90 + i) for i in range(12)]
    assert compile_builds(many, workers=2) == {}
    assert all(map(is_cached, many))
