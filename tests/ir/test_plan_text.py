"""A plan's print and its JSON, in full."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace

import pytest
import sympy

from fusion_compiler.ir.decision import EAGER_OP, Decision, apart, noted
from fusion_compiler.ir.loops import Axis
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_text import (
    WIDTH,
    cycle_of,
    eager_ops,
    execution_order,
    fitting,
    format_plan,
    human_bytes,
    iteration_space,
    library_calls,
    modules_of,
    plan_json,
    print_plan,
    totals,
)
from tests.plans import layered_plan, left

GOLDEN = """\
plan graph0.forward for h200
  18 ops: 12 in 3 kernels (1 distinct), 3 library calls, 3 eager
  9 calls of eager fused: 1.4 GB -> 402.7 MB moved, {before} -> {after} us predicted ({gain}x)

  kernel          runs  ops  iteration space      moves    us  eager  bound
  add_tanh_mul_0    x3    4  8192 rows x 4096  134.2 MB  {us}  {single}  memory
      add, tanh, mul  @ model.layers.*.mlp

library calls
  mm x3: one kernel of mul_0 and mm_1 would save at most 12.2 us

stayed eager
  aten.topk.default x3: no row in the operator table
      at block.py:9: h = F.gelu(self.up(x))  (in model.layers.0.mlp)

not fused, by what one kernel would save (5 of 7; FUSION_DEBUG=2 shows all)
  at most   24.5 us  mul_0 + mm_1 x2: contraction: mm is a library call
             0.0 us  a0x + b0x: cost: merging costs 0 us in registers
            -1.0 us  a1x + b1x: cost: merging costs 1 us in registers
            -2.0 us  a2x + b2x: cost: merging costs 2 us in registers
            -3.0 us  a3x + b3x: cost: merging costs 3 us in registers

masks: one attention mask proved causal"""


def golden(plan: FusionPlan) -> str:
    """The predictions are the cost model's business; everything else is fixed."""
    first = plan.clusters[0]
    return GOLDEN.format(
        before=f"{3 * first.eager_us:.1f}",
        after=f"{3 * first.cost.us:.1f}",
        gain=f"{first.eager_us / first.cost.us:.1f}",
        us=f"{first.cost.us:.1f}",
        single=f"{first.eager_us:.1f}",
    )


def with_refusals(plan: FusionPlan, *refusals: Decision) -> FusionPlan:
    """The plan with other refusals of pairs."""
    return replace(plan, decisions=(*(d for d in plan.decisions if not d.other), *refusals))


def test_print_is_the_golden_text():
    plan = layered_plan()
    assert str(plan) == golden(plan)
    assert str(layered_plan()) == str(plan)


def test_refusals_of_one_reason_that_cost_nothing_are_one_entry() -> None:
    plan = layered_plan()
    refused = [apart(f"a{i}x", f"b{i}x", "convex", "an op between them needs one", 0.0) for i in range(9)]
    plan = with_refusals(plan, *refused)
    assert "0.0 us  a0x + b0x x9: convex: an op between them needs one" in str(plan)
    assert "a1x" not in str(plan) and "a1x + b1x: convex" in format_plan(plan, 2)


def test_alternatives_are_entries_of_their_own() -> None:
    """One kernel of a product and one of its two readers: both savings cannot be had."""
    pairs = (("mm_0", "add_0"), ("mm_0", "add_1"), ("mm_2", "add_2"))
    plan = with_refusals(layered_plan(), *(apart(a, b, "contraction", "why", 2.0, True) for a, b in pairs))
    assert "at most    4.0 us  mm_0 + add_0 x2 (or 1 pair like it): contraction: why" in str(plan)
    assert "at most    2.0 us  mm_0 + add_1: contraction: why" in format_plan(plan, 2)


def test_level_two_shows_every_rejection():
    text = format_plan(layered_plan(), 2)
    assert text.count("merging costs") == 6 and "shows all" not in text
    savings = [float(figure) for figure in re.findall(r"([-\d.]+) us  ", text.split("not fused")[1])]
    assert savings == sorted(savings, reverse=True) and savings[0] == 24.5


