"""Choosing, compiling, tuning and launching, against a GPU that computes in the interpreter.

See `tests.fake_gpu`: what is launched is checked by what it computes.
"""

from __future__ import annotations

import itertools
import sys
import threading
import timeit
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import triton

from fusion_compiler import api
from fusion_compiler.compiler import runners
from fusion_compiler.errors import FusionWarning, HardwareExceededError, KernelError, MissingTritonError
from fusion_compiler.ir.kernel import Program, Role
from fusion_compiler.runtime import background, cuda, launch
from fusion_compiler.runtime.binding import (
    KEPT_BYTES,
    Entry,
    Variant,
    Varying,
    ZeroedScratch,
    bind,
    dim_source,
    direct_call,
    evaluate,
)
from fusion_compiler.runtime.builds import Build, compile_build
from fusion_compiler.runtime.launch import MOST_VARIANTS, Runner, compile_all, find_gpu, interpret, tuning_key
from fusion_compiler.runtime.progress import Progress
from fusion_compiler.runtime.stages import Stages
from fusion_compiler.runtime.target import build_of
from fusion_compiler.support.store import TUNING, Store
from tests.fake_gpu import FakeGpu, IdleGpu, use
from tests.hand_made import argument, contiguous, elementwise, row_softmax, ticket_sum, two_kernel_sum


def no_fallback(*_: object) -> tuple[torch.Tensor, ...]:
    raise AssertionError("the fallback was called")


def runner(gpu: FakeGpu, *candidates: Program, **options: Any) -> Runner:
    options = {"fallback": no_fallback, "name": "cluster", "strict": True} | options
    return Runner(tuple(candidates), gpus=lambda device: gpu, **options)


def add_bf16(n: int = 1000, block: int = 128) -> Program:
    return elementwise("x0 + x1", n, (torch.bfloat16, torch.bfloat16), torch.bfloat16, block)


def vectors(n: int, count: int = 2, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(n, dtype=torch.float64).to(dtype) for _ in range(count)]


def assert_softmax(y: torch.Tensor, x: torch.Tensor) -> None:
    """Within one rounding to bfloat16 of the float64 result."""
    torch.testing.assert_close(y.double(), torch.softmax(x.double(), -1), rtol=2**-8, atol=0)


# -- launching ------------------------------------------------------------------------------------


def test_elementwise() -> None:
    gpu = FakeGpu(compiles=True)
    run = runner(gpu, add_bf16())
    for _ in range(2):
        a, b = vectors(1000)
        (y,) = run(a, b)
        assert torch.equal(y, a + b)
    assert gpu.launched == [("elementwise", (8, 1, 1), 7)] * 2
    assert len(gpu.loaded) == 1


def test_sizes_are_arguments() -> None:
    gpu = FakeGpu(compiles=True)
    run = runner(gpu, row_softmax(100))
    for rows in (1, 5, 16):
        x = torch.randn(rows, 100).bfloat16()
        (y,) = run(x, rows)
        assert y.shape == (rows, 100) and y.stride() == (100, 1)
        assert_softmax(y, x)
    assert len(gpu.loaded) == 1
    assert dict(gpu.loaded[0].signature)["rows"] == "i32"


@pytest.mark.parametrize(
    "program", [two_kernel_sum(37, 64), ticket_sum(37, 64)], ids=["two kernels", "ticket"]
)
def test_column_sums(program: Program) -> None:
    gpu = FakeGpu(compiles=True)
    run = runner(gpu, program)
    for _ in range(3):
        x = torch.randn(37, 64)
        (y,) = run(x)
        torch.testing.assert_close(y.double(), x.double().sum(0), rtol=0, atol=1e-5)
    assert [name for name, _, _ in gpu.launched] == [k.name for k in program.kernels] * 3


def test_unaligned_inputs_take_another_build() -> None:
    gpu = FakeGpu()
    run = runner(gpu, add_bf16(100))
    a, b = vectors(108)
    for offset in (0, 1, 3, 8, 1):
        x, y = a[offset : offset + 100], b[8 - offset : 108 - offset]
        assert torch.equal(run(x, y)[0], x + y)
    # The output is allocated by the launcher, so it stays aligned in both.
    assert [build.divisible for build in gpu.loaded] == [(0, 1, 2), (2,)]


def test_one_unaligned_input_leaves_the_others_aligned() -> None:
    gpu = FakeGpu()
    run = runner(gpu, add_bf16(100))
    a, b = vectors(101)
    for x, y in ((a[1:], b[:100]), (a[:100], b[1:]), (a[1:], b[1:]), (a[:100], b[:100]), (a[1:], b[:100])):
        assert torch.equal(run(x, y)[0], x + y)
    assert [build.divisible for build in gpu.loaded] == [(0, 1, 2), (1, 2), (0, 2), (2,)]


