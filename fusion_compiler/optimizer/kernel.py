"""The kernel of a formula, over any number of parameters of any sizes.

A program takes one block of one parameter. Where that lies is in two tables: `blocks`, of which block of
which parameter, and `places`, of the addresses of each parameter's tensors and its number of elements:

    blocks[program] = (parameter, block)      int32
    places[parameter] = (address of each tensor, elements)      int64

Whole blocks go one way, without masks, and what is left at a parameter's end another. Both are the same tile
program, printed twice: a mask's bound would hide that addresses are multiples of 16 bytes, and nothing would
be moved in words of 16.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fusion_compiler.codegen.assemble import text_of
from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.expression import TRITON_TYPES
from fusion_compiler.codegen.names import HEADER, problem
from fusion_compiler.codegen.nodes import build_nodes
from fusion_compiler.codegen.regions import whole_block
from fusion_compiler.ir.dag import OpDag, build
from fusion_compiler.ir.kernel import Argument, Kernel, Role
from fusion_compiler.ir.loops import COLS, Index, Load, LoopNest
from fusion_compiler.optimizer.formula import Formula, Refused
from fusion_compiler.passes.lower.lower import lower
from fusion_compiler.passes.lower.simplify import simplify
from fusion_compiler.passes.lower.space import Illegal
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.schedule import Cols, Schedule

BLOCK, WARPS = 1024, 4  # measured: .99 of the copy bandwidth over one flat tensor (AdamW in bfloat16, H200)
COUNT = "count"
# What stochastic rounding adds to the arguments of a block's program: the key of this step, which parameter
# it is, and which of its elements is the block's first.
RANDOM = ("seed", "parameter", "first")


def kernel_of(
    formula: Formula,
    dtypes: Sequence[torch.dtype],
    name: str,
    aligned: bool = True,
    stochastic: bool = False,
) -> Kernel:
    """The kernel of a formula for tensors of some dtypes, in the order of `formula.structure.tensors`.

    Its arguments are the tables and the formula's numbers; its grid is the caller's, one program for each row
    of `blocks`. aligned: every address is a multiple of 16 bytes. stochastic: the parameter, in bfloat16, is
    rounded at random, by the key that is the last argument. Raises Refused where a dtype has no kernel.
    """
    if unknown := [d for d in dtypes if d not in TRITON_TYPES]:
        raise Refused(f"no kernel holds {unknown[0]}")
    dag = build(formula.body, lambda node: None)
    tensors, numbers = dag.inputs[: len(dtypes)], dag.inputs[len(dtypes) :]
    loops = _loops(dag)
    changed = {out: tensors[at] for out, at in zip(dag.outputs, formula.updated, strict=True)}
    home = {tensor: tensor for tensor in tensors} | changed
    pointers = {buffer: f"{tensor}_ptr" for buffer, tensor in home.items()} | {n: n for n in numbers}
    held = dict(zip(tensors, dtypes, strict=True)) | dict.fromkeys(numbers, formula.structure.dtype)
    held |= {out: held[tensor] for out, tensor in changed.items()}
    touched = {home[buffer] for buffer in _buffers(loops) if buffer in home}
    used = tuple(tensor for tensor in tensors if tensor in touched)
    given = ", ".join([*(f"{t}_ptr" for t in used), *numbers, *(RANDOM if stochastic else ())])
    rounded = dag.outputs[formula.updated.index(0)] if stochastic else None
    block, rest = (_body(loops, pointers, held, numbers, masked, rounded) for masked in (False, True))
    seeds = RANDOM[:1] if stochastic else ()
    source = (
        f"{HEADER}"
        f"@triton.jit\ndef {name}_block({given}):\n{block}\n\n\n"
        f"@triton.jit\ndef {name}_rest({given}, {COUNT}):\n{rest}\n\n\n"
        f"@triton.jit\ndef {name}({', '.join(('places_ptr', 'blocks_ptr', *numbers, *seeds))}):\n"
        f"{_doc(name, dict(zip(numbers, formula.meanings, strict=True)))}"
        f"{_entry(name, tensors, dtypes, used, given, aligned)}"
    )
    wrong = problem(source)
    assert wrong is None, f"the text of {name} is no kernel: {wrong}"
    arguments = (
        Argument("places_ptr", Role.INPUT, 0, torch.int64),
        Argument("blocks_ptr", Role.INPUT, 1, torch.int32),
        *(Argument(n, Role.NUMBER, i, formula.structure.dtype, aligned=False) for i, n in enumerate(numbers)),
        *(Argument(n, Role.NUMBER, len(numbers), torch.int64, aligned=False) for n in seeds),
    )
    return Kernel(name, source, arguments, (1,), WARPS)


def _loops(dag: OpDag) -> LoopNest:
    """The nest of a formula's body, over the columns of one block."""
    ops = tuple(name for name in dag.order if name not in dag.inputs)
    try:
        loops = simplify(lower(dag, ops, dag.outputs))
    except Illegal as error:
        raise Refused(str(error)) from error
    along = Index(0, ((0, 1),))
    indices = [n.index for n in loops.nodes if isinstance(n, Load)] + [s.index for s in loops.stores]
    if len(loops.axes) != 1 or any(i not in (along, Index(0, ())) for i in indices):
        raise Refused("its elements are not updated each from itself")
    return replace(loops, axes=(replace(loops.axes[0], size=BLOCK, group=COLS),))