def test_clusters_are_listed_in_execution_order():
    plan = layered_plan()
    backwards = replace(plan, clusters=plan.clusters[::-1])
    assert [c.name for c in execution_order(backwards)] == [c.name for c in plan.clusters]
    assert str(backwards) == str(plan)


def test_a_cluster_comes_after_what_it_reads_though_its_ops_began_earlier():
    plan = layered_plan()
    first, second = plan.clusters[0], plan.clusters[1]
    reader = replace(first, ops=(*second.ops, "topk_0"), inputs=("mul_1",), outputs=("topk_2",))
    crossed = replace(plan, clusters=(reader, replace(second, ops=("topk_2",))))
    assert [c.name for c in execution_order(crossed)] == [second.name, reader.name]


def test_a_plan_that_cannot_run_says_so():
    plan = layered_plan()
    assert cycle_of(plan) == ()
    first = replace(plan.clusters[0], inputs=("mul_2",))
    broken = replace(plan, clusters=(first, *plan.clusters[1:]))
    ring = cycle_of(broken)
    assert {"add_tanh_mul_0", "add_tanh_mul_2", "mm_1"} <= set(ring)
    assert "  CANNOT RUN: " in str(broken) and "CANNOT RUN" not in str(plan)
    assert broken.json()["cycle"] == list(ring) and plan.json()["cycle"] == []


def test_single_layer_is_not_folded():
    text = str(layered_plan(1))
    assert "6 ops: 4 in 1 kernel, 1 library call, 1 eager" in text
    assert "@ model.layers.0.mlp" in text and " x1" not in text and "distinct" not in text


def test_nothing_to_say():
    plan = layered_plan()
    empty = replace(plan, clusters=(), decisions=())
    assert str(empty).splitlines()[1:3] == [
        "  18 ops: 0 in 0 kernels, 0 library calls, 0 eager",
        "  0 calls of eager fused: 0 B -> 0 B moved, 0.0 -> 0.0 us predicted",
    ]


def test_long_names_and_reasons_stay_within_the_width():
    plan = layered_plan()
    cluster = replace(plan.clusters[0], name="n" * 80, ops=plan.clusters[0].ops * 40, pattern="p" * 60)
    call = replace(plan.leftovers[1], reason="because of this and that, " * 20)
    refused = apart("a" * 40, "b" * 40, "rule", "so many words " * 30, 1.0)
    wide = replace(plan, clusters=(cluster,), decisions=(noted("n", "w " * 200), call, refused))
    lines = str(wide).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "so many words" in str(wide) and "because of this" in str(wide)


def test_clusters_with_other_sizes_are_not_folded():
    plan = layered_plan()
    loops = plan.clusters[1].loops
    other = replace(loops, axes=(Axis("r", 4096, "rows"), *loops.axes[1:]))
    plan = replace(
        plan, clusters=(plan.clusters[0], replace(plan.clusters[1], loops=other), plan.clusters[2])
    )
    assert totals(plan).distinct_kernels == 2
    table = [line for line in str(plan).splitlines() if "add_tanh_mul" in line]
    assert len(table) == 2 and "x2" in table[0] and "4096 rows x 4096" in table[1]


def test_iteration_space():
    cluster = layered_plan(1).clusters[0]
    s = sympy.Symbol("s0", positive=True, integer=True)
    axes = (Axis("b", s, "rows"), Axis("t", 128, "rows"), Axis("c", 64, "cols"))
    assert iteration_space(replace(cluster, loops=replace(cluster.loops, axes=axes))) == "128*s0 rows x 64"
    assert iteration_space(replace(cluster, loops=replace(cluster.loops, axes=axes[:2]))) == "128*s0 elements"
    assert iteration_space(replace(cluster, loops=replace(cluster.loops, axes=axes[1:2]))) == "128 elements"


def test_totals():
    t = totals(layered_plan())
    element = 8192 * 4096 * 2
    assert t.bytes_before == 3 * element * (2 + 2 + 3), "add, tanh and mul; the view moves nothing"
    assert t.bytes_after == 3 * (2 * element + 4096 * 2)
    assert (t.ops, t.fused_ops, t.kernels, t.library_calls, t.eager_ops) == (18, 12, 3, 3, 3)


