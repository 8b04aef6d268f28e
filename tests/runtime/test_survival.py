"""Failures on the way from the model to the launch on a GPU: damaged and unwritable caches, kill -9, too
large a kernel, no memory.

The GPU is `tests.fake_gpu`'s, and its kernels are compiled for sm_90.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs
from triton.runtime.errors import OutOfResources

import fusion_compiler as fc
from fusion_compiler.compiler import compiler
from fusion_compiler.errors import FusionWarning, KernelError
from fusion_compiler.runtime import launch
from fusion_compiler.runtime.binding import Entry
from fusion_compiler.runtime.builds import Build
from fusion_compiler.support.store import TUNING
from tests import ROOT
from tests.fake_gpu import FakeGpu, use
from tests.test_bad_input import Model

US = (4.0, 3.0, 2.0, 1.0) * 4  # what timing would say of the candidates: the last is the fastest


def softmax(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x * w, -1)


def assert_right(fast: Callable[..., Tensor], device: str = "cpu") -> None:
    """On fresh inputs, within a few roundings to float32 of float64."""
    x, w = torch.randn(6, 200, device=device), torch.randn(200, device=device)
    torch.testing.assert_close(fast(x, w).double(), softmax(x.double(), w.double()), rtol=1e-5, atol=1e-7)


def compiled(fn: Callable[..., Any], **options: Any) -> Any:
    """A compilation of its own, as another process would make it."""
    torch._dynamo.reset()
    return fc.compile(fn, dynamic=False, **options)


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that holds both caches: "tuning" is ours, "kernels" Triton's."""
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "tuning"))
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path / "kernels")
        yield tmp_path


def with_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    use(gpu, monkeypatch)
    monkeypatch.setattr(compiler, "compile_all", launch.compile_all)
    return gpu


# -- caches on disk -----------------------------------------------------------------------------------


def files(folder: Path) -> list[Path]:
    """Also while a compilation removes its temporary folders there, which ends `Path.rglob` with an error."""
    return sorted(Path(parent, name) for parent, _, names in os.walk(folder) for name in names)


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


