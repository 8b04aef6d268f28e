"""fc.explain's report: its numbers, its answers, and every form in which it can be had."""

from __future__ import annotations

import cProfile
import io
import json
import re
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusion_compiler as fc
from examples.encoder_layer import EncoderLayer
from fusion_compiler.errors import UnknownOpError
from fusion_compiler.passes.fuse.search import Search
from tests import ROOT


@pytest.fixture(scope="module")
def report() -> fc.Report:
    """The paper's encoder layer at its sizes, its attention as it is written; nothing is computed."""
    return explained(EncoderLayer())


def explained(model: nn.Module) -> fc.Report:
    with sdpa_kernel([SDPBackend.MATH]):
        x = torch.empty(8, 512, 1024, dtype=torch.half, requires_grad=True)
        return fc.explain(model.half(), x, disable=("general attention",))


def calls(report: fc.Report, target: str) -> list[Any]:
    return [call for plan in report.plans for call in plan.calls if call.target == target]


def test_calls_are_those_that_eager_makes(report: fc.Report) -> None:
    """Three library operators that the graph takes apart are one call each, forward and backward."""
    for target, number in (("_softmax", 1), ("native_layer_norm", 2), ("native_dropout", 4)):
        assert len(calls(report, target)) == number
    for target, number in (("_softmax_backward_data", 1), ("native_layer_norm_backward", 2)):
        assert len(calls(report, target)) == number
    assert sum(call.kind == "contraction" for plan in report.plans for call in plan.calls) == 24


def test_calls_are_what_torch_dispatches() -> None:
    """Against a record of what eager really calls for an unfused model, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func._opname)
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8), nn.Softmax(-1))
    x = torch.randn(4, 16, requires_grad=True)
    with Record() as record:
        model(x).sum().backward()
    counted = {
        "addmm",
        "mm",
        "native_layer_norm",
        "gelu",
        "_softmax",
        "_softmax_backward_data",
        "gelu_backward",
    }
    counted |= {"native_layer_norm_backward"}
    ours = [c.target for plan in fc.explain(lambda m, x: m(x).sum(), model, x).plans for c in plan.calls]
    for name in counted - {"mm"}:
        assert ours.count(name) == record.names.count(name) > 0, name


def test_words_and_flops_of_known_calls(report: fc.Report) -> None:
    product = calls(report, "mm")[0]
    assert product.flops == 2 * 4096 * 1024 * 1024
    assert (product.words_read, product.words_written) == (4096 * 1024 + 1024 * 1024, 4096 * 1024)
    softmax = calls(report, "_softmax")[0]
    scores = 8 * 16 * 512 * 512
    assert softmax.words_read == scores and scores <= softmax.words_written <= scores + 2 * 8 * 16 * 512
    norm = calls(report, "native_layer_norm")[0]
    assert norm.words_read == 4096 * 1024 + 2 * 1024
    assert norm.words_written == 4096 * 1024 + 2 * 4096  # mean and 1 / deviation are kept for backward


def test_shares_of_the_classes_are_the_papers(report: fc.Report) -> None:
    """Ivanov et al.: contractions are 99.80% of the flop, normalizations 0.17%, element-wise work 0.03%."""
    share = {row["class"]: row["flop_share"] for row in report.json()["movement"]["classes"]}
    assert share["contraction"] == pytest.approx(0.998, abs=0.002)
    assert share["normalization"] == pytest.approx(0.0017, abs=0.0003)
    assert 0.0003 < share["element-wise"] < 0.0015  # a dropout is four operations here, one there


def test_a_lookup_reads_what_it_looks_up() -> None:
    table = torch.empty(50000, 64)
    report = fc.explain(lambda i, w: F.embedding(i, w) * 2, torch.zeros(8, dtype=torch.int64), table)
    call = calls(report, "embedding")[0]
    assert call.words_read == 8 + 8 * 64 and call.words_written == 8 * 64


def test_what_backward_computes_again_is_not_eagers(report: fc.Report) -> None:
    backward = report.plans[1]
    assert any(op.startswith("uniform") for op in backward.dag.order)  # dropout's mask is made again
    assert not any(call.target == "native_dropout" for call in backward.calls)


def test_totals_add_up(report: fc.Report) -> None:
    data = report.json()
    for key in ("launches_before", "bytes_before", "us_before", "bytes_after", "us_after", "intermediates"):
        assert data["totals"][key] == pytest.approx(sum(g["totals"][key] for g in data["graphs"]))
    rows = data["movement"]["classes"]
    for key in ("bytes_before", "us_before", "bytes_after", "us_after"):
        assert sum(row[key] for row in rows) == pytest.approx(data["totals"][key])
    assert sum(row["share"] for row in rows) == pytest.approx(1) and data["totals"]["bytes_after"] > 0
    assert sum(row["units"] for row in rows) == data["totals"]["launches_after"]
    assert all(0 < call["mue"] <= 1 for g in data["graphs"] for call in g["calls"])


def test_units_are_in_an_order_in_which_they_can_run(report: fc.Report) -> None:
    for graph in report.json()["graphs"]:
        position = {unit["name"]: i for i, unit in enumerate(graph["units"])}
        made_by = {name: unit["name"] for unit in graph["units"] for name in unit["outputs"]}
        edges = [(made_by[i], u["name"]) for u in graph["units"] for i in u["inputs"] if i in made_by]
        assert edges and all(position[a] < position[b] for a, b in edges)


def test_every_edge_at_a_cluster_has_its_refusal(report: fc.Report) -> None:
    for plan in report.plans:
        made_by = {name: c.name for c in plan.clusters for name in c.outputs}
        passed = {(made_by[i], c.name) for c in plan.clusters for i in c.inputs if i in made_by}
        refused = {(r.subject, r.other) for r in report.edges[plan.name]}
        assert passed <= refused
        assert all(r.reason and r.rule for r in report.edges[plan.name])


def test_a_refusal_by_cost_is_what_the_model_says() -> None:
    """The backward of a log-softmax in rows of a million: a sum along the row, and what reads it, are two."""
    x = torch.empty(64, 1 << 20, requires_grad=True)
    why = fc.explain(lambda x: torch.log_softmax(x, -1), x).questions["graph0.backward"]
    by_cost = [refused for refused in why.edges() if refused.rule == "cost"]
    assert by_cost
    for refused in by_cost:
        candidates = why.candidates(why.units[refused.subject], why.units[refused.other])
        union = why.solved[0].pool.union(candidates)
        assert refused.saving == pytest.approx(sum(p.cost.us for p in candidates) - union.cost.us)
        assert refused.saving <= 0 and not refused.at_most


def test_bounds_are_bounds(report: fc.Report) -> None:
    """The bound on a fusion's saving is never more than the time of both clusters, nor negative."""
    for name, edges in report.edges.items():
        why = report.questions[name]
        for refused in edges:
            if refused.at_most:
                both = sum(why.cost(why.units[u]).us for u in (refused.subject, refused.other))
                assert 0 <= refused.saving <= both


