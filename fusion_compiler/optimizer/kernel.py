"""The kernel of some formulas, over any number of parameters of any sizes.

A program updates one block of one parameter. Two tables say where that is: `blocks` holds the parameter and
the block of each program, and `places` holds the addresses of each parameter's tensors, its number of
elements, its set of numbers, and its formula (groups with and without weight decay differ in that):

    blocks[program] = (parameter, block)      int32
    places[parameter] = (address of each tensor, elements, set, formula)      int64

The numbers of a single set are arguments. The numbers of several sets, for example of groups with different
learning rates, are a third table, numbers[set], in float32 or float64.

Whole blocks run a function without masks, and the rest at a parameter's end another function. Both are the
same tile program, printed twice: a mask's bound would hide that addresses are multiples of 16 bytes, and no
access would move words of 16 bytes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fusion_compiler.codegen.assemble import rewritten, roundings
from fusion_compiler.codegen.rows import RowEmitter
from fusion_compiler.codegen.text import module
from fusion_compiler.codegen.tile import Assign, Do, Function, If, Statement
from fusion_compiler.codegen.values import PlacedNest, Tile
from fusion_compiler.ir.dag import OpDag, build
from fusion_compiler.ir.kernel import Argument, Kernel, Role
from fusion_compiler.ir.loops import COLS, Index, Load, LoopNest
from fusion_compiler.ops.syntax import DTYPES, Expression, Global, Name, fm, plus, times, tl
from fusion_compiler.optimizer.formula import GRAD, Formula, Refused
from fusion_compiler.passes.lower.lower import lower
from fusion_compiler.passes.lower.simplify import simplify
from fusion_compiler.passes.lower.space import Illegal
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.placement import At, Place, Placement

BLOCK, WARPS = 1024, 4  # measured: 0.99 of the copy bandwidth over one flat tensor (AdamW in bfloat16, H200)
COUNT, FACTOR = "count", "factor"
PLACES, BLOCKS, NUMBERS = Name("places_ptr"), Name("blocks_ptr"), Name("numbers_ptr")
# Stochastic rounding adds these arguments to a block's program: the key of this step, the parameter's
# position, and the position of the block's first element in the parameter.
RANDOM = ("seed", "parameter", "first")


@dataclass(frozen=True)
class Variant:
    """A variant says how a kernel differs from others of the same formulas and dtypes.

    aligned: every address is a multiple of 16 bytes. table: of several sets of numbers, each with its
    formula. clipped: gradients are multiplied by a factor in the device's memory. stochastic: the parameter,
    in bfloat16, is rounded at random.
    """

    aligned: bool = True
    table: bool = False
    clipped: bool = False
    stochastic: bool = False


@dataclass(frozen=True)
class _Body:
    """A `_Body` holds a formula's two functions, for whole blocks and for the rest.

    tensors: names of the tensors. used: the tensors that it touches. numbers: names of the numbers, in order,
    with their meanings. parameters: those of the functions.
    """

    name: str
    tensors: tuple[str, ...]
    used: tuple[str, ...]
    numbers: Mapping[str, str]
    parameters: tuple[Name, ...]
    functions: tuple[Function, Function]


def kernel_of(
    formulas: Sequence[Formula], dtypes: Sequence[torch.dtype], name: str, variant: Variant
) -> Kernel:
    """Return the kernel of formulas of one structure. dtypes: those of the structure's `tensors`, in order.

    Its arguments are the tables, the formula's numbers if there is a single set, the address of the
    gradients' factor and the key of random numbers; the caller chooses its grid, one program for each row of
    `blocks`. Raises Refused if a dtype has no kernel.
    """
    if unknown := [d for d in dtypes if d not in DTYPES]:
        raise Refused(f"no kernel holds {unknown[0]}")
    alone = len(formulas) == 1
    bodies = [
        _body(formula, dtypes, name if alone else f"{name}_{i}", variant)
        for i, formula in enumerate(formulas)
    ]
    structure = formulas[0].structure
    arguments = [
        Argument("places_ptr", Role.INPUT, 0, torch.int64),
        Argument("blocks_ptr", Role.INPUT, 1, torch.int32),
    ]
    if variant.table:
        arguments.append(Argument("numbers_ptr", Role.INPUT, 2, structure.dtype))
    if variant.clipped:
        arguments.append(Argument(f"{FACTOR}_ptr", Role.INPUT, 3, structure.dtype, aligned=False))
    numbers = () if variant.table else tuple(bodies[0].numbers)
    scalars = [(number, structure.dtype) for number in numbers]
    scalars += [(seed, torch.int64) for seed in RANDOM[:1] if variant.stochastic]
    arguments += [Argument(n, Role.NUMBER, i, dtype, aligned=False) for i, (n, dtype) in enumerate(scalars)]
    entry = Function(
        name, tuple(Name(a.name) for a in arguments), _entry(dtypes, bodies, variant), _doc(name, bodies)
    )
    source = module([*(function for body in bodies for function in body.functions), entry])
    return Kernel(name, source, tuple(arguments), (1,), WARPS)


def _body(formula: Formula, dtypes: Sequence[torch.dtype], name: str, variant: Variant) -> _Body:
    dag = build(formula.body, lambda node: None)
    tensors, numbers = dag.inputs[: len(dtypes)], dag.inputs[len(dtypes) :]
    loops = _loops(dag)
    changed = {out: tensors[at] for out, at in zip(dag.outputs, formula.updated, strict=True)}
    home = {tensor: tensor for tensor in tensors} | changed
    pointers = {buffer: Name(f"{tensor}_ptr") for buffer, tensor in home.items()}
    pointers |= {number: Name(number) for number in numbers}
    held = dict(zip(tensors, dtypes, strict=True)) | dict.fromkeys(numbers, formula.structure.dtype)
    held |= {out: held[tensor] for out, tensor in changed.items()}
    touched = {home[buffer] for buffer in _buffers(loops) if buffer in home}
    used = tuple(tensor for tensor in tensors if tensor in touched)
    factor = (FACTOR,) if variant.clipped else ()
    random = RANDOM if variant.stochastic else ()
    parameters = tuple(map(Name, (*(f"{tensor}_ptr" for tensor in used), *numbers, *factor, *random)))
    clipped = tensors[formula.structure.tensors.index(GRAD)] if variant.clipped else None
    rounded = dag.outputs[formula.updated.index(0)] if variant.stochastic else None
    block, rest = (
        _program(loops, pointers, held, numbers, masked, clipped, rounded) for masked in (False, True)
    )
    functions = (
        Function(f"{name}_block", parameters, block),
        Function(f"{name}_rest", (*parameters, Name(COUNT)), rest),
    )
    meanings = dict(zip(numbers, formula.meanings, strict=True))
    return _Body(name, tuple(tensors), used, meanings, parameters, functions)


def _loops(dag: OpDag) -> LoopNest:
    """Return the loop nest of a formula's body, over the columns of one block."""
    ops = tuple(name for name in dag.order if name not in dag.inputs)
    try:
        loops = simplify(lower(dag, ops, dag.outputs))
    except Illegal as error:
        raise Refused(str(error)) from error
    along = Index(0, ((0, 1),))
    indices = [n.index for n in loops.nodes if isinstance(n, Load)] + [s.index for s in loops.stores]
    if len(loops.axes) != 1 or any(i not in (along, Index(0, ())) for i in indices):
        raise Refused("an element's update depends on other elements")
    return replace(loops, axes=(replace(loops.axes[0], name="col", size=BLOCK, group=COLS),))


