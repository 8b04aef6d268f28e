"""Legality: whether a nest can run under a placement."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import not_above, product
from fusion_compiler.ir.kernel import Buffer
from fusion_compiler.ir.loops import Load, LoopNest, Reduce, operands_of, store_operands, with_operands
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.boxes import box_of
from fusion_compiler.schedule.placed_axes import placed
from fusion_compiler.schedule.placement import On, Place, Placement, Stage
from fusion_compiler.schedule.run import Run
from fusion_compiler.schedule.tile_products import product_of

MOST_PARTS = 512  # of carried reductions, which are merged in one tile
MOST_COPIES = 256  # of one statement, that unrolled axes make
DESCRIPTORS = 90  # the first compute capability that has tensor descriptors, times ten
NO_BUFFERS: Mapping[str, Buffer] = {}


def refusal(
    loops: LoopNest,
    placement: Placement,
    buffers: Mapping[str, Buffer] = NO_BUFFERS,
    device: DeviceSpec | None = None,
) -> str | None:
    """Return why a nest cannot run under a placement, or None if it can. buffers, device: as for
    `refusal_of`."""
    try:
        run = Run(Analysis(loops), placement)
    except ValueError as error:
        return str(error)
    return refusal_of(run, buffers, device)


def refusal_of(
    run: Run, buffers: Mapping[str, Buffer] = NO_BUFFERS, device: DeviceSpec | None = None
) -> str | None:
    """Return why a nest cannot run as a run says, or None if it can. buffers, device: where the placement has
    descriptors; those buffers, and all that the nest stores, and the device if it is known."""
    loops, placement, leaves, copies = run.a.loops, run.placement, run.leaves, 1
    for leaf in leaves:
        if leaf.place in (Place.LANES, Place.UNROLL):
            if not isinstance(leaf.extent, int):
                return f"{leaf.name} has {leaf.extent} elements, which a tile cannot hold"
            copies *= leaf.extent if leaf.place is Place.UNROLL else 1
    if copies > MOST_COPIES:
        return f"unrolled axes repeat a statement {copies} times, more than {MOST_COPIES}"
    for directive in placement.directives:
        if isinstance(directive, On):
            numbers = (n for n, name in enumerate(loops.names) if name == directive.reduction)
            if not any(product_of(loops, n, run.where) for n in numbers):
                return f"{directive}: {directive.reduction} is no sum of products of two tiles"
    if run.a.matrices is not None and (reason := _unfinished(run)) is not None:
        return reason
    if run.sharing is not None and run.sharing.refusal is not None:
        return run.sharing.refusal
    for number, carried in run.carried.items():
        if isinstance(carried, str):
            return carried
        count = len(placed(run.where.of_axes(run.a.loops.reduction(number).axes), Place.LOOP))
        if run.sharing is None or count != 1:
            return f"{loops.names[number]} is carried by a loop over its axis, and there are {count}"
        parts = product(leaf.extent for leaf in run.sharing.leaves.get(number, ()))
        if not not_above(parts, MOST_PARTS):
            return f"{parts} programs share {loops.names[number]}, and one merges at most {MOST_PARTS} parts"
    on_grid = {axis for leaf in leaves if leaf.place is Place.GRID for axis in leaf.members}
    of_each = placement.combined(Stage.EACH)
    waits = list[dict[frozenset[int], int]]()  # shared reductions, by the axes that they reduce
    for number, node in enumerate(loops.nodes):
        before = {axes: n for o in operands_of(node) for axes, n in waits[o].items() if n not in run.merged}
        if before and (isinstance(node, Reduce) or len(before) > 1):
            return f"{loops.names[number]} needs {loops.names[min(before.values())]}, which programs share"
        is_shared = isinstance(node, Reduce) and loops.names[number] not in of_each
        shared = node.axes & on_grid if isinstance(node, Reduce) and is_shared else frozenset[int]()
        waits.append({node.axes: number} if isinstance(node, Reduce) and shared else before)
    for name in sorted(placement.descriptors):
        if device is not None and not has_descriptors(device):
            return f"{device.target} has no tensor descriptors"
        loads = [node for node in loops.nodes if isinstance(node, Load) and node.buffer == name]
        if not loads:
            return f"the nest loads no {name}"
        if name not in buffers:
            return f"nothing is known about {name}"
        if any(buffer.reuses == name for buffer in buffers.values()):
            return f"{name} is overwritten"
        if buffers[name].dtype is torch.bool:
            return f"{name} has elements of {buffers[name].dtype}"
        boxes = (box_of(loops, load, leaves, buffers[name].dtype.itemsize) for load in loads)
        if (reason := next((box for box in boxes if isinstance(box, str)), None)) is not None:
            return reason
    return None


def _unfinished(run: Run) -> str | None:
    """Return why a second stage cannot finish the reductions of which programs with products have parts."""
    loops, last = run.a.loops, run.where.last_group()
    on_grid = {axis for leaf in run.leaves if leaf.place is Place.GRID for axis in leaf.members}
    reductions = {n: node for n, node in enumerate(loops.nodes) if isinstance(node, Reduce)}
    parts = {n for n, node in reductions.items() if node.axes & on_grid}
    if last is not None:
        _, _, blocks = last
        for n in sorted(parts):
            if reductions[n].axes & blocks.members:
                return f"{loops.names[n]} has parts of {blocks.extent} blocks, and the last group has fewer"
    for store in loops.stores:
        needed = with_operands(loops, store_operands(store), parts)
        if not needed.isdisjoint(parts) and (others := needed & reductions.keys() - parts):
            return f"what is stored of {loops.names[min(needed & parts)]} needs {loops.names[min(others)]}"
    return None


def has_descriptors(device: DeviceSpec) -> bool:
    """True if a device loads through tensor descriptors."""
    capability = re.fullmatch(r"sm_(\d+)", device.target)
    return capability is not None and int(capability[1]) >= DESCRIPTORS