def test_many_ways_of_not_being_aligned_share_a_build() -> None:
    program = elementwise("x0 + x1 + x2", 96, (torch.bfloat16,) * 3, torch.bfloat16, block=128)
    gpu = FakeGpu()
    run = runner(gpu, program)
    inputs = [torch.randn(97).bfloat16() for _ in range(3)]
    for shifts in itertools.product((0, 1), repeat=3):
        views = [x[s : 96 + s] for x, s in zip(inputs, shifts, strict=True)]
        torch.testing.assert_close(run(*views)[0], sum(views), rtol=0.02, atol=0.02)
    assert len(gpu.loaded) == MOST_VARIANTS + 1 and gpu.loaded[-1].divisible == (3,)


def test_only_claimed_alignment_is_checked() -> None:
    program = add_bf16(100)
    (kernel,) = program.kernels
    arguments = tuple(replace(a, aligned=a.role is Role.OUTPUT) for a in kernel.arguments)
    gpu = FakeGpu()
    run = runner(gpu, replace(program, kernels=(replace(kernel, arguments=arguments),)))
    a, b = vectors(101)
    assert torch.equal(run(a[1:], b[1:])[0], a[1:] + b[1:])
    assert [build.divisible for build in gpu.loaded] == [(2,)]


def test_a_size_may_claim_divisibility_too() -> None:
    program = row_softmax(100)
    (kernel,) = program.kernels
    arguments = tuple(replace(a, aligned=True) for a in kernel.arguments)
    gpu = FakeGpu()
    run = runner(gpu, replace(program, kernels=(replace(kernel, arguments=arguments),)))
    for rows in (16, 5):
        x = torch.randn(rows, 100).bfloat16()
        assert_softmax(run(x, rows)[0], x)
    assert [build.divisible for build in gpu.loaded] == [(0, 1, 2), (0, 1)]


def test_sizes_beyond_int32_take_a_wide_build() -> None:
    n = sympy.Symbol("s7", integer=True, positive=True)
    source = row_softmax(4).kernels[0].source.split("def ")[0] + (
        "def low_bits(y_ptr, n):\n    tl.store(y_ptr, n.to(tl.int64) % 1000)\n"
    )
    arguments = (
        argument("y_ptr", Role.OUTPUT, 0, torch.int64),
        argument("n", Role.SIZE, 0, torch.int32, aligned=False),
    )
    kernel = replace(
        row_softmax(4).kernels[0], name="low_bits", source=source, arguments=arguments, grid=(1,)
    )
    gpu = FakeGpu(compiles=True)
    run = runner(gpu, Program((kernel,), (), (contiguous("y", (1,), torch.int64),), sizes=(n,)))
    for value in (2**31 - 1, 2**31, 2**40 + 77, 12):
        assert run(value)[0].item() == value % 1000
    assert [dict(build.signature)["n"] for build in gpu.loaded] == ["i32", "i64"]


def test_empty_grids_launch_nothing_and_allocate() -> None:
    gpu = FakeGpu()
    assert runner(gpu, add_bf16(0))(*vectors(0))[0].shape == (0,)
    (y,) = runner(gpu, row_softmax(8))(torch.empty(0, 8).bfloat16(), 0)
    assert y.shape == (0, 8) and y.dtype == torch.bfloat16
    assert gpu.launched == []


def test_outputs_have_the_strides_that_the_program_says() -> None:
    program = elementwise("x0", 12, (torch.float32,), torch.float32)
    transposed = replace(program, outputs=(replace(program.outputs[0], shape=(3, 4), stride=(1, 3)),))
    x = torch.randn(12)
    (y,) = runner(FakeGpu(), transposed)(x)
    assert y.stride() == (1, 3) and torch.equal(y, x.view(4, 3).T)


def test_a_grid_beyond_the_hardware_runs_the_fallback() -> None:
    program = row_softmax(8)
    (kernel,) = program.kernels
    rows = program.sizes[0]
    tall = replace(program, kernels=(replace(kernel, grid=(1, rows)),))
    x = torch.randn(3, 8).bfloat16()
    called: list[int] = []

    def fallback(x: torch.Tensor, rows: int) -> tuple[torch.Tensor, ...]:
        called.append(rows)
        return (x,)

    gpu = FakeGpu()
    run = runner(gpu, tall, fallback=fallback, strict=False)
    with pytest.warns(FusionWarning, match="65536"):
        run(x, 65536)
    assert called == [65536] and gpu.launched == []
    with pytest.raises(KernelError, match="65536"):
        runner(gpu, tall)(x, 65536)


