"""Build a loop nest node by node from another one."""

from __future__ import annotations

from torch._ops import OpOverload

from fusion_compiler.ir.loops import LoopNest, Node, applied, renumber, renumber_axes, renumber_store


class Rebuilt:
    """Builds a loop nest node by node from an old one. numbers: maps each old node to the new node with its
    value."""

    def __init__(self, loops: LoopNest) -> None:
        self.loops = loops
        self.nodes: list[Node] = []
        self.names: list[str] = []
        self.numbers: dict[int, int] = {}

    def add(self, node: Node, name: str) -> int:
        self.nodes.append(node)
        self.names.append(name)
        return len(self.nodes) - 1

    def keep(self, number: int) -> None:
        node = renumber(self.loops.nodes[number], self.numbers)
        self.numbers[number] = self.add(node, self.loops.names[number])

    def apply(self, name: str, target: OpOverload, /, *operands: int, **literals: float) -> int:
        """Add an operator of new nodes and of literals (see `ir.loops.applied`)."""
        return self.add(applied(self.nodes, target, *operands, dtype=None, **literals), name)

    def done(self) -> LoopNest:
        stores = tuple(renumber_store(s, self.numbers) for s in self.loops.stores)
        axes = renumber_axes(self.loops.axes, self.numbers)
        return LoopNest(axes, tuple(self.nodes), stores, tuple(self.names))