def test_no_fusion_saves_more_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a search every op is a kernel, and what one kernel of two takes is what the cost model says."""
    monkeypatch.setattr(Search, "merge", lambda search, numbers: ("law", "not tried"))

    def model(x: Tensor, y: Tensor) -> Tensor:
        return (torch.tanh(x) * y).sum(-1) + torch.softmax(y, -1).amax(-1)

    report = fc.explain(model, torch.empty(8192, 4096), torch.empty(8192, 4096))
    (why,) = report.questions.values()
    gains = [r for r in report.plans[0].refusals if r.rule == "search"]
    assert len(gains) > 5
    for refused in gains:
        bound = why.bound(why.units[refused.subject], why.units[refused.other])
        assert bound >= refused.saving > 0


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("softmax", "dropout", "are one kernel: mul_softmax_dropout"),
        ("mm_3", "add_dropout_add_layer_norm", "contraction: mm is a library call: the epilogues of"),
        ("F.relu", "norm2", "convex: a path leaves them and comes back: mm_5 needs add_relu_dropout, add"),
        ("view_2", "add", "view_2 is a view of add: it moves nothing"),
        ("mm_3", "mm_3", "mm_3 and mm_3 are one call: mm_3"),
    ],
)
def test_answers(report: fc.Report, a: str, b: str, expected: str) -> None:
    assert expected in str(report.why(a, b)[0])


def test_answers_by_place_and_module(report: fc.Report) -> None:
    place = next(
        op.source
        for op in map(report.plans[0].dag.op, report.plans[0].dag.order)
        if op.source and "F.relu" in op.source.code
    )
    spot = f"{Path(place.file).name}:{place.line}"
    by_place, by_code = report.why(spot, "norm2"), report.why("F.relu", "norm2")
    assert [a.text for a in by_place] == [a.text for a in by_code]
    assert all(answer.fused for answer in report.why("norm1", "norm1"))


def test_answers_and_reports_say_which_pass_they_are_about(report: fc.Report) -> None:
    answers = report.why("F.relu", "norm2")
    assert [a.graph for a in answers] == ["graph0.forward", "graph0.backward"]
    assert all(str(a) == f"{a.graph}: {a.text}" for a in answers)
    assert str(report).splitlines()[1].startswith("  forward and backward: ")
    assert [graph["phase"] for graph in report.json()["graphs"]] == ["forward", "backward"]
    inference = fc.explain(torch.sin, torch.empty(3))
    assert str(inference).splitlines()[1].startswith("  inference: ")


def test_a_compiled_model_and_its_report_print_the_same_plans_without_a_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax(F.gelu(x @ w), -1).cumsum(0).topk(9)[0]

    x, w = torch.randn(40, 30, requires_grad=True), torch.randn(30, 20)
    fast = fc.compile(model, backend="eager")
    fast(x, w).sum().backward()
    monkeypatch.setattr("fusion_compiler.passes.fuse.why.solve", lambda *_: pytest.fail("searched again"))
    text, printed = str(fast.report()), str(fast.plan)
    for plan in fast.plan:
        assert plan.refusals and plan.leftovers and str(plan) in text and str(plan) in printed
        for refused in plan.refusals[:1]:
            assert refused.about in str(plan) and f"{refused.rule}: " in str(plan)
            assert fast.why(refused.subject, refused.other)[0].refused == refused


def test_an_unknown_name_says_what_is_close(report: fc.Report) -> None:
    with pytest.raises(UnknownOpError, match=r"mul_softmax_dropot.*did you mean 'mul_softmax_dropout'"):
        report.why("mul_softmax_dropot", "mm_3")
    with pytest.raises(UnknownOpError, match="nowhere"):
        report.why("mm_3", "nowhere")


def test_missed_are_the_ten_largest_families(report: fc.Report) -> None:
    """Two layers give the pairs of one twice; alternatives, two products of one tensor, are not added up."""
    missed = report.missed
    assert [m.total_us for m in missed] == sorted((m.total_us for m in missed), reverse=True)
    largest = max(r.saving for edges in report.edges.values() for r in edges)
    assert len(missed) == 10 and missed[0].refused.saving == missed[0].total_us == largest
    assert missed[0].times == 1 and any(m.others for m in missed)
    twice = explained(nn.Sequential(EncoderLayer(), EncoderLayer())).missed
    assert twice[0].times == 2 and twice[0].total_us == pytest.approx(2 * largest)


def test_json_is_plain_and_documented(report: fc.Report) -> None:
    data = report.json()
    assert json.loads(json.dumps(data)) == data and data["schema"] == 2
    page = (ROOT / "docs" / "report-schema.md").read_text()
    keys = {*data, *data["totals"], *data["graphs"][0], *data["graphs"][0]["edges"][0]}
    keys |= {k for g in data["graphs"] for part in ("units", "ops", "calls") for row in g[part] for k in row}
    keys |= {k for row in data["movement"]["classes"] for k in row}
    missing = {key for key in keys if not re.search(rf"[`{{\s]{key}[`}},\s]", page)}
    assert not missing


def test_every_cluster_has_its_kernel(report: fc.Report) -> None:
    data = report.json()
    for graph in data["graphs"]:
        for unit in graph["units"]:
            assert (unit["sort"] == "cluster") == (unit["kernel"] is not None)
            if unit["kernel"]:
                assert "@triton.jit" in data["kernels"][unit["kernel"]]


def test_graphs_of_units(report: fc.Report, tmp_path: Path) -> None:
    report.graphml(tmp_path / "report.graphml")
    read = nx.read_graphml(tmp_path / "report.graphml", force_multigraph=True)
    data = report.json()
    assert len(read) == sum(len(g["units"]) for g in data["graphs"])
    assert read.number_of_edges() == sum(len(g["edges"]) for g in data["graphs"])
    assert read.nodes["graph0.forward/mul_softmax_dropout"]["sort"] == "cluster"
    text = report.dot()
    assert text.startswith("digraph") and '"graph0.forward/mul_softmax_dropout"' in text


def test_text_says_what_the_data_says(report: fc.Report) -> None:
    text, totals = str(report), report.json()["totals"]
    assert f"{totals['launches_before']} calls of eager -> {totals['launches_after']}" in text
    assert all(len(line) <= 110 for line in text.splitlines())
    stream = io.StringIO()
    report.show(stream)
    assert stream.getvalue() == f"{text}\n"


def calls_to_print(layers: int) -> int:
    """Python functions that are called to print a report, for which nothing is planned again."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(layers):
            x = F.dropout(torch.tanh(x @ w), 0.1)  # all of them read one seed
        return x

    report = fc.explain(model, torch.empty(64, 64, requires_grad=True), torch.empty(64, 64))
    counter = cProfile.Profile()
    counter.runcall(str, report)
    return sum(row.callcount for row in counter.getstats())


