"""Programs of several devices exchange tiles: all ranks' sum, a residual and an RMSNorm in one kernel.

Each rank is a process, and has the others' memory at addresses of its own, as devices with peer access do.
"""

from __future__ import annotations

import multiprocessing
import re
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from fusion_compiler.codegen import math as functions
from fusion_compiler.codegen.exchange import Peers, all_reduced
from fusion_compiler.codegen.passes import launched_dependently
from fusion_compiler.codegen.text import module
from fusion_compiler.codegen.tile import (
    Assign,
    Boxes,
    Do,
    Function,
    Scope,
    Signal,
    Statement,
    Store,
    Wait,
    reads,
    renamed,
    writes,
)
from fusion_compiler.ir.kernel import Kernel, Role
from fusion_compiler.ops.syntax import Expression, Name, Var, fm, libdevice, tl
from fusion_compiler.runtime.interpreter import run_source
from fusion_compiler.runtime.target import argument_type, compile_for
from tests import ROOT
from tests.hand_made import argument

EPS = 1e-6
LIMIT = 240  # seconds, after which a rank that has not ended is an error
LOOKS = 300  # of a wait for what nobody sends
DTYPES = (torch.float32, torch.int64)  # of tiles and boxes
X, RESIDUAL, OUT, TILES, PADS, RANK = map(
    Name, ("x_ptr", "residual_ptr", "out_ptr", "tiles_ptr", "pads_ptr", "rank")
)


