"""Derive facts about a loop nest that the kinds of schedules and the code generator need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch.utils._sympy.functions import FloorDiv

from fusion_compiler.ir.dims import Dim, hint, product, quotient, upper_bound
from fusion_compiler.ir.loops import (
    COLS,
    GROUPS,
    INNER,
    RAGGED,
    ROWS,
    TILE,
    Checked,
    Compute,
    Constant,
    Coordinate,
    Index,
    Load,
    LoopNest,
    Random,
    Reduce,
    Scan,
    axes_in,
    cast_of,
    groups_of,
    operands_of,
    pair_of,
    reduced_groups,
    right_neighbours,
    rounding_of,
    store_operands,
    with_operands,
    with_readers,
)
from fusion_compiler.ir.moments import HALVES, mean_of_squares
from fusion_compiler.ir.rebuilt import Rebuilt
from fusion_compiler.ops.arithmetic import MUL
from fusion_compiler.schedule.carried import PEAKS, Carried, carried_of, plain_peaks
from fusion_compiler.schedule.chains import Chain
from fusion_compiler.schedule.matrices import Matrices
from fusion_compiler.schedule.products import Products, is_product
from fusion_compiler.schedule.shapes import WORD
from fusion_compiler.schedule.uses import Uses, uses_of
from fusion_compiler.schedule.windows import Windows, windows_of

MOST_FACTORS = 16  # of a product that is taken apart
SHORT = (*HALVES, str(torch.float8_e4m3fn), str(torch.float8_e5m2))  # with at most 11 significant bits


class Analysis:
    """An analysis derives facts about one loop nest, on first use."""

    def __init__(self, loops: LoopNest) -> None:
        self.loops = loops
        self.groups = groups_of(loops)
        reductions = ((i, n) for i, n in enumerate(loops.nodes) if isinstance(n, Reduce))
        self._reduced = {i: reduced_groups(loops.axes, n) for i, n in reductions}
        self.axes = {g: tuple(a for a in loops.axes if a.group == g) for g in GROUPS}
        self.first = {ROWS: 0, COLS: len(self.axes[ROWS])}
        self.rows, self.cols = (axes_in(loops.axes, (group,)) for group in GROUPS)
        self.ragged, self.inner = (axes_in(loops.axes, (group,)) for group in (RAGGED, INNER))
        self.sizes = {g: product(a.size for a in self.axes[g]) for g in GROUPS}

    @property
    def node_axes(self) -> tuple[frozenset[int], ...]:
        """Return the axes over which each node varies."""
        return self.loops.node_axes

    def size(self, group: str) -> Dim:
        return self.sizes[group]

    @cached_property
    def in_rows(self) -> bool:
        """True if tiles of rows and columns run the nest (`schedule.row_tiles`), rather than those of any
        axes or of products."""
        return not self.inner and self.products is None

    @cached_property
    def products(self) -> Products | None:
        """Return the products of few rows that the nest makes, and little else; None if it makes none."""
        return Products.of(self.loops, {})

    @cached_property
    def matrices(self) -> Matrices | None:
        """Return the products of matrices with many rows that the nest makes; None if it makes none."""
        return Matrices.of(self.loops) if self.inner else None

    @cached_property
    def chain(self) -> Chain | None:
        """Return the products of the nest that read products; None if it makes none."""
        return Chain.of(self.loops) if self.inner else None

    @cached_property
    def windows(self) -> Windows | None:
        """Return the windows of the nest (`schedule.windowed`); None if it has none, or is run otherwise. A
        filter is multiplied by windows, which overlap: those are no products of few rows."""
        are_products = self.in_rows or self.matrices is not None or is_product(self.loops, self.products)
        return None if are_products else windows_of(self.loops)

    def merged(self, index: Index) -> tuple[Index, dict[int, str]]:
        """Return (the index with each contiguous group of axes as one axis, {that axis: its group}).

        The last axis of the group stands for the group.
        """
        merged_axes: dict[int, str] = {}
        terms = dict(index.terms)
        for group in GROUPS:
            axes, first = self.axes[group], self.first[group]
            step = terms.get(first + len(axes) - 1, 0)
            if len(axes) > 1 and step != 0:
                inner = [product((step, *(a.size for a in axes[i + 1 :]))) for i in range(len(axes))]
                if all(terms.get(first + i, 0) == c for i, c in enumerate(inner)):
                    for i in range(len(axes) - 1):
                        terms.pop(first + i, None)  # absent where an inner axis is empty
                    merged_axes[first + len(axes) - 1] = group
        return Index(index.const, tuple(sorted(terms.items()))), merged_axes

    def lies_in_rows(self, index: Index) -> bool:
        """True if an access goes through a tensor row by row, without gaps, from the beginning of a word."""
        return self._steps_from_a_word(index) == {ROWS: self.size(COLS), COLS: 1}

    def lies_along_cols(self, index: Index) -> bool:
        """True if an access reads the same for every row, without gaps, from the beginning of a word."""
        return self._steps_from_a_word(index) == {COLS: 1}

    def _steps_from_a_word(self, index: Index) -> dict[str, Dim] | None:
        """Return the elements from one row to the next, and from one column to the next.

        Return None if the index has other terms, or starts within a word.
        """
        merged, merged_axes = self.merged(index)
        steps: dict[str, Dim] = {}
        for key, step in merged.terms:
            group = self.loops.axes[key].group if key >= 0 else ""
            if group and (key in merged_axes or len(self.axes[group]) == 1):
                steps[group] = step
        complete = len(steps) == len(merged.terms) and isinstance(index.const, int)
        return steps if complete and index.const % WORD == 0 else None

    @cached_property
    def contiguous(self) -> dict[str, int]:
        """Return how many full-size accesses are contiguous along the rows, and along the columns."""
        votes = {ROWS: 0, COLS: 0}
        indices = [n.index for n in self.loops.nodes if isinstance(n, Load)]
        for index in [*indices, *(s.index for s in self.loops.stores)]:
            groups = {self.loops.axes[k].group for k, _ in index.terms if k >= 0}
            for key, coeff in index.terms:
                if key >= 0 and coeff == 1 and groups == {ROWS, COLS}:
                    votes[self.loops.axes[key].group] += 1
        return votes

    def is_outer(self, index: Index, group: str, block: int) -> bool:
        """True if an access varies with outer axes of a group alone, and so is the same within each block."""
        inner = self.within_moving(index, group)
        return inner != 0 and quotient(inner, block) is not None

    def within_moving(self, index: Index, group: str) -> Dim:
        """Return how many elements of a group share each step of an access; 0 if it does not vary there."""
        axes, first = self.axes[group], self.first[group]
        moving = [key - first for key, _ in index.terms if first <= key < first + len(axes)]
        return product(a.size for a in axes[max(moving) + 1 :]) if moving else 0

    def gathers(self, rows: int, cols: int) -> bool:
        """True if lanes of a tile load scattered elements, or several loads gather from one buffer.

        The first is a mean over some rows and some columns, for example; the second, overlapping windows.
        """
        loads = [n for n in self.loops.nodes if isinstance(n, Load)]
        spread = (n.index for n in loads if self._is_gathered(n.index))
        gathered = Counter(n.buffer for n in loads if any(k < 0 for k, _ in n.index.terms))
        return max(gathered.values(), default=0) > 1 or any(
            not self.is_outer(i, ROWS, rows) and not self.is_outer(i, COLS, cols) for i in spread
        )

    def _is_gathered(self, index: Index) -> bool:
        if {self.loops.axes[k].group for k, _ in index.terms if k >= 0} != {ROWS, COLS}:
            return False
        steps = dict(index.terms)
        return all(steps.get(self.first[g] + len(self.axes[g]) - 1) != 1 for g in (ROWS, COLS))

    @cached_property
    def pairs(self) -> dict[int, int]:
        """Return {load of every other element: load of the right neighbours}."""
        loads = ((i, n) for i, n in enumerate(self.loops.nodes) if isinstance(n, Load))
        return right_neighbours(self.loops.axes, loads)

    @property
    def tall(self) -> bool:
        """True if full-size accesses are contiguous along the rows, so that a tile needs several rows."""
        return self.contiguous[ROWS] > 0

    @property
    def only_tall(self) -> bool:
        """True if all full-size accesses that are contiguous are so along the rows."""
        return self.tall and not self.mixed

    @property
    def mixed(self) -> bool:
        """True if some full-size accesses are contiguous along the rows and some along the columns."""
        return self.contiguous[ROWS] > 0 and self.contiguous[COLS] > 0

    @cached_property
    def uses(self) -> Mapping[int, Uses]:
        """Return, by reduction, what reads it."""
        return uses_of(self.loops, self.node_axes)

    @cached_property
    def over_different_axes(self) -> bool:
        """True if reductions are over different inner axes, and are no products."""
        several = bool(self.inner) and len({self.loops.reduction(n).axes for n in self.uses}) > 1
        return several and self.products is None

    @cached_property
    def late_axes(self) -> frozenset[int]:
        """Return the inner axes over which nothing is reduced but what is only stored."""
        read = (n for n, use in self.uses.items() if use.needs_all is not None or use.readers)
        return self.inner - frozenset[int]().union(*(self.loops.reduction(n).axes for n in read))

    @cached_property
    def reductions(self) -> tuple[int, ...]:
        """Return the numbers of the reductions, but those over a ragged axis."""
        return tuple(i for i, groups in self._reduced.items() if RAGGED not in groups)

    @cached_property
    def invariants(self) -> Mapping[int, tuple[int, ...]]:
        """Return {reduction over a ragged axis: nodes outside of its loop that the loop reads}."""
        nodes, invariants = self.loops.nodes, dict[int, tuple[int, ...]]()
        for i, node in enumerate(nodes):
            if isinstance(node, Reduce) and RAGGED in self.reduced_groups(i):
                outside = {n for n, axes in enumerate(self.node_axes) if axes.isdisjoint(node.axes)}
                invariants[i] = tuple(outside & with_operands(self.loops, operands_of(node), outside))
        return invariants

    @cached_property
    def scans(self) -> tuple[int, ...]:
        """Return the scans along the row; one program needs the whole row."""
        return tuple(i for i, n in enumerate(self.loops.nodes) if isinstance(n, Scan))

    @cached_property
    def directions(self) -> frozenset[bool]:
        """Return the directions of the scans; True is from the last column to the first."""
        return frozenset(n.reverse for n in self.loops.nodes if isinstance(n, Scan))

    def is_sum(self, number: int) -> bool:
        """True if a node is a sum of float32."""
        node = self.loops.nodes[number]
        return isinstance(node, Reduce) and node.combine == "sum" and node.dtype is torch.float32

    @cached_property
    def factors(self) -> tuple[Counter[int], ...]:
        """Return {factor: power} for each node. A node that is no product, or one of more than MOST_FACTORS,
        is its own only factor."""
        factors: list[Counter[int]] = []
        for i, node in enumerate(self.loops.nodes):
            product_of = Counter((i,))
            if isinstance(node, Compute) and node.dtype is torch.float32:
                operands, source = [factors[n] for n in pair_of(node, MUL)], cast_of(node)
                if operands and sum(f.total() for f in operands) <= MOST_FACTORS:
                    product_of = operands[0] + operands[1]
                elif source is not None and self.loops.nodes[source].dtype is torch.float32:
                    product_of = factors[source]
            factors.append(product_of)
        return tuple(factors)

    @cached_property
    def sums_along(self) -> tuple[int, ...]:
        """Return the sums of float32 along the row that depend on no other reduction of their level."""
        together = {*self.rescaled, *self.moments, *(total for total, _ in self.moments.values())}
        late = self.after_rows | together
        along = (i for i in self.reductions if self.is_sum(i) and COLS in self.reduced_groups(i))
        return tuple(i for i in along if i not in late)

    @cached_property
    def reads_rows(self) -> bool:
        """True if a reduction or scan goes along the rows, rather than only over them."""
        return bool(self.scans) or any(COLS in self.reduced_groups(i) for i in self.reductions)

    @cached_property
    def walks_rows(self) -> bool:
        """True if programs keep sums over rows while they reduce along the rows.

        Each program then has one partial result.
        """
        unknown = not isinstance(self.size(ROWS), int)
        return self.reads_rows and bool(self.across_rows) and (unknown or self.ends_in_a_row)

    @cached_property
    def stores_rows(self) -> bool:
        """True if a value that varies along the row is stored, so that rows are not only reduced."""
        return any(COLS in self.groups[s.value] for s in self.loops.stores)

    @cached_property
    def shareable(self) -> bool:
        """True if programs can exchange their reductions along the row, whose values need 32 bits."""
        if self.scans:
            return False
        nodes = (self.loops.nodes[i] for i in self.reductions if COLS in self.reduced_groups(i))
        along = (node for node in nodes if isinstance(node, Reduce))
        return isinstance(self.size(COLS), int) and all(accumulator_dtype(n).itemsize == 4 for n in along)

    @cached_property
    def full_loads(self) -> int:
        """Return how many tensors are loaded over all axes of the nest."""
        loads = [n for n in self.loops.nodes if isinstance(n, Load)]
        return len({n.buffer for n in loads if len(n.index.terms) >= len(axes_in(self.loops.axes, TILE))})

    @cached_property
    def across_rows(self) -> tuple[int, ...]:
        """Return the reductions over rows, which are complete only when every program is done."""
        return tuple(i for i in self.reductions if ROWS in self.reduced_groups(i))

    def reduced_groups(self, node: int) -> frozenset[str]:
        """Return the groups of axes that a reduction reduces."""
        return self._reduced[node]

    @cached_property
    def along(self) -> tuple[int, ...]:
        """Return the reductions that a program completes by itself, if its tile has all of their terms."""
        return tuple(n for n in self.reductions if n not in self.across_rows)

    @cached_property
    def per_row(self) -> frozenset[int]:
        """Return the reductions that keep one number for each row between the blocks of a loop."""
        totals = (total for total, _ in self.moments.values())
        peaks = (of.reads[0] for of in self.rescaled.values())
        return frozenset({*self.rescaled, *peaks, *self.moments, *totals})

    @cached_property
    def live(self) -> tuple[Mapping[int, int], ...]:
        """Return the bytes of an element of the values that are live together, by their nodes, before each
        node after which fewer are. Nodes are computed in their order; without a reduction, all is stored in
        the end."""
        nodes, last_use = self.loops.nodes, dict[int, int]()
        for i, node in enumerate(nodes):
            last_use.update(dict.fromkeys(operands_of(node), i))
        for i, node in reversed(list(enumerate(nodes))):
            if isinstance(node, Checked):  # a check is its operand
                last_use[node.operand] = max(last_use[node.operand], last_use.get(i, i))
        if not self.reductions:
            last_use |= dict.fromkeys((store.value for store in self.loops.stores), len(nodes))
        live, moments = dict[int, int](), list[Mapping[int, int]]()
        for i, node in enumerate(nodes):
            if i in self.after_rows:
                continue
            if not isinstance(node, Constant | Checked):
                live[i] = 1 if node.dtype is torch.bool else node.dtype.itemsize
            left = {n: size for n, size in live.items() if last_use.get(n, -1) > i}
            if len(left) < len(live):
                moments.append(live)
            live = left
        return (*moments, live)

    @cached_property
    def live_by_axes(self) -> tuple[Mapping[frozenset[int], int], ...]:
        """Return the numbers of `live`, added up over values that vary over the same axes."""
        by_axes = list[Mapping[frozenset[int], int]]()
        for moment in self.live:
            sums = dict[frozenset[int], int]()
            for n, size in moment.items():
                sums[self.node_axes[n]] = sums.get(self.node_axes[n], 0) + size
            by_axes.append(sums)
        return tuple(by_axes)

    @cached_property
    def after_rows(self) -> frozenset[int]:
        """Return the nodes that wait for a reduction over the rows, which no program of the main kernel can
        complete alone."""
        return with_readers(self.loops, self.across_rows)

    @cached_property
    def ends_in_a_row(self) -> bool:
        """True if the nodes that wait for sums over rows form a row rather than one element."""
        stored = (s.index for s in self.loops.stores if s.value in self.after_rows)
        axes = (self.loops.axes[k] for index in stored for k, _ in index.terms if k >= 0)
        return any(a.group == COLS for a in axes) or any(COLS in self.groups[i] for i in self.after_rows)

    def _is_along_columns(self, number: int) -> bool:
        return self.reduced_groups(number) == frozenset({COLS})

    @cached_property
    def rescaled(self) -> Mapping[int, Carried]:
        """Return the sums that a loop over the columns makes together with the maximum or minimum that they
        read, such as sum(exp(x - max(x))) (Milakov and Gimelshein, 2018)."""
        along = {n: self.loops.reduction(n) for n in self.reductions if self._is_along_columns(n)}
        peaks = {n for n, node in along.items() if node.combine in PEAKS}
        laws = ((n, carried_of(self.loops, n)) for n in along if peaks and n not in peaks)
        return {n: of for n, of in laws if isinstance(of, Carried) and of.of_peak and of.shift is None}

    @cached_property
    def moments(self) -> dict[int, tuple[int, int]]:
        """Return {sum((x - mean)^2): (sum(x), mean)} if only the mean reads sum(x)."""
        users = Counter(o for n in self.loops.nodes for o in operands_of(n))
        users.update(o for s in self.loops.stores for o in store_operands(s))
        moments: dict[int, tuple[int, int]] = {}
        for number in self.reductions:
            pair = mean_of_squares(self.loops, number) if self._is_along_columns(number) else None
            if pair is not None and users[pair[0]] == 1 and pair not in moments.values():
                moments[number] = pair
        return moments

    @cached_property
    def level(self) -> tuple[int, ...]:
        """Return how many passes over the columns must precede each node."""
        levels: list[int] = []
        for i, node in enumerate(self.loops.nodes):
            depth = max((levels[o] for o in operands_of(node)), default=0)
            if i in self.rescaled:
                depth = levels[self.rescaled[i].reads[0]]
            elif i in self.moments:
                depth = levels[self.moments[i][0]]
            elif isinstance(node, Reduce) and COLS in self.reduced_groups(i):
                depth += 1
            levels.append(depth)
        return tuple(levels)

    @cached_property
    def nan_safe_max(self) -> frozenset[int]:
        """Return the maxima whose NaN reaches every store through a sum anyway."""
        return plain_peaks(self.loops, self.rescaled)

    def fp16_values(self, dtypes: Mapping[str, torch.dtype]) -> frozenset[int]:
        """Return the float32 values on which only results of 16 bits or less depend.

        dtypes: those of the buffers.

        The kernel may compute these values approximately. A value that the kernel rounds to 16 bits or less
        is such a result. exp(x - max(x)) may be approximate in its sum: the errors of a term, 2^-22 of it and
        2^-24 of the exponent that makes it small, do not exceed those of the addition. Operands of scans are
        exact, since errors add up or multiply along the row. Reproducible values are exact, since they must
        be the same number in every kernel.
        """
        nodes = self.loops.nodes
        exact = {i for i, n in enumerate(nodes) if n.dtype is not torch.float32}
        computed = {i: n for i, n in enumerate(nodes) if isinstance(n, Compute)}
        reproducible = {i for i, n in computed.items() if n.reproducible and not n.single_producer}
        exact |= reproducible
        exact |= {i for i in range(len(nodes)) if rounding_of(nodes[i]) not in (None, *SHORT)}
        exact |= {s.value for s in self.loops.stores if str(dtypes[s.buffer]) not in SHORT}
        exact |= {o for i in self.scans for o in operands_of(nodes[i])}
        for i in range(len(nodes) - 1, -1, -1):
            if i in exact and i in self.rescaled:
                (term,) = operands_of(nodes[i])
                exact.update(operands_of(nodes[term]))
            elif i in exact and (rounding_of(nodes[i]) not in SHORT or i in reproducible):
                exact.update(operands_of(nodes[i]))
        return frozenset(range(len(nodes))) - exact

    @cached_property
    def rounds_products(self) -> bool:
        """True if a product must be rounded before it is added.

        Compilers fuse the two in one kernel and not in another, and a reproducible value must be the same in
        both.
        """
        nodes = (n for n in self.loops.nodes if isinstance(n, Compute) and n.reproducible)
        return any(n.spec.multiplies or dict(n.operands).get("alpha", 1) != 1 for n in nodes)

    @cached_property
    def furthest(self) -> int:
        """Return the largest element offset of any access; -1 if a size is only known at run time."""
        worst = 0
        indices = [n.index for n in self.loops.nodes if isinstance(n, Load | Coordinate | Random)]
        for index in [*indices, *(s.index for s in self.loops.stores)]:
            reach = index.const
            for key, coeff in index.terms:
                if key < 0:
                    continue
                reach = reach + coeff * (self.loops.axes[key].size - 1)
            reach = upper_bound(reach)
            if not isinstance(reach, int):
                return -1
            worst = max(worst, reach)
        return max(worst, hint(self.size(ROWS)) * hint(self.size(COLS)))


# A program adds up at most so many blocks of rows one after the other. If all terms are equal, each block
# costs 2^-26 of the sum, and more blocks would lose more than eager's order of summation does.
MOST_TURNS = 256


def enough(programs: int, count: int, rows: int) -> int:
    """Return `programs`, or more if a program would have to add more than `MOST_TURNS` blocks of `rows`."""
    return max(programs, -(-count // (rows * MOST_TURNS)))


def ceil_div(a: Dim, b: int) -> Dim:
    if isinstance(a, int):
        return -(-a // b)
    return a if b == 1 else FloorDiv(a + (b - 1), b)  # type: ignore[return-value]



def along_rows_first(loops: LoopNest) -> LoopNest:
    """Split each reduction over both groups into one along the row and one over the rows.

    Passes over the columns never hold a whole row, so each block has to be reduced before the next.
    """
    new, (rows, cols) = Rebuilt(loops), (axes_in(loops.axes, (group,)) for group in (ROWS, COLS))
    for i, node in enumerate(loops.nodes):
        if rows and cols and isinstance(node, Reduce) and node.axes == rows | cols:
            along = new.add(replace(node, operand=new.numbers[node.operand], axes=cols), loops.names[i])
            new.numbers[i] = new.add(replace(node, operand=along, axes=rows), loops.names[i])
        else:
            new.keep(i)
    return new.done()


def accumulator_dtype(reduce: Reduce) -> torch.dtype:
    """Return the dtype in which a reduction is accumulated and stored as a partial result."""
    return torch.int32 if reduce.combine in ("any", "all") else reduce.dtype
