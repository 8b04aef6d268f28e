"""Affine index algebra: how an element of a tensor is found from a point of the iteration space.

A tensor's coordinates are one `Index` for each dimension. View operators regroup coordinates
without moving data: `regroup` finds the new ones, and where that would cut an axis in two it says
which (`NeedsSplit`), so that the caller can refine the space and start again.
"""

from __future__ import annotations

from math import gcd

from fusion_compiler.ir.dims import Dim, not_above, product, quotient, simple, strides_of
from fusion_compiler.ir.loops import Index

ZERO = Index(0, ())


class NotExpressible(Exception):
    """The layout is not affine over any refinement of the space."""


class NeedsSplit(Exception):
    """Axis `axis` has to become two, the inner one of extent `inner`."""

    def __init__(self, axis: int, inner: Dim) -> None:
        super().__init__(axis, inner)
        self.axis, self.inner = axis, inner


def axis(number: int) -> Index:
    return Index(0, ((number, 1),))


def combine(parts: list[tuple[Index, Dim]]) -> Index:
    """sum(index * factor)."""
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    const: Dim = 0
    terms: dict[int, Dim] = {}
    for index, factor in parts:
        const = const + index.const * factor
        for key, coeff in index.terms:
            terms[key] = terms.get(key, 0) + coeff * factor
    return Index(simple(const), tuple(sorted((k, simple(c)) for k, c in terms.items() if c != 0)))


def shifted(index: Index, offset: Dim) -> Index:
    return index if offset == 0 else Index(simple(index.const + offset), index.terms)


def fixed(index: Index, key: int, value: Dim) -> Index:
    """An index where one of its axes has a value."""
    at = dict(index.terms).get(key)
    if at is None:
        return index
    return Index(simple(index.const + at * value), tuple((k, c) for k, c in index.terms if k != key))


def divided(index: Index, step: int) -> tuple[Index, int] | None:
    """(index // step, index % step) where the latter is the same for every element; else None."""
    terms = [(k, quotient(c, step)) for k, c in index.terms]
    if not isinstance(index.const, int) or any(c is None for _, c in terms):
        return None
    whole, over = divmod(index.const, step)
    return Index(whole, tuple((k, c) for k, c in terms if c is not None)), over


def flatten(coords: tuple[Index, ...], strides: tuple[Dim, ...]) -> Index:
    """The element number of coordinates under strides."""
    return (
        combine([(c, s) for c, s in zip(coords, strides, strict=True) if c is not ZERO]) if coords else ZERO
    )


class Extents:
    """Upper limits of the keys of index terms: axis sizes, and the lengths that gathers index.

    narrowed: lower limits of axes, where what is computed counts only under a condition that implies them.
    """

    def __init__(self, axes: tuple[Dim, ...]) -> None:
        self.axes = axes
        self.indirect: dict[int, Dim] = {}
        self.narrowed: dict[int, Dim] = {}

    def of(self, key: int) -> Dim:
        return self.axes[key] if key >= 0 else self.indirect[key]

    def limits(self, index: Index) -> tuple[Dim, Dim]:
        """Smallest and largest value of an index."""
        low = high = index.const
        for key, coeff in index.terms:
            reach = coeff * (self.narrowed.get(key, self.of(key)) - 1)
            if not_above(0, coeff):
                high = high + reach
            else:
                low = low + reach
        return simple(low), simple(high)


def digits(index: Index, sizes: tuple[Dim, ...], extents: Extents) -> tuple[Index, ...]:
    """Split an element number into coordinates of a row-major shape."""
    out: list[Index] = []
    for size in reversed(sizes[1:]):
        if size in (0, 1):  # of an empty tensor no element is ever asked for
            out.append(ZERO)
            continue
        index, low = _divide(index, size, extents)
        out.append(low)
    if sizes:
        out.append(index)
    return tuple(reversed(out))


def _divide(index: Index, size: Dim, extents: Extents) -> tuple[Index, Index]:
    """(index // size, index % size), exactly."""
    high: list[tuple[int, Dim]] = []
    low: list[tuple[int, Dim]] = []
    for key, coeff in index.terms:
        ratio = quotient(coeff, size)
        if ratio is None:
            low.append((key, coeff))
        else:
            high.append((key, ratio))
    whole: Dim = 0
    rest = index.const
    if isinstance(rest, int) and isinstance(size, int):
        whole, rest = divmod(rest, size)
    elif (ratio := quotient(rest, size)) is not None:
        whole, rest = ratio, 0
    remainder = Index(rest, tuple(low))
    smallest, largest = extents.limits(remainder)
    if not_above(0, smallest) and not_above(largest, size - 1):
        return Index(whole, tuple(high)), remainder
    for key, coeff in low:  # an axis that runs across the boundary has to be cut there
        inner = quotient(size, coeff)
        if key >= 0 and inner is not None and inner != 1 and not_above(size, coeff * extents.of(key)):
            if quotient(extents.of(key), inner) not in (None, 1):
                raise NeedsSplit(key, inner)
    # axis of 6 seen as (2, 3) beside another of (3, 2): cut by the common factor
    for key, coeff in low:
        if key >= 0 and isinstance(coeff, int) and isinstance(size, int) and isinstance(extents.of(key), int):
            inner_int = size // gcd(size, coeff)
            if 1 < inner_int < extents.of(key) and extents.of(key) % inner_int == 0:
                raise NeedsSplit(key, inner_int)
    raise NotExpressible(f"cannot split an index at {size}")


def regroup(
    coords: tuple[Index, ...], shape: tuple[Dim, ...], into: tuple[Dim, ...], extents: Extents
) -> tuple[Index, ...]:
    """Coordinates in a tensor of shape `into` of the element at `coords` of its view of shape `shape`.

    Dimensions are matched in runs of equal product, so that what a view leaves alone passes as it is; of one
    element there is only the first, whatever the others are.
    """
    out: list[Index] = []
    i = j = 0
    while i < len(shape) or j < len(into):
        if j < len(into) and into[j] == 1:
            out.append(ZERO)
            j += 1
            continue
        if i < len(shape) and shape[i] == 1:
            i += 1
            continue
        start_i, start_j = i, j
        left = shape[i] if i < len(shape) else 1
        right = into[j] if j < len(into) else 1
        i, j = min(i + 1, len(shape)), min(j + 1, len(into))
        while simple(left) != simple(right):
            if i < len(shape) and (j == len(into) or not_above(left, right)):
                left, i = left * shape[i], i + 1
            elif j < len(into):
                right, j = right * into[j], j + 1
            else:
                raise NotExpressible(f"view {shape} -> {into}")
        run, target = coords[start_i:i], into[start_j:j]
        if len(run) == 1 and len(target) == 1:
            out.append(run[0])
        else:
            flat = flatten(run, strides_of(shape[start_i:i]))
            out.extend(digits(flat, target, extents))
    return tuple(out)


def is_bijection(coords: tuple[Index, ...], shape: tuple[Dim, ...], extents: Extents) -> bool:
    """Whether the axes in `coords` visit every element of `shape` exactly once."""
    flat = flatten(coords, strides_of(shape))
    if flat.const != 0 or any(key < 0 for key, _ in flat.terms):
        return False
    remaining = list(flat.terms)
    step: Dim = 1
    while remaining:
        found = next((t for t in remaining if t[1] == step), None)
        if found is None:
            return False
        remaining.remove(found)
        step = simple(step * extents.of(found[0]))
    return simple(product(shape)) == step
