"""Compute affine indices: maps from points of the iteration space to elements of tensors.

A tensor's coordinates are one `Index` per dimension. View operators regroup coordinates without moving data.
`regroup` computes the new coordinates. If that would split an axis, it raises `NeedsSplit`, so that the
caller can refine the space and start again.
"""

from __future__ import annotations

from math import gcd

from fusion_compiler.ir.dims import Dim, not_above, product, quotient, simple, strides_of
from fusion_compiler.ir.loops import Index

ZERO = Index(0, ())


class NotExpressible(Exception):
    """The layout is not affine over any refinement of the space."""


class NeedsSplit(Exception):
    """The axis `axis` must be split in two, with an inner axis of extent `inner`."""

    def __init__(self, axis: int, inner: Dim) -> None:
        super().__init__(axis, inner)
        self.axis, self.inner = axis, inner


def axis(number: int) -> Index:
    """Return the index that is the axis itself."""
    return Index(0, ((number, 1),))


def combine(parts: list[tuple[Index, Dim]]) -> Index:
    """Return sum(index * factor)."""
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
    """Return an index with `value` in place of the axis `key`."""
    coeff = dict(index.terms).get(key)
    if coeff is None:
        return index
    return Index(simple(index.const + coeff * value), tuple((k, c) for k, c in index.terms if k != key))


def divided(index: Index, step: int) -> tuple[Index, int] | None:
    """Return (index // step, index % step) if the remainder is the same for every element, else None."""
    terms = [(k, quotient(c, step)) for k, c in index.terms]
    if not isinstance(index.const, int) or any(c is None for _, c in terms):
        return None
    const, rest = divmod(index.const, step)
    return Index(const, tuple((k, c) for k, c in terms if c is not None)), rest


def flatten(coords: tuple[Index, ...], strides: tuple[Dim, ...]) -> Index:
    """Return the element number of coordinates under strides."""
    return (
        combine([(c, s) for c, s in zip(coords, strides, strict=True) if c is not ZERO]) if coords else ZERO
    )


class Extents:
    """Extents belong to the keys of index terms: sizes of axes, and lengths of indirectly indexed
    dimensions."""

    def __init__(self, axes: tuple[Dim, ...]) -> None:
        self.axes = axes
        self.indirect: dict[int, Dim] = {}
        self.narrowed: dict[int, Dim] = {}

    def of(self, key: int) -> Dim:
        return self.axes[key] if key >= 0 else self.indirect[key]

    def limits(self, index: Index) -> tuple[Dim, Dim]:
        """Return the smallest and the largest value of an index."""
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
        if size in (0, 1):  # an empty tensor has no element to ask for
            out.append(ZERO)
            continue
        index, low = _divide(index, size, extents)
        out.append(low)
    if sizes:
        out.append(index)
    return tuple(reversed(out))


def _divide(index: Index, size: Dim, extents: Extents) -> tuple[Index, Index]:
    """Return (index // size, index % size). Raises NeedsSplit or NotExpressible if they are not affine."""
    high: list[tuple[int, Dim]] = []
    low: list[tuple[int, Dim]] = []
    for key, coeff in index.terms:
        ratio = quotient(coeff, size)
        if ratio is None:
            low.append((key, coeff))
        else:
            high.append((key, ratio))
    const: Dim = 0
    rest = index.const
    if isinstance(rest, int) and isinstance(size, int):
        const, rest = divmod(rest, size)
    elif (ratio := quotient(rest, size)) is not None:
        const, rest = ratio, 0
    remainder = Index(rest, tuple(low))
    smallest, largest = extents.limits(remainder)
    if not_above(0, smallest) and not_above(largest, size - 1):
        return Index(const, tuple(high)), remainder
    for key, coeff in low:  # an axis that crosses the boundary must be split there
        inner = quotient(size, coeff)
        if key >= 0 and inner is not None and inner != 1 and not_above(size, coeff * extents.of(key)):
            if quotient(extents.of(key), inner) not in (None, 1):
                raise NeedsSplit(key, inner)
    # an axis of 6 viewed as (2, 3) beside another viewed as (3, 2): split by the common factor
    for key, coeff in low:
        if key >= 0 and isinstance(coeff, int) and isinstance(size, int) and isinstance(extents.of(key), int):
            inner_int = size // gcd(size, coeff)
            if 1 < inner_int < extents.of(key) and extents.of(key) % inner_int == 0:
                raise NeedsSplit(key, inner_int)
    raise NotExpressible(f"cannot split an index at {size}")


def regroup(
    coords: tuple[Index, ...], shape: tuple[Dim, ...], into: tuple[Dim, ...], extents: Extents
) -> tuple[Index, ...]:
    """Return coordinates in a tensor of shape `into` of the element at `coords` of its view of shape `shape`.

    Dimensions are matched in runs of equal product, so dimensions that the view does not change keep their
    index. A dimension of size 1 gets index 0.
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
    """True if the axes in `coords` visit every element of `shape` exactly once."""
    flat = flatten(coords, strides_of(shape))
    if flat.const != 0 or any(key < 0 for key, _ in flat.terms):
        return False
    remaining = list(flat.terms)
    step: Dim = 1
    while remaining:
        term = next((t for t in remaining if t[1] == step), None)
        if term is None:
            return False
        remaining.remove(term)
        step = simple(step * extents.of(term[0]))
    return simple(product(shape)) == step
