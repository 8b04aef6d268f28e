"""Choosing among schedules by what a whole graph takes, with times that stand in for a device's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_compiler.ir.kernel import Program
from fusion_compiler.ops.own import random
from fusion_compiler.runtime import graph_tuning
from fusion_compiler.runtime.cuda_graphs import repeatable
from fusion_compiler.runtime.graph_tuning import GraphTuning
from fusion_compiler.runtime.launch import Runner
from fusion_compiler.runtime.stages import Stages
from fusion_compiler.support.store import Store
from tests.fake_gpu import FakeGpu
from tests.hand_made import elementwise

N = 1000
BLOCKS = (128, 256, 512)


def programs() -> tuple[Program, ...]:
    """The same sum with 8, 4 and 2 programs."""
    return tuple(elementwise("x0 + x1", N, (torch.float32,) * 2, torch.float32, block) for block in BLOCKS)


def no_fallback(*_: object) -> tuple[Tensor, ...]:
    raise AssertionError("the fallback was called")


class Graph:
    """y.add_(1) and x + y by one kernel, whose grid tells what the graph takes."""

    def __init__(self, store: Store | None = None, us: Sequence[float] = (10.0, 11.0, 12.0)) -> None:
        self.gpu = FakeGpu(us=tuple(us))
        self.runner = Runner(
            programs(), no_fallback, name="sum", strict=True, store=store, gpus=lambda device: self.gpu
        )
        self.taken = {8: 100.0, 4: 100.0, 2: 100.0}  # us by the programs of a launch
        self.measures = 0

    def __call__(self, arguments: list[Any]) -> list[Tensor]:
        x, y = arguments
        arguments.clear()
        y.add_(1)
        return list(self.runner(x, y))

    def measured(
        self, run: Callable[[list[Any]], Any], arguments: Sequence[Any], restore: Callable[[], None]
    ) -> Callable[[], float]:
        def measure() -> float:
            self.measures += 1
            run(list(arguments))
            run(list(arguments))
            restore()
            return self.taken[self.gpu.launched[-1][1][0]]

        return measure

    def tune(self) -> tuple[Tensor, Tensor]:
        """After a first call; the arguments, which were 2 and 5."""
        x, y = torch.full((N,), 2.0), torch.full((N,), 4.0)
        self([x, y])
        GraphTuning([self.runner], Stages(), self.measured)(self, [x, y], (1,), self.gpu.index)
        assert bool((x == 2).all()) and bool((y == 5).all())
        return x, y

    def programs(self) -> int:
        """Run the graph, and return the number of programs of its last launch."""
        (result,) = self([torch.full((N,), 2.0), torch.full((N,), 4.0)])
        assert bool((result == 7).all())
        return self.gpu.launched[-1][1][0]


@pytest.fixture(autouse=True)
def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_tuning, "compile_builds", lambda builds: list(builds))


def test_what_is_fastest_in_the_graph_is_taken_and_kept(tmp_path: Path) -> None:
    graph = Graph(Store(tmp_path))
    graph.taken |= {4: 90.0}
    graph.tune()
    assert graph.programs() == 4
    again = Graph(Store(tmp_path))
    again.tune()
    assert again.programs() == 4 and again.gpu.timed == again.measures == 0, "another process knows"


def test_noise_and_luck_change_nothing() -> None:
    graph = Graph()
    graph.taken |= {4: 99.8}
    graph.tune()
    assert graph.programs() == 8
    lucky, times = Graph(), iter([100.0, 90.0, 115.0, 100.0])
    lucky.measured = lambda run, arguments, restore: lambda: next(times)  # type: ignore[method-assign]
    lucky.tune()
    assert lucky.programs() == 8


def test_what_was_slow_alone_is_not_tried() -> None:
    graph = Graph(us=(10.0, 21.0, 12.0))
    graph.taken |= {4: 1.0}
    graph.tune()
    assert graph.programs() == 8 and graph.measures == 2


def test_a_graph_is_tuned_once() -> None:
    graph = Graph()
    graph.tune()
    before = graph.measures
    graph.tune()
    assert graph.measures == before == 3


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_without_memory_or_a_recording_it_stays_as_it_is(tmp_path: Path, error: type[RuntimeError]) -> None:
    graph = Graph(Store(tmp_path))

    def measured(run: Any, arguments: Sequence[Any], restore: Callable[[], None]) -> Callable[[], float]:
        def measure() -> float:
            run(list(arguments))
            if graph.gpu.launched[-1][1][0] != 8:
                raise error("no memory")
            return 100.0

        return measure

    graph.measured = measured  # type: ignore[method-assign]
    graph.tune()
    assert graph.programs() == 8
    later = Graph(Store(tmp_path))
    later.taken |= {2: 80.0}
    later.tune()
    assert later.programs() == 2 and later.gpu.timed == 0, "what took how long alone is known"


class Pair:
    """Two kernels of which one gains by what the other is."""

    def __init__(self, taken: dict[tuple[int, int], float]) -> None:
        self.graphs, self.taken, self.measures = (Graph(), Graph()), taken, 0

    def tune(self) -> tuple[int, ...]:
        """The programs of both in the end."""

        def run(arguments: list[Any]) -> list[Tensor]:
            return [y for graph in self.graphs for y in graph(list(arguments))]

        def measured(
            run: Callable[[list[Any]], Any], arguments: Sequence[Any], restore: Callable[[], None]
        ) -> Callable[[], float]:
            def measure() -> float:
                self.measures += 1
                run(list(arguments))
                restore()
                a, b = (graph.gpu.launched[-1][1][0] for graph in self.graphs)
                return self.taken.get((a, b), 200.0)

            return measure

        x, y = torch.full((N,), 2.0), torch.full((N,), 4.0)
        run([x, y])
        runners = [graph.runner for graph in self.graphs]
        GraphTuning(runners, Stages(), measured)(run, [x, y], (1,), self.graphs[0].gpu.index)
        return tuple(graph.programs() for graph in self.graphs)


def test_what_one_gains_by_another_is_found() -> None:
    pair = Pair({(8, 8): 100.0, (4, 8): 101.0, (8, 4): 90.0, (4, 4): 80.0, (4, 2): 70.0})
    assert pair.tune() == (4, 2)
    nothing = Pair({(8, 8): 100.0})
    assert nothing.tune() == (8, 8) and nothing.measures == 5, "there is no second round"


def test_it_begins_with_those_that_load_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Early loads pay if the neighbours use them too; a launch without a turn keeps its fastest program."""
    taken = {(8, 8): 100.0, (4, 8): 101.0, (8, 4): 101.0, (4, 4): 80.0}
    assert Pair(taken).tune() == (8, 8)

    def early() -> Pair:
        pair = Pair(taken)
        for graph in pair.graphs:
            graph.runner.candidates = tuple(replace(p, early=i == 1) for i, p in enumerate(programs()))
        return pair

    assert early().tune() == (4, 4)
    monkeypatch.setattr(graph_tuning, "MOST_SECONDS", 0.0)
    assert early().tune() == (8, 8)


