"""The cut is the best of all cuts, and machines are put next to those that are near them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.machines.dags import bottleneck, exhaustive, random_dag, step_of, times
from fusion_compiler.machines.cut import best_order, clusters, cut, improve, orders, price
from fusion_compiler.machines.plan import Link, Machine


@pytest.mark.parametrize("seed", range(1000, 1030))
def test_no_cut_has_a_shorter_bottleneck(seed: int) -> None:
    dag = random_dag(seed)
    best = cut(dag.chain(), dag.places())
    assert best is not None
    stages, links = times(dag, best.at)
    assert bottleneck(stages, links) == pytest.approx(best.us)
    assert sum(stages) + sum(links) == pytest.approx(best.total)
    assert best.us == pytest.approx(exhaustive(dag, bottleneck))


def test_the_step_is_nearly_as_short_as_that_of_any_cuts() -> None:
    ratios = []
    for dag in map(random_dag, range(1000, 1020)):
        chain, places = dag.chain(), dag.places()
        first = cut(chain, places)
        assert first is not None
        best = improve(chain, places, [first], lambda cuts, d=dag: step_of(*times(d, cuts.at)))
        ratios.append(step_of(*times(dag, best.at)) / exhaustive(dag, step_of))
        assert step_of(*times(dag, best.at)) <= step_of(*times(dag, first.at))
    assert sum(ratio <= 1.01 for ratio in ratios) >= 17 and max(ratios) < 1.1


def test_memory_that_no_cut_fits_into_has_no_cut() -> None:
    dag = next(d for d in map(random_dag, range(50)) if d.memory < float("inf"))
    small = replace(dag, memory=1.0)
    assert cut(small.chain(), small.places()) is None
    assert price(small.chain(), small.places(), range(1, len(dag.speeds))).us == float("inf")


def two_hosts(a: int, b: int) -> Link:
    """Machines 0, 2 and 1, 3 are on one host each."""
    return Link(1e11, 1.0) if a % 2 == b % 2 else Link(1e8, 100.0)


def test_machines_with_fast_links_are_a_cluster() -> None:
    assert clusters(4, two_hosts) == [[0, 2], [1, 3]]
    assert clusters(4, lambda a, b: Link(1e9, 1.0)) == [[0, 1, 2, 3]]
    machines = [Machine(str(i), speed=1.0 + (i == 3)) for i in range(4)]
    wanted = [o for o in itertools.permutations(range(4)) if {*o[:2]} in ({0, 2}, {1, 3})]
    tried = list(orders(machines, two_hosts))
    assert {*tried} <= {*wanted} and len(tried) == 4  # 0 and 2 are equal, 1 and 3 are not


def test_equal_machines_have_one_order() -> None:
    machines = [Machine(str(i)) for i in range(8)]
    assert list(orders(machines, lambda a, b: Link(1e9, 1.0))) == [tuple(range(8))]


def test_a_faster_machine_is_put_where_the_work_is() -> None:
    dag = next(d for d in map(random_dag, range(100)) if len(set(d.speeds)) == 2 and len(d.speeds) == 3)
    chain, places = dag.chain(), dag.places()

    def placed(order: Sequence[int]) -> list[object]:
        return [replace(p, machine=m, kind=m) for p, m in zip(places, order, strict=True)]

    every = list(itertools.permutations(range(3)))
    best = best_order(chain, every, placed)  # type: ignore[arg-type]
    costs = [partition.us for order in every if (partition := cut(chain, placed(order))) is not None]  # type: ignore[arg-type]
    assert best is not None and best[1].us == min(costs)
