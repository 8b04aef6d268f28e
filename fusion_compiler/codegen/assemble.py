"""Turn loop nests and their schedules into a Program: main kernels, and second kernels for partial results.

Tile programs that do not depend on each other share a launch, in which each program has a part of the grid.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import sympy
import torch

from fusion_compiler.codegen.aligned_rows import AlignedRowEmitter
from fusion_compiler.codegen.carrying import CarryingEmitter
from fusion_compiler.codegen.chains import ChainEmitter
from fusion_compiler.codegen.exchange import mailbox, messages, messages_of
from fusion_compiler.codegen.matrix_products import MatrixEmitter, multiplies_matrices
from fusion_compiler.codegen.names import GLOBAL
from fusion_compiler.codegen.passes import (
    checked_late,
    joined,
    launched_dependently,
    stored_early,
    stored_late,
)
from fusion_compiler.codegen.placed import Emitter
from fusion_compiler.codegen.products import ProductEmitter
from fusion_compiler.codegen.replicated import Replicated
from fusion_compiler.codegen.rows import RowEmitter
from fusion_compiler.codegen.second_stages import Split, split_of
from fusion_compiler.codegen.sizes import name_sizes
from fusion_compiler.codegen.strength_reduction import shortened
from fusion_compiler.codegen.text import module
from fusion_compiler.codegen.tile import Assign, Do, Function, If, Statement, Store, reads
from fusion_compiler.codegen.values import PlacedNest
from fusion_compiler.ir.dims import Dim, product, simple, strides_of
from fusion_compiler.ir.kernel import Argument, Buffer, Kernel, Program, Role
from fusion_compiler.ir.loops import (
    ROWS,
    Load,
    LoopNest,
    Random,
    operands_of,
    right_neighbours,
    rounding_of,
    symbols_of,
)
from fusion_compiler.ir.loops import Store as LoopStore
from fusion_compiler.ops.syntax import Expression, Global, Literal, Name, Variable, lift, plus, tl
from fusion_compiler.schedule.analysis import Analysis, along_rows_first
from fusion_compiler.schedule.carried import Carried
from fusion_compiler.schedule.placement import Place, Placement
from fusion_compiler.schedule.run import Run
from fusion_compiler.schedule.shapes import WORD
from fusion_compiler.schedule.tile_products import is_chained

# With this many registers a thread, a multiprocessor still holds the dozen warps that keep memory busy.
ENOUGH_REGISTERS = 128
NOTHING: Mapping[int, int] = {}
NO_BUFFERS: Mapping[str, Buffer] = {}
# Options of loads of what other programs have stored: the L1 cache may hold older lines.
FROM_L2: Mapping[str, Expression] = {"cache_modifier": Literal(".cg")}
FIRST = Literal(0)  # the number of the only program


@dataclass(frozen=True)
class Signature:
    """A signature holds the buffers of a program by role; sizes and derived: as in `Program`."""

    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    sizes: tuple[sympy.Symbol, ...]
    derived: tuple[tuple[sympy.Symbol, sympy.Expr], ...] = ()


def signature_of(nests: tuple[LoopNest, ...], buffers: Mapping[str, Buffer]) -> Signature:
    """Return the signature of the program of some loop nests.

    The inputs stand in the order of their first loads, and those that are only written into follow. The
    outputs stand in the order of their first stores, and the symbols in that of their names.
    """
    loaded = dict.fromkeys(n.buffer for loops in nests for n in loops.nodes if isinstance(n, Load))
    stored = dict.fromkeys(s.buffer for loops in nests for s in loops.stores)
    loaded |= dict.fromkeys(over for b in stored if (over := buffers[b].reuses) is not None)
    tensors = [(*buffers[name].shape, *buffers[name].stride) for name in (*loaded, *stored)]
    salts = [n.salt for loops in nests for n in loops.nodes if isinstance(n, Random)]
    streams = dict.fromkeys(s for s in salts if isinstance(s, sympy.Symbol))
    sizes = (*symbols_of(nests, tensors), *streams)
    return Signature(tuple(buffers[b] for b in loaded), tuple(buffers[b] for b in stored), sizes)


class Nests:
    """The loop nests of one cluster, as all of its programs have them.

    buffers: describes every buffer that is loaded or stored, by name.
    """

    def __init__(self, nests: tuple[LoopNest, ...], buffers: Mapping[str, Buffer]) -> None:
        signature = signature_of(nests, buffers)
        nests, names = name_sizes(nests)
        derived = tuple((symbol, size) for size, symbol in names.items())
        self.signature = replace(signature, derived=derived)
        self.analyses = tuple(Analysis(shortened(loops, buffers)) for loops in nests)

    @cached_property
    def in_passes(self) -> tuple[Analysis, ...]:
        """Return the analyses for schedules that take a pass for each reduction along a row."""
        return tuple(Analysis(along_rows_first(a.loops)) for a in self.analyses)

    def runs(self, placements: tuple[Placement, ...]) -> list[Run]:
        """Return the run of each nest, in passes where its placement takes them."""
        runs = [Run(a, placement) for a, placement in zip(self.analyses, placements, strict=True)]
        return [
            Run(self.in_passes[i], run.placement) if run.in_passes else run for i, run in enumerate(runs)
        ]


def build(
    nests: Nests,
    placements: tuple[Placement, ...],
    name: str,
    doc: str,
    constants: frozenset[str] | None = None,
) -> Program:
    """Return the program of one cluster: its loop nests run side by side, each under its schedule.

    The second kernels that loop nests need also run side by side.
    constants: the buffers that nothing in the graph writes, or None if no kernel may be launched dependently
        (`passes.launched_dependently`). Kernels whose programs wait for each other are never launched so.
        Kernels that leave counters at zero may be: no program touches a counter before the program's wait
        has ended, and the kernel that touched the counter last has ended by then.
    """
    name = f"{name}_" if name in GLOBAL else name
    signature = nests.signature
    numbers, tickets = itertools.count(), itertools.count()
    runs = nests.runs(placements)
    splits = [split_of(run, numbers, tickets) for run in runs]
    stored = [{**split.partials, **mailboxes(runs[i], i)} for i, split in enumerate(splits)]
    counters = (split.last.counter for split in splits if split.last is not None)
    scratch = (*itertools.chain.from_iterable(of_nest.values() for of_nest in stored), *counters)
    if any(run.together > 1 for run in runs):
        constants = None
    main = [
        Part(run, signature, scratch, split, of_nest, constants)
        for run, split, of_nest in zip(runs, splits, stored, strict=True)
    ]
    after = [
        Part(run, signature, scratch, Split(stores=run.a.loops.stores), constants=constants)
        for split in splits
        for loops, placement in split.stages
        for run in (Run(Analysis(loops), placement),)
    ]
    kernels = _kernels(main, name, doc)
    kernels += _kernels(after, f"{name}_finish", f"The partial results of {name}, summed.")
    text = " beside ".join(dict.fromkeys(map(str, placements)))
    misaligned = any(placement.misaligned for placement in placements)
    return Program(
        tuple(kernels),
        signature.inputs,
        signature.outputs,
        scratch,
        signature.sizes,
        signature.derived,
        text,
        word=WORD * max((b.dtype.itemsize for b in signature.inputs), default=0) if misaligned else 0,
        early=any(placement.early for placement in placements),
    )


def _kernels(parts: list[Part], name: str, doc: str) -> list[Kernel]:
    """Return the kernels of some parts, in as few launches as the parts allow."""
    launches: list[list[Part]] = []
    for part in parts:
        launch = next((g for g in launches if all(_may_share_launch(part, other) for other in g)), None)
        if launch is None:
            launches.append([part])
        else:
            launch.append(part)
    names = [name] if len(launches) == 1 else [f"{name}_{i}" for i in range(len(launches))]
    return [
        replace(_kernel(launch, kernel, doc), fp_fusion=not any(part.a.rounds_products for part in launch))
        for launch, kernel in zip(launches, names, strict=True)
    ]


def _may_share_launch(one: Part, other: Part) -> bool:
    """True if two loop nests lose nothing in one launch.

    A launch has one number of warps, and every program in it has the registers of the part that needs most.
    A part that needs few registers would therefore have fewer programs on a multiprocessor, unless the launch
    needs at most `ENOUGH_REGISTERS`. Programs that wait for each other have a launch to themselves.
    """
    fewer, more = sorted((one.run.registers, other.run.registers))
    same_warps = one.placement.num_warps == other.placement.num_warps
    same_launch = same_warps and one.run.together == other.run.together == 1
    return same_launch and more <= max(ENOUGH_REGISTERS, 2 * fewer)


def _kernel(parts: list[Part], name: str, doc: str) -> Kernel:
    """Return the kernel of one launch, in which each part has a contiguous range of the grid."""
    warps, stages = parts[0].placement.num_warps, max(part.placement.num_stages for part in parts)
    if len(parts) == 1:
        functions, body, grid = parts[0].program(name, tl.program_id(0))
        return parts[0].kernel(name, doc, functions, body, grid, warps, stages)
    program = Name("program")
    functions, calls = list[Function](), list[tuple[Dim, Do]]()
    end: Dim = 0
    for position, part in enumerate(parts):
        inner, body, grid = part.program(f"{name}_{position}", program)
        used = part.used(body)
        functions += [*inner, Function(f"{name}_{position}", (program, *used), body)]
        number = program if position == 0 else program - end
        end = simple(end + product(grid))
        calls.append((end, Do(Global(f"{name}_{position}")(number, *used))))
    *others, (_, last) = calls
    branches: list[Statement] = [last]
    for bound, call in reversed(others):
        branches = [If(program < bound, [call], branches)]
    body = [Assign((program,), tl.program_id(0)), *branches]
    return parts[0].kernel(name, doc, functions, body, (end,), warps, stages)


def mailboxes(run: Run, position: int) -> dict[str, Buffer]:
    """Return the scratch of programs that exchange reductions: a buffer for each message, [groups, receivers,
    senders]. A group of programs shares a row, or the axes in SHARED.

    The keys are the names that the emitter uses. position: that of the loop nest in its cluster.
    """
    if run.together == 1:
        return {}
    groups, all_messages = run.a.size(ROWS), messages(run.a)
    if run.sharing is not None:
        groups = product(leaf.extent for leaf in run.leaves if leaf.place is Place.GRID)
        together = run.sharing.together()
        all_messages = (message for numbers in together for message in messages_of(run.a, numbers))
    shape = (groups, run.parts, run.parts)
    names = [mailbox(message) for message in all_messages]
    return {
        name: Buffer(
            f"{name}_of_{position}" if position else name, shape, strides_of(shape), torch.int64, zeroed=True
        )
        for name in names
    }


class Part:
    """A part of a kernel is the tile program of one loop nest under its placement, with the parameters that
    kernels may take.

    named: buffers by the names that the emitter uses, where these are not their own.
    """

    def __init__(
        self,
        run: Run,
        signature: Signature,
        scratch: tuple[Buffer, ...],
        split: Split,
        named: Mapping[str, Buffer] = NO_BUFFERS,
        constants: frozenset[str] | None = None,
    ) -> None:
        self.run, self.a, self.placement = run, run.a, run.placement
        self.signature, self.scratch, self.split, self.constants = signature, scratch, split, constants
        self.empty = frozenset(b.name for b in signature.inputs if 0 in b.shape)
        self.parameters: dict[str, Argument] = {}
        for role, buffers in (
            (Role.INPUT, signature.inputs),
            (Role.OUTPUT, signature.outputs),
            (Role.SCRATCH, scratch),
        ):
            for i, buffer in enumerate(buffers):
                parameter = f"{PREFIX[role]}{i}_ptr" if role is not Role.SCRATCH else f"{buffer.name}_ptr"
                argument = Argument(parameter, role, i, buffer.dtype)
                if buffer.reuses is not None:
                    argument = replace(self.parameters[buffer.reuses], name=parameter)
                self.parameters[buffer.name] = argument
        for i, symbol in enumerate((*signature.sizes, *(symbol for symbol, _ in signature.derived))):
            self.parameters[f"size {symbol.name}"] = Argument(
                symbol.name, Role.SIZE, i, torch.int64, aligned=False
            )
        self.pointers = {b: Name(p.name) for b, p in self.parameters.items()}
        self.pointers |= {name: self.pointers[buffer.name] for name, buffer in named.items()}
        self.dtypes = {b: p.dtype for b, p in self.parameters.items()}

    def program(
        self, name: str, number: Expression
    ) -> tuple[list[Function], list[Statement], tuple[Dim, ...]]:
        """Return (functions that the body calls, body, grid). number: the program's number in the grid."""
        emitter = self.emitter()
        functions = self.replicated(emitter, f"{name}_first") if isinstance(emitter, ProductEmitter) else []
        body, grid = emitter.program(number, self.split)
        functions += self.last_program(emitter, f"{name}_last")
        return functions, self.finished(rewritten(body, self.roundings())), grid

    def emitter(self) -> Emitter:
        nest = PlacedNest(self.a, self.placement, self.pointers, self.dtypes, self.empty)
        carried = {n: of for n, of in self.run.carried.items() if isinstance(of, Carried)}
        if self.run.sharing is not None and (carried or is_chained(self.a, self.placement)):
            return CarryingEmitter(nest, self.run.sharing, carried)
        if self.run.sharing is not None:
            return ChainEmitter(nest, self.run.sharing)
        if self.run.in_rows:
            return AlignedRowEmitter(nest) if self.placement.word else RowEmitter(nest)
        return MatrixEmitter(nest) if multiplies_matrices(self.run) else ProductEmitter(nest)

    def roundings(self) -> Mapping[int, int]:
        """Return the stores that `stored_early` may move: none of misaligned rows, passes or other tiles."""
        if not self.run.in_rows or self.placement.word or self.run.in_passes:
            return NOTHING
        return roundings(self.a, self.a.loops.stores)

    def finished(self, body: list[Statement]) -> list[Statement]:
        """Return a body with the last rewrites: `stored_late`, and `launched_dependently` where allowed."""
        reused = ((b.name, b.reuses) for b in self.signature.outputs if b.reuses is not None)
        stored_late(body, {self.name(a): self.name(b) for a, b in reused})
        if self.constants is None:
            return body
        pointers = frozenset(b for b, p in self.parameters.items() if p.role is not Role.SIZE)
        constant = frozenset(map(self.name, pointers & self.constants))
        return launched_dependently(body, constant, frozenset(map(self.name, pointers)), self.placement.early)

    def last_program(self, emitter: Emitter, name: str) -> list[Function]:
        """Let the last of the programs that share reductions run their part of the second stage, and set its
        counter back to zero.

        That program sees all partial results: a draw, after a barrier of all threads, releases and acquires,
        and the loads bypass the L1 cache, which may hold older lines.
        Returns the second stage as a function of its own: its names mean other tiles than the caller's.
        """
        last = self.split.last
        if last is None:
            return []
        inner = Split(stores=last.loops.stores)
        part = Part(Run(Analysis(last.loops), last.placement), self.signature, self.scratch, inner)
        nest = PlacedNest(part.a, part.placement, part.pointers, part.dtypes, part.empty, FROM_L2)
        parameters = [Name("block")] if last.blocks else []
        body, _ = ProductEmitter(nest).program(parameters[0] if parameters else FIRST, inner)
        body, numbers = rewritten(body), [emitter.number_of(last.blocks)] if last.blocks else []
        pointers = part.used(body)
        emitter.add(Do(tl.debug_barrier()))
        call = Do(Global(name)(*numbers, *pointers))
        emitter.add(self.if_last(last.counter, numbers, last.programs, call))
        return [Function(name, (*parameters, *pointers), body)]

    def if_last(self, counter: Buffer, numbers: Sequence[Expression], programs: Dim, call: Do) -> If:
        """Return a call by the program that draws the last ticket, which sets the counter back to zero.
        numbers: of the counter, if there are several. programs: how many draw."""
        ticket = plus(Name(f"{counter.name}_ptr"), *numbers)
        last = tl.atomic_add(ticket, 1).eq(lift(simple(programs - 1)))
        return If(last, [Store(ticket, Literal(0)), call])

    def name(self, buffer: str) -> Name:
        return Name(self.parameters[buffer].name)

    def arguments(self, body: Sequence[Statement]) -> tuple[Argument, ...]:
        read = set[Variable]().union(*map(reads, body))
        return tuple(a for a in self.parameters.values() if Name(a.name) in read)

    def used(self, body: Sequence[Statement]) -> tuple[Name, ...]:
        return tuple(Name(argument.name) for argument in self.arguments(body))

    def kernel(
        self,
        name: str,
        doc: str,
        functions: Sequence[Function],
        body: list[Statement],
        grid: tuple[Dim, ...],
        warps: int,
        stages: int,
    ) -> Kernel:
        used = self.arguments(body)
        function = Function(name, tuple(Name(a.name) for a in used), body, doc)
        source = module([*functions, function])
        return Kernel(
            name,
            source,
            used,
            grid,
            warps,
            max(1, stages),
            self.run.together,
            self.placement.registers,
            dependent=self.constants is not None,
        )

    def replicated(self, emitter: ProductEmitter, name: str) -> list[Function]:
        """Return the function that makes replicated reductions, if there are any."""
        copies = Replicated.of(self.a, self.placement)
        if copies is None:
            return []
        placement = copies.placement(self.placement.num_warps)
        inner = RowEmitter(
            PlacedNest(Analysis(copies.loops), placement, self.pointers, self.dtypes, self.empty)
        )
        body = rewritten(copies.statements(inner, emitter))
        used = self.used(body)
        copies.enter(emitter, inner, Global(name)(*used))
        return [Function(name, used, body)]


def rewritten(body: list[Statement], stored_at_once: Mapping[int, int] = NOTHING) -> list[Statement]:
    """Return a tile program after the rewrites that every kernel has. stored_at_once: see `stored_early`."""
    if stored_at_once:
        stored_early(body, stored_at_once)
    joined(body)
    checked_late(body)
    return body


def roundings(a: Analysis, stores: Sequence[LoopStore]) -> dict[int, int]:
    """Return the nodes that round, each with the node that it rounds, if `stored_early` may move stores."""
    if right_neighbours(a.loops.axes, enumerate(stores)):
        return {}
    return {i: operands_of(n)[0] for i, n in enumerate(a.loops.nodes) if rounding_of(n) is not None}


PREFIX = {Role.INPUT: "in", Role.OUTPUT: "out"}
