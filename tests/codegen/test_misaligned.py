"""Tiles that begin with the word in which their row begins: values, what is read around a row, how wide."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, _interpreter

from benchmarks.kernels.case import Case, as_tuple
from benchmarks.kernels.clusters import CASES
from fusion_compiler.codegen.emit import schedules_of
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.kernel import Program
from fusion_compiler.ir.loops import COLS, LoopNest
from fusion_compiler.runtime.launch import Runner
from fusion_compiler.runtime.target import compile_for
from fusion_compiler.schedule import misaligned
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.placement import Placement
from fusion_compiler.schedule.row_tiles import Cols, RowTile
from tests.exactness import Compiled, not_as_close, wide
from tests.fake_gpu import FakeGpu
from tests.versions import of_measured_versions

WITHOUT_ROWS = ("SwiGLU", "4 x (tanh, sigmoid, mul, sub)")  # no value serves a row or a column


FORMS = range(7)  # of `in_form`


def in_form(form: int, loops: LoopNest, name: str, device: DeviceSpec) -> tuple[RowTile | Placement, ...]:
    """A misaligned form alone, where there is any: eight programs with several rows each, four of them or
    pairs (in words of half the size), and where nothing is summed over these a row each, in one block, in a
    loop over blocks, and shared by programs in both ways; where nothing is reduced, a grid of blocks."""
    plain, a = schedules_of(loops, name, device), Analysis(loops)
    width = a.size(COLS)
    if not misaligned.fits(a) or not isinstance(width, int):
        return plain
    block = 1 << (width - 1).bit_length()
    kinds = [RowTile(1, block, Cols.WHOLE, programs=8, num_stages=2)]
    if a.shareable:
        kinds.append(RowTile(1, block // 2, Cols.WHOLE, programs=4, num_stages=2, splits=2))
    else:
        kinds.append(RowTile(1, block, Cols.WHOLE, programs=4, num_stages=2))
    if not a.across_rows:
        kinds += [RowTile(1, block, Cols.WHOLE), RowTile(1, block // 4, Cols.LOOP)]
        if a.shareable:
            kinds += [
                RowTile(1, block // 8, Cols.LOOP, splits=4),
                RowTile(1, block // 2, Cols.WHOLE, splits=2),
            ]
    if not a.reductions:
        kinds.append(RowTile(1, block // 4, Cols.GRID))
    forms = [s for s in (misaligned.form_of(a, s) for s in kinds) if s is not None]
    return (forms[min(form, len(forms) - 1)],)


def programs(compiled: Compiled) -> list[Program]:
    return [runner.candidates[runner.schedule] for runner in compiled.compiler.runners.values()]


def computed(results: Tensor | Sequence[Tensor], inputs: list[Tensor], seed: int) -> list[Tensor]:
    """The results, and the gradients of the inputs that ask for one."""
    outputs = tuple(results) if isinstance(results, tuple | list) else (results,)
    drawn = torch.Generator().manual_seed(seed)
    weights = [torch.randn(o.shape, generator=drawn).to(o.dtype) for o in outputs]
    leaves = [x for x in inputs if x.requires_grad]
    return [o.detach() for o in (*outputs, *torch.autograd.grad(outputs, leaves, weights))]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("columns", "dtype"), [(135, torch.float32), (531, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if "columns" in c.quick], ids=lambda case: case.name)
def test_values_and_gradients(case: Case, columns: int, dtype: torch.dtype) -> None:
    fn, tensors_ = case.without_randomness(), case.make(rows=19, columns=columns)
    cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors_.items()}
    inputs = [t.requires_grad_(n in case.differentiate) for n, t in cast.items()]
    exact = [t.requires_grad_(x.requires_grad) for t, x in zip(wide(inputs), inputs, strict=True)]
    eager, truth = computed(fn(*inputs), inputs, 1), computed(fn(*exact), exact, 1)
    for form in FORMS[dtype is torch.float32 :: 2]:  # the others with the other dtype
        compiled = Compiled(fn, schedules=functools.partial(in_form, form))
        ours = computed(compiled(*inputs), inputs, 1)
        problems = [not_as_close(*values) for values in zip(ours, eager, truth, strict=True)]
        assert not any(problems), problems
        assert any(p.word for p in programs(compiled)) == (case.name not in WITHOUT_ROWS)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, w.shape, w, b)


def softmax(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.softmax(x, -1) * w + b


def four_reductions(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    total, top = x.sum(-1, keepdim=True), x.amax(-1, keepdim=True)
    seldom, often = (x > 3.2).any(-1, keepdim=True), (x > -3.2).all(-1, keepdim=True)
    return torch.where(seldom, x + total, x * top) * w, torch.where(often, x, b)


BLOCK = 64
# Around what decides how a row is divided: its first word, a whole number of blocks, and what a block has
# room for beside them at any lead.
AT_EDGES = (BLOCK + 9, BLOCK + 58, 3 * BLOCK - 7, 3 * BLOCK - 1, 3 * BLOCK + 1, 3 * BLOCK + 7, 3 * BLOCK + 9,
            4 * BLOCK + 57, 4 * BLOCK + 58)  # fmt: skip


@pytest.mark.parametrize("number", range(len(AT_EDGES)))
def test_each_element_counts_once_and_is_stored_once(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In loops by one program and by several that share the row, at every lead: no program stores what its
    neighbour has, be it the same value."""
    columns, fn = AT_EDGES[number], (layer_norm, softmax, four_reductions)[number % 3]
    stored: Counter[int] = Counter()

    def store(_: object, pointers: Any, value: Any, mask: Any, *__: object) -> None:
        stored.update(pointers.data[mask.data].flatten().tolist())
        _interpreter.store(pointers.data, value.data, mask.data)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", store)
    dtype = torch.float32 if fn is four_reductions else torch.bfloat16
    x, w, b = (t.to(dtype) for t in tensors(8, columns))
    truth, eager = fn(*wide((x, w, b))), fn(x, w, b)
    for splits in (1, 2 + number // 3):
        schedule = RowTile(1, BLOCK, Cols.LOOP, splits=splits)
        compiled = Compiled(fn, schedules=functools.partial(form_of, schedule))
        stored.clear()
        ours = compiled(x, w, b)
        for got, *others in zip(*map(as_tuple, (ours, eager, truth)), strict=True):
            assert not (problem := not_as_close(got, *others)), problem
            begin, size = got.data_ptr(), got.element_size()
            assert all(stored[begin + i * size] == 1 for i in range(got.numel()))


def form_of(schedule: RowTile, loops: LoopNest, *_: object) -> tuple[RowTile | Placement, ...]:
    """The misaligned form of a schedule, which there is at these widths unless too many share a row."""
    a = Analysis(loops)
    form = misaligned.form_of(a, schedule)
    while form is None:
        assert schedule.splits > 1
        schedule = schedule._replace(splits=schedule.splits - 1)
        form = misaligned.form_of(a, schedule)
    assert form.misaligned and 0 < misaligned.inner_cols(a, form) < a.size(COLS)
    return (form,)


def several_rows(
    rows: int, programs: int, loops: LoopNest, name: str, device: DeviceSpec
) -> tuple[RowTile | Placement, ...]:
    """Groups of three programs that take several rows at once, where there is something to exchange."""
    a = Analysis(loops)
    if not misaligned.fits(a) or not any(COLS in a.reduced_groups(i) for i in a.reductions):
        return schedules_of(loops, name, device)
    width = a.size(COLS)
    assert isinstance(width, int)
    block = 1 << (width // 3).bit_length()
    form = misaligned.form_of(a, RowTile(rows, block, Cols.WHOLE, programs, num_stages=2, splits=3))
    assert form is not None and form.word == programs
    return (form,)


@pytest.mark.parametrize(
    ("block_rows", "groups", "rows", "dtype"),
    [
        (2, 8, 19, torch.float32),
        (2, 4, 17, torch.bfloat16),
        (4, 4, 21, torch.float32),
        (2, 8, 32, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("number", range(3))
def test_rows_of_one_lead_are_exchanged_at_once(
    number: int, block_rows: int, groups: int, rows: int, dtype: torch.dtype
) -> None:
    """Blocks with rows that do not exist, and without; words of eight and of four elements."""
    fn = (layer_norm, softmax, four_reductions)[number]
    inputs = [t.to(dtype).requires_grad_() for t in tensors(rows, 267)]
    exact = [t.requires_grad_() for t in wide(inputs)]
    compiled = Compiled(fn, schedules=functools.partial(several_rows, block_rows, groups))
    ours, eager, truth = (
        computed(f(*args), args, 1) for f, args in ((compiled, inputs), (fn, inputs), (fn, exact))
    )
    problems = [not_as_close(*values) for values in zip(ours, eager, truth, strict=True)]
    assert not any(problems), problems
    spelled = f"split(row.o, {block_rows})" if block_rows > 1 else "place(row.o, LOOP)"
    assert any("align(" in p.schedule and spelled in p.schedule for p in programs(compiled))


def tensors(rows: int = 40, columns: int = 531) -> list[Tensor]:
    return [torch.randn(rows, columns), torch.randn(columns), torch.randn(columns)]


def test_what_neighbours_hold_counts_nowhere() -> None:
    x, w, b = tensors()
    x[::2] = torch.tensor([float("nan"), float("inf"), float("-inf"), 3e38]).repeat(133)[:531]
    want = layer_norm(x.double(), w.double(), b.double())[1::2]
    forms = [functools.partial(in_form, form) for form in FORMS]
    for schedules in (*forms, functools.partial(several_rows, 2, 8)):
        got = Compiled(layer_norm, schedules=schedules)(x, w, b)
        assert got[::2].isnan().all()
        torch.testing.assert_close(got[1::2].double(), want, rtol=1e-5, atol=1e-5)


def layer_norm_programs() -> tuple[Program, ...]:
    compiled = Compiled(layer_norm)
    compiled(*tensors())
    (runner,) = compiled.compiler.runners.values()
    return runner.candidates


def test_inputs_that_begin_within_a_word_take_the_first_candidate() -> None:
    """A word that they end in may lie beyond a page."""
    plain, tiled, *_ = layer_norm_programs()
    assert tiled.word == 32 and not plain.word  # eight floats
    gpu = FakeGpu(us=(2.0, 1.0))
    run = Runner((plain, tiled), lambda *_: (), name="layer_norm", strict=True, gpus=lambda _: gpu)
    x, w, b = tensors()
    want = layer_norm(x.double(), w.double(), b.double())
    shifted = torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    halfway = torch.empty(x.numel() + 4)[4:].view_as(x).copy_(x)  # aligned to 16 bytes, not to a word
    grids: list[int] = []
    for argument in (x, shifted, x, halfway):
        got = run(argument, w, b)[-1]
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
        grids.append(gpu.launched[-1][1][0])
    in_words, row_each = tiled.kernels[0].grid[0], plain.kernels[0].grid[0]
    assert grids == [in_words, row_each, in_words, row_each]
    interpreted = Runner((plain, tiled), lambda *_: (), name="layer_norm", backend="interpret", schedule=1)
    assert interpreted.for_any_address(tiled) is plain
    torch.testing.assert_close(interpreted(shifted, w, b)[-1].double(), want, rtol=1e-5, atol=1e-5)


def test_parts_of_a_launch_have_a_candidate_for_inputs_that_begin_anywhere() -> None:
    """Their best schedules with one number of warps are misaligned for one of them or for the other."""

    def siblings(s: Tensor, u: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        (row,) = s @ u
        x, y = x * row, y * row
        return x / x.abs().sum(-1, keepdim=True) + x.amax(-1, keepdim=True), y.abs().sum(-1)

    shapes = ((1, 4), (4, 5001), (3, 5001), (5, 5001))
    begins = [torch.randn(torch.Size(shape).numel() + 1) for shape in shapes]
    compiled = Compiled(siblings)
    for first in (0, 1):
        inputs = [t[first:][: torch.Size(s).numel()].view(s) for t, s in zip(begins, shapes, strict=True)]
        exact = siblings(*(t.double() for t in inputs))
        for our, want in zip(compiled(*inputs), exact, strict=True):
            torch.testing.assert_close(our.double(), want, rtol=1e-5, atol=1e-4)
    assert [len(cluster.nests) for cluster in compiled.plans[0].clusters] == [2]
    (runner,) = compiled.compiler.runners.values()
    assert [bool(program.word) for program in runner.candidates] == [True] * 4 + [False]


def test_rows_are_moved_in_words_and_copied_ahead() -> None:
    """16 bytes an access where it was one element, asynchronously in a loop, and nothing spilled."""
    inputs = [t.bfloat16().requires_grad_() for t in tensors(600, 5793)]
    compiled = Compiled(layer_norm)
    computed(compiled(*inputs), inputs, 1)
    for runner in compiled.compiler.runners.values():
        plain, looped, *_ = (compile_for(p.kernels[0], "sm_90") for p in runner.candidates)
        for access in ("cp.async.cg.shared.global", "st.global.v4.b32"):  # 16 bytes each
            assert access in looped.asm["ptx"] and access not in plain.asm["ptx"]
        assert looped.spills == 0


@of_measured_versions
def test_blocks_within_the_row_are_moved_in_words_without_masks() -> None:
    """Both passes move such blocks so, weights included; tiles with the row's ends are half as wide."""
    schedule = RowTile(1, 4096, Cols.LOOP, num_warps=4)
    compiled = Compiled(layer_norm, schedules=functools.partial(form_of, schedule))
    compiled(*(t.bfloat16() for t in tensors(3, 9301)))
    ((kernel,),) = (p.kernels for p in programs(compiled))
    binary = compile_for(kernel, "sm_90")
    accesses = re.findall(
        r"^\s+(@%p\d+ )?(?:ld|st)\.global\S*\.v([24])\S*(32|64)", binary.asm["ptx"], re.MULTILINE
    )
    assert all(int(count) * int(bits) == 128 for _, count, bits in accesses)
    blocks, ends = 4096 // (32 * 4 * 8), 2048 // (32 * 4 * 8)
    assert Counter(bool(masked) for masked, *_ in accesses) == {
        False: blocks * (2 + 2 + 2 + 1),  # the row twice, weight and bias by two words each, the result
        True: ends * (2 + 1),
    }
    assert binary.spills == 0 and binary.registers < 128
