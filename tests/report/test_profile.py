"""Times by unit: the mapping of a trace's events, a profile's numbers and text, ranges for profilers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

import fusion_compiler as fc
from fusion_compiler.capture.module import plan_of
from fusion_compiler.errors import (
    InvalidOptionError,
    NotCompiledError,
    NothingToProfileError,
    ReplayedGraphError,
)
from fusion_compiler.ir.decision import Outcome
from fusion_compiler.ir.plan_text import WIDTH
from fusion_compiler.report.profiling import Profile, profile_of
from fusion_compiler.report.timeline import STEP, device_timeline, host_timeline, named
from fusion_compiler.runtime.cuda_graphs import RECORDED
from fusion_compiler.runtime.pairs import replayed
from fusion_compiler.stitch.graph_source import Ranged
from fusion_compiler.stitch.order import ordered
from fusion_compiler.stitch.stitch import stitch
from fusion_compiler.stitch.units import ranges_of, units_of
from tests.fake_gpu import FakeGpu, use
from tests.stitch.test_stitch import planned, runner_of

HOST, AUTOGRAD, STREAM = 1, 2, 7  # threads and a stream


class Trace:
    """Events as torch.profiler writes them, times in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.correlation = 0

    def range(self, name: str, start: float, end: float, thread: int = HOST) -> None:
        self.add("user_annotation", name, start, end - start, thread, 0)

    def drawn(self, name: str, start: float, end: float) -> None:
        """Add the record by which the profiler shows a range on the kernels' stream."""
        self.add("gpu_user_annotation", name, start, end - start, STREAM, 0)

    def kernel(
        self, name: str, launched: float | None, start: float, us: float, thread: int = HOST, **more: Any
    ) -> None:
        self.correlation += 1
        if launched is not None:
            launch, category = more.get("launch", "cuLaunchKernelEx"), more.get("category", "cuda_driver")
            self.add(category, launch, launched, 4.0, thread, self.correlation)
        self.add(more.get("work", "kernel"), name, start, us, STREAM, self.correlation)

    def add(self, category: str, name: str, ts: float, dur: float, thread: int, correlation: int) -> None:
        args = {"correlation": correlation} if correlation else {}
        pid = 0 if thread == STREAM else 99
        event: dict[str, Any] = {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur}
        self.events.append({**event, "pid": pid, "tid": thread, "args": args})


def runs(trace: Trace, *ranges: str) -> dict[tuple[str, int], tuple[int, float]]:
    return {(r.range, r.step): (r.calls, r.us) for r in device_timeline(trace.events, ranges).runs}


def test_clusters_that_share_a_kernel_and_a_call_of_two_kernels() -> None:
    trace = Trace()
    trace.range(STEP, 0, 100)
    for name, start in (("g/norm [a:1]", 10), ("g/mm [b:2]", 20), ("g/norm_1 [c:3]", 30)):
        trace.range(name, start, start + 8)
    trace.kernel("norm", 11, 40, 5.0)
    trace.kernel("gemm", 21, 50, 20.0, launch="cudaLaunchKernel", category="cuda_runtime")
    trace.kernel("splitKreduce", 25, 70, 3.0, launch="cudaLaunchKernel", category="cuda_runtime")
    trace.kernel("norm", 31, 75, 6.0)  # another layer's, under the first one's name
    names = ("g/norm [a:1]", "g/mm [b:2]", "g/norm_1 [c:3]")
    counts = runs(trace, *names)
    assert counts == {(names[0], 0): (1, 5.0), (names[1], 0): (1, 23.0), (names[2], 0): (1, 6.0)}
    owners = device_timeline(trace.events, names).owners
    assert [trace.events[i]["name"] for i, owner in owners.items() if owner == names[1]] == [
        "gemm",
        "splitKreduce",
    ]


