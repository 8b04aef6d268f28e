"""A model that is cut computes what it computed, and the plan says which stage holds what."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.pipelining import pipeline

import fusion_compiler as fc
from fusion_compiler.errors import (
    InvalidOptionError,
    MachinesError,
    NotCallableError,
    NotExportableError,
    OtherGraphError,
)
from fusion_compiler.machines.estimate import Clock, Measuring, estimate, measure, spec_of, timed_passes
from fusion_compiler.machines.workload import workload
from fusion_compiler.ops.table import Kind

THREE = tuple(fc.Machine(name, "h200") for name in "abc")
CUTS = (None, ("gelu", "linear_5"), ("scaled_dot_product_attention", "batch_norm_2"))
LINK = fc.Link(bytes_per_s=1e9, latency_us=20.0)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.qkv, self.batch = nn.Linear(width, 3 * width), nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return x + self.drop(self.batch(F.gelu(x).mT).mT)


class Language(nn.Module):
    """A small language model with a mask, a position table, batch norms, dropout and tied weights."""

    def __init__(self, layers: int = 4, width: int = 16, words: int = 50) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("rates", torch.rand(width))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        mask = place[:, None] >= place[None, :]
        y = self.words(x) * scale + (self.rates * place[:, None]).cos()  # type: ignore[operator]
        for block in self.blocks:
            y = block(y, mask)
        return self.head(y)


def run(stages: tuple[fx.GraphModule, ...], *args: Any) -> Any:
    values: Any = stages[0](*args)
    for stage in stages[1:]:
        values = stage(*values) if isinstance(values, tuple) else stage(values)
    return values


def trained(model: nn.Module, call: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return the results, gradients and buffers of a step, from the buffers that the model has now."""
    before = {n: b.clone() for n, b in model.named_buffers()}
    model.zero_grad()
    torch.manual_seed(3)
    y = call(x)
    y.square().mean().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    after = {n: b.clone() for n, b in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    return y.detach(), grads, after


def same(left: tuple[Any, ...], right: tuple[Any, ...]) -> None:
    torch.testing.assert_close(left[0], right[0], rtol=0, atol=0)
    for ours, theirs in zip(left[1:], right[1:], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # PyTorch's pipeline()
@pytest.mark.parametrize("cuts", CUTS)
def test_the_stages_one_after_the_other_are_the_model(cuts: tuple[str, ...] | None) -> None:
    torch.manual_seed(0)
    model = Language().double()
    x = torch.randint(0, 50, (3, 7))
    plan = fc.partition(model, (x,), machines=THREE, links=LINK, cuts=cuts)
    assert len(plan.stages) == 3 and (cuts is None or plan.cuts == cuts)
    truth = trained(model, model, x)
    stages = plan.modules()
    same(trained(model, lambda x: run(stages, x), x), truth)
    pipe = pipeline(model, (x,), split_policy=plan.split_policy)
    assert pipe.num_stages == 3
    del truth[1]["words.weight"]  # pipeline() gives each stage a copy of a tied weight
    same(trained(model, lambda x: run_pipe(pipe, x), x), truth)


def run_pipe(pipe: Any, x: Tensor) -> Tensor:
    result = fx.Interpreter(pipe.split_gm).run(x)  # pipe(x) detaches what crosses
    return result if isinstance(result, Tensor) else result[0]


def test_stages_say_what_crosses_and_what_they_hold() -> None:
    model = Language()
    x = torch.randint(0, 50, (3, 7))
    plan = fc.partition(model, (x,), machines=THREE, links=LINK)
    stages = plan.modules()
    values: Any = (x,)
    for stage, module, edge in itertools.zip_longest(plan.stages, stages, plan.edges):
        assert {n for n, _ in module.named_parameters()} == set(stage.parameters)
        assert {n for n, _ in module.named_buffers()} == set(stage.buffers)
        assert stage.parameter_bytes == sum(p.nbytes for p in module.parameters())
        values = module(*values)
        values = values if isinstance(values, tuple) else (values,)
        if edge is not None:
            assert [(tuple(v.shape), v.dtype, v.requires_grad) for v in values] == [
                (t.shape, t.dtype, t.differentiable) for t in edge.tensors
            ]
            assert edge.forward_us == 20 + edge.forward_bytes / 1e3
    assert {p for s in plan.stages for p in s.parameters} == {n for n, _ in model.named_parameters()}
    assert [s.number for s in plan.stages if "words.weight" in s.parameters] == [0, 2]
    (tied,) = [d for d in plan.decisions if d.rule == "tied parameter"]
    assert tied.subject == "words.weight" and "stages 0, 2" in tied.reason


def test_masks_are_computed_again_where_that_is_cheaper() -> None:
    model = Language()
    x = torch.randint(0, 50, (3, 7))
    plan = fc.partition(model, (x,), machines=THREE, links=LINK)
    assert [t for e in plan.edges for t in e.tensors if t.dtype is torch.bool] == []
    assert all("ge" in s.repeated for s in plan.stages[1:])
    fast = fc.partition(model, (x,), machines=THREE, links=fc.Link(1e15, 0.0), cuts=plan.cuts)
    assert any(t.dtype is torch.bool for e in fast.edges for t in e.tensors)
    assert not fast.stages[1].repeated


def test_what_is_written_into_is_never_computed_again() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.zeros(8, 8)
            mask[:, 2] = 1.0  # through a view
            early = mask > 0.5
            mask.add_(1.0)
            for layer in self.layers:
                x = layer(x) * mask + early
            return x

    model, x = Masked(), torch.randn(8, 8)
    plan = fc.partition(model, (x,), machines=THREE, links=LINK, cuts=("linear_1", "linear_2"))
    torch.testing.assert_close(run(plan.modules(), x), model(x), rtol=0, atol=0)
    assert not plan.repeated


def test_rotary_factors_without_gradients_are_computed_again() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.register_buffer("rates", torch.rand(8))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                angles = self.rates * torch.arange(x.shape[0])[:, None]  # type: ignore[operator]
                cos, sin = angles.cos(), angles.sin()
            for layer in self.layers:
                x = layer(x) * cos + sin
            return x

    model, x = Rotary().double(), torch.randn(512, 8).double()
    for measured in (False, True):
        cuts = ("linear_1", "linear_2")
        plan = fc.partition(model, (x,), machines=THREE, links=LINK, measured=measured, cuts=cuts)
        torch.testing.assert_close(run(plan.modules(), x), model(x), rtol=0, atol=0)
        if not measured:  # a CPU that is busy may take longer than the link
            assert all(len(e.tensors) == 1 for e in plan.edges)
            again = [d for d in plan.decisions if d.rule == "computed again"]
            assert len(again) == 2 and all("stages 1, 2" in d.reason for d in again)


def test_random_numbers_are_never_drawn_again() -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand(8) > 0.5
            for layer in self.layers:
                x = layer(x) * noise
            return x

    plan = fc.partition(
        Noise(), (torch.randn(2, 8),), machines=THREE, links=LINK, cuts=("linear_1", "linear_2")
    )
    assert all("rand" not in s.repeated and "gt" not in s.repeated for s in plan.stages)
    assert all("gt" in [t.name for t in e.tensors] for e in plan.edges)


def test_a_write_in_place_is_never_cut_off_from_what_it_writes() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layers[0](x)
            view = y[:, :4]
            z = self.layers[1](y.detach().clone())
            view.add_(1.0)
            return self.layers[3](self.layers[2](y + z))

    model, x = InPlace().double(), torch.randn(2, 8).double()
    plan = fc.partition(model, (x,), machines=THREE[:2], links=LINK)
    names = [n.name for n in plan.graph.graph.nodes if n.op == "call_function"]
    first, write = names.index("linear"), names.index("add_")
    for name in names[first + 1 : write + 1]:
        with pytest.raises(MachinesError, match="cannot be cut before"):
            fc.partition(model, (x,), machines=THREE[:2], links=LINK, cuts=(name,))
    for name in names[write + 1 :]:
        cut = fc.partition(model, (x,), machines=THREE[:2], links=LINK, cuts=(name,))
        torch.testing.assert_close(run(cut.modules(), x), model(x))


def test_a_stage_that_is_trained_has_a_gradient() -> None:
    class Late(nn.Module):
        """A model that works on its input before anything is trained, and on its results."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            for _ in range(6):
                x = x @ x
            for layer in self.layers:
                x = layer(x)
            return x, x.argsort().argsort().argsort().argsort()

    plan = fc.partition(Late(), (torch.randn(64, 64),), machines=THREE, links=LINK)
    assert all(s.backward_us > 0 and s.parameters for s in plan.stages)
    assert all(any(t.differentiable for t in e.tensors) for e in plan.edges)


def test_memory_bounds_every_stage() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    x = torch.randn(4, 64)
    free = fc.partition(model, (x,), machines=THREE, links=LINK)
    most = max(s.memory_bytes for s in free.stages)
    small = [fc.Machine("small", "h200", memory_bytes=most * 0.6), *THREE[1:]]
    plan = fc.partition(model, (x,), machines=small, links=LINK)
    (stage,) = [s for s in plan.stages if s.machine == "small"]
    assert stage.memory_bytes <= most * 0.6
    tiny = [fc.Machine(name, "h200", memory_bytes=1000) for name in "abc"]
    with pytest.raises(MachinesError, match="does not fit"):
        fc.partition(model, (x,), machines=tiny, links=LINK)


def test_machines_of_other_speeds_get_other_shares() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12)))
    x = torch.randn(4096, 512)
    machines = [fc.Machine("slow"), fc.Machine("fast", speed=3.0)]
    plan = fc.partition(model, (x,), machines=machines, links=fc.Link(1e12, 1.0), microbatches=16)
    sizes = {s.machine: len(s.operators) for s in plan.stages}
    assert sizes == {"slow": 3, "fast": 9}


def test_inference_has_no_gradients_and_one_order() -> None:
    model = Language().eval()
    plan = fc.partition(model, (torch.randint(0, 50, (3, 7)),), machines=THREE, links=LINK)
    assert all(s.backward_us == 0 for s in plan.stages) and all(e.backward_bytes == 0 for e in plan.edges)
    assert len(plan.events) == 3 * plan.microbatches


def test_interleaved_stages_go_round() -> None:
    model = Language(layers=8)
    plan = fc.partition(
        model, (torch.randint(0, 50, (3, 7)),), machines=THREE[:2], links=LINK, schedule="interleaved",
        stages_per_machine=2, microbatches=4,
    )  # fmt: skip
    assert [s.machine for s in plan.stages] == ["a", "b", "a", "b"] and len(plan.edges) == 3
    assert len(plan.events) == 2 * 4 * 4


def test_the_schedule_with_the_shortest_step_is_taken_and_equal_ones_hold_less() -> None:
    model, args = Language(layers=8), (torch.randint(0, 50, (3, 7)),)
    for microbatches, schedule in ((1, "1f1b"), (8, "eager-1f1b")):
        slow = fc.Link(bytes_per_s=1e9, latency_us=0.0)
        options: Any = {"machines": THREE, "links": slow, "microbatches": microbatches}
        plans = {s: fc.partition(model, args, schedule=s, **options) for s in ("1f1b", "eager-1f1b", "gpipe")}
        plan = fc.partition(model, args, schedule="auto", **options)
        assert plan.schedule == schedule and plan.events == plans[schedule].events
        refused = {d.subject: d.reason for d in plan.decisions if d.rule == "schedule"}
        assert refused.keys() == plans.keys() - {schedule}
        for name, reason in refused.items():
            assert reason.endswith(f"{plans[name].step_us / plan.step_us:.2f} times as long")


def test_zero_bubble_stages_go_round_or_back_and_their_timeline_shows_weights(tmp_path: Path) -> None:
    model, args = Language(layers=8), (torch.randint(0, 50, (3, 7)),)
    options: Any = {"machines": THREE[:2], "links": LINK, "stages_per_machine": 2, "microbatches": 4}
    for schedule, machines in (("zero-bubble", [*"abab"]), ("zbv", [*"abba"])):
        plan = fc.partition(model, args, schedule=schedule, **options)
        assert [s.machine for s in plan.stages] == machines
        assert len(plan.events) == 3 * 4 * 4
        assert (plan.edges[1].us == 0) == (schedule == "zbv")  # its two stages in the middle share a machine
        assert "~" in str(plan) and "0~~: of the weights" in str(plan)
        plan.html(tmp_path / "plan.html")
        assert "gradients of the weights of microbatch 3" in (tmp_path / "plan.html").read_text()
    forward = fc.partition(model.eval(), args, schedule="zbv", **options)
    assert len(forward.events) == 4 * 4 and "~" not in str(forward).split("why")[0]


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_convolution_is_counted_by_its_arithmetic(dimensions: int) -> None:
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1](8, 4, 3)
    work = workload(layer, (torch.zeros(2, 8, *[6] * dimensions),), {}, training=True)
    (op,) = map(work.dag.op, work.order)
    assert op.kind is Kind.CONTRACTION
    assert op.flops == 2 * (2 * 4 * 4**dimensions) * (8 * 3**dimensions) and op.window == 3**dimensions


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_transposed_convolution_is_counted_by_its_inputs(dimensions: int) -> None:
    layer = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dimensions - 1](8, 4, 3, stride=2)
    work = workload(layer, (torch.zeros(2, 8, *[6] * dimensions),), {}, training=True)
    (op,) = map(work.dag.op, work.order)
    assert op.kind is Kind.CONTRACTION
    assert op.flops == 2 * (2 * 8 * 6**dimensions) * (4 * 3**dimensions)


def test_the_gradient_of_a_bias_is_a_pass_over_the_results_gradient() -> None:
    x, h200 = torch.randn(4096, 512), spec_of("h200")

    def backward(bias: bool) -> float:
        work = workload(nn.Linear(512, 1024, bias=bias), (x,), {}, training=True)
        ((_, us),) = estimate(work, h200)
        return us

    read = 1e6 * 4096 * 1024 * 4 / h200.copy_bandwidth
    assert read < backward(True) - backward(False) < 3 * read


def test_a_depthwise_convolution_has_no_window() -> None:
    work = workload(nn.Conv2d(8, 8, 3, groups=8), (torch.zeros(2, 8, 6, 6),), {}, training=True)
    (op,) = map(work.dag.op, work.order)
    assert op.window == 0 and op.flops


def test_gradients_that_are_added_to_others_take_time() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            z = y + self.second(y)
            return z * (z > 0)  # a condition has no gradient

    work = workload(Residual(), (torch.randn(1, 64),), {}, training=True)
    accumulated = {name: work.accumulated(name) for name in work.order}
    first, second, add, _, _ = work.order
    assert len(accumulated[first]) == 1 and len(accumulated[second]) == 2  # weights; and y, which `add` reads
    assert first in accumulated[second] and accumulated[add] == ()
    times = dict(zip(work.order, estimate(work, spec_of("h200")), strict=True))
    assert times[second][1] > 2 * times[second][0]


def test_a_repetition_adds_to_the_gradients_of_parameters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randn_like", torch.ones_like)
    x, weight = (torch.ones(3, requires_grad=True) for _ in range(2))
    timed_passes(lambda: x * weight, Clock(torch.device("cpu")), True, [x])
    assert x.grad is not None and torch.equal(x.grad, torch.ones(3))
    assert weight.grad is not None and float(weight.grad.min()) > 2


def test_measured_times_are_those_of_this_machine() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1024), nn.Linear(1024, 64))
    plan = fc.partition(model, (torch.randn(256, 64),), machines=THREE[:2], links=LINK, measured=True)
    assert all(s.forward_us > 0 and s.backward_us > 0 for s in plan.stages)
    cpus = [fc.Machine(name, "cpu") for name in "ab"]
    estimated = fc.partition(model, (torch.randn(256, 64),), machines=cpus, links=LINK, cuts=plan.cuts)
    assert 0.05 < estimated.step_us / plan.step_us < 20


class Written(nn.Module):
    """It writes in place, looks rows up, and has a buffer and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(50, 8), nn.BatchNorm1d(8), nn.Linear(8, 50)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.weight.mul_(0.5)
            shift.add_(1)
        y = self.norm(self.words(x).flatten(0, 1)) + shift
        return self.head(y.relu_())


def test_measuring_runs_the_model_on_its_own_values_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x, shift = Written(), torch.randint(0, 50, (3, 7)), torch.ones(8)
    before = copy.deepcopy(model.state_dict())
    work = workload(model, (x,), {"shift": shift}, training=True)
    values: dict[str, Any] = {}
    run_node = Measuring.run_node

    def kept(self: Measuring, n: fx.Node) -> Any:
        values[n.name] = run_node(self, n)
        return values[n.name]

    monkeypatch.setattr(Measuring, "run_node", kept)
    times = measure(work, (x,), {"shift": shift}, torch.device("cpu"))
    assert torch.equal(shift, torch.ones(8))
    of = dict(zip(work.order, times, strict=True))
    operators = [n for n in work.order if n.startswith(("embedding", "batch_norm", "relu", "linear"))]
    assert len(operators) == 4 and all(of[name][0] > 0 and of[name][1] > 0 for name in operators)
    torch.testing.assert_close(values["output"][0], copy.deepcopy(model)(x, torch.ones(8)))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(MachinesError, match="meta device cannot be measured"):
        args = x.to("meta"), torch.ones(8, device="meta")
        fc.partition(Written().to("meta"), args, machines=THREE[:2], links=LINK, measured=True)


def test_a_rehearsal_measures_the_stages_and_changes_nothing() -> None:
    model, x = Language(), torch.randint(0, 50, (3, 7))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    machines = [replace(m, speed=1.0 + 9.0 * (m.name == "b")) for m in THREE]
    plan = fc.partition(model, (x,), machines=machines, links=LINK, cuts=("gelu", "linear_5"))
    measured = plan.rehearsed((x,))
    assert type(measured) is type(plan) and measured.edges == plan.edges and measured.cuts == plan.cuts
    assert all(s.forward_us > 5 and s.backward_us > 5 for s in measured.stages)
    assert measured.step_us > max(8 * s.us for s in measured.stages)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())


def test_the_plan_prints() -> None:
    plan = fc.partition(Language(), (torch.randint(0, 50, (3, 7)),), machines=THREE, links=LINK)
    text = str(plan)
    assert text.startswith("Language on 3 machines: 1f1b, 8 microbatches,")
    for stage in plan.stages:
        assert f"stage {stage.number}" in text
    rows = [line for line in text.splitlines() if line[:3] in ("a |", "b |", "c |")]
    assert len(rows) == 3 and len({len(row) for row in rows}) == 1
    assert "one machine: the fastest would take" in text
    assert rows[0][3] == "0" and "equal layers" in text and "earlier, before" in text


def test_the_page_has_a_bar_for_each_phase_and_keeps_texts_as_texts(tmp_path: Path) -> None:
    machines = [fc.Machine("a <b>", "h200"), *THREE[1:]]
    plan = fc.partition(Language(), (torch.randint(0, 50, (3, 7)),), machines=machines, links=LINK)
    plan.html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    svg = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + len("</svg>")])
    bars = svg.findall(".//rect")
    assert len(bars) == len(plan.events) == 2 * 3 * 8
    assert max(float(b.attrib["x"]) + float(b.attrib["width"]) for b in bars) == pytest.approx(1200, abs=1)
    assert "a <b>" not in page and page.count("a &lt;b&gt;") >= 2
    assert "<script" not in page and "http" not in page


