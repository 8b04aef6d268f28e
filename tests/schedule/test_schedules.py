"""The search over schedules: its grid is legal, its table says what was found."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.__main__ import parse
from benchmarks.kernels import ranking, schedules
from benchmarks.kernels.case import Case
from benchmarks.kernels.schedule_grid import neighbours
from benchmarks.kernels.schedules import CapturedCluster, Clock, Search, clusters_of, summarize
from benchmarks.kernels.sizes import ALL_CASES
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.kernel import Kernel
from fusion_compiler.runtime.builds import Build
from fusion_compiler.runtime.launch import Runner
from fusion_compiler.schedule import row_tiles
from fusion_compiler.schedule.row_tiles import Cols, RowTile
from tests.exactness import Compiled
from tests.fake_gpu import FakeGpu

NAMES = (
    "bias + GELU(tanh)", "LayerNorm", "softmax", "cross-entropy", "GroupNorm + SiLU",
    "256 x 1024 x 256 over both ends", "64K x 4096 over everything", "silu(NCHW) * NHWC",
)  # fmt: skip
QUICK = parse(["schedules", "--quick", "--device", "cpu"])


def case_of(name: str) -> Case:
    return next(c for c in ALL_CASES if c.name == name)


def found_of(name: str) -> list[CapturedCluster]:
    """The clusters of a case in float64, for a device so small that its programs have to loop."""
    clusters = clusters_of(dataclasses.replace(case_of(name), dtype=torch.float64), QUICK)
    return [dataclasses.replace(f, device=dataclasses.replace(f.device, sms=1)) for f in clusters]


@pytest.mark.parametrize("name", NAMES)
def test_any_schedule_of_the_grid_gives_the_clusters_results(name: str) -> None:
    for held in found_of(name):
        reference = held.reference(*held.arguments)
        for schedule in random.sample(held.grid, min(3, len(held.grid))):
            program = held.program(schedule)
            assert not isinstance(program, str), f"{schedule}: {program}"
            runner = Runner((program,), held.reference, name=held.name, strict=True, backend="interpret")
            torch.testing.assert_close(runner(*held.arguments), reference)


def test_the_grid_has_loops_stages_and_what_the_space_chooses() -> None:
    forward, backward = found_of("LayerNorm")
    assert set(forward.candidates) <= set(forward.grid)
    assert {s.cols for s in forward.grid} == {Cols.WHOLE, Cols.LOOP}
    assert {s.programs is None for s in forward.grid} == {True, False}
    assert {s.cols for s in backward.grid} == {Cols.WHOLE}  # sums over the rows: no part of a row alone
    assert all(s.programs for s in backward.grid if s.block_rows < 16)


def test_neighbours_are_one_step_away() -> None:
    blocks = tuple(
        RowTile(1, block, Cols.GRID, num_warps=w) for block in (256, 512, 2048) for w in (2, 4, 8)
    )
    near = neighbours(RowTile(1, 512, Cols.GRID, num_warps=4), blocks)
    assert {(s.block_cols, s.num_warps) for s in near} == {(256, 4), (2048, 4), (512, 2), (512, 8), (256, 2)}


class Rigged(Clock):
    """Fastest at two warps and 512 columns, the slower the further from there."""

    def times(self, cluster: CapturedCluster, programs: object) -> list[float | str]:
        far = {s: abs(s.num_warps - 2) + abs(s.block_cols - 512) / 100 for s in cluster.grid}
        steps = {cluster.program(s).schedule: steps for s, steps in far.items()}
        return [1 + steps[p.schedule] for p in programs]  # type: ignore[attr-defined]


def test_the_search_climbs_to_the_best_of_the_grid() -> None:
    (cluster,) = clusters_of(dataclasses.replace(case_of("SwiGLU"), differentiate=()), QUICK)
    search = Search(cluster, Rigged(), limit=3)
    search.run(60)
    result = search.result(1e12)
    assert search.times[min(search.times, key=search.times.__getitem__)] == min(
        Rigged().times(cluster, [cluster.program(s) for s in cluster.grid])
    )
    assert result["best"]["us"] <= result["tuned"]["us"] <= result["first"]["us"]


class Timed(FakeGpu):
    """Launches in the interpreter; the later a call, the slower."""

    def times(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        for call in calls:
            call()
        return [float(i + 1) for i in range(len(calls))]


def test_on_a_gpu_what_cannot_be_launched_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Build] = []
    monkeypatch.setattr(schedules, "compile_builds", lambda builds, workers: compiled.extend(builds))
    (cluster,) = clusters_of(dataclasses.replace(case_of("SwiGLU"), differentiate=()), QUICK)
    gpu = Timed(refused=("8",))  # warps
    search = Search(cluster, Clock(gpu), limit=4)
    search.prepare()
    first = search.first_round()
    assert len(compiled) == len(first)
    search.measure(first)
    assert {s.num_warps == 8 for s in search.failed} == {True}
    assert set(search.times) == {s for s in first if s.num_warps != 8}
    result = search.result(1e12)
    assert result["best"]["us"] == 1.0 and result["error"] < 0.01
    assert all("HardwareExceededError" in why for why in result["failed"].values())


def test_a_run_fills_the_table_and_a_resumed_one_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "one")
    path = str(tmp_path / "schedules.json")
    options = parse(
        [
            "schedules",
            "--quick",
            "--device",
            "cpu",
            "--limit",
            "1",
            "--budget",
            "0",
            "--json",
            path,
            "--resume",
        ]
    )
    cases = [case_of("chunked SwiGLU"), case_of("64K x 4096 over everything")]
    rows = schedules.main(options, cases).rows
    assert [(r["case"], r["done"]) for r in rows] == [(c.name, True) for c in cases]
    assert len(rows[0]["clusters"]) == 2
    for cluster in (c for r in rows for c in r["clusters"]):
        assert cluster["best"]["us"] == min(us for _, us in cluster["all"])
        assert not cluster["failed"]
    assert "first choice" in capsys.readouterr().out
    assert schedules.main(options, cases).rows == rows


def test_the_summary_counts_choices_within_five_percent() -> None:
    def cluster(first: float, tuned: float, best: float) -> dict[str, object]:
        return {
            "predicted_us": 1.1 * tuned,
            **{
                n: {"schedule": n, "us": us}
                for n, us in zip(("first", "tuned", "best"), (first, tuned, best), strict=True)
            },
        }

    clusters = [cluster(10, 10, 10), cluster(22, 20.5, 20), cluster(60, 50, 40), {"failed": {"x": "no"}}]
    summary = summarize([{"clusters": clusters}])
    assert summary["clusters"] == 3
    assert summary["first choice within 5% of the best"] == pytest.approx(1 / 3)
    assert summary["best of the tuned within 5% of the best"] == pytest.approx(2 / 3)
    assert summary["first choice / best, worst"] == pytest.approx(1.5)
    assert summary["prediction against the tuned: mean error"] == pytest.approx(0.1)
    assert summary["prediction against the tuned: rank correlation"] == 1


def test_a_ranking_is_held_to_what_was_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first choice is looked up among the timings; one that was not timed is listed and not judged."""
    case = dataclasses.replace(case_of("SwiGLU"), differentiate=())
    ((name, key),) = ranking.clusters_of(case, "h200")
    first, second, *_ = ranking.ranked(key.nests[0], device_spec("h200"))

    def summary(timed: list[list[object]]) -> dict[str, float]:
        file = tmp_path / "timed.json"
        row = {"case": "SwiGLU", "clusters": [{"cluster": name, "all": timed}]}
        file.write_text(json.dumps({"rows": [row]}))
        return ranking.main(file, [case])

    figures = summary([[str(first), 11.0], [str(second), 10.4], ["another", 10.0]])
    assert figures["first choice / best, worst"] == pytest.approx(1.1)
    assert figures["first choice within 5% of the best"] == 0
    assert figures["best of the first 4 within 5% of the best"] == 1
    assert str(first) in capsys.readouterr().out
    assert summary([[str(second), 10.0]]) == {}
    assert "not timed" in capsys.readouterr().out