def test_a_report_is_printed_in_linear_time() -> None:
    few, many = calls_to_print(8), calls_to_print(16)
    assert many < 2.1 * few and many < 150_000


class Experts(nn.Module):
    """Their gradients run side by side, in kernels of several loop nests each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(256, 512) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(512, 256) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        candidates = [down(F.gelu(up(x))) for up, down in zip(self.up, self.down, strict=True)]
        return torch.stack(candidates).sum(0)


def test_what_is_bound_by_its_launch_is_shorter_than_two() -> None:
    report = fc.explain(Experts().half(), torch.empty(512, 256, dtype=torch.half))
    device = report.questions["graph0.backward"].setting.device
    units = [u for graph in report.json()["graphs"] for u in graph["units"] if u["sort"] == "cluster"]
    for unit in units:
        assert (unit["bound"] == "launch") == (unit["us"] <= device.launch_us + device.floor_us)
    several = next(u for u in units if u["bound"] != "launch")
    assert several["space"].endswith(", +3") and "launches" not in several["why"]


def test_a_model_that_fuses_nothing() -> None:
    report = fc.explain(lambda x, y: x @ y, torch.empty(8, 8), torch.empty(8, 8))
    assert report.missed == () and report.json()["totals"]["kernels"] == 0
    assert isinstance(report.edges["graph0.inference"], tuple) and not report.edges["graph0.inference"]