def test_work_outside_of_any_range_is_kept_by_name_and_step() -> None:
    trace = Trace()
    for start in (0, 1000):
        trace.range(STEP, start, start + 500)
        trace.range("g/a", start + 10, start + 20)
        trace.kernel("k", start + 12, start + 100, 7.0)
        trace.kernel("fill", start + 30, start + 110, 2.0)  # launched after the unit
        trace.kernel("Memcpy", start + 5, start + 50, 1.0, work="gpu_memcpy")  # and before it
    trace.kernel("between", 600, 610, 50.0)  # of no step: not counted
    line = device_timeline(trace.events, ["g/a"])
    assert [(r.range, r.step, r.us) for r in line.runs] == [("g/a", 0, 7.0), ("g/a", 1, 7.0)]
    assert [(o.kernel, o.step, o.us) for o in line.outside] == [
        ("fill", 0, 2.0),
        ("Memcpy", 0, 1.0),
        ("fill", 1, 2.0),
        ("Memcpy", 1, 1.0),
    ]
    assert line.steps == (500.0, 500.0)


def test_backward_on_a_thread_of_its_own_at_the_same_time() -> None:
    trace = Trace()
    trace.range(STEP, 0, 100)
    trace.range("g.forward/a", 10, 60)
    trace.range("g.backward/b", 20, 40, AUTOGRAD)
    trace.kernel("k", 30, 50, 5.0, AUTOGRAD)
    trace.kernel("k", 31, 55, 9.0, HOST)
    assert runs(trace, "g.forward/a", "g.backward/b") == {
        ("g.forward/a", 0): (1, 9.0),
        ("g.backward/b", 0): (1, 5.0),
    }


def test_the_innermost_range_and_the_right_one_of_a_row() -> None:
    trace = Trace()
    trace.range(STEP, 0, 100)
    trace.range("g/outer", 10, 50)
    trace.range("g/inner", 20, 30)
    for launched, us in ((15, 1.0), (25, 2.0), (40, 4.0), (60, 8.0)):
        trace.kernel("k", launched, launched + 1, us)
    assert runs(trace, "g/outer", "g/inner") == {("g/outer", 0): (1, 5.0), ("g/inner", 0): (1, 2.0)}


def test_a_launch_that_the_trace_lacks_is_found_by_the_range_on_the_stream() -> None:
    trace = Trace()
    trace.range(STEP, 0, 100)
    for name, host, device in (("g/a", 10, 40), ("g/b", 20, 60)):
        trace.range(name, host, host + 5)
        trace.drawn(name, device, device + 10)
        trace.kernel("same", None, device, 10.0)
    trace.kernel("other", None, 80, 3.0)
    line = device_timeline(trace.events, ["g/a", "g/b"])
    assert {r.range: r.us for r in line.runs} == {"g/a": 10.0, "g/b": 10.0}
    assert [o.kernel for o in line.outside] == ["other"]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 9)), max_size=12),
)
def test_every_microsecond_is_somebodys_and_the_nearest_ranges(
    ranges: list[tuple[int, int]], kernels: list[tuple[int, int]]
) -> None:
    """Ranges one after the other, launches anywhere: each goes to the range around it, or outside."""
    trace, around, now = Trace(), dict[str, tuple[int, int]](), 0
    trace.range(STEP, -1, 1000)
    for number, (gap, length) in enumerate(ranges):
        begin = now + gap + 1
        now = begin + length
        around[f"g/{number}"] = (begin, now)
        trace.range(f"g/{number}", begin, now)
    expected = dict.fromkeys(around, 0.0)
    left = 0.0
    for launched, us in kernels:
        trace.kernel("same", launched, 2000 - launched, us)
        owner = next((n for n, (begin, end) in around.items() if begin <= launched <= end), None)
        if owner is None:
            left += us
        else:
            expected[owner] += us
    line = device_timeline(trace.events, around)
    assert {r.range: r.us for r in line.runs} == expected
    assert sum(o.us for o in line.outside) == left


