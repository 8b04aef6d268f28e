"""Compare, with verify=True, each cluster's kernel with its fx subgraph, and each kernel of the user's with
its pattern's code, once, and decide what to make of the difference.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from fusion_compiler.errors import KernelError, UserKernelError, WarnOnce
from fusion_compiler.ir.dag import OpDag
from fusion_compiler.ir.plan_text import aligned

# The two sides round at different places: a sum of n terms in another order, 16-bit results between ops.
ROUNDINGS = 64
WORSE = 4  # times as far from float64 as the pattern's own code a user's kernel may be


@dataclass(frozen=True)
class Verified:
    """A row has the error of one output of one cluster, or of one kernel of the user's, at its first call.

    error: largest absolute difference. scale: largest finite absolute value of the fx subgraph's output.
    bound: what `error` may be: 64 roundings, at that scale, of the narrowest float dtype that eager stores on
        the way or at the end. Integers must be equal.
    Of a user's kernel, and of a result that differs by more, all three are against the code in float64, see
    `compare_with_exact`.
    """

    cluster: str
    output: str
    dtype: torch.dtype
    error: float
    scale: float
    bound: float

    @property
    def agrees(self) -> bool:
        return self.error <= self.bound


@dataclass
class Verification:
    """The table of a compilation is filled as clusters are called for the first time.

    nothing: why it stays empty, if there are no kernels.
    """

    rows: list[Verified] = field(default_factory=list[Verified])
    nothing: str = ""

    def __str__(self) -> str:
        if not self.rows:
            return self.nothing or "nothing has been verified yet: compile with verify=True and call it once"
        table = [("cluster", "output", "dtype", "error", "of at most", "allowed", "")]
        for row in self.rows:
            numbers = (f"{row.error:.1e}", f"{row.scale:.1e}", f"{row.bound:.1e}")
            dtype = str(row.dtype).removeprefix("torch.")
            table.append((row.cluster, row.output, dtype, *numbers, "" if row.agrees else "WRONG"))
        return "\n".join(aligned(table, left=(0, 1, 2, 6)))


def coarsest(dag: OpDag, ops: Iterable[str]) -> float:
    """Return the rounding of the narrowest float dtype among the results of some ops."""
    dtypes = [meta.dtype for name in ops for meta in dag.op(name).outputs]
    return max((torch.finfo(d).eps for d in dtypes if d.is_floating_point), default=0.0)


def compare(cluster: str, output: str, got: Tensor, want: Tensor, coarsest: float = 0.0) -> Verified:
    """Return the row with the largest difference; NaN and infinities must be where the other has them.
    coarsest: the rounding of the narrowest float between the two ends, if that is not the result's."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return Verified(cluster, output, want.dtype, torch.inf, 0.0, 0.0)
    a, b = got.detach().to(torch.float64), want.detach().to(torch.float64)
    same = (a == b) | (a.isnan() & b.isnan())
    wrong = torch.where(same, 0.0, (a - b).abs()).nan_to_num(torch.inf)
    finite = b[b.isfinite()].abs()
    error = float(wrong.max()) if wrong.numel() else 0.0
    scale = float(finite.max()) if finite.numel() else 0.0
    epsilon = max(torch.finfo(want.dtype).eps, coarsest) if want.is_floating_point() else 0.0
    return Verified(cluster, output, want.dtype, error, scale, ROUNDINGS * epsilon * scale)


def compare_with_exact(kernel: str, output: str, got: Tensor, want: Tensor, exact: Tensor | None) -> Verified:
    """Compare a user's kernel with its pattern's code run in float64, if that can be and has the same form.

    It may be off by one rounding of its dtype, by 64 of float32 (float64 for float64), or four times as far
    as the code in the tensors' own dtypes, `want`, is.
    """
    if exact is None or not want.is_floating_point() or exact.shape != want.shape or got.dtype != want.dtype:
        return compare(kernel, output, got, want)
    plain = compare(kernel, output, want.to(torch.float64), exact.to(torch.float64))
    row = compare(kernel, output, got.to(torch.float64), exact.to(torch.float64))
    wide = torch.float64 if want.dtype is torch.float64 else torch.float32
    rounding = max(torch.finfo(want.dtype).eps, ROUNDINGS * torch.finfo(wide).eps)
    return replace(row, dtype=want.dtype, bound=max(WORSE * plain.error, rounding * row.scale))