def test_a_kernel_may_start_when_the_one_before_it_has_ended(tmp_path: Path) -> None:
    """The chosen programs are measured twice, with and without it, and the result is kept for other
    processes."""

    class Dependent(Graph):
        def __init__(self) -> None:
            super().__init__(Store(tmp_path))
            kernels = [replace(k, dependent=True) for p in programs() for k in p.kernels]
            self.runner.candidates = tuple(
                replace(p, kernels=(k,)) for p, k in zip(programs(), kernels, strict=True)
            )

        def measured(self, *args: Any) -> Callable[[], float]:
            measure = super().measured(*args)
            return lambda: measure() - (10 if self.gpu.launched[-1][0].endswith("_behind") else 0)

    graph = Dependent()
    graph.tune()
    assert graph.programs() == 8 and graph.gpu.launched[-1][0].endswith("_behind")
    assert graph.measures == 5
    again = Dependent()
    again.tune()
    assert again.programs() == 8 and again.measures == again.gpu.timed == 0
    assert again.gpu.launched[-1][0].endswith("_behind")
    slower = Graph()
    slower.tune()
    slower.programs()
    assert not slower.gpu.launched[-1][0].endswith("_behind"), "it does not start early"


def test_it_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_tuning, "MOST_SECONDS", 0.0)
    graph = Graph()
    graph.taken |= {4: 1.0}
    graph.tune()
    assert graph.programs() == 8 and graph.measures == 1


def test_what_a_graph_writes_into_is_known() -> None:
    def writes(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        y[1:].mul_(x[1:])
        torch._foreach_add_([z], 1.0)
        return x + y

    three = [torch.ones(4) for _ in range(3)]
    assert repeatable(make_fx(writes)(*three)) == (1, 2)
    assert repeatable(make_fx(lambda x, y, z: x + y)(*three)) == ()
    assert repeatable(make_fx(lambda x, y, z: torch.rand_like(x) + y)(*three)) is None
    assert repeatable(make_fx(lambda x, y, z: random.seed(torch.device("cpu")) + y)(*three)) is None