def test_a_launch_on_a_thread_that_has_no_ranges_is_found_by_the_range_on_the_stream() -> None:
    trace = Trace()
    trace.range(STEP, 0, 100)
    trace.range("g/a", 10, 20, AUTOGRAD)
    trace.drawn("g/a", 30, 50)
    trace.kernel("k", 12, 30, 20.0, thread=12345)  # the same thread, as CUPTI numbers it
    trace.kernel("later", 60, 70, 2.0, thread=12345)
    line = device_timeline(trace.events, ["g/a"])
    assert [(r.range, r.us) for r in line.runs] == [("g/a", 20.0)]
    assert [o.kernel for o in line.outside] == ["later"]


def test_a_unit_that_runs_twice_in_a_step_counts_each_call() -> None:
    trace = Trace()
    trace.range(STEP, 0, 100)
    for start in (10, 30):
        trace.range("g/a", start, start + 5)
        trace.kernel("k", start + 1, start + 2, 4.0)
    assert runs(trace, "g/a") == {("g/a", 0): (2, 8.0)}


@pytest.mark.parametrize("launch", ["cudaGraphLaunch", "cuGraphLaunch"])
def test_a_replayed_graph_is_refused_with_what_to_do(launch: str) -> None:
    trace = Trace()
    trace.range(STEP, 0, 100)
    trace.kernel("k", 11, 20, 1.0, launch=launch, category="cuda_runtime")
    with pytest.raises(ReplayedGraphError, match=r"(?s)cannot be told apart.*without cudagraphs=True"):
        device_timeline(trace.events, ["g/a"])


def test_host_times_are_those_of_the_ranges() -> None:
    trace = Trace()
    trace.range(STEP, 0, 100)
    trace.range("g/a", 10, 25)
    trace.range("somebody's", 30, 60)
    line = host_timeline(trace.events, ["g/a"])
    assert [(r.range, r.calls, r.us) for r in line.runs] == [("g/a", 1, 15.0)]
    assert line.outside == () and line.steps == (100.0,)


def test_slices_carry_cluster_and_source() -> None:
    trace = Trace()
    trace.range(STEP, 0, 100)
    trace.range("graph0.forward/mm_1 [layers.0.up:30]", 10, 25)
    trace.kernel("nvjet_hsh", 12, 40, 2.0)
    trace.kernel("fill", 50, 60, 2.0)
    line = device_timeline(trace.events, ["graph0.forward/mm_1 [layers.0.up:30]"])
    kernels = [e for e in named(trace.events, line.owners) if e["cat"] == "kernel"]
    assert [e["name"] for e in kernels] == ["mm_1: nvjet_hsh", "fill"]
    assert kernels[0]["args"] == {
        "correlation": 1, "graph": "graph0.forward", "cluster": "mm_1", "source": "layers.0.up:30",
        "kernel": "nvjet_hsh",
    }  # fmt: skip
    assert trace.events[2]["name"] != "mm_1: nvjet_hsh", "the events that were given stay as they are"


class Layers(nn.Module):
    """Two layers that are the same work."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for up, norm in zip(self.up, self.norm, strict=True):
            x = x + F.gelu(up(norm(x)))
        return x


@pytest.fixture
def layers() -> Iterator[tuple[nn.Module, Tensor]]:
    model = Layers()
    yield fc.compile(model, backend="eager"), torch.randn(4, 8, requires_grad=True)


def traced(fast: nn.Module, us: Callable[[str], float], steps: int = 3) -> Trace:
    """A made-up trace of a compiled model: each unit one kernel of `us(unit)`, and one kernel of nobody's."""
    trace = Trace()
    for step in range(steps):
        now = begin = 1e6 * step
        for plan in plan_of(fast):
            for unit in units_of(plan).values():
                trace.range(unit.range, now + 1, now + 9)
                trace.kernel("shared", now + 2, now + 5, us(unit.name) * (1 + step))
                now += 10
        trace.kernel("nobody's", now + 2, now + 5, 2.5)
        trace.range(STEP, begin, now + 20)
    return trace


