"""Index algebra against arithmetic: every claim is checked at every point of a small space."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_compiler.ir.index import (
    Extents,
    NeedsSplit,
    NotExpressible,
    axis,
    combine,
    digits,
    divided,
    fixed,
    flatten,
    is_bijection,
    regroup,
    shifted,
)
from fusion_compiler.ir.loops import Index


def points(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, sizes))


def at(index: Index, point: tuple[int, ...]) -> int:
    """The value of an index of integers at a point of its axes."""
    return int(index.const) + sum(int(coeff) * point[key] for key, coeff in index.terms)


def row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    steps = [1]
    for size in reversed(sizes[1:]):
        steps.insert(0, steps[0] * size)
    return tuple(steps[: len(sizes)])


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(shapes, st.integers(-7, 7), st.integers(-3, 3))
@settings(derandomize=True, deadline=None)
def test_combined_indices_are_sums(sizes: tuple[int, ...], offset: int, factor: int) -> None:
    one = flatten(tuple(map(axis, range(len(sizes)))), row_major(sizes))
    both = combine([(one, factor), (shifted(axis(0), offset), 2)])
    for point in points(sizes):
        assert at(both, point) == at(one, point) * factor + 2 * (point[0] + offset)
    low, high = Extents(sizes).limits(both)
    assert {low, high} <= {at(both, p) for p in points(sizes)} or len(both.terms) == 0
    assert all(low <= at(both, p) <= high for p in points(sizes))


@given(st.lists(st.sampled_from((1, 2, 3, 4, 6, 8, 12)), min_size=1, max_size=3).map(tuple), st.data())
@settings(derandomize=True, deadline=None)
def test_a_view_shows_the_element_of_the_same_number(shape: tuple[int, ...], data: st.DataObject) -> None:
    """regroup is exact where it answers; where it asks for a split, splitting leads to an answer."""
    count = 1
    for size in shape:
        count *= size
    into: list[int] = []
    rest = count
    while rest > 1 and len(into) < 3:
        into.append(data.draw(st.sampled_from([f for f in range(1, rest + 1) if rest % f == 0])))
        rest //= into[-1]
    target = (*into, rest)
    factors = [[s] for s in shape]
    for _ in range(20):
        sizes = tuple(f for parts in factors for f in parts)
        numbers = iter(range(len(sizes)))
        coords = tuple(
            flatten(tuple(axis(next(numbers)) for _ in parts), row_major(tuple(parts))) for parts in factors
        )
        try:
            seen = regroup(coords, shape, target, Extents(sizes))
        except NeedsSplit as split:
            flat = [(d, i) for d, parts in enumerate(factors) for i in range(len(parts))]
            d, i = flat[split.axis]
            assert factors[d][i] % split.inner == 0
            factors[d][i : i + 1] = [factors[d][i] // int(split.inner), int(split.inner)]
            continue
        except NotExpressible:
            return  # (2, 3) seen as (3, 2): no axis is cut by both
        for point in points(sizes):
            number = at(flatten(coords, row_major(shape)), point)
            assert at(flatten(seen, row_major(target)), point) == number
            assert all(0 <= at(c, point) < s for c, s in zip(seen, target, strict=True))
        return
    pytest.fail("splits without an end")


@given(
    st.lists(st.integers(2, 5), min_size=1, max_size=4).map(tuple), st.permutations(range(4)), st.booleans()
)
@settings(derandomize=True, deadline=None)
def test_a_bijection_visits_every_element_once(
    sizes: tuple[int, ...], order: list[int], broken: bool
) -> None:
    axes = [a for a in order if a < len(sizes)]
    shape = tuple(sizes[a] for a in axes)
    coords = tuple(axis(a) for a in axes)
    if broken:
        coords = (shifted(coords[0], 1), *coords[1:])
    visited = sorted(at(flatten(coords, row_major(shape)), p) for p in points(sizes))
    count = len(visited)
    assert is_bijection(coords, shape, Extents(sizes)) == (visited == list(range(count)))


@given(shapes, st.integers(-9, 9), st.sampled_from((2, 3, 4)), st.data())
@settings(derandomize=True, deadline=None)
def test_an_index_at_a_value_and_in_steps(
    sizes: tuple[int, ...], const: int, step: int, data: st.DataObject
) -> None:
    index = shifted(combine([(axis(i), 12 * (i + 1)) for i in range(len(sizes))]), const)
    key, quotient = data.draw(st.integers(0, len(sizes) - 1)), divided(index, step)
    assert quotient is not None
    for point in points(sizes):
        assert at(fixed(index, key, point[key]), (*point[:key], 99, *point[key + 1 :])) == at(index, point)
        assert (at(quotient[0], point), quotient[1]) == divmod(at(index, point), step)
    assert divided(combine([(axis(0), 7)]), step) is None


def test_digits_divide_exactly_or_not_at_all() -> None:
    extents = Extents((6, 4))
    flat = combine([(axis(0), 4), (axis(1), 1)])
    high, low = digits(flat, (6, 4), extents)
    assert (high, low) == (axis(0), axis(1))
    with pytest.raises(NeedsSplit) as split:
        digits(flat, (3, 8), extents)
    assert (split.value.axis, split.value.inner) == (0, 2)
    with pytest.raises(NotExpressible, match="cannot split an index at 5"):
        digits(flat, (5, 5), extents)
