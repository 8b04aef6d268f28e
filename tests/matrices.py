"""Matrix products with many rows as loop nests, as lowering would write them, and their buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy
import torch
from torch import Tensor

from fusion_compiler.codegen import assemble
from fusion_compiler.ir.dims import Dim, hint
from fusion_compiler.ir.kernel import Buffer, Program
from fusion_compiler.ir.loops import COLS, INNER, Compute, Load, Reduce, Value
from fusion_compiler.runtime.launch import interpret
from fusion_compiler.schedule.placement import Placement
from tests.hand_made import contiguous
from tests.nests import TARGETS, Nest

NO_SIZES: Mapping[sympy.Symbol, int] = {}


class Products(Nest):
    """A nest of matrices [b, m, k] and [b, k, n], any of them transposed; one batch has no axis b.

    shapes, dtypes: those of the buffers, by name. dtype: of all matrices that say no other.
    """

    def __init__(
        self, m: Dim, n: Dim, k: Dim, b: int = 1, dtype: torch.dtype = torch.bfloat16, inner: str = "k"
    ) -> None:
        sizes: dict[str, Dim] = {"b": b, "m": m, "n": n, "k": k}
        names = [*(name for name in sizes if name not in inner), *inner]
        axes = {
            name: (sizes[name], INNER if name in inner else COLS) for name in names if name != "b" or b > 1
        }
        super().__init__(axes)
        self.dtype, self.batch = dtype, "b" if b > 1 else ""
        self.shapes, self.dtypes = dict[str, tuple[Dim, ...]](), dict[str, torch.dtype]()

    def described(self, name: str, axes: Sequence[str], dtype: torch.dtype) -> None:
        self.shapes[name], self.dtypes[name] = tuple(self.axes[axis][0] for axis in axes), dtype

    def read(self, name: str, axes: str, dtype: torch.dtype | None = None) -> Value:
        """Load a tensor that has some axes, in the order in which they lie in memory."""
        dtype = dtype or self.dtype
        self.described(name, axes, dtype)
        return self.load(name, *axes, dtype=dtype)

    def write(self, name: str, value: Value, axes: str, dtype: torch.dtype | None = None) -> None:
        dtype = dtype or self.dtype
        self.described(name, axes, dtype)
        self.store(name, value, *axes, dtype=dtype)

    def summed(self, value: Value, axes: str) -> Value:
        numbers = frozenset(list(self.axes).index(axis) for axis in axes)
        return self.push(Reduce("sum", value.node, numbers, torch.float32))

    def product(self, left: Value, right: Value) -> Value:
        return self.summed(self.mul(left, right), "k")

    def rounded(self, value: Value) -> Value:
        """Round to the dtype of the matrices, as eager does before a product."""
        operands = (("self", value), ("rounding", str(self.dtype)))
        return self.push(Compute(TARGETS["_to_copy.default"], operands, torch.float32))

    def memory(self) -> dict[str, Buffer]:
        return {name: contiguous(name, shape, self.dtypes[name]) for name, shape in self.shapes.items()}

    def program(self, placement: Placement, name: str = "product") -> Program:
        nests = assemble.Nests((self.nest(),), self.memory())
        return assemble.build(nests, (placement,), name, "")

    def inputs(self, sizes: Mapping[sympy.Symbol, int] = NO_SIZES, wide: float = 1.0) -> dict[str, Tensor]:
        """Return random tensors for what the nest loads."""
        loaded = {node.buffer for node in self.nodes if isinstance(node, Load)}
        shapes = {name: [hint(size, sizes) for size in self.shapes[name]] for name in sorted(loaded)}
        return {name: (wide * torch.randn(shape)).to(self.dtypes[name]) for name, shape in shapes.items()}

    def run(
        self, placement: Placement, inputs: Mapping[str, Tensor], sizes: Sequence[int] = ()
    ) -> dict[str, Tensor]:
        program = self.program(placement)
        outputs = interpret(program, [inputs[buffer.name] for buffer in program.inputs], sizes)
        return dict(zip((buffer.name for buffer in program.outputs), outputs, strict=True))