def test_a_plan_of_another_graph_is_refused() -> None:
    plan = fc.partition(Language(), (torch.randint(0, 50, (3, 7)),), machines=THREE, links=LINK)
    with pytest.raises(OtherGraphError):
        pipeline(Language(), (torch.randint(0, 50, (3, 9)),), split_policy=plan.split_policy)


def test_another_process_makes_the_same_stages() -> None:
    model, x = Language(), torch.randint(0, 50, (3, 7))
    machines = [*THREE[:2], replace(THREE[2], speed=2.0)]
    plan = fc.partition(model, (x,), machines=machines, links=LINK)
    assert plan.repeated
    fast = fc.Link(1e15, 0.0)  # with which nothing would be computed again
    same = {"machines": plan.machines, "cuts": plan.cuts, "repeated": plan.repeated}
    again = fc.partition(model, (x,), links=fast, **same)  # type: ignore[arg-type]
    assert [s.operators for s in again.stages] == [s.operators for s in plan.stages]
    assert [e.tensors for e in again.edges] == [e.tensors for e in plan.edges]
    assert again.machines == plan.machines


def test_one_machine_has_one_stage() -> None:
    plan = fc.partition(Language(), (torch.randint(0, 50, (3, 7)),), machines=THREE[:1], links=())
    assert len(plan.stages) == 1 and not plan.edges and plan.bubble == pytest.approx(0)
    assert plan.step_us == pytest.approx(8 * plan.stages[0].us)