def test_contractions_are_library_calls_not_eager_ops():
    plan = layered_plan()
    assert [call.subject for call in library_calls(plan)] == ["mm_0", "mm_1", "mm_2"]
    assert [call.subject for call in eager_ops(plan)] == ["topk_0", "topk_1", "topk_2"]


def test_views_that_stay_are_not_eager_ops():
    plan = layered_plan(1)
    view = left(EAGER_OP, "view_0", "aten.view.default", "nobody fuses it")
    assert str(replace(plan, decisions=(*plan.decisions, view))) == str(plan)


def test_modules():
    dag = layered_plan().dag
    assert modules_of(dag, ["mm_0", "add_0"]) == ["model.layers.0.mlp"]
    assert modules_of(dag, ["mm_0", "add_1"]) == ["model.layers.*.mlp"]
    assert modules_of(dag, ["x"]) == []


@pytest.mark.parametrize(
    ("width", "text"),
    [(16, "aaa, bbbb, ccccc"), (15, "aaa, bbbb, +1"), (12, "aaa, +2"), (7, "aaa, +2")],
)
def test_items_that_do_not_fit_are_counted(width: int, text: str):
    assert fitting(["aaa", "bbbb", "ccccc"], width) == text


def test_a_single_item_is_cut():
    assert fitting(["abcdefgh"], 6) == "abc..." and fitting([], 6) == ""


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (402_677_760, "402.7 MB"), (5_300_000_000_000, "5300 GB")],
)
def test_human_bytes(number: int, text: str):
    assert human_bytes(number) == text


def test_json_holds_what_its_docstring_lists():
    plan = layered_plan()
    data = plan.json()
    assert json.loads(json.dumps(data)) == data
    assert data == plan_json(layered_plan())
    documented = plan_json.__doc__ or ""
    assert all(key in documented for key in data), "every key is documented"
    assert (data["schema"], data["graph"], data["device"]) == (2, "graph0.forward", "h200")
    assert data["library_calls"] == {"mm": 3}
    clusters = data["clusters"]
    assert isinstance(clusters, list) and all(key in documented for key in clusters[0])
    first = clusters[0]
    assert first["repeats"] == 3 and first["inputs"] == ["mm_0"] and first["outputs"] == ["mul_0"]
    assert [op["target"] for op in first["ops"]][1:] == [
        "aten.add.Tensor",
        "aten.tanh.default",
        "aten.mul.Tensor",
    ]
    assert first["ops"][0]["source"]["line"] == 7
    assert first["axes"][0] == {"name": "r", "size": 8192, "group": "rows", "estimate": 8192}
    assert first["cost"]["us"] == plan.clusters[0].cost.us
    eager = data["eager"]
    assert isinstance(eager, list) and [e["op"] for e in eager] == ["topk_0", "topk_1", "topk_2"]


def test_json_of_symbolic_sizes_is_text():
    plan = layered_plan(1)
    cluster = plan.clusters[0]
    s = sympy.Symbol("s0", positive=True, integer=True)
    loops = replace(cluster.loops, axes=(Axis("r", 2 * s, "rows"),))
    data = replace(plan, clusters=(replace(cluster, loops=loops),)).json()
    assert json.loads(json.dumps(data))["clusters"][0]["axes"][0]["size"] == "2*s0"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_print_plan_is_the_same_text_at_a_terminal_and_in_a_file(monkeypatch: pytest.MonkeyPatch):
    plan = layered_plan()
    file, terminal, bare = io.StringIO(), Terminal(), Terminal()
    print_plan(plan, file=file)
    assert file.getvalue() == str(plan) + "\n"
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    print_plan(plan, file=terminal)
    assert terminal.getvalue() == str(plan) + "\n"
    monkeypatch.setitem(sys.modules, "rich.console", None)
    print_plan(plan, file=bare)
    assert bare.getvalue() == str(plan) + "\n"


def test_an_eager_op_without_a_source_prints_without_a_place():
    plan = replace(layered_plan(1), decisions=(left(EAGER_OP, "topk_0", "aten.topk.default", "why"),))
    assert str(plan).endswith("  aten.topk.default: why")
