"""Samples of long tests: as many cases as the marker says, the same ones from the same seed."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.conftest import left_out


class Case:
    """A collected test with one marker."""

    def __init__(self, nodeid: str, *marker: Any, **options: Any) -> None:
        self.nodeid = nodeid
        self.marker = getattr(pytest.mark, marker[0])(*marker[1:], **options).mark if marker else None

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marker if self.marker is not None and self.marker.name == name else None


def cases(count: int, test: str, *marker: Any, **options: Any) -> list[pytest.Item]:
    return [cast("pytest.Item", Case(f"{test}[{i}]", *marker, **options)) for i in range(count)]


def test_a_sample_has_the_count_of_its_marker() -> None:
    long, short = cases(9, "a.py::long", "sample", 4), cases(2, "a.py::short", "sample", 4)
    every = [*long, *short, *cases(5, "a.py::other"), *cases(5, "a.py::slow", "gpu")]
    gone = left_out(every, seed=1)
    assert gone < set(long) and len(gone) == 5


def test_a_group_is_sampled_as_one_test() -> None:
    group = [cases(1, f"a.py::test_{i}", "sample", 1, group="long")[0] for i in range(4)]
    assert len(left_out(group, seed=1)) == 3
    elsewhere = [cases(1, f"b.py::test_{i}", "sample", 1, group="long")[0] for i in range(2)]
    assert len(left_out([*group, *elsewhere], seed=1)) == 4


def test_a_seed_decides_the_sample() -> None:
    every = cases(100, "a.py::long", "sample", 10)
    assert left_out(every, seed=1) == left_out(every, seed=1) != left_out(every, seed=2)