def _buffers(loops: LoopNest) -> set[str]:
    return {n.buffer for n in loops.nodes if isinstance(n, Load)} | {s.buffer for s in loops.stores}


def _body(
    loops: LoopNest,
    pointers: dict[str, str],
    dtypes: dict[str, torch.dtype],
    numbers: Sequence[str],
    masked: bool,
    rounded: str | None,
) -> str:
    """The tile program of a block, masked where it may end within. rounded: what is rounded at random."""
    b = Builder(Analysis(loops), Schedule(1, BLOCK, Cols.GRID, num_warps=WARPS), pointers, dtypes)
    b.rough = frozenset()  # what is trained by it adds up over many steps
    for i, node in enumerate(loops.nodes):
        if isinstance(node, Load) and node.buffer in numbers:
            b.env[i] = node.buffer
    b.define("col", f"tl.arange(0, {BLOCK})")
    if masked:
        b.define("col_inside", f"col < {COUNT}")
        b.tile = replace(b.tile, col_mask="col_inside")
    for value in (store.value for store in loops.stores if store.buffer == rounded):
        build_nodes(b, b.need((value,)))
        words = f"fm.words_block(seed, first // 4 + tl.arange(0, {BLOCK // 4}), parameter)"
        b.env[value] = b.let("rounded", f"fm.stochastic({b.env[value]}, {words})")
    whole_block(b)
    return text_of(b)


def _doc(name: str, numbers: Mapping[str, str]) -> str:
    """What the kernel does, and what its numbers are."""
    lines = [f"{number} = {meaning}" for number, meaning in numbers.items()]
    wrapped = (part for line in lines for part in textwrap.wrap(line, 104, subsequent_indent="    "))
    text = "\n    ".join(wrapped)
    return f'    """One step of {name} for a block of one parameter.\n\n    {text}\n    """\n'


def _entry(
    name: str,
    tensors: Sequence[str],
    dtypes: Sequence[torch.dtype],
    used: Sequence[str],
    given: str,
    aligned: bool,
) -> str:
    """What finds a program's block and hands it on, with what a block's program is given."""
    width = len(tensors) + 1
    lines = [
        "program = tl.program_id(0)",
        "parameter = tl.load(blocks_ptr + 2 * program)",
        f"place = places_ptr + parameter.to(tl.int64) * {width}",
        f"first = tl.load(blocks_ptr + 2 * program + 1).to(tl.int64) * {BLOCK}",
        f"{COUNT} = tl.load(place + {width - 1}) - first",
    ]
    for tensor in used:
        at = tensors.index(tensor)
        kind = f"tl.pointer_type({TRITON_TYPES[dtypes[at]]})"
        pointer = f"tl.load(place + {at}).to({kind}) + first"
        lines.append(f"{tensor}_ptr = {f'tl.multiple_of({pointer}, 16)' if aligned else pointer}")
    lines += [
        f"if {COUNT} >= {BLOCK}:",
        f"    {name}_block({given})",
        "else:",
        f"    {name}_rest({given}, {COUNT})",
    ]
    return "".join(f"    {line}\n" for line in lines)