@dataclass(frozen=True)
class Case:
    """The parameters of a kernel.

    one_device: the ranks are programs of one launch. one_half: all rounds write to the same tiles. without: a
    sort of statements that is left out.
    """

    count: int
    rows: int
    cols: int
    dtype: torch.dtype = torch.float32
    one_device: bool = False
    one_half: bool = False
    without: type[Statement] | None = None

    @property
    def kernel(self) -> Kernel:
        """rms_norm(sum of x over all ranks + residual), a row for each program."""
        program, rank, row, col = Name("program"), RANK, Name("row"), Name("col")
        start: list[Statement] = [Assign((program,), tl.program_id(0))]
        if self.one_device:
            start += [Assign((row,), program // self.count), Assign((rank,), program % self.count)]
        else:
            start.append(Assign((row,), program))
        lane, inside = row * self.cols + col, col < self.cols
        x, total, norm = Var("values"), Var("sum"), Var("norm")
        size = 0 if self.one_half else self.rows * self.cols
        scope = Scope.DEVICE if self.one_device else Scope.SYSTEM
        peers = Peers(TILES, PADS, rank, self.count, row, self.dtype, size, scope)
        exchanged, reduced = all_reduced(peers, x, lane, inside)
        place = rank * (self.rows * self.cols) + lane if self.one_device else lane
        mean = tl.sum(total * total, axis=0) / self.cols
        body = [
            *start,
            Assign((col,), tl.arange(0, 1 << (self.cols - 1).bit_length())),
            Assign((x,), loaded(X + place, inside)),
            *(s for s in exchanged if self.without is None or not isinstance(s, self.without)),
            Assign((total,), reduced + loaded(RESIDUAL + lane, inside)),
            Assign((norm,), total * libdevice.rsqrt(mean + EPS)),
            Store(OUT + place, norm, inside),
        ]
        arguments = [
            argument("x_ptr", Role.INPUT, 0, self.dtype),
            argument("residual_ptr", Role.INPUT, 1, torch.float32),
            argument("tiles_ptr", Role.INPUT, 2, torch.int64),
            argument("pads_ptr", Role.INPUT, 3, torch.int64),
            argument("out_ptr", Role.OUTPUT, 0, torch.float32),
        ]
        if not self.one_device:
            arguments.append(argument("rank", Role.SIZE, 0, torch.int32, aligned=False))
        parameters = tuple(Name(a.name) for a in arguments)
        source = module([Function("add_norm", parameters, body, "Adds up all ranks' rows.")])
        programs = self.rows * (self.count if self.one_device else 1)
        together = self.count if self.one_device else 1
        return Kernel("add_norm", source, tuple(arguments), (programs,), together=together)

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of elements of a rank's tiles and of its boxes."""
        return 2 * self.rows * self.cols, self.rows * self.count

    def run(self, *tensors: Tensor, rank: int = 0) -> None:
        """Interpret the kernel. rank: of this process."""
        kernel = self.kernel
        types = [argument_type(argument) for argument in kernel.arguments]
        values = [*(tensor.data_ptr() for tensor in tensors), rank][: len(types)]
        run_source(kernel.source, kernel.name, types, values, [int(n) for n in kernel.grid], kernel.together)

    def inputs(self, number: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return the tensors that the ranks add up in a round, by rank, and the residual that they share."""
        generator = torch.Generator().manual_seed(seed + number)
        x = 3 * torch.randn(self.count, self.rows, self.cols, generator=generator)
        return x.to(self.dtype), torch.randn(self.rows, self.cols, generator=generator)

    def expected(self, number: int, seed: int) -> Tensor:
        """The result in float64."""
        x, residual = self.inputs(number, seed)
        total = x.double().sum(0) + residual.double()
        return total * (total.square().mean(-1, keepdim=True) + EPS).rsqrt()


def loaded(pointer: Expression, mask: Expression) -> Expression:
    return tl.load(pointer, mask=mask, other=0.0).to(torch.float32)


# -- ranks as processes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The work of the processes. behind: rank 0 reads the tiles of a round when the others have left those of
    the next one. silent: a rank that sends nothing."""

    case: Case
    rounds: int
    seed: int
    folder: Path
    behind: bool = False
    silent: int | None = None


def memory_of(run: Run, rank: int) -> tuple[Tensor, Tensor]:
    """The tiles and boxes of a rank, at this process's own addresses."""
    tiles, boxes = run.case.sizes
    return (
        torch.from_file(str(run.folder / f"tiles {rank}"), shared=True, size=tiles, dtype=run.case.dtype),
        torch.from_file(str(run.folder / f"boxes {rank}"), shared=True, size=boxes, dtype=torch.int64),
    )


def rank_of(run: Run, rank: int, results: Connection) -> None:
    """One rank's process: sends what its rounds give, or the error that ended it."""
    try:
        if run.silent is not None:
            functions.PATIENCE = LOOKS
            builder = interpreter.interpreter_builder
            builder.options = replace(builder.options, debug=True)  # its assertions count
        results.send([out.numpy() for out in rounds_of(run, rank)])
    except Exception as error:
        results.send(f"{error}\n{traceback.format_exc()}")


def rounds_of(run: Run, rank: int) -> Iterator[Tensor]:
    case = run.case
    memory = [memory_of(run, peer) for peer in range(case.count)]
    tables = [torch.tensor([part.data_ptr() for part in parts]) for parts in zip(*memory, strict=True)]
    if run.behind and rank == 0:
        read_behind(memory[0][1], run.rounds)
    if run.silent == rank:
        case = replace(case, without=Signal)
    generator = torch.Generator().manual_seed(run.seed * case.count + rank)
    for number in range(run.rounds):
        time.sleep(0.05 * float(torch.rand((), generator=generator)))
        out = torch.full((case.rows, case.cols), float("nan"))
        x, residual = case.inputs(number, run.seed)
        case.run(x[rank].contiguous(), residual, *tables, out, rank=rank)
        yield out


def read_behind(boxes: Tensor, rounds: int) -> None:
    """Let each wait but the last end when the others have signalled the next round. boxes: of one program."""
    arrived = functions.arrived

    def later(pointers: Any, number: Any, *rest: Any) -> Any:
        result = arrived(pointers, number, *rest)
        last, end = number.handle.data.item(), time.monotonic() + LIMIT / 2
        while last < rounds and not bool((boxes[1:] > last).all()):
            assert time.monotonic() < end, "the others wait until this rank has read"
            time.sleep(0.001)
        return result

    functions.arrived = later  # in this process alone


def ended(run: Run) -> list[list[Tensor] | str]:
    """Return the results of each rank's rounds, or the error that ended it. Raise TimeoutError if one
    hangs."""
    case = run.case
    for rank in range(case.count):
        tiles, boxes = case.sizes
        (run.folder / f"tiles {rank}").write_bytes(bytes(tiles * case.dtype.itemsize))
        (run.folder / f"boxes {rank}").write_bytes(bytes(boxes * torch.int64.itemsize))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pipes = [context.Pipe(duplex=False) for _ in range(case.count)]
    processes = [
        context.Process(target=rank_of, args=(run, rank, pipe[1]), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    end = time.monotonic() + LIMIT
    results: list[list[Tensor] | str] = []
    try:
        for process in processes:
            process.start()
        for rank, (pipe, _) in enumerate(pipes):
            if not pipe.poll(max(0.0, end - time.monotonic())):
                raise TimeoutError(f"rank {rank} has not ended after {LIMIT} seconds")
            result = pipe.recv()
            results.append(result if isinstance(result, str) else [torch.from_numpy(out) for out in result])
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    return results


def results_of(run: Run) -> list[list[Tensor]]:
    """The results by rank and round. Raises RuntimeError if a rank ended in an error."""
    results: list[list[Tensor]] = []
    for rank, result in enumerate(ended(run)):
        if isinstance(result, str):
            raise RuntimeError(f"rank {rank}: {result}")
        assert len(result) == run.rounds
        results.append(result)
    return results


def right(run: Run, results: Sequence[Sequence[Tensor]]) -> bool:
    """True if all rounds of all ranks are near float64."""
    truth = [run.case.expected(number, run.seed) for number in range(run.rounds)]
    pairs = [pair for result in results for pair in zip(result, truth, strict=True)]
    return all(torch.allclose(out.double(), true, rtol=1e-5, atol=1e-5) for out, true in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_ranks_have_the_sum_of_all_tiles_in_the_same_bits(
    count: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Over rounds through the same memory, of programs that begin at different times."""
    run = Run(Case(count, 3, 100, dtype), rounds=5, seed=fresh_seed(), folder=tmp_path)
    first, *others = results = results_of(run)
    assert right(run, results)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("one_half", [False, True], ids=["two halves", "one half"])
def test_a_tile_lasts_until_the_slowest_rank_has_read_it(one_half: bool, tmp_path: Path) -> None:
    """Because rounds write to two halves in turn: with one, the slow rank reads tiles of the next round."""
    case = Case(3, 1, 64, one_half=one_half)
    run = Run(case, rounds=4, seed=fresh_seed(), folder=tmp_path, behind=True)
    assert right(run, results_of(run)) is not one_half


def test_a_wait_for_a_rank_that_does_not_signal_ends_in_an_error(tmp_path: Path) -> None:
    run = Run(Case(3, 2, 16), rounds=1, seed=fresh_seed(), folder=tmp_path, silent=1)
    for error in ended(run):
        assert isinstance(error, str) and "a program waits for others that do not run" in error


def fresh_seed() -> int:
    return int(torch.randint(1 << 30, ()))


# -- one device -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 33])
def test_programs_of_one_device_exchange_tiles_by_the_same_statements(count: int) -> None:
    """Their tables have addresses in one memory."""
    case, seed = Case(count, 2, 24, one_device=True), fresh_seed()
    tiles, boxes = (torch.zeros(count, size, dtype=d) for size, d in zip(case.sizes, DTYPES, strict=True))
    tables = [torch.tensor([row.data_ptr() for row in part]) for part in (tiles, boxes)]
    for number in range(3):
        out = torch.full((count, case.rows, case.cols), float("nan"))
        case.run(*case.inputs(number, seed), *tables, out)
        expected = case.expected(number, seed).expand(out.shape)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(out, out[:1].expand(out.shape))


# -- text and machine code --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 8])
def test_signals_release_and_waits_acquire_for_all_devices(count: int) -> None:
    """In this order: tile, barrier, release; acquire, barrier, tiles. Tiles move in words of 16 bytes."""
    binary = compile_for(Case(count, 4, 4096, torch.bfloat16).kernel, "sm_90")
    lines = [line.strip() for line in binary.asm["ptx"].splitlines()]

    def places(pattern: str) -> list[int]:
        return [i for i, line in enumerate(lines) if re.search(pattern, line)]

    (release,), acquires = places(r"atom\S*\.sys\S*\.release|atom\S*\.release\S*\.sys"), places(
        r"atom\S*\.sys\S*\.acquire|atom\S*\.acquire\S*\.sys"
    )
    assert len(acquires) == 2 and acquires[0] > release  # a look, and those of the loop
    assert not places(r"atom.*\.gpu")
    barriers = places(r"bar\.sync")
    tiles_out = [i for i in places(r"st\.global\.v4") if i < release]
    tiles_in = [i for i in places(r"ld\.global\.v4") if i > release]
    words = 4096 // (8 * 128)
    assert len(tiles_out) == words and any(tiles_out[-1] < barrier < release for barrier in barriers)
    assert any(acquires[-1] < barrier < tiles_in[0] for barrier in barriers)
    assert len(tiles_in) >= words * count and not binary.spills


@pytest.mark.parametrize("count", [4, 64])
def test_one_device_needs_no_system_scope(count: int) -> None:
    ptx = compile_for(Case(count, 4, 512, one_device=True).kernel, "sm_90").asm["ptx"]
    assert re.search(r"atom\S*\.gpu", ptx) and not re.search(r"atom\S*\.sys", ptx)


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_other_targets_compile(target: str) -> None:
    binary = compile_for(Case(4, 4, 4096, torch.bfloat16).kernel, target)
    assert binary.registers > 0 and not binary.spills


def test_loads_of_tiles_depend_on_the_wait() -> None:
    """The loads depend on it by a variable, as rewrites know no other order."""
    peers = Peers(TILES, PADS, RANK, 3, Name("program"), torch.float32, 64)
    statements, _ = all_reduced(peers, Var("x"), Name("col"))
    (at,) = (i for i, s in enumerate(statements) if isinstance(s, Wait))
    targets = writes(statements[at])
    loads = [s for s in statements[at + 1 :] if isinstance(s, Assign) and "tl.load" in str(s.value)]
    assert len(loads) == 3 and all(targets & reads(s) for s in loads)


def test_a_kernel_that_starts_early_reads_the_number_behind_its_wait_for_earlier_kernels() -> None:
    """An earlier kernel may be the same kernel in the round before; the tables never change."""
    peers = Peers(TILES, PADS, RANK, 3, Name("program"), torch.float32, 64)
    statements, _ = all_reduced(peers, Var("x"), Name("col"))
    tables = frozenset({TILES, PADS})
    body = launched_dependently(statements, tables, tables)
    at = body.index(Do(fm.wait_for_kernels()))
    behind = [s for s in statements if not reads(s) & tables and "ranks" not in {v.base for v in writes(s)}]
    assert body[at + 1 :] == behind and isinstance(behind[0], Assign) and isinstance(behind[1], Store)


def test_a_signal_is_renamed_in_all_its_parts() -> None:
    old, new = (tuple(Var(f"{base}") for base in "abcd") for _ in range(2))
    a, b, c, d = old
    signal = Signal(Boxes(a, b < 4, (c,)), (d,))
    statement = renamed(signal, dict(zip(old, new, strict=True)))
    assert isinstance(statement, Signal) and reads(statement) == set(new)


def test_the_page_shows_the_kernel() -> None:
    page = (ROOT / "docs" / "techniques.md").read_text(encoding="utf-8")
    section = page.partition("### Tiles of several devices\n")[2].partition("\n##")[0]
    shown = re.findall(r"^    (\S.*)$", section, re.MULTILINE)
    lines = Case(4, 4, 4096, torch.bfloat16).kernel.source.splitlines()
    common = [line.strip() for line in lines if line.strip() in shown]
    assert common == shown and len(shown) > 5