def test_numbers_of_a_profile(layers: tuple[nn.Module, Tensor]) -> None:
    fast, x = layers
    with torch.no_grad():
        fast(x)
    plans = plan_of(fast)
    trace = traced(fast, lambda unit: 4.0 if unit.startswith("addmm") else 2.0)
    result = profile_of("Layers", plans, trace.events, on_device=True, step_us=123.0)
    us = {m.unit.name: m.us for m in result.units}
    assert set(us) == set(units_of(plans[0])) and len(us) >= 4
    # Three steps of 1, 2 and 3 times as much: the median is twice.
    assert {n: t for n, t in us.items() if n.startswith("addmm")} == {"addmm": 8.0, "addmm_1": 8.0}
    assert all(t == 4.0 for n, t in us.items() if not n.startswith("addmm"))
    assert result.work_us == pytest.approx(sum(us.values()) + 2.5) and result.outside_us == 2.5
    assert [(o.kernel, o.calls, o.us) for o in result.unmatched] == [("nobody's", 1.0, 2.5)]
    for measured in result.units:
        if measured.unit.sort == "cluster":
            (cost,) = (c.cost for c in plans[0].clusters if c.name == measured.unit.name)
            moved = cost.bytes_read + cost.bytes_written
            assert measured.bandwidth == pytest.approx(moved / 4e-6)
            assert measured.error == pytest.approx(cost.us / 4.0 - 1)
        else:
            assert measured.predicted.us > 0 and measured.error == pytest.approx(
                measured.predicted.us / 8 - 1
            )


def test_a_unit_is_placed_where_most_of_it_comes_from(layers: tuple[nn.Module, Tensor]) -> None:
    fast, x = layers
    fast(x).sum().backward()
    units = {unit.name: unit for plan in plan_of(fast) for unit in units_of(plan).values()}
    norms = {name: unit for name, unit in units.items() if "layer_norm" in name}
    assert {unit.graph for unit in norms.values()} == {"graph0.forward", "graph0.backward"}
    for name, unit in norms.items():
        assert unit.source is not None and unit.source.module.startswith("norm."), name
        assert unit.range == f"{unit.graph}/{name} [{unit.source.module}:{unit.source.line}]"


def test_text_folds_layers_and_puts_the_largest_first(layers: tuple[nn.Module, Tensor]) -> None:
    fast, x = layers
    with torch.no_grad():
        fast(x)
    trace = traced(fast, lambda unit: 40.0 if unit.startswith("addmm") else 2.0)
    result = profile_of("Layers", plan_of(fast), trace.events, on_device=True, step_us=123.0)
    text = str(result)
    assert max(map(len, text.splitlines())) <= WIDTH
    rows = text[text.index("  unit") :].splitlines()
    assert rows[1].split()[:3] == ["addmm", "x2", "160.0"], "both layers' products, one row"
    assert "up.0" in rows[2] and "test_profile.py" in rows[2]
    assert "step 123.0 us" in text and "nobody's" in text and "predicted for h200" in text


def test_json_fits_the_reports_schema(layers: tuple[nn.Module, Tensor]) -> None:
    fast, x = layers
    fast(x).sum().backward()
    trace = traced(fast, lambda _: 3.0)
    result = profile_of("Layers", plan_of(fast), trace.events, on_device=True, step_us=9.0)
    data = json.loads(json.dumps(result.json()))
    assert {"device", "repetitions", "step_us", "outside_us", "unmatched"} <= set(data["measured"])
    assert data["measured"]["repetitions"] == 3 and data["measured"]["clock"] == "device"
    assert {name: set(units) for name, units in data["units"].items()} == {
        plan.name: set(units_of(plan)) for plan in plan_of(fast)
    }
    assert set(data["units"]) == {"graph0.forward", "graph0.backward"}
    report = replace(fc.explain(Layers(), x), measured=result.json()).json()
    assert report["measured"] == data["measured"]
    for graph in report["graphs"]:
        assert {u["name"]: u["measured"] for u in graph["units"]} == data["units"][graph["name"]]
        for unit in graph["units"]:
            assert unit["measured"]["error"] == pytest.approx(unit["us"] / 6.0 - 1)
    row = data["units"]["graph0.forward"]["addmm"]
    assert row.keys() == {"us", "bandwidth", "error"} and row["us"] == 6.0