def _buffers(loops: LoopNest) -> set[str]:
    return {n.buffer for n in loops.nodes if isinstance(n, Load)} | {s.buffer for s in loops.stores}


def _program(
    loops: LoopNest,
    pointers: dict[str, Name],
    dtypes: dict[str, torch.dtype],
    numbers: Sequence[str],
    masked: bool,
    clipped: str | None,
    rounded: str | None,
) -> list[Statement]:
    """Return the tile program of a block. masked: the parameter may end within the block. clipped: the buffer
    that is multiplied by the factor. rounded: the buffer that is rounded at random."""
    emitter = _BlockEmitter(loops, pointers, dtypes, masked)
    tiles = emitter.scopes[0].tiles
    for i, node in enumerate(loops.nodes):
        if isinstance(node, Load) and node.buffer in numbers:
            tiles[emitter.key(i)] = Tile(Name(node.buffer))
    for i, node in enumerate(loops.nodes):
        if isinstance(node, Load) and node.buffer == clipped:
            tile = emitter.tile(i)
            value = emitter.let("clipped", tile.value * Name(FACTOR))
            tiles[emitter.key(i)] = replace(tile, value=value)
    for value in (store.value for store in loops.stores if store.buffer == rounded):
        tile = emitter.tile(value)
        seed, parameter, first = map(Name, RANDOM)
        words = fm.words_block(seed, first // 4 + tl.arange(0, BLOCK // 4), parameter)
        random = emitter.let("rounded", fm.stochastic(tile.value, words))
        tiles[emitter.key(value)] = replace(tile, value=random)
    emitter.block(loops.stores)
    return rewritten(emitter.scopes[0].body, roundings(emitter.a, loops.stores))


class _BlockEmitter(RowEmitter):
    """Emit the program of one block. masked: elements from COUNT on do not exist."""

    def __init__(
        self, loops: LoopNest, pointers: Mapping[str, Name], dtypes: Mapping[str, torch.dtype], masked: bool
    ) -> None:
        placement = Placement((At(loops.axes[0].name, Place.LANES),), WARPS)
        super().__init__(PlacedNest(Analysis(loops), placement, pointers, dtypes))
        self.masked_end, self.fp16 = masked, frozenset()  # no fp16: errors of updates add up over many steps

    def inside(self, axes: frozenset[int]) -> Tile | None:
        col, _ = self.coordinate(0)
        if not self.masked_end or not axes or col is None:
            return None
        return self.check("col", col, 0, Name(COUNT))


def _doc(name: str, bodies: Sequence[_Body]) -> str:
    """Return the docstring of a kernel, which says what it does and what its numbers are."""
    lines: list[str] = []
    for body in bodies:
        if len(bodies) > 1:
            lines.append(f"{body.name}:")
        for number, meaning in body.numbers.items():
            lines += textwrap.wrap(f"{number} = {meaning}", 104, subsequent_indent="    ")
    text = "\n".join(lines)
    return f"One step of {name} for a block of one parameter.\n\n{text}\n"


def _entry(dtypes: Sequence[torch.dtype], bodies: Sequence[_Body], variant: Variant) -> list[Statement]:
    """Return the statements that find a program's block and call the function of its formula."""
    tensors = bodies[0].tensors
    width = len(tensors) + 3
    statements: list[Statement] = []

    def let(name: str, value: Expression) -> Name:
        statements.append(Assign((Name(name),), value))
        return Name(name)

    program = let("program", tl.program_id(0))
    parameter = let("parameter", tl.load(BLOCKS + times(2, program)))
    place = let("place", PLACES + parameter.to(torch.int64) * width)
    first = let("first", tl.load(plus(BLOCKS, times(2, program), 1)).to(torch.int64) * BLOCK)
    count = let(COUNT, tl.load(place + (width - 3)) - first)
    for at, tensor in enumerate(tensors):
        if any(tensor in body.used for body in bodies):
            pointer = tl.load(place + at).to(tl.pointer_type(dtypes[at])) + first
            let(f"{tensor}_ptr", tl.multiple_of(pointer, 16) if variant.aligned else pointer)
    if variant.table:
        most = max(bodies, key=lambda body: len(body.numbers)).numbers
        numbers = let("numbers", NUMBERS + tl.load(place + (width - 2)) * len(most))
        for i, number in enumerate(most):
            let(number, tl.load(numbers + i))
    if variant.clipped:
        let(FACTOR, tl.load(Name(f"{FACTOR}_ptr")))
    if len(bodies) == 1:
        return [*statements, _call(bodies[0], count)]
    formula = let("formula", tl.load(place + (width - 1)))
    return [*statements, *(If(formula.eq(i), [_call(body, count)]) for i, body in enumerate(bodies))]


def _call(body: _Body, count: Name) -> If:
    block, rest = (Global(function.name) for function in body.functions)
    return If(count >= BLOCK, [Do(block(*body.parameters))], [Do(rest(*body.parameters, count))])