# -- sizes ----------------------------------------------------------------------------------------


def test_size_expressions_are_exact() -> None:
    from torch.utils._sympy.functions import CeilDiv, FloorDiv, Mod

    a, b = sympy.symbols("s3 n1", integer=True, positive=True)  # n1 is also a name of the text
    values = [*range(1, 120), 2**53 + 1, 3 * 2**60 + 5]
    expressions: dict[Any, Callable[[int, int], int]] = {
        sympy.ceiling(a / 49): lambda x, y: -(-x // 49),
        sympy.floor(a / 49): lambda x, y: x // 49,
        sympy.ceiling(a / b): lambda x, y: -(-x // y),
        FloorDiv(a + b, 7): lambda x, y: (x + y) // 7,
        CeilDiv(a, 128): lambda x, y: -(-x // 128),
        Mod(a, 8) + 1: lambda x, y: x % 8 + 1,
        a * (a - 1) / 2: lambda x, y: x * (x - 1) // 2,
        sympy.Max(a, b) * 3 - 1: lambda x, y: max(x, y) * 3 - 1,
        sympy.Min(a, 100): lambda x, y: min(x, 100),
        a**2 * b: lambda x, y: x * x * y,
    }
    program = Program((), (), (), sizes=(a, b))
    for expression, expected in expressions.items():
        for x in values:
            (got,) = evaluate((expression,), program, (x, 49))
            assert got == expected(x, 49) and isinstance(got, int), (expression, x)
    with pytest.raises(ValueError, match="not sizes"):
        dim_source(a + sympy.Symbol("z"), (a,))


@pytest.mark.parametrize("backend", ["triton", "interpret"])
def test_sizes_that_the_launcher_derives(backend: Any) -> None:
    from torch.utils._sympy.functions import IntTrueDiv, TruncToInt

    program = row_softmax(8)
    (kernel,), (rows,) = program.kernels, program.sizes
    half = sympy.Symbol("half", integer=True, nonnegative=True)
    arguments = tuple(replace(a, position=1) if a.role is Role.SIZE else a for a in kernel.arguments)
    program = replace(
        program,
        kernels=(replace(kernel, arguments=arguments, grid=(half,)),),
        outputs=(replace(program.outputs[0], shape=(half, 8)),),
        derived=((half, TruncToInt(IntTrueDiv(rows, 2))),),
    )
    x = torch.randn(7, 8).bfloat16()
    gpu = FakeGpu()
    run = Runner((program,), lambda *_: (), name="half", strict=True, backend=backend, gpus=lambda _: gpu)
    (y,) = run(x, 7)
    torch.testing.assert_close(y, torch.softmax(x[:3].float(), -1).bfloat16())
    assert [grid for _, grid, _ in gpu.launched] == ([(3, 1, 1)] if backend == "triton" else [])


# -- scratch ----------------------------------------------------------------------------------------


def test_zeroed_scratch_is_kept_for_stream_and_thread() -> None:
    gpu = FakeGpu()
    scratch = ZeroedScratch(gpu, (contiguous("t", (1,), torch.int32, zeroed=True),))
    (first,) = scratch(1, (4,))
    assert first.tolist() == [0, 0, 0, 0]
    assert scratch(1, (4,))[0] is first and scratch(1, (2,))[0] is first
    assert scratch(2, (4,))[0] is not first
    (grown,) = scratch(1, (8,))
    assert grown.numel() == 8 and scratch(1, (4,))[0] is grown
    other: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: other.extend(scratch(1, (8,))))
    thread.start()
    thread.join()
    assert other[0] is not grown
    large = KEPT_BYTES // 4 + 1
    for _ in range(2):
        (mailboxes,) = scratch(1, (large,))
        assert mailboxes.count_nonzero() == 0
        mailboxes.fill_(1)
    assert scratch(1, (4,))[0] is grown, "the large ones are given back"
    gpu.capturing = True
    assert scratch(1, (8,))[0] is not grown and scratch(1, (8,))[0].tolist() == [0] * 8


def test_the_interpreter_notices_scratch_that_is_left_dirty() -> None:
    program = ticket_sum(37, 64)
    (kernel,) = program.kernels
    dirty = replace(kernel, source=kernel.source.replace("tl.store(ticket_ptr, 0)", "pass"))
    with pytest.raises(KernelError, match="ticket is not zero"):
        interpret(replace(program, kernels=(dirty,)), [torch.randn(37, 64)])


# -- tuning -----------------------------------------------------------------------------------------


def blocks() -> tuple[Program, ...]:
    return tuple(add_bf16(block=block) for block in (128, 256, 512))


def launched_grid(gpu: FakeGpu) -> int:
    return gpu.launched[-1][1][0]


def test_the_fastest_is_taken_and_remembered(tmp_path: Path) -> None:
    a, b = vectors(1000)
    gpu = FakeGpu(us=(9.0, 8.0, 5.0), compiles=True)
    run = runner(gpu, *blocks(), store=Store(tmp_path))
    assert torch.equal(run(a, b)[0], a + b)
    assert gpu.timed == 1 and launched_grid(gpu) == 2
    again = FakeGpu(us=(1.0, 2.0, 3.0))
    assert torch.equal(runner(again, *blocks(), store=Store(tmp_path))(a, b)[0], a + b)
    assert again.timed == 0 and launched_grid(again) == 2 and len(again.loaded) == 1
    other = FakeGpu(us=(1.0, 2.0, 3.0), name="another GPU")
    runner(other, *blocks(), store=Store(tmp_path))(a, b)
    assert other.timed == 1 and launched_grid(other) == 8


def test_timing_noise_does_not_beat_the_prediction() -> None:
    gpu = FakeGpu(us=(5.04, 5.0, 6.0))
    runner(gpu, *blocks())(*vectors(1000))
    assert launched_grid(gpu) == 8


@pytest.mark.parametrize("record", [{"candidate": 17}, {"candidate": "0"}, [], "x", {"candidate": -1}, {}])
def test_a_foreign_record_is_ignored(tmp_path: Path, record: Any) -> None:
    store = Store(tmp_path)
    store.put(tuning_key(blocks(), "fake"), record)
    gpu = FakeGpu(us=(9.0, 5.0, 8.0))
    runner(gpu, *blocks(), store=store)(*vectors(1000))
    assert gpu.timed == 1 and launched_grid(gpu) == 4


def test_capture_and_no_tuning_take_the_first() -> None:
    for options, gpu in (({}, FakeGpu(capturing=True)), ({"tune": False}, FakeGpu())):
        runner(gpu, *blocks(), **options)(*vectors(1000))
        assert gpu.timed == 0 and launched_grid(gpu) == 8 and len(gpu.loaded) == 1


def test_out_of_memory_while_timing_takes_the_first(tmp_path: Path) -> None:
    store, gpu = Store(tmp_path), FakeGpu(out_of_memory=True)
    a, b = vectors(1000)
    assert torch.equal(runner(gpu, *blocks(), store=store)(a, b)[0], a + b)
    assert launched_grid(gpu) == 8 and not store.files(TUNING)


def test_a_candidate_that_cannot_be_launched_is_dropped() -> None:
    slow, fast = row_softmax(100, warps=8), row_softmax(100, warps=4)
    x = torch.randn(3, 100).bfloat16()
    for order in itertools.permutations((slow, fast)):
        gpu = FakeGpu(refused=("8",))
        assert_softmax(runner(gpu, *order)(x, 3)[0], x)
        assert {build.num_warps for build in gpu.loaded} == {4}
    untuned = FakeGpu(refused=("8",))
    runner(untuned, slow, fast, tune=False)(x, 3)
    assert [build.num_warps for build in untuned.loaded] == [4]


# -- failing ----------------------------------------------------------------------------------------


def broken() -> Program:
    program = add_bf16()
    (kernel,) = program.kernels
    return replace(
        program, kernels=(replace(kernel, source=kernel.source.replace("x0 + x1", "tl.no_such(x0)")),)
    )


def test_when_all_fail_one_warning_and_the_fallback() -> None:
    a, b = vectors(1000)
    gpu = FakeGpu(compiles=True)
    run = runner(gpu, broken(), fallback=lambda a, b: (a + b,), strict=False, name="residual_3")
    with pytest.warns(FusionWarning) as caught:
        assert torch.equal(run(a, b)[0], a + b)
    (warning,) = caught
    text = str(warning.message)
    assert "residual_3" in text and "no_such" in text and "what to do" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(run(a, b)[0], a + b)
    for candidates in ((broken(),), (broken(), replace(broken(), schedule="rows: 1"))):
        with pytest.raises(KernelError, match="no_such"):
            runner(gpu, *candidates)(a, b)


def test_when_all_exceed_the_hardware_each_says_by_how_much() -> None:
    gpu = FakeGpu(refused=("row_softmax",))
    x = torch.randn(3, 100).bfloat16()
    with pytest.raises(HardwareExceededError, match="300000 of shared memory, but fake has 232448"):
        runner(gpu, row_softmax(100))(x, 3)
    with pytest.raises(KernelError, match=r"8 warps: .*300000[\s\S]*4 warps: .*300000"):
        runner(gpu, row_softmax(100, warps=8), row_softmax(100))(x, 3)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingTritonError, match="pip install"):
        find_gpu(None)


def test_a_late_variant_that_fails_runs_the_fallback() -> None:
    gpu = FakeGpu()
    run = runner(gpu, add_bf16(100), fallback=lambda a, b: (a + b,), strict=False)
    a, b = vectors(101)
    run(a[:100], b[:100])
    gpu.refused = ("elementwise",)
    with pytest.warns(FusionWarning, match="shared memory"):
        assert torch.equal(run(a[1:], b[1:])[0], a[1:] + b[1:])


def test_inputs_that_are_not_on_a_gpu() -> None:
    a, b = vectors(1000)
    run = Runner((add_bf16(),), lambda a, b: (a + b,), name="cluster")
    with pytest.warns(FusionWarning, match="on cpu"):
        assert torch.equal(run(a, b)[0], a + b)
    with pytest.raises(KernelError, match="meta"):
        runner(FakeGpu(), add_bf16())(a, b.to("meta"))
    with pytest.raises(ValueError, match="no program"):
        Runner((), no_fallback, name="cluster")


def test_errors_of_the_driver_are_not_hidden() -> None:
    gpu = FakeGpu()
    run = runner(gpu, add_bf16(), fallback=no_fallback, strict=False)
    a, b = vectors(1000)
    run(a, b)
    gpu.launched = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        run(a, b)


# -- other backends -----------------------------------------------------------------------------------


def test_eager_and_interpret_backends() -> None:
    a, b = vectors(1000)
    marker = (torch.zeros(1),)
    assert Runner((), lambda *_: marker, name="c", backend="eager")(a, b) is marker
    for schedule in range(3):
        run = Runner(blocks(), no_fallback, name="c", backend="interpret", strict=True, schedule=schedule)
        assert torch.equal(run(a, b)[0], a + b)
    wrong = Runner((broken(),), no_fallback, name="c", backend="interpret", strict=True)
    with pytest.raises(KernelError, match="no_such"):
        wrong(a, b)
    meta = Runner((add_bf16(),), lambda *_: marker, name="c", backend="interpret")
    with pytest.warns(FusionWarning, match="meta"):
        assert meta(a.to("meta"), b) is marker


# -- ahead of time ----------------------------------------------------------------------------------


def test_compile_all_compiles_each_kernel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[Build]] = []

    def compile_builds(builds: Iterator[Build], **_: object) -> dict[Build, str]:
        asked.append(list(builds))
        return {}

    monkeypatch.setattr(background, "compile_builds", compile_builds)
    monkeypatch.setattr(background, "is_cached", lambda build: False)  # pyright: ignore[reportUnknownLambdaType]
    gpu, store = FakeGpu(us=(9.0, 8.0, 5.0)), Store(tmp_path)
    softmax = runner(gpu, row_softmax(100), store=store)
    tuned = runner(gpu, *blocks(), store=store)
    untuned = runner(gpu, *blocks(), tune=False)
    eager = Runner((), no_fallback, name="c", backend="eager")
    compile_all([softmax, tuned, untuned, eager])
    assert softmax.background is tuned.background is untuned.background is not None
    assert eager.background is None
    softmax.background.wait()
    assert [build.name for build in asked[-1]] == ["row_softmax"] + ["elementwise"] * 3
    store.put(tuning_key(blocks(), "fake"), {"candidate": 2})
    compile_all([tuned])
    assert len(asked) == 1, "another graph that has the cluster too asks for nothing"
    later = runner(gpu, *blocks(), store=store)
    compile_all([later])
    assert later.background is not None
    later.background.wait()
    assert len(asked[-1]) == 1 and asked[-1][0].source == blocks()[2].kernels[0].source