def test_without_a_gpu_times_are_the_hosts_and_the_text_says_so(layers: tuple[nn.Module, Tensor]) -> None:
    fast, x = layers
    weight = next(fast.parameters())
    kept = weight.grad = torch.full_like(weight, 7.0)
    result = fc.profile(fast, x, repetitions=2)
    assert not result.on_device and result.repetitions == 2
    assert {m.unit.graph for m in result.units} == {"graph0.forward", "graph0.backward"}
    names = {m.unit.name for m in result.units}
    assert {c.name for plan in plan_of(fast) for c in plan.clusters} <= names
    assert all(m.us > 0 and m.error is None and m.bandwidth is None for m in result.units)
    assert sum(m.us for m in result.units) <= 2 * result.work_us
    assert "nothing" in str(result) and "the host's" in " ".join(str(result).split())
    assert result.json()["measured"]["clock"] == "host"
    shown = result.report().json()
    assert shown["measured"] == result.json()["measured"] and shown["kernels"]
    taken = {u["name"]: u["measured"] for g in shown["graphs"] for u in g["units"] if u["measured"]}
    assert {name: row["us"] for name, row in taken.items()} == {m.unit.name: m.us for m in result.units}
    assert weight.grad is kept and x.grad is None, "gradients are as they were"
    assert torch.equal(kept, torch.full_like(weight, 7.0))


def test_a_model_with_a_break_is_profiled_in_all_its_graphs() -> None:
    def broken(x: Tensor) -> Tensor:
        y = torch.softmax(x, -1)
        torch._dynamo.graph_break()
        return torch.log_softmax(y, -1)

    with torch.no_grad(), pytest.warns(fc.FusionWarning, match="breaks the graph"):
        result = fc.profile(fc.compile(broken, backend="eager"), torch.randn(3, 4), repetitions=1)
    assert {m.unit.graph for m in result.units} == {"graph0.inference", "graph1.inference"}
    assert [b.source.code for b in result.report().breaks if b.source] == ["torch._dynamo.graph_break()"]


def test_interpreted_kernels_are_profiled_and_a_function_may_be_asked() -> None:
    fast = fc.compile(lambda x: torch.softmax(x * 2, -1), backend="interpret", strict=True)
    with torch.no_grad():
        result = fc.profile(fast, torch.randn(2, 5), repetitions=1)
    (measured,) = result.units
    assert (measured.unit.sort, measured.calls) == ("cluster", 1) and measured.us > 0


def test_the_trace_is_a_file_with_the_last_step_and_our_names(
    layers: tuple[nn.Module, Tensor], tmp_path: Path
) -> None:
    fast, x = layers
    fc.profile(fast, x, repetitions=3).trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    annotations = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    assert annotations.count(STEP) == 1
    for plan in plan_of(fast):
        for unit in units_of(plan).values():
            assert annotations.count(unit.range) == 1
    assert any("[norm.1:" in name for name in annotations)


def test_a_step_without_a_graph_of_ours_is_refused() -> None:
    fast = fc.compile(lambda x: x, backend="eager")
    with pytest.raises(NothingToProfileError, match="no compiled graph of <lambda> ran"):
        fc.profile(fast, torch.randn(3))


@pytest.mark.parametrize("target", [nn.Linear(2, 2), len, 3])
def test_what_compile_did_not_return_is_refused(target: Any) -> None:
    with pytest.raises(NotCompiledError, match=r"(?s)not .*what to do: fast = "):
        fc.profile(target, torch.randn(2))


@pytest.mark.parametrize("repetitions", [0, -1, True])
def test_repetitions_are_a_number(repetitions: int) -> None:
    with pytest.raises(InvalidOptionError, match="at least 1"):
        fc.profile(fc.compile(torch.sin), torch.randn(2), repetitions=repetitions)


def test_recorded_graphs_are_refused_before_anything_runs() -> None:
    fast = fc.compile(lambda x: x.sin() + 1, backend="eager")
    x = torch.randn(3)
    fast(x)
    (plan,) = plan_of(fast)
    plan_of(fast).decide(plan.name, replayed(RECORDED, Outcome.FORCED))
    with pytest.raises(ReplayedGraphError, match="cudagraphs=True"):
        fc.profile(fast, x)