@dataclass(frozen=True, eq=False)
class KernelCheck:
    """A check handles the results of a user's kernel at its first call; one belongs to one compilation."""

    verification: Verification
    warned: WarnOnce

    def __call__(
        self,
        kernel: str,
        outputs: Sequence[str],
        got: Sequence[Tensor],
        want: Sequence[Tensor],
        exact: Sequence[Tensor] | None,
    ) -> bool:
        """True if the results hold. Otherwise return False with one FusionWarning; strict raises KernelError.

        got: of the kernel. want: of its pattern's code. exact: of that in float64; None where it has none.
        """
        truth = exact if exact is not None else [None] * len(want)
        rows = [compare_with_exact(kernel, *row) for row in zip(outputs, got, want, truth, strict=True)]
        self.verification.rows.extend(rows)
        bad = next((row for row in rows if not row.agrees), None)
        if bad is None:
            return True
        detail = (
            f"{bad.output} differs from the pattern's code by {bad.error:.1e} of at most {bad.scale:.1e}, "
            f"{bad.bound:.1e} is allowed"
        )
        self.warned.fall_back(f"verify {kernel}", UserKernelError(kernel=kernel, detail=detail))
        return False


def in_float64(module: fx.GraphModule) -> Callable[..., Sequence[Tensor]]:
    """Return a graph of ATen ops with float64 in the place of every float dtype, also of arguments and
    results."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        node.args = map_aggregate(node.args, _wide)
        node.kwargs = map_aggregate(node.kwargs, _wide)
    wide = fx.GraphModule(module, graph)
    return lambda *arguments: wide(*map(_wide, arguments))


def _wide(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


class Verifier:
    """A verifier is a cluster's runner that compares on its first call and is gone from then on.

    If the results differ by more than rounding, both are compared with the fx subgraph run in float64: where
    values cancel, either may be rounding alone. If the kernel's are then still wrong, or of another shape or
    dtype, the fx subgraph's are returned, then and later, with one FusionWarning; strict raises KernelError.
    written: positions of the arguments into which a cluster writes; the comparison writes into copies.
    """

    def __init__(
        self,
        run: Callable[..., Sequence[Tensor]],
        reference: fx.GraphModule,
        name: str,
        outputs: tuple[str, ...],
        coarsest: float,
        verification: Verification,
        warned: WarnOnce,
        written: frozenset[int] = frozenset(),
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self._reference, self._outputs, self._verification = reference, outputs, verification
        self._coarsest = coarsest
        self._run, self._warned, self._written = run, warned, written
        self._entry: Callable[..., Sequence[Tensor]] = self._first
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> Sequence[Tensor]:
        return self._entry(*arguments)

    def _first(self, *arguments: Any) -> Sequence[Tensor]:
        with self._lock:
            if self._entry != self._first:  # another thread was faster
                return self._entry(*arguments)
            before = [a.clone() if i in self._written else a for i, a in enumerate(arguments)]
            want = self._reference(*(a.clone() if i in self._written else a for i, a in enumerate(arguments)))
            got = self._run(*arguments)
            rows = [
                compare(self.__name__, *row, self._coarsest)
                for row in zip(self._outputs, got, want, strict=True)
            ]
            if not all(row.agrees for row in rows):
                rows = self._held_to_float64(rows, before, got, want)
            self._verification.rows.extend(rows)
            bad = next((row for row in rows if not row.agrees), None)
            self._entry = self._run if bad is None else self._reference
        if bad is None:
            return got
        detail = f"{bad.output} differs from its fx subgraph by {bad.error:.1e}, {bad.bound:.1e} is allowed"
        error = KernelError(kernel=self.__name__, action="verify", detail=detail)
        self._warned.fall_back(f"verify {self.__name__}", error)
        return self._reference(*arguments) if self._written else want

    def _held_to_float64(
        self, rows: list[Verified], arguments: Sequence[Any], got: Sequence[Tensor], want: Sequence[Tensor]
    ) -> list[Verified]:
        """Return the rows again, those that disagree with their errors against float64."""
        try:
            exact = in_float64(self._reference)(*arguments)
        except (RuntimeError, TypeError):  # an operator that has no float64, or reads bits
            return rows
        return [
            row if row.agrees else compare_with_exact(row.cluster, row.output, *tensors)
            for row, *tensors in zip(rows, got, want, exact, strict=True)
        ]