def test_a_call_waits_for_kernels_that_are_being_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others' work goes on meanwhile, and the seconds of waiting are told apart from those of loading."""
    begun, finish, called = threading.Event(), threading.Event(), list[str]()

    def compile_builds(builds: Iterator[Build], report: Callable[[int, int], None]) -> dict[Build, str]:
        begun.set()
        report(0, 2)
        assert finish.wait(30)
        report(1, 2)
        called.append("compiled")
        raise RuntimeError("what is wrong shows when a kernel is loaded")

    monkeypatch.setattr(background, "compile_builds", compile_builds)
    monkeypatch.setattr(background, "is_cached", lambda build: False)  # pyright: ignore[reportUnknownLambdaType]
    stages, gpu = Stages(), FakeGpu()
    run = Runner((add_bf16(),), no_fallback, name="c", gpus=lambda _: gpu, stages=stages)
    progressed: list[tuple[int, int]] = []
    progress = Progress(enabled=False)
    monkeypatch.setattr(progress, "kernels", lambda *n: progressed.append(n))  # pyright: ignore[reportUnknownLambdaType]
    compile_all([run], progress=progress)
    assert begun.wait(30) and not called and not progressed
    threading.Timer(0.2, finish.set).start()
    a, b = torch.randn(8, dtype=torch.bfloat16), torch.randn(8, dtype=torch.bfloat16)
    run(a, b)
    assert called == ["compiled"] and gpu.loaded and progressed == [(1, 2)]
    assert stages.seconds["kernels"] >= 0.1 > stages.seconds["load and tune"]