def test_errors_say_what_is_wrong() -> None:
    model, args = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(2, 4),)
    with pytest.raises(NotCallableError):
        fc.partition(args, args, machines=THREE, links=LINK)
    with pytest.raises(MachinesError, match="no link connects b and c"):
        fc.partition(
            model, args, machines=THREE, links=[fc.Link(1, 1, ("a", "b")), fc.Link(1, 1, ("a", "c"))]
        )
    with pytest.raises(MachinesError, match="a link connects a and x, not two of the machines"):
        fc.partition(model, args, machines=THREE, links=[LINK, fc.Link(1, 1, ("a", "x"))])
    with pytest.raises(MachinesError, match="cannot be cut before"):
        fc.partition(model, args, machines=THREE, links=LINK, cuts=("linear_1",))
    with pytest.raises(MachinesError, match="too many"):
        fc.partition(model, args, machines=THREE, links=LINK)
    with pytest.raises(InvalidOptionError, match="schedule"):
        fc.partition(model, args, machines=THREE, links=LINK, schedule="2f2b")
    with pytest.raises(InvalidOptionError, match="stages_per_machine"):
        fc.partition(model, args, machines=THREE, links=LINK, stages_per_machine=2)
    with pytest.raises(InvalidOptionError, match="machines"):
        fc.partition(model, args, machines=[THREE[0], THREE[0]], links=LINK)

    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(NotExportableError):
        fc.partition(Breaks(), args, machines=THREE, links=LINK)
