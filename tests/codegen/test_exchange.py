"""Messages between programs that share a row arrive, and compile under any number of warps."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

import fusion_compiler as fc
from fusion_compiler.codegen.math import UNSENT as MARK
from fusion_compiler.compiler.runners import emit_cluster
from fusion_compiler.ir.canonical import canonical
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.kernel import Kernel, Program, Role
from fusion_compiler.runtime.launch import Runner, interpret
from fusion_compiler.runtime.target import compile_for
from tests.hand_made import HEADER, argument, contiguous

ROWS = 2
PARTS = (2, 4, 8, 16, 32, 64, 128)
WARPS = (1, 2, 4, 8, 16, 32)
NEUTRAL = 7.0
UNSENT = MARK.value  # the bits that no value has when it is sent in a pair


def exchange(splits: int, warps: int = 4, pair: bool = False) -> Program:
    """Every program sends its number to those of its row, alone or with the negative, and stores theirs."""
    lanes = 1 << (splits - 1).bit_length()
    source = "from fusion_compiler.codegen import math as fm\n" + HEADER + (
        f"def exchange(x_ptr, y_ptr, mail_ptr):\n"
        f"    program = tl.program_id(0)\n"
        f"    part = program % {splits}\n"
        f"    parts = tl.arange(0, {lanes})\n"
        f"    mail = mail_ptr + program // {splits} * {splits * splits}\n"
        f"    theirs, mine = mail + parts * {splits} + part, mail + part * {splits} + parts\n"
        f"    x = tl.load(x_ptr + program)\n"
        + (
            f"    fm.send_pair(theirs, -x, x, parts < {splits})\n"
            f"    minus, all_x = fm.receive_pair(mine, x, parts < {splits}, -{NEUTRAL}, {NEUTRAL})\n"
            f"    all_x = tl.where(-minus == all_x, all_x, minus)\n"
            if pair
            else f"    fm.send(theirs, x, parts < {splits})\n"
            f"    all_x = fm.receive(mine, x, parts < {splits}, {NEUTRAL})\n"
        )
        + f"    tl.store(y_ptr + program * {lanes} + parts, all_x)\n"
    )  # fmt: skip
    arguments = (
        argument("x_ptr", Role.INPUT, 0, torch.float32),
        argument("y_ptr", Role.OUTPUT, 0, torch.float32),
        argument("mail_ptr", Role.SCRATCH, 0, torch.int64),
    )
    kernel = Kernel("exchange", source, arguments, (ROWS * splits,), num_warps=warps, together=splits)
    return Program(
        (kernel,),
        (contiguous("x", (ROWS, splits), torch.float32),),
        (contiguous("y", (ROWS, splits, lanes), torch.float32),),
        scratch=(contiguous("mail", (ROWS, splits, splits), torch.int64, zeroed=True),),
    )


def exchange_rows(
    splits: int, rows: int, block: int, warps: int = 4, pair: bool = False, apart: int = 1
) -> Program:
    """The same by programs that take `block` rows at once, each of which has numbers of its own.

    apart: from one row of a block to the next; between them lie those of as many other blocks.
    """
    lanes = 1 << (splits - 1).bit_length()
    kind, sent = ("_pair", "-x, x") if pair else ("", "x")
    neutral = f"-{NEUTRAL}, {NEUTRAL}" if pair else f"{NEUTRAL}"
    left = f"{rows} - first_row, {apart}, {splits * splits}"
    value = "tl.where(-theirs[r][0] == theirs[r][1], theirs[r][1], theirs[r][0])" if pair else "theirs[r]"
    source = "from fusion_compiler.codegen import math as fm\n" + HEADER + (
        f"def exchange(x_ptr, y_ptr, mail_ptr):\n"
        f"    program = tl.program_id(0)\n"
        f"    part = program % {splits}\n"
        f"    parts = tl.arange(0, {lanes})\n"
        f"    block = program // {splits}\n"
        f"    first_row = block // {apart} * {apart * block} + block % {apart}\n"
        f"    mail = mail_ptr + first_row * {splits * splits}\n"
        f"    row = first_row + tl.arange(0, {block})[:, None] * {apart}\n"
        f"    x = tl.load(x_ptr + row * {splits} + part, mask=row < {rows}, other=-1.0)\n"
        f"    boxes = mail + parts * {splits} + part\n"
        f"    fm.send{kind}(boxes, {sent}, parts < {splits}, {left})\n"
        f"    boxes = mail + part * {splits} + parts\n"
        f"    theirs = fm.receive{kind}(boxes, x, parts < {splits}, {neutral}, {left})\n"
        f"    for r in tl.static_range({block}):\n"
        f"        row = first_row + r * {apart}\n"
        f"        tl.store(y_ptr + (row * {splits} + part) * {lanes} + parts, {value}, mask=row < {rows})\n"
    )  # fmt: skip
    blocks = -(-rows // (block * apart)) * apart
    kernel = replace(exchange(splits, warps).kernels[0], source=source, grid=(blocks * splits,))
    return Program(
        (kernel,),
        (contiguous("x", (rows, splits), torch.float32),),
        (contiguous("y", (rows, splits, lanes), torch.float32),),
        scratch=(contiguous("mail", (rows, splits, splits), torch.int64, zeroed=True),),
    )


def received(x: torch.Tensor) -> torch.Tensor:
    """Return what the kernel stores: each program of a row has the numbers of all, then neutral elements."""
    rows, splits = x.shape
    y = x.new_full((rows, splits, 1 << (splits - 1).bit_length()), NEUTRAL)
    y[:, :, :splits] = x[:, None, :]
    return y


def numbers(splits: int, device: str = "cpu", rows: int = ROWS) -> torch.Tensor:
    """Some whose letters could be taken for none: zero, and the NaN that marks them."""
    x = torch.randn(rows, splits, device=device)
    x[0, 0], x[0, 1], x[1, 0] = 0.0, float("-inf"), float("inf")
    x[1, 1] = torch.tensor(-0x80000000 | UNSENT, dtype=torch.int32).view(torch.float32)  # negated when sent
    return x


@pytest.mark.parametrize("pair", [False, True], ids=["alone", "pair"])
@pytest.mark.parametrize("splits", [2, 3, 32, 33])
def test_all_letters_arrive_and_the_mailboxes_are_left_empty(splits: int, pair: bool) -> None:
    x = numbers(splits)
    (y,) = interpret(exchange(splits, pair=pair), (x,))
    torch.testing.assert_close(y, received(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("pair", [False, True], ids=["alone", "pair"])
@pytest.mark.parametrize(
    ("splits", "rows", "block", "apart"),
    [(2, 7, 2, 1), (3, 7, 4, 1), (33, 2, 2, 1), (5, 3, 4, 1), (2, 11, 2, 4), (3, 5, 4, 2), (4, 8, 2, 4)],
)
def test_letters_of_several_rows_arrive_and_those_of_missing_rows_are_not_awaited(
    splits: int, rows: int, block: int, apart: int, pair: bool
) -> None:
    x = numbers(splits, rows=rows)
    (y,) = interpret(exchange_rows(splits, rows, block, pair=pair, apart=apart), (x,))
    torch.testing.assert_close(y, received(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("warps", WARPS)
def test_it_compiles_with_fewer_and_with_more_threads_than_parts(warps: int) -> None:
    """And waits no longer than it must: by one load of a letter that is missing, and one barrier then."""
    for splits, pair in product(PARTS, (False, True)):
        ptx = compile_for(exchange(splits, warps, pair).kernels[0], "sm_90").asm["ptx"]
        waits = ptx.count("ld.relaxed.gpu.global")
        assert waits == ptx.count("bar.sync")
        if splits <= 32 * warps:
            assert waits == 1
        else:  # several letters a thread: none of our schedules; Triton may wait again to lay them out anew
            assert splits // (32 * warps) <= waits <= 2 * splits // (32 * warps)


@pytest.mark.parametrize("block", [2, 4])
def test_several_rows_are_waited_for_at_once(block: int) -> None:
    """Each letter is loaded by itself, but there is one loop around them, and one barrier then."""
    for warps, pair in ((4, False), (8, True)):
        ptx = compile_for(exchange_rows(64, 7, block, warps, pair).kernels[0], "sm_90").asm["ptx"]
        assert ptx.count("ld.relaxed.gpu.global") == block and ptx.count("bra WAIT") == 1


@pytest.mark.parametrize("warps", [1, 2, 4, 8])
def test_the_portable_wait_compiles(warps: int) -> None:
    """A loop whose result nobody uses would not, where a thread has a letter of its own or several."""
    for splits in (32, 64, 128):
        assert compile_for(exchange(splits, warps).kernels[0], "gfx942").registers > 0
    assert compile_for(exchange_rows(64, 7, 4, warps).kernels[0], "gfx942").registers > 0


def test_norms_one_after_the_other_compile_where_programs_share_rows_in_blocks() -> None:
    """No variable of the exchange is one of the loops behind it, whose tiles have another shape."""

    def norms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        once = torch.nn.functional.layer_norm(x, x.shape[1:], w).relu()
        return torch.nn.functional.layer_norm(once, x.shape[1:])

    explained = fc.explain(norms, torch.empty(8, 180_000), torch.empty(180_000), device="h200")
    (plan,) = explained.plans
    (cluster,) = plan.clusters
    key, device = canonical(cluster, plan.dag), device_spec(plan.device)
    programs = emit_cluster(key, cluster, plan.dag, device)
    looped = [p for p in programs if "place(col.i.o, LOOP)" in p.schedule]
    assert looped
    for program in looped:
        assert all(compile_for(kernel, "sm_90").registers for kernel in program.kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("warps", WARPS)
def test_all_letters_arrive_on_the_device(warps: int) -> None:
    for splits in (*PARTS, 3, 33, 100):
        for pair in (False, True):
            run = Runner((exchange(splits, warps, pair),), lambda *_: (), name="exchange", strict=True)
            for _ in range(50):
                x = numbers(splits, "cuda")
                torch.testing.assert_close(run(x)[0], received(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [2, 4])
def test_letters_of_several_rows_arrive_on_the_device(block: int) -> None:
    for splits, warps, pair in product((2, 16, 33, 64), (4, 16), (False, True)):
        program = exchange_rows(splits, 7, block, warps, pair)
        run = Runner((program,), lambda *_: (), name="exchange", strict=True)
        for _ in range(50):
            x = numbers(splits, "cuda", rows=7)
            torch.testing.assert_close(run(x)[0], received(x), rtol=0, atol=0, equal_nan=True)