def test_devices_without_an_index_are_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "gpu_of", lambda index: FakeGpu(index=index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert find_gpu(torch.device("cuda", 2)).index == 2
    assert find_gpu(torch.device("cuda")).index == 3 and find_gpu(None).index == 3
    with pytest.raises(ValueError, match="cpu"):
        find_gpu(torch.device("cpu"))


def test_compile_all_leaves_a_missing_gpu_to_the_runners() -> None:
    run = Runner((add_bf16(),), no_fallback, name="c")
    compile_all([run], torch.device("cpu"))
    assert run.background is None


def test_what_takes_little_of_a_graph_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its kernels are fewer to compile; tune="all" times it all the same."""
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(runners, "LITTLE", 0.3)
    for tune, timed in ((True, ["softmax"]), ("all", ["cumsum", "softmax"])):
        use(gpu := IdleGpu(), monkeypatch)
        gpu.us = (1.0,) * 1000
        compiler = api.Compiler(api.Options.of(tune=tune, device="h200"))
        compiled = torch.compile(lambda x, y: (x.softmax(-1), y.cumsum(0)), backend=compiler.backend())
        compiled(torch.randn(4096, 1024), torch.randn(64))
        assert len(compiler.runners) == 2
        names = [runner.name.partition("_")[0] for runner in compiler.runners.values() if runner.tune]
        assert sorted(names) == timed
        assert gpu.timed == len(timed)


# -- speed ------------------------------------------------------------------------------------------


def test_a_launch_costs_the_host_little() -> None:
    """A call, less what allocating and taking addresses cost, which no launcher can avoid."""
    gpu = FakeGpu()
    gpu.empty = lambda shape, stride, dtype: y  # type: ignore[method-assign]
    y = torch.empty(1000, dtype=torch.bfloat16)
    entry = Entry(lambda *_: None, None, None)

    def never(*_: Any) -> Any:
        raise AssertionError

    function = bind(add_bf16(), Variant(), [entry], gpu, never, never, never)
    a, b = vectors(1000)

    def unavoidable() -> tuple[torch.Tensor]:
        gpu.current_stream(-1)
        a.data_ptr()
        b.data_ptr()
        y.data_ptr()
        return (y,)

    count = 20000
    ours = min(timeit.repeat(lambda: function(a, b), number=count, repeat=5)) / count * 1e6
    least = min(timeit.repeat(unavoidable, number=count, repeat=5)) / count * 1e6
    assert ours - least < 2.0


def test_calls_of_other_devices_go_elsewhere_unless_there_are_none() -> None:
    a, b = vectors(1000)
    for alone, device, taken in ((False, -1, False), (False, 5, True), (True, 5, False)):
        gpu = FakeGpu(alone=alone)
        gpu.current_device = lambda: device  # type: ignore[method-assign]  # noqa: B023
        function = bind(
            add_bf16(), Variant(), [gpu.load(build_of(add_bf16().kernels[0], gpu.target))], gpu,
            no_fallback, lambda *_: (), no_fallback,
        )  # fmt: skip
        assert (function(a, b) == ()) is taken and bool(gpu.launched) is not taken


def test_programs_without_inputs_run_where_their_results_belong() -> None:
    gpus = [FakeGpu(index=i) for i in range(2)]
    asked: list[torch.device | None] = []

    def find(device: torch.device | None) -> FakeGpu:
        asked.append(device)
        return gpus[device.index if device is not None else 0]

    home = torch.device("cuda", 1)
    run = Runner((elementwise("i", 9, (), torch.int32),), no_fallback, name="c", gpus=find, home=home)
    assert torch.equal(run()[0], torch.arange(9, dtype=torch.int32)) and asked == [home]
    assert gpus[1].launched and not gpus[0].launched


# -- on a device --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "program", [two_kernel_sum(37, 64), ticket_sum(37, 64)], ids=["two kernels", "ticket"]
)
def test_programs_run_on_the_device(program: Program) -> None:
    run = Runner((program,), no_fallback, name="c", strict=True)
    for _ in range(20):
        x = torch.randn(37, 64, device="cuda")
        torch.testing.assert_close(run(x)[0].double(), x.double().sum(0), rtol=0, atol=1e-4)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x = torch.randn(37, 64, device="cuda")
        (y,) = run(x)
    stream.synchronize()
    torch.testing.assert_close(y.double(), x.double().sum(0), rtol=0, atol=1e-4)


@pytest.mark.gpu
def test_tuning_and_alignment_on_the_device(tmp_path: Path) -> None:
    store = Store(tmp_path)
    candidates = tuple(add_bf16(1_000_000, block) for block in (128, 1024, 4096))
    a, b = (torch.randn(1_000_008, device="cuda").bfloat16() for _ in range(2))
    for _ in range(2):  # the second finds the first one's record
        run = Runner(candidates, no_fallback, name="c", strict=True, store=store)
        for offset in (0, 1, 8):
            x, y = a[offset : offset + 1_000_000], b[:1_000_000]
            assert torch.equal(run(x, y)[0], x + y)
    record = store.get(tuning_key(candidates, torch.cuda.get_device_name()))
    assert record["candidate"] in range(3) and all(us > 0 for us in record["us"])


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [False, True])
def test_a_cuda_graph_captures_launches(warm: bool) -> None:
    run = Runner((ticket_sum(37, 64),), no_fallback, name="c", strict=True)
    x = torch.randn(37, 64, device="cuda")
    run(x) if warm else Runner((ticket_sum(37, 64),), no_fallback, name="c", strict=True)(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (y,) = run(x)
    for _ in range(3):
        x.copy_(torch.randn(37, 64))
        graph.replay()
        torch.testing.assert_close(y.double(), x.double().sum(0), rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("damage", [lambda content: content[:100], lambda content: b"\0" * len(content)])
def test_a_damaged_entry_is_replaced_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cuda.gpu_of.cache_clear()  # it has what it loaded for other tests
    a, b = (torch.randn(1000, device="cuda").bfloat16() for _ in range(2))
    Runner((add_bf16(),), no_fallback, name="c", strict=True)(a, b)
    (cubin,) = tmp_path.rglob("elementwise.cubin")
    for seal in tmp_path.rglob("*.sha256"):
        seal.unlink()  # as if the process had been killed before it wrote one
    cubin.write_bytes(damage(cubin.read_bytes()))
    cuda.gpu_of.cache_clear()
    run = Runner((add_bf16(),), no_fallback, name="c", strict=True)
    assert torch.equal(run(a, b)[0], a + b)


@pytest.mark.gpu
def test_a_launch_costs_the_host_less_than_two_aten_adds() -> None:
    run = Runner((add_bf16(),), no_fallback, name="c", strict=True)
    a, b = (torch.randn(1000, device="cuda").bfloat16() for _ in range(2))

    def microseconds(call: Callable[[], object]) -> float:
        best = []
        for _ in range(5):
            torch.cuda.synchronize()
            best.append(timeit.timeit(call, number=500) / 500 * 1e6)
        return min(best)

    run(a, b)
    assert microseconds(lambda: run(a, b)) < 2 * microseconds(lambda: a + b)


# -- programs that wait for each other ----------------------------------------------------------------


class HoldingGpu(FakeGpu):
    """Holds so many programs of a kernel at a time; `ways` says how each was launched that waits."""

    def __init__(self, resident: int | None) -> None:
        super().__init__()
        self.resident, self.ways = resident, list[str]()

    def load(self, build: Build) -> Entry:
        entry = super().load(build)

        def launched(way: str) -> Entry:
            def run(*args: Any) -> None:
                self.ways.append(way)
                entry.run(*args)

            return replace(entry, run=run)

        if not build.cooperative:
            return entry
        return replace(launched("together"), apart=launched("apart"), resident=self.resident)


def waiting(program: Program, together: int) -> Program:
    """As if programs waited for each other: what counts is how they are launched."""
    return replace(program, kernels=tuple(replace(k, together=together) for k in program.kernels))


@pytest.mark.parametrize("resident", [16, 15, 8, None])
def test_a_launch_is_cooperative_where_the_device_holds_all_programs(resident: int | None) -> None:
    gpu = HoldingGpu(resident)
    a, b = vectors(2000)  # 16 programs
    for together, ways in ((1, []), (2, ["together" if resident == 16 else "apart"])):
        (y,) = runner(gpu, waiting(add_bf16(2000), together))(a, b)
        assert torch.equal(y, a + b) and gpu.ways == ways and len(gpu.followed) == len(ways)


def test_a_launch_of_unknown_size_is_cooperative_where_it_fits() -> None:
    gpu = HoldingGpu(8)
    run = runner(gpu, waiting(row_softmax(100), 2))
    for rows in (8, 9, 0, 1):
        x = torch.randn(rows, 100).bfloat16()
        assert_softmax(run(x, rows)[0], x)
    assert gpu.ways == ["together", "apart", "together"], "and none of no rows"
    assert gpu.followed == [gpu.stream] * 3


def test_programs_that_the_device_cannot_hold_at_a_time_are_not_launched() -> None:
    """Nor those of which four launches beside each other would fill it with waiting."""
    a, b = vectors(2000)
    for together, needed in ((2, 8), (16, 64)):
        said = f"needs {needed} of programs at a time, but fake has 7"
        with pytest.raises(HardwareExceededError, match=said):
            runner(HoldingGpu(7), waiting(add_bf16(2000), together))(a, b)
    gpu = HoldingGpu(7)
    assert torch.equal(runner(gpu, waiting(add_bf16(2000), 16), add_bf16(2000))(a, b)[0], a + b)
    assert not gpu.ways


def test_a_build_of_programs_that_wait_asks_for_a_cooperative_launch() -> None:
    for together in (1, 2):
        (kernel,) = waiting(add_bf16(), together).kernels
        metadata = compile_build(build_of(kernel, ("cuda", 90, 32))).metadata
        assert metadata.launch_cooperative_grid == (together > 1)


class Launcher:
    """Stands in for Triton's: `launch` is the C function that it calls at last."""

    def __init__(self, launch: Callable[..., None], scratch: int = 0) -> None:
        self.launch, self.scratch = launch, scratch

    def __call__(self, x: int, y: int, z: int, stream: int, function: object, *rest: object) -> None:
        scratch = x * y * z * self.scratch if self.scratch else None
        self.launch(x, y, z, stream, function, False, scratch, *rest[:4], rest[4:])


def test_a_launcher_is_left_out_where_it_only_passes_on() -> None:
    seen: list[tuple[object, ...]] = []

    def launch(*args: object) -> None:
        seen.append(args)

    class Direct(FakeGpu):
        def load(self, build: Build) -> Entry:
            run = Launcher(launch)
            direct = direct_call(run, "function", "packed", len(build.signature))
            return Entry(run, "function", "packed", None, direct)

    a, b = vectors(1000)
    (y,) = runner(Direct(), add_bf16())(a, b)
    assert seen == [
        (
            8,
            1,
            1,
            7,
            "function",
            False,
            None,
            "packed",
            None,
            None,
            None,
            (a.data_ptr(), b.data_ptr(), y.data_ptr()),
        )
    ]
    assert direct_call(Launcher(launch, scratch=16), "function", "packed", 3) is None
    assert direct_call(launch, "function", "packed", 3) is None
    assert len(seen) == 1


def test_tritons_own_launcher_only_passes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fields that its __call__ reads, without the driver that its __init__ needs."""
    from triton.backends.nvidia.driver import CudaLauncher

    native: Any = object.__new__(CudaLauncher)
    names = ("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align")
    vars(native).update(dict.fromkeys(names, 0), num_ctas=1, launch_cooperative_grid=False, launch_pdl=False)
    vars(native).update(arg_annotations=["p"], kernel_signature=b"OO", gsan_enabled=False)
    monkeypatch.setattr(triton.runtime.driver, "_active", object())  # which a newer one asks for
    seen: list[tuple[object, ...]] = []
    native.launch = lambda *values: seen.append(values)
    direct = direct_call(native, 11, (4, 1, 0), 2)
    assert direct is not None and direct[0] is native.launch and not seen
    native(5, 6, 7, 8, 11, (4, 1, 0), None, None, None, 100, 200)
    values = {"x": 5, "y": 6, "z": 7, "stream": 8, "0": 100, "1": 200}

    def filled(value: Any) -> Any:
        if isinstance(value, Varying):
            return values[value.name]
        return tuple(map(filled, value)) if isinstance(value, tuple) else value

    assert tuple(map(filled, direct[1])) == seen[0]