DAMAGE: tuple[Callable[[bytes], bytes], ...] = (
    lambda content: b"",
    lambda content: content[: len(content) // 2],
    lambda content: bytes(len(content)),
    flipped,
)


def test_damaged_files_are_found_out_and_replaced(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = with_gpu(FakeGpu(us=US, compiles=True), monkeypatch)
    assert_right(compiled(softmax, strict=True))
    chosen = gpu.launched[-1]
    intact = {path: path.read_bytes() for path in files(caches)}
    assert {".json", ".cubin", ".sha256"} <= {path.suffix for path in intact}
    for turn in range(2):
        for i, (path, content) in enumerate(intact.items()):
            path.write_bytes(DAMAGE[(i + turn) % len(DAMAGE)](content))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a stored plan in .* is damaged", FusionWarning)
            assert_right(compiled(softmax, strict=True))
        assert gpu.launched[-1] == chosen
        # What was run is what is kept: the code is that of an undamaged compilation.
        for path, content in intact.items():
            assert path.suffix != ".cubin" or path.read_bytes() == content
    assert gpu.timed == 3, "a damaged record is no record"
    assert_right(compiled(softmax, strict=True))
    assert gpu.timed == 3, "what replaced it is one"


def test_where_nothing_can_be_written_one_warning_for_each_cache(
    caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(FakeGpu(us=US, compiles=True), monkeypatch)
    for name in ("tuning", "kernels"):
        (caches / name).write_text("not a folder")
    with pytest.warns(FusionWarning) as caught:
        fast = compiled(softmax, strict=True)
        assert_right(fast)
    assert sorted("TRITON_CACHE_DIR" in str(w.message) for w in caught) == [False, True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_right(fast)
    assert (caches / "tuning").read_text() == (caches / "kernels").read_text() == "not a folder"


# Children compile into the folder's caches and are killed once so many files are there; then their parent
# does the same undisturbed.
KILLED = """
import os, signal, sys, time
from pathlib import Path
import pytest, torch, torch._dynamo, triton
from tests.runtime import test_survival as here
device, folder = sys.argv[1], Path(sys.argv[2])
if device == "cpu":
    here.with_gpu(here.FakeGpu(us=here.US, compiles=True), pytest.MonkeyPatch())
for wanted in map(int, sys.argv[3:]):
    child = os.fork()
    if not child:
        here.assert_right(here.compiled(here.softmax, strict=True), device)
        signal.pause()
    os.setpgid(child, child)
    try:
        while len(here.files(folder)) < wanted:
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child has ended by itself"
            time.sleep(0.001)
    finally:  # whatever happens here, no child stays behind and holds the pipes
        os.killpg(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    print("killed")
here.assert_right(here.compiled(here.softmax, strict=True), device)
print("right")
"""


def assert_killing_harms_nothing(caches: Path, device: str) -> None:
    places = {"FUSION_CACHE_DIR": str(caches / "tuning"), "TRITON_CACHE_DIR": str(caches / "kernels")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED, device, str(caches), "1", "9"],
        cwd=ROOT,
        env=os.environ | places,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split() == ["killed", "killed", "right"], done.stdout + done.stderr


def test_a_compilation_that_was_killed_harms_no_later_one(caches: Path) -> None:
    assert_killing_harms_nothing(caches, "cpu")


# -- a kernel that the hardware cannot hold -----------------------------------------------------------


@dataclass
class SmallGpu(FakeGpu):
    """Refuses the first `too_large` different kernels that it is to load."""

    too_large: int = 0

    def __post_init__(self) -> None:
        self.asked: list[Build] = []

    def load(self, build: Build) -> Entry:
        if build not in self.asked:
            self.asked.append(build)
        if self.asked.index(build) < self.too_large:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return super().load(build)


def test_a_schedule_that_does_not_fit_is_skipped(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tune in (True, False):
        gpu = with_gpu(SmallGpu(us=US, too_large=1, name=f"{tune}"), monkeypatch)
        assert_right(compiled(softmax, strict=True, tune=tune))
        assert len(gpu.asked) > 1 and gpu.asked[0] not in gpu.loaded


def test_a_cluster_that_does_not_fit_runs_eager_with_one_warning(
    caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(SmallGpu(us=US, too_large=99), monkeypatch)
    fast = compiled(softmax)
    with pytest.warns(FusionWarning, match=r"(?s)softmax.* runs eager: .*shared memory") as caught:
        assert_right(fast)
        assert_right(fast)
    assert len(caught) == 1
    with pytest.raises(KernelError, match="needs 300000 of shared memory, but fake has 232448"):
        assert_right(compiled(softmax, strict=True))


# -- no memory ----------------------------------------------------------------------------------------


@dataclass
class FullGpu(FakeGpu):
    """A GPU with room for `room` more tensors, or for any number if it is None."""

    room: int | None = None

    def empty(self, shape: Any, stride: Any, dtype: torch.dtype, /) -> Tensor:
        if self.room is not None:
            if self.room == 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.room -= 1
        return super().empty(shape, stride, dtype)


def test_no_memory_for_timing_takes_the_first_schedule(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = with_gpu(FakeGpu(us=US, out_of_memory=True), monkeypatch)
    fast = compiled(softmax, strict=True)
    assert_right(fast)
    assert gpu.launched[-1][0] == gpu.loaded[0].name and not files(caches / "tuning" / TUNING.folder)
    gpu.out_of_memory = False
    assert_right(compiled(softmax, strict=True))
    assert gpu.timed == 1 and files(caches / "tuning" / TUNING.folder), "the next process has another try"


def step(called: Any, optimizer: torch.optim.Optimizer, number: int) -> float:
    torch.manual_seed(number)
    optimizer.zero_grad()
    loss = called(torch.randn(16, 8))
    loss.backward()
    optimizer.step()
    return loss.item()


def test_a_step_that_finds_no_memory_can_be_taken_again(
    caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in eager: the error is PyTorch's, no state is lost, and freeing memory is all that it takes.

    The model has every state that a step touches: running statistics, random numbers, an optimizer's moments.
    """
    gpu = with_gpu(FullGpu(us=US), monkeypatch)
    model = Model()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin)]
    fast, other = compiled(model, strict=True, tune=False), fc.compile(twin, strict=True, tune=False)

    def both_step(number: int) -> None:
        assert step(fast, optimizers[0], number) == step(other, optimizers[1], number)

    both_step(0)
    for room in range(100):
        before = copy.deepcopy((optimizers[0].state_dict(), [p.detach() for p in model.parameters()]))
        statistics = copy.deepcopy(dict(model.named_buffers()))
        gpu.room = room
        try:
            step(fast, optimizers[0], room)
            break
        except torch.OutOfMemoryError:
            gpu.room = None
        after = (optimizers[0].state_dict(), [p.detach() for p in model.parameters()])
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        for name, value in model.named_buffers():  # a forward that went through has counted, as in eager
            value.copy_(statistics[name])
        both_step(room)
    assert room > 3, "forward and backward have found no memory"
    gpu.room = None
    step(other, optimizers[1], room)
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b)
