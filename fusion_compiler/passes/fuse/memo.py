"""Lower and price sets of ops once if they differ by names and the salts of random numbers alone: a model
repeats its layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from fusion_compiler.ir.dag import OpDag, Ref
from fusion_compiler.ir.layout import is_view
from fusion_compiler.ir.loops import Load, LoopNest, Node, Random, exact
from fusion_compiler.ir.plan_data import Cost
from fusion_compiler.ops.own.random import uniform
from fusion_compiler.passes.lower.ranges import lookups
from fusion_compiler.passes.lower.space import Illegal

Names = tuple[str, ...]
Price = Callable[[Names, Names], tuple[LoopNest, Cost]]
Salts = tuple[object, ...]
Key = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]


class Memo:
    """A memo remembers `price` by structure: the ops in their order, the views between them, what they read.

    price: (ops, outputs) -> loop nest and cost; it raises Illegal, which is remembered too. It may depend
    on nothing but the ops, the views that lead to them, target and shape of the ops behind these views,
    whether an op's indices are known to be in range, and settled(op).
    """

    def __init__(self, dag: OpDag, price: Price, settled: Callable[[str], bool] = lambda _: False) -> None:
        self._dag, self._price, self._settled = dag, price, settled
        self._numbers: dict[object, int] = {}
        self._records: dict[tuple[str, bool], int] = {}
        self._results: dict[Key, tuple[Names, Salts, tuple[LoopNest, Cost] | Illegal]] = {}

    def __call__(self, ops: Names, outputs: Names) -> tuple[LoopNest, Cost]:
        key, names, salts = self._key(ops, outputs)
        if key not in self._results:
            try:
                self._results[key] = names, salts, self._price(ops, outputs)
            except Illegal as error:  # a new exception: the traceback of this one keeps much alive
                self._results[key] = names, salts, Illegal(error.rule, error.reason)
        before, salted, result = self._results[key]
        renamed = {a: b for a, b in zip(before, names, strict=True) if a != b}
        if isinstance(result, Illegal):
            words = re.sub(r"\w+", lambda word: renamed.get(word[0], word[0]), result.reason)
            raise Illegal(result.rule, words)
        loops, cost = result
        resalted = {a: b for a, b in zip(salted, salts, strict=True) if a != b}
        return (_renamed(loops, renamed, resalted) if renamed or resalted else loops), cost

    def _key(self, ops: Names, outputs: Names) -> tuple[Key, Names, Salts]:
        """Return the structure, with all names and salts that it stands for, by number."""
        numbers = {name: i for i, name in enumerate(ops)}
        salts: dict[object, int] = {}
        names = list(ops)
        rows: list[tuple[int, ...]] = []
        for i, name in enumerate(names):  # the list grows by the operands of its ops
            if i >= len(ops) and not is_view(self._dag.op(name)):
                rows.append((self._outside(name),))
                continue
            operands = self._dag.op(name).inputs
            for operand in operands:
                if operand not in numbers:
                    numbers[operand] = len(names)
                    names.append(operand)
            row = (self._record(name), *(numbers[operand] for operand in operands))
            op = self._dag.op(name)
            rows.append((*row, salts.setdefault(op.args[2], len(salts))) if op.target is uniform else row)
        return (tuple(rows), tuple(numbers[o] for o in outputs)), tuple(names), tuple(salts)

    def _record(self, name: str) -> int:
        """Return a number for the description of an op, in which operands are places."""
        key = name, self._settled(name)
        if key not in self._records:
            op = self._dag.op(name)
            args = op.args[:2] if op.target is uniform else op.args  # the salt is no part of the structure
            places = {operand: place for place, operand in enumerate(op.inputs)}
            described = (_exact(args, places), _exact(op.kwargs, places))
            checks = tuple(lookup.unproved for lookup in lookups(self._dag, op))
            self._records[key] = self._number(
                (op.target, op.kind, described, op.outputs, checks, op.reproducible, op.rounds, key[1])
            )
        return self._records[key]

    def _outside(self, name: str) -> int:
        op = self._dag.op(name)
        return self._number((op.target, op.outputs))

    def _number(self, described: object) -> int:
        return self._numbers.setdefault(described, len(self._numbers))


def _exact(value: object, places: Mapping[str, int]) -> object:
    """Return arguments as a key, operands by their places among the ops that are read."""
    if isinstance(value, Ref):
        return Ref, places[value.name]
    if isinstance(value, tuple):
        return tuple(_exact(v, places) for v in value)
    return exact(value)


def _renamed(loops: LoopNest, renamed: Mapping[str, str], resalted: Mapping[object, object]) -> LoopNest:
    def node(n: Node) -> Node:
        if isinstance(n, Load) and n.buffer in renamed:
            return replace(n, buffer=renamed[n.buffer])
        if isinstance(n, Random) and n.salt in resalted:
            return replace(n, salt=resalted[n.salt])
        return n

    nodes = tuple(map(node, loops.nodes))
    stores = tuple(replace(s, buffer=renamed.get(s.buffer, s.buffer)) for s in loops.stores)
    return LoopNest(loops.axes, nodes, stores, tuple(renamed.get(n, n) for n in loops.names))