def kernels_of(compiled: Compiled) -> tuple[Kernel, ...]:
    """Return the kernels of its only cluster."""
    (runner,) = compiled.compiler.runners.values()
    return runner.candidates[0].kernels


@pytest.mark.parametrize("width", [1000, 1024, 5000])
def test_a_maximum_in_each_lane_is_the_rows(width: int) -> None:
    """Rows that are read once by threads of many elements, with a tile of their end and without."""

    def fn(x: Tensor) -> Tensor:
        return (x - x.amax(-1, keepdim=True)).exp().sum(-1).log()

    by_lanes = RowTile(1, 1024, Cols.LOOP, num_warps=1)
    compiled = Compiled(fn, schedules=lambda *_: (by_lanes,))
    x = torch.randn(5, width) * 3
    x[0] = torch.arange(width) / 50
    x[1], x[2, 7], x[3, -1], x[4, : width // 2] = -torch.inf, torch.nan, torch.inf, -torch.inf
    torch.testing.assert_close(compiled(x).double(), fn(x.double()), rtol=1e-6, atol=1e-6, equal_nan=True)
    assert "tl.reshape" in kernels_of(compiled)[0].source


@pytest.mark.parametrize("most", [5, 4])
def test_partial_results_of_many_programs_are_added_by_a_second_kernel(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_tiles, "MOST_TICKETS", most)
    by_row = RowTile(1, 8, Cols.WHOLE, num_warps=1)
    compiled = Compiled(lambda x: torch.logsumexp(x, -1).mean(), schedules=lambda *_: (by_row,))
    x = torch.randn(5, 7)
    torch.testing.assert_close(
        compiled(x).double(), torch.logsumexp(x.double(), -1).mean(), rtol=1e-6, atol=0
    )
    assert len(kernels_of(compiled)) == (1 if most == 5 else 2)


def test_rows_that_do_not_exist_add_nothing_to_sums_over_rows() -> None:
    """Loads of them are zero, and so is what is made of zeros alone; the rest is masked."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (x * y - x).sum(0), (x + 1).sum(0), (y * 0.5 + y.exp()).sum(0), x.amax(0)

    by_blocks = RowTile(4, 16, Cols.GRID, programs=2, num_warps=1)
    compiled = Compiled(fn, schedules=lambda *_: (by_blocks,))
    x, y = torch.randn(13, 21) - 5, torch.randn(13, 21)
    for got, want in zip(compiled(x, y), fn(x.double(), y.double()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert kernels_of(compiled)[0].source.count("tl.where(row_inside") == 3


@pytest.mark.parametrize(("inside", "at_once"), [(64, True), (48, True), (49, False)])
def test_a_value_of_some_rows_and_columns_is_loaded_once_for_them(inside: int, at_once: bool) -> None:
    """If blocks of rows cross from one such value to the next, it is gathered and not copied ahead."""

    def fn(x: Tensor, mean: Tensor) -> Tensor:
        return (x.unflatten(-1, (4, 6)) - mean[:, None, :, None]).abs().sum((0, 1))

    x, mean = torch.randn(5, inside, 24), torch.randn(5, 4)
    loop = RowTile(16, 32, Cols.GRID, programs=2, num_warps=1, num_stages=3)
    compiled = Compiled(fn, schedules=lambda *_: (loop,))
    want = fn(x.double(), mean.double())
    for runs in (compiled, Compiled(fn)):
        torch.testing.assert_close(runs(x, mean).double(), want, rtol=1e-5, atol=1e-5)
    assert ("first_row //" in kernels_of(compiled)[0].source) == at_once
    nest = compiled.compiler.plans[0].clusters[0].loops
    of_rows = [s for s in ranking.ranked(nest, device_spec("h200")) if isinstance(s, RowTile)]
    tall = [s for s in of_rows if s.block_rows == 16 and s.programs]
    assert tall and all((s.num_stages > 1) <= at_once for s in tall)
