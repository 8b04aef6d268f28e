"""Turn a tile program and a schedule into a Program: main kernel, partial sums, finishing.

Reductions over rows that several programs share leave one partial result a program in scratch
memory. What follows them (the sum of the partials, and every op that waits for it) is a tile
program of its own over those partials. Where it is one element wide the last program to arrive
runs it (a ticket counter tells); where it is a row, a second kernel does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from fusion_compiler.codegen.expression import dim_text
from fusion_compiler.codegen.printer import Analysis, Cols, Printer, Schedule, axes_strides
from fusion_compiler.dims import Dim, product, simple, strides_of
from fusion_compiler.kernel import Argument, Buffer, Kernel, Program, Role
from fusion_compiler.loops import (
    COLS,
    ROWS,
    Axis,
    Index,
    Load,
    LoopNest,
    Node,
    Random,
    Reduce,
    Store,
    operands_of,
    renumber,
)

HEADER = """import triton
import triton.language as tl
from triton.language.extra import libdevice

from fusion_compiler.codegen import math as fm


"""
COUNTER = "ticket"


@dataclass(frozen=True)
class Signature:
    """Buffers of a program by name, with their roles."""

    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    sizes: tuple[sympy.Symbol, ...]


def ceil_div(a: Dim, b: int) -> Dim:
    if isinstance(a, int):
        return -(-a // b)
    return a if b == 1 else FloorDiv(a + (b - 1), b)  # type: ignore[return-value]


def signature_of(nests: tuple[LoopNest, ...], buffers: Mapping[str, Buffer]) -> Signature:
    """Inputs in order of first load, outputs in order of store, symbols in order of name."""
    loaded = dict.fromkeys(n.buffer for loops in nests for n in loops.nodes if isinstance(n, Load))
    stored = [s.buffer for loops in nests for s in loops.stores]
    dims: set[sympy.Symbol] = set()
    for name in (*loaded, *stored):
        for dim in (*buffers[name].shape, *buffers[name].stride):
            dims |= set() if isinstance(dim, int) else dim.free_symbols  # type: ignore[arg-type]
    for a in (a for loops in nests for a in loops.axes):
        dims |= set() if isinstance(a.size, int) else a.size.free_symbols  # type: ignore[arg-type]
    salts = [n.salt for loops in nests for n in loops.nodes if isinstance(n, Random)]
    streams = dict.fromkeys(s for s in salts if isinstance(s, sympy.Symbol))
    sizes = (*sorted(dims, key=lambda s: s.name), *streams)
    return Signature(tuple(buffers[b] for b in loaded), tuple(buffers[b] for b in stored), sizes)


def build(
    loops: LoopNest, schedule: Schedule, name: str, doc: str, buffers: Mapping[str, Buffer], cost: float = 0.0
) -> Program:
    """The program of one cluster under one schedule. `buffers` describes every loaded or stored name."""
    signature = signature_of((loops,), buffers)
    analysis = Analysis(loops)
    programs = row_programs(analysis, schedule)
    if not analysis.across_rows or programs == 1:
        kernel = _Assembly(analysis, schedule, name, doc, signature, ()).main(None)
        return Program(
            (kernel,), signature.inputs, signature.outputs, (), signature.sizes, str(schedule), cost
        )
    assert isinstance(programs, int), "programs that share a reduction are counted at compile time"
    partials = tuple(_partial(analysis, i, number, programs) for i, number in enumerate(analysis.across_rows))
    late = finishing(analysis, programs, tuple(b.name for b in partials))
    late_schedule = _finish_schedule(late, programs)
    scalar = product(a.size for a in analysis.axes[COLS]) == 1 or not _finish_cols(analysis)
    if scalar:
        counter = Buffer(COUNTER, (1,), (1,), torch.int32, zeroed=True)
        kernel = _Assembly(analysis, schedule, name, doc, signature, (*partials, counter)).main(
            (late, late_schedule, programs)
        )
        scratch = (*partials, counter)
        return Program(
            (kernel,), signature.inputs, signature.outputs, scratch, signature.sizes, str(schedule), cost
        )
    main = _Assembly(analysis, schedule, name, doc, signature, partials).main(None)
    finish_doc = f"The partial results of {name}, summed."
    finish = _Assembly(Analysis(late), late_schedule, f"{name}_finish", finish_doc, signature, partials).main(
        None
    )
    return Program(
        (main, finish), signature.inputs, signature.outputs, partials, signature.sizes, str(schedule), cost
    )


def build_beside(
    nests: tuple[LoopNest, ...],
    schedules: tuple[Schedule, ...],
    name: str,
    doc: str,
    buffers: Mapping[str, Buffer],
) -> Program:
    """Tile programs that do not depend on each other in one launch: each takes its share of the grid.

    Their schedules have one number of warps, and none of them reduces over rows.
    """
    signature = signature_of(nests, buffers)
    lines = ["    program = tl.program_id(0)"]
    functions: list[str] = []
    end: Dim = 0
    parts = [
        _Assembly(Analysis(n), s, name, doc, signature, ()) for n, s in zip(nests, schedules, strict=True)
    ]
    for position, part in enumerate(parts):
        p = part.printer(part.a, part.s)
        p.program = "program"
        start, count = end, product(part.body(p, partial=False))
        end = simple(end + count)
        body = "\n".join(p.lines)
        used = ", ".join(a.name for a in part.used(body))
        functions.append(f"@triton.jit\ndef {name}_{position}(program, {used}):\n{body}\n\n\n")
        last = position == len(parts) - 1
        lines.append("    else:" if last else f"    {'el' if position else ''}if program < {dim_text(end)}:")
        own = "program" if position == 0 else f"program - {dim_text(start)}"
        lines.append(f"        {name}_{position}({own}, {used})")
    stages = max(s.num_stages for s in schedules)
    kernel = parts[0].kernel("\n".join(lines), (end,), schedules[0].num_warps, stages, "".join(functions))
    shown = " beside ".join(str(s) for s in dict.fromkeys(schedules))
    return Program((kernel,), signature.inputs, signature.outputs, (), signature.sizes, shown)


def row_programs(analysis: Analysis, schedule: Schedule) -> Dim:
    """How many programs share the rows."""
    if schedule.programs is not None:
        return schedule.programs
    return ceil_div(analysis.size(ROWS), schedule.block_rows)


def _finish_cols(analysis: Analysis) -> bool:
    """Whether any partial result is a row rather than one element."""
    return any(COLS in analysis.groups[i] for i in analysis.across_rows)


def _partial(analysis: Analysis, position: int, number: int, programs: int) -> Buffer:
    node = analysis.loops.nodes[number]
    assert isinstance(node, Reduce)
    width = analysis.size(COLS) if COLS in analysis.groups[number] else 1
    dtype = torch.int32 if node.combine in ("any", "all") else node.dtype
    return Buffer(f"partial_{position}", (programs, width), strides_of((programs, width)), dtype)


def finishing(analysis: Analysis, programs: int, partials: tuple[str, ...]) -> LoopNest:
    """The tile program that sums the partial results and computes what waits for them."""
    loops = analysis.loops
    cols = analysis.axes[COLS] if _finish_cols(analysis) else ()
    group = ROWS if cols else COLS  # one element wide: the partials are the row
    axes = (Axis("row" if cols else "col", programs, group), *cols)
    shift = 1 - len(analysis.axes[ROWS])
    roots = [s.value for s in loops.stores if s.value in analysis.finish]
    needed: set[int] = set()
    stack = list(roots)
    while stack:
        number = stack.pop()
        if number not in needed:
            needed.add(number)
            stack.extend(() if number in analysis.across_rows else operands_of(loops.nodes[number]))
    numbers: dict[int, int] = {}
    nodes: list[Node] = []
    names: list[str] = []
    moved = {i: i + shift for i in range(len(analysis.axes[ROWS]), len(loops.axes))}
    for number in sorted(needed):
        node = loops.nodes[number]
        if number in analysis.across_rows:
            assert isinstance(node, Reduce)
            wide = COLS in analysis.groups[number]
            width = analysis.size(COLS) if wide else 1
            terms = ((0, width), *(axes_strides(cols, 1) if wide else ()))
            dtype = torch.int32 if node.combine in ("any", "all") else node.dtype
            nodes.append(
                Load(partials[analysis.across_rows.index(number)], Index(0, tuple(terms)), None, dtype)
            )
            names.append("partial")
            node = Reduce(node.combine, len(nodes) - 1, frozenset({group}), node.dtype)
        else:
            node = renumber(node, numbers, moved)
        numbers[number] = len(nodes)
        nodes.append(node)
        names.append(loops.names[number])
    stores = tuple(
        Store(
            s.buffer, Index(s.index.const, tuple((moved[k], c) for k, c in s.index.terms)), numbers[s.value]
        )
        for s in loops.stores
        if s.value in analysis.finish
    )
    return LoopNest(axes, tuple(nodes), stores, tuple(names))


def _finish_schedule(late: LoopNest, programs: int) -> Schedule:
    rows = [a for a in late.axes if a.group == ROWS]
    if not rows:
        return Schedule(1, _power(programs), Cols.WHOLE, num_warps=4)
    return Schedule(min(_power(programs), 64), 32, Cols.GRID, programs=1, num_warps=4)


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


class _Assembly:
    """One kernel: parameters, body, grid."""

    def __init__(
        self,
        analysis: Analysis,
        schedule: Schedule,
        name: str,
        doc: str,
        signature: Signature,
        scratch: tuple[Buffer, ...],
    ) -> None:
        self.a, self.s, self.name, self.doc, self.signature, self.scratch = (
            analysis,
            schedule,
            name,
            doc,
            signature,
            scratch,
        )
        self.parameters: dict[str, Argument] = {}
        for role, buffers in (
            (Role.INPUT, signature.inputs),
            (Role.OUTPUT, signature.outputs),
            (Role.SCRATCH, scratch),
        ):
            for i, buffer in enumerate(buffers):
                parameter = f"{PREFIX[role]}{i}_ptr" if role is not Role.SCRATCH else f"{buffer.name}_ptr"
                self.parameters[buffer.name] = Argument(parameter, role, i, buffer.dtype)
        for i, symbol in enumerate(signature.sizes):
            self.parameters[f"size {symbol.name}"] = Argument(
                symbol.name, Role.SIZE, i, torch.int64, aligned=False
            )

    def printer(self, analysis: Analysis, schedule: Schedule, load_options: str = "") -> Printer:
        pointers = {b: p.name for b, p in self.parameters.items()}
        dtypes = {b: p.dtype for b, p in self.parameters.items()}
        return Printer(analysis, schedule, pointers, dtypes, set(pointers.values()), load_options)

    def main(self, last: tuple[LoopNest, Schedule, int] | None) -> Kernel:
        p = self.printer(self.a, self.s)
        grid = self.body(p, partial=bool(self.scratch) and not self.is_finish())
        functions = self.last_program(p, *last) if last is not None else ""
        return self.kernel("\n".join(p.lines), grid, self.s.num_warps, self.s.num_stages, functions)

    def used(self, body: str) -> tuple[Argument, ...]:
        return tuple(a for a in self.parameters.values() if _uses(body, a.name))

    def kernel(
        self, body: str, grid: tuple[Dim, ...], warps: int, stages: int, functions: str = ""
    ) -> Kernel:
        used = self.used(body)
        head = f"@triton.jit\ndef {self.name}({', '.join(a.name for a in used)}):\n"
        quoted = "\n    ".join(self.doc.splitlines())
        source = f'{HEADER}{functions}{head}    """{quoted}"""\n{body}\n'
        return Kernel(self.name, source, used, grid, warps, max(1, stages))

    def is_finish(self) -> bool:
        return any(isinstance(n, Load) and n.buffer.startswith("partial_") for n in self.a.loops.nodes)

    def body(self, p: Printer, partial: bool) -> tuple[Dim, ...]:
        """Print the main part; the grid that it needs."""
        s = self.s
        wide = ".to(tl.int64)" if p.wide else ""
        blocks = ceil_div(self.a.size(ROWS), s.block_rows)
        share = blocks if s.programs is None else s.programs  # programs along the rows
        row_program, grid = self.place_cols(p, share, wide)
        if s.programs is None:
            if share == 1:
                if self.a.axes[ROWS]:
                    p.rows_at("0")
            else:
                p.rows_at(row_program if p.flat else f"{row_program} * {s.block_rows}")
            self.block(p)
            accumulators = self.tile_accumulators(p)
        else:
            accumulators = self.row_loop(p, row_program if s.programs > 1 else "0", s.programs)
        self.finish(p, accumulators, row_program, partial)
        return grid

    def place_cols(self, p: Printer, share: Dim, wide: str) -> tuple[str, tuple[Dim, ...]]:
        """Define `col`; (text of the program's number along the rows, grid)."""
        program = p.program + wide
        if self.s.cols is not Cols.GRID:
            if self.s.cols is Cols.WHOLE:
                p.cols_at(None)
            return program, (share,)
        blocks = ceil_div(self.a.size(COLS), self.s.block_cols)
        if share == 1:
            p.line(f"first_col = {program} * {self.s.block_cols}")
            p.cols_at("first_col")
            return program, (blocks,)
        if blocks == 1:
            p.line("first_col = 0")
        else:
            p.line(f"first_col = {program} % {dim_text(blocks)} * {self.s.block_cols}")
            program = f"({program} // {dim_text(blocks)})"
        p.cols_at("first_col")
        return program, (product((blocks, share)),)

    def block(self, p: Printer) -> None:
        if self.s.cols is Cols.LOOP:
            p.looped_block()
        else:
            p.whole_block()

    def row_loop(self, p: Printer, program: str, programs: int) -> dict[int, str]:
        """Blocks of rows in turn; what does not depend on the row is computed before."""
        if self.s.cols is not Cols.LOOP:
            early = [i for i, g in enumerate(self.a.groups) if ROWS not in g and i not in self.a.finish]
            wanted = p.need([*(o for s in p.stores_of("main") for o in (s.value,)), *p.accumulated()])
            p.print_nodes(i for i in wanted if i in early)
        accumulators = p.start_accumulators(list(self.a.across_rows))
        step = programs * self.s.block_rows
        start = program if self.s.block_rows == 1 or program == "0" else f"{program} * {self.s.block_rows}"
        rows = dim_text(self.a.size(ROWS))
        with p.scope(f"for first_row in tl.range({start}, {rows}, {step}{p.stages()}):"):
            p.rows_at("first_row")
            self.block(p)
            for number in self.a.across_rows:
                p.accumulate(number, accumulators[number], self.a.over(number))
        return accumulators

    def tile_accumulators(self, p: Printer) -> dict[int, str]:
        """Without a loop the tile itself is the accumulator."""
        names: dict[int, str] = {}
        for number in self.a.across_rows:
            text = p.tile(number, self.a.over(number))
            names[number] = name = p.fresh("tile")
            p.line(f"{name} = {text}")
        return names

    def finish(self, p: Printer, accumulators: dict[int, str], program: str, partial: bool) -> None:
        """Fold each accumulator; store it as a partial result, or go on to what waits for it."""
        for position, number in enumerate(self.a.across_rows):
            folded = p.fold_rows(number, accumulators[number])
            if not partial:
                p.env[number] = name = p.fresh("total")
                p.line(f"{name} = {folded}")
                continue
            wide = COLS in self.a.groups[number]
            width = self.a.size(COLS) if wide else 1
            index = program if width == 1 else f"{program} * {dim_text(width)}"
            index += " + col" if wide else "" if p.flat else " + tl.zeros([1, 1], tl.int32)"
            mask = f", mask={p.col_mask}" if wide and p.col_mask else ""
            p.line(f"tl.store(partial_{position}_ptr + {index}, {folded}{mask})")
        if not partial:
            for store in p.stores_of("finish"):
                p.row_mask = None
                p.store(store)

    def last_program(self, p: Printer, late: LoopNest, schedule: Schedule, programs: int) -> str:
        """The program that takes the last ticket runs the finishing part, and puts the counter back.

        Returns the finishing part as a function of its own: its names mean other tiles than the caller's.
        """
        inner = self.printer(Analysis(late), schedule, ', cache_modifier=".cg"')
        inner.cols_at(None)
        inner.print_nodes(inner.need([s.value for s in late.stores]))
        for store in late.stores:
            inner.store(store)
        body = "\n".join(inner.lines)
        used = ", ".join(a.name for a in self.used(body))
        p.line("tl.debug_barrier()")
        with p.scope(f"if tl.atomic_add({COUNTER}_ptr, 1) == {programs - 1}:"):
            p.line(f"tl.store({COUNTER}_ptr, 0)")
            p.line(f"{self.name}_last({used})")
        return f"@triton.jit\ndef {self.name}_last({used}):\n{body}\n\n\n"


PREFIX = {Role.INPUT: "in", Role.OUTPUT: "out"}


def _uses(body: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", body) is not None