# -- ranges in others' profilers ---------------------------------------------------------------------


def shown(call: Callable[[], object]) -> list[str]:
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True) as traced:
        call()
    return [e.name for e in traced.events() or () if e.name.startswith("graph")]


def test_ranges_are_there_while_a_profiler_is_active_and_only_then(
    monkeypatch: pytest.MonkeyPatch, layers: tuple[nn.Module, Tensor]
) -> None:
    fast, x = layers
    asked: list[int] = []
    original = Ranged.__call__

    def counted(self: Ranged, *args: Any) -> Any:
        asked.append(id(self))
        return original(self, *args)

    monkeypatch.setattr(Ranged, "__call__", counted)
    plain = fast(x)
    assert asked == []
    names = shown(lambda: fast(x))
    assert len(asked) == 1
    (forward,) = (plan for plan in plan_of(fast) if plan.name == "graph0.forward")
    assert names == [unit.range for unit in units_of(forward).values()]
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True):
        torch.testing.assert_close(fast(x), plain, rtol=0, atol=0)
    fast(x)
    assert len(asked) == 2


def test_launched_kernels_run_in_ranges_too(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    use(gpu, monkeypatch)
    fast = fc.compile(lambda x: torch.softmax(x * 2, -1) @ x, tune=False, strict=True)
    x = torch.randn(5, 5)
    results: list[Tensor] = []
    with torch.no_grad():
        fast(x)
        names = shown(lambda: results.append(fast(x)))
    torch.testing.assert_close(results[0], torch.softmax(x * 2, -1) @ x)
    assert [name.partition(" ")[0] for name in names] == [
        "graph0.inference/mul_softmax",
        "graph0.inference/mm",
    ]
    assert [kernel for kernel, _, _ in gpu.launched] == ["mul_softmax"] * 2


def test_names_of_ranges_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(plan: Any) -> Any:
        calls.append(plan.name)
        return ranges_of(plan)

    monkeypatch.setattr("fusion_compiler.compiler.compiler.ranges_of", counted)
    fast = fc.compile(lambda x: torch.softmax(x, -1), backend="eager")
    x = torch.randn(3, 4)
    fast(x)
    assert calls == []
    assert shown(lambda: fast(x)) == shown(lambda: fast(x)) != []
    assert calls == ["graph0.inference"]


def test_a_profile_compares_by_its_numbers() -> None:
    one = Profile("m", "d", "h200", True, 1, 2.0, 3.0, 4.0, (), (), events=({"ph": "X"},))
    assert one == Profile("m", "d", "h200", True, 1, 2.0, 3.0, 4.0, (), ()) and "events" not in repr(one)


def test_the_version_with_ranges_makes_the_same_calls() -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    plan = planned(lambda x, w: (F.gelu(x @ w) + 1,), x, w)
    texts = {name: f"g/{name}" for name in units_of(plan)}
    runners = {c.name: runner_of(c, plan) for c in plan.clusters}
    plain = stitch(plan, runners, ordered(plan)).code.strip().splitlines()
    module = stitch(plan, runners, ordered(plan), ranges=lambda: texts)
    (ranged,) = (v for v in type(module).forward.__globals__.values() if isinstance(v, Ranged))
    lines = ranged.text.strip().splitlines()
    assert len(lines) == len(plain) and len(module.code.strip().splitlines()) == len(plain) + 1
    opened = [re.match(r"    with record_function\('g/(\w+)'\): (.*)", line) for line in lines]
    assert [m[1] for m in opened if m] == list(units_of(plan)) and len(texts) == 2
    without = [f"    {m[2]}" if m else line for m, line in zip(opened, lines, strict=True)]
    assert without == plain
    arguments = [x, w]
    torch.testing.assert_close(ranged(module, arguments), [F.gelu(x @ w) + 1], check_stride=True)
    assert arguments == []
