"""Recording as CUDA graphs: the graphs that are recorded, the reasons for others, and the plan's notes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._inductor import cudagraph_trees
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import fusion_compiler as fc
from fusion_compiler.capture.module import Plans
from fusion_compiler.compiler.replays import Replays
from fusion_compiler.errors import FusionWarning, WarnOnce
from fusion_compiler.ir.chunks import Chunked
from fusion_compiler.ir.dag import size_hints
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.graph_info import GraphInfo, Phase
from fusion_compiler.ops.table import Kind
from fusion_compiler.options import Options
from fusion_compiler.passes.fuse.step_time import step_time
from fusion_compiler.runtime import cuda_graphs
from fusion_compiler.runtime.binding import SHARED_BYTES, ZeroedScratch, unkept_scratch
from fusion_compiler.runtime.cuda_graphs import (
    FORMS,
    FORWARD_IS_NOT,
    RECORDED,
    Form,
    Recordings,
    Terms,
    form_of,
    refusal,
)
from fusion_compiler.runtime.graph_pool import Pool
from fusion_compiler.stitch.order import ordered
from tests.fake_gpu import FakeGpu, use
from tests.hand_made import contiguous


def traced(function: Callable[..., Any], *devices: str) -> fx.GraphModule:
    """`function` of one 4 x 4 FakeTensor on each device."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        inputs = [torch.empty(4, 4, device=device) for device in devices]
    return make_fx(function, tracing_mode="fake")(*inputs)


def with_item(graph: fx.GraphModule) -> fx.GraphModule:
    """The first result becomes a number that the host has to know."""
    node = next(node for node in graph.graph.nodes if node.op == "call_function")
    node.meta["val"] = ShapeEnv().create_unbacked_symint()
    return graph


def with_names(graph: fx.GraphModule) -> fx.GraphModule:
    """The first result is one by name, as those of a user's Triton kernel are."""
    node = next(node for node in graph.graph.nodes if node.op == "call_function")
    node.meta["val"] = {"out": node.meta["val"]}
    return graph


def writes(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(y)
    return y + 1


@pytest.mark.parametrize(
    ("graph", "static", "reason"),
    [
        (lambda: traced(lambda x, y: (x @ y).relu(), "cuda", "cuda"), (), None),
        (lambda: traced(writes, "cuda", "cuda"), (0,), None),
        (lambda: traced(writes, "cuda", "cuda"), (1,), "writes into x_1"),
        (lambda: traced(lambda x, y: x + y.sum(), "cuda", "cpu"), (), "on cpu"),
        (lambda: traced(lambda x: x.cpu(), "cuda"), (), "on cpu"),
        (lambda: traced(lambda x, y: (x + 1, y + 1), "cuda:0", "cuda:1"), (), "cuda:0 and cuda:1"),
        (lambda: make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.randn(4, 4)), (), "sizes differ"),
        (lambda: with_item(traced(lambda x: x.sum() + 1, "cuda")), (), "sum_1 (aten.sum.default) waits"),
        (lambda: with_names(traced(lambda x: x + 1, "cuda")), (), None),
        (lambda: with_names(traced(lambda x: x.cpu() + 1, "cuda")), (), "on cpu"),
        (lambda: traced(lambda: None), (), "no device"),
    ],
)
def test_what_is_recorded(
    graph: Callable[[], fx.GraphModule], static: Sequence[int], reason: str | None
) -> None:
    gm = graph()
    why = refusal(gm, form_of(gm, static), Phase.FORWARD)
    assert (why is None) if reason is None else (why is not None and reason in why)


def sized(*, with_sizes: bool) -> fx.GraphModule:
    """Return a graph of a tensor with any number of rows; with sizes, that number is an argument as well."""
    env, source = ShapeEnv(), ConstantSource("rows")
    symbol = env.create_symbol(5, source, dynamic_dim=DimDynamic.DYNAMIC)
    with FakeTensorMode(shape_env=env):
        x = torch.empty(env.create_symintnode(symbol, hint=5, source=source), 4, device="cuda")
    graph = fx.Graph()
    if with_sizes:
        graph.placeholder("rows").meta["val"] = x.shape[0]
    node = graph.placeholder("x")
    node.meta["val"] = x
    graph.output((node,))
    return fx.GraphModule(nn.Module(), graph)


def test_sizes_that_differ_are_recorded_in_inference_where_they_are_told() -> None:
    for with_sizes, phase, fits in (
        (True, Phase.INFERENCE, True),
        (True, Phase.FORWARD, False),
        (False, Phase.INFERENCE, False),
    ):
        graph = sized(with_sizes=with_sizes)
        form = form_of(graph, ())
        assert form.sizes == ((0,) if with_sizes else ())
        why = refusal(graph, form, phase)
        assert why is None if fits else why is not None and "sizes differ" in why


def test_a_view_of_what_else_is_there_is_not_recorded_where_sizes_differ() -> None:
    """AOTAutograd makes it again of the argument or the other result, at the offset that it has: a copy has
    none."""
    sin, t = torch.ops.aten.sin.default, torch.ops.aten.t.default
    for both, refused in (((t,), True), ((sin,), False), ((sin, t), True), ((sin, sin), False)):
        graph = sized(with_sizes=True)
        output = graph.graph.output_node()
        (x,) = output.all_input_nodes
        results: list[fx.Node] = []
        for target in both:
            with graph.graph.inserting_before(output):
                source = results[0] if target is t and results else x
                results.append(graph.graph.call_function(target, (source,)))
            results[-1].meta["val"] = x.meta["val"]
        output.args = (tuple(results),)
        why = refusal(graph, form_of(graph, ()), Phase.INFERENCE)
        assert (why is not None and "is a view of an argument" in why) == refused
    fixed = traced(lambda x: x.t(), "cuda")
    assert refusal(fixed, form_of(fixed, ()), Phase.INFERENCE) is None


def test_what_is_written_may_lie_anywhere_in_inference() -> None:
    graph = traced(writes, "cuda", "cuda")
    form = form_of(graph, (1,))
    assert form == Form(written=(0,)) and refusal(graph, form, Phase.INFERENCE) is None
    memory = torch.empty(64, dtype=torch.uint8)
    aligned = -memory.data_ptr() % 16
    assert form.of([memory[aligned:]]) == (memory.data_ptr() + aligned,)
    assert form.is_aligned(form.of([memory[aligned:]]))
    assert not form.is_aligned(form.of([memory[aligned + 1 :]]))
    ran: list[str] = []
    call = cuda_graphs._when_known(lambda _: ran.append("plain"), lambda _: ran.append("replayed"), form)
    for _ in range(3):
        call([memory[aligned + 1 :]])
    assert ran == ["plain"] * 3


def test_a_form_is_replayed_once_it_has_come_twice() -> None:
    ran: list[str] = []
    form = Form(sizes=(0,), written=(1,))
    call = cuda_graphs._when_known(
        lambda arguments: ran.append(f"plain {arguments[0]}"),
        lambda arguments: ran.append(f"replayed {arguments[0]}"),
        form,
    )
    mine, theirs = torch.empty(2, 64)
    for size, cache in ((5, mine), (7, mine), (5, mine), (5, theirs), (5, mine), (7, mine), (5, theirs)):
        call([size, cache])
    assert ran == [
        "plain 5", "plain 7", "replayed 5", "plain 5", "replayed 5", "replayed 7", "replayed 5",
    ]  # fmt: skip
    ran.clear()
    for size in (*range(100, 300), *range(100, 300), *range(250, 300)):
        call([size, mine])
    assert all(line.startswith("plain") for line in ran[:400]), "each is forgotten before it comes again"
    assert ran[400:] == [f"replayed {size}" for size in range(250, 300)]


def info_of(phase: Phase, graph: int = 0) -> GraphInfo:
    return GraphInfo(f"graph{graph}.{phase}", phase, (), 1)


def test_a_backward_follows_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str | None] = []
    backward_runs: list[int] = []
    kept = False  # for a backward to come

    class Manager:
        def set_to_running_backward(self) -> None:
            backward_runs.append(1)

    monkeypatch.setattr(cuda_graphs, "refusal", lambda *_: reasons.pop(0))
    monkeypatch.setattr(cuda_graphs, "recorded", lambda run, *_: lambda arguments: ["replayed"])
    monkeypatch.setattr(cuda_graphs, "is_kept", lambda: kept)
    monkeypatch.setattr(cudagraph_trees, "get_manager", lambda index, create_if_none_exists: Manager())
    graph = traced(lambda x: x + 1, "cuda:0")
    recordings = Recordings()

    def plain(arguments: list[Any]) -> list[str]:
        return ["plain"]

    def decide(phase: Phase, number: int, reason: str | None) -> tuple[Any, str]:
        reasons.append(reason)
        run, decision = recordings.wrap(plain, graph, [], info_of(phase, number))
        return run, decision.reason

    run, note = decide(Phase.BACKWARD, 0, None)
    assert (run, note) == (plain, FORWARD_IS_NOT)
    assert decide(Phase.FORWARD, 0, "on cpu") == (plain, "on cpu")
    assert decide(Phase.BACKWARD, 0, None) == (plain, FORWARD_IS_NOT)
    run, note = decide(Phase.FORWARD, 1, None)
    assert note == RECORDED and [run([]) for _ in range(3)] == [["plain"], ["replayed"], ["replayed"]]
    run, note = decide(Phase.BACKWARD, 1, None)
    assert note == RECORDED and [run([]) for _ in range(3)] == [["plain"], ["replayed"], ["replayed"]]
    assert len(backward_runs) == 1
    kept = True
    assert run([]) == ["plain"] and len(backward_runs) == 2
    run, note = decide(Phase.BACKWARD, 1, "sizes differ")
    assert note == "sizes differ" and [run([]) for _ in range(2)] == [["plain"]] * 2
    assert len(backward_runs) == 4


PAYS = Terms(host_us=900.0, gpu_us=300.0, peak=1 << 20, copy_us=5.0, replay_us=160.0)


@pytest.mark.parametrize(
    ("terms", "reason"),
    [
        (PAYS, None),
        (replace(PAYS, gpu_us=1700.0), None),  # a busy host takes longer than predicted,
        (replace(PAYS, gpu_us=1000.0, peak=1 << 27), "what they launch 1000 us"),  # where that keeps little
        (replace(PAYS, gpu_us=1800.0, copy_us=0.0), "its launches take 900 us, what they launch 1800 us"),
        (replace(PAYS, peak=5 << 30), None),  # how much may be kept is the pool's to say
        (replace(PAYS, copy_us=1600.0), "what they launch 300 us and the copies of a CUDA graph 1600 us"),
        (replace(PAYS, host_us=160.0, gpu_us=2.0), "its launches take 160 us, a CUDA graph's 160 us"),
    ],
)
def test_what_is_recorded_unasked(terms: Terms, reason: str | None) -> None:
    why = terms.refusal
    assert why is None if reason is None else why is not None and reason in why


@pytest.mark.parametrize(
    ("phase", "moved"), [(Phase.INFERENCE, 2 << 20), (Phase.FORWARD, 1 << 20), (Phase.BACKWARD, 0)]
)
def test_copies_of_arguments_and_results_count(phase: Phase, moved: int) -> None:
    """A parameter lies where it is, and a backward pass takes over what was saved."""
    tensors = torch.empty(1 << 20, dtype=torch.uint8), torch.empty(1 << 20, dtype=torch.uint8)
    (plan,) = fc.explain(lambda x, w: x + w, *tensors).plans
    replays = Replays(Options.of(), Plans(), WarnOnce())
    terms = replays._terms(plan, GraphInfo("graph0", phase, (1,), 1), 0)
    assert terms.copy_us == pytest.approx(2e6 * moved / device_spec("h200").copy_bandwidth)


def test_a_forward_and_its_backward_are_judged_together() -> None:
    """A step takes what the host takes for both, or the device."""
    forward = replace(PAYS, gpu_us=500.0, peak=1 << 27)
    backward = replace(PAYS, gpu_us=1200.0, peak=1 << 28)
    assert forward.refusal is None and backward.refusal is not None
    both = forward + backward
    assert both.refusal is None and both.recorded_us == 1710.0 and both.peak == 3 << 27
    slower = both + replace(PAYS, host_us=0.0, gpu_us=500.0, copy_us=0.0)
    assert slower.refusal is not None and slower.is_open
    assert not (slower + slower + replace(PAYS, host_us=0.0, gpu_us=30000.0)).is_open


def test_sizes_are_recorded_unasked_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(cuda_graphs, "Recorder", lambda *_: lambda arguments: ran.append("replayed") or [])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Pool, "free_bytes", lambda self: 1 << 30)

    asked: list[int] = []

    def terms(at: Mapping[sympy.Symbol, int] | None) -> Terms:
        (size,) = (8192,) if at is None else at.values()
        asked.append(size)
        return replace(PAYS, copy_us=size / 4 if size > 64 else 1.0, peak=1 << 28 if size == 32 else 1 << 20)

    def plain(arguments: list[Any]) -> list[Any]:
        ran.append("plain")
        return []

    call, decision = Recordings().wrap(plain, sized(with_sizes=True), [], info_of(Phase.INFERENCE), terms)
    assert "but with the sizes that it was captured with: its launches take 900 us" in decision.reason
    for size in (65536, 65536, 65536, 64, 64, 64, 7, 32, 32, 32):
        call([size, torch.ones(size)])
    assert ran == [*["plain"] * 4, "replayed", "replayed", *["plain"] * 4]
    assert asked == [8192, 65536, 64, 32], "once of each size, when it comes again; 32 would keep too much"


def test_what_is_predicted_of_a_symbolic_graph_is_of_the_sizes_that_it_was_captured_with() -> None:
    """And of other sizes as far as their bytes are more: what it takes, holds at most and gives back."""
    fast = fc.compile(lambda x, y: (x @ y).relu(), dynamic=True, backend="eager", device="h200")
    rows, width = 4096, 1024
    with torch.no_grad():
        fast(torch.ones(rows, width), torch.ones(width, width))
    (plan,) = fast.plan
    sizes = size_hints([n.meta["val"] for n in plan.dag.module.graph.find_nodes(op="placeholder")])
    assert set(sizes.values()) == {rows, width}
    (product,) = (op for op in map(plan.dag.op, plan.dag.order) if op.kind is Kind.CONTRACTION)
    assert product.flops == 2 * rows * width * width
    larger = {symbol: size * (16 if size == rows else 1) for symbol, size in sizes.items()}
    now, at_larger = (step_time(plan, device_spec("h200"), sizes, at) for at in (sizes, larger))
    assert at_larger.gpu_us > 8 * now.gpu_us > 80 and at_larger.host_us == now.host_us
    assert ordered(plan, hints=sizes).peak >= rows * width * 4


class Net(nn.Module):
    """Parameters, and a buffer that is written into."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return torch.tanh(self.linear(x)) + self.steps


def test_recordings_are_told_of_parameters_buffers_and_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[dict[str, Any]] = []

    def impl(model: Any, inputs: list[Any], static: Sequence[int], **options: Any) -> Any:
        entry: dict[str, Any] = {"count": len(inputs), "static": tuple(static), "calls": 0, **options}
        entries.append(entry)

        def run(arguments: list[Any]) -> Any:
            entry["calls"] += 1
            return model(arguments)

        return run

    monkeypatch.setattr(cudagraph_trees, "cudagraphify_impl", impl)
    monkeypatch.setattr(cuda_graphs, "refusal", lambda *_: None)
    monkeypatch.setattr(cuda_graphs, "_device_index", lambda gm: 0)
    monkeypatch.setattr(cudagraph_trees, "get_manager", lambda *_, **__: None)
    use(FakeGpu(), monkeypatch)
    model, exact = Net(), Net().double()
    exact.load_state_dict(model.state_dict())
    fast = fc.compile(model, cudagraphs=True, tune=False, strict=True)
    for _ in range(3):
        x = torch.randn(3, 8)
        got, want = fast(x), exact(x.double())
        torch.testing.assert_close(got, want, check_dtype=False)
        got.square().sum().backward()
        want.square().sum().backward()
    torch.testing.assert_close(model.steps, exact.steps, check_dtype=False)
    torch.testing.assert_close(model.linear.weight.grad, exact.linear.weight.grad, check_dtype=False)
    forward, backward = entries
    assert (forward["is_backward"], forward["is_inference"], backward["is_backward"]) == (False, False, True)
    assert [e["calls"] for e in entries] == [2, 2]
    assert len(forward["static"]) == 3 and set(forward["mutated_input_idxs"]) <= set(forward["static"])
    assert len(forward["mutated_input_idxs"]) == 1 and forward["device_index"] == 0
    assert len(forward["placeholders"]) == forward["count"]
    assert [plan.decision("CUDA graph").reason for plan in fast.plan] == [RECORDED] * 2


def test_caches_that_move_and_grow_are_replayed_where_they_lay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `generate` makes them: for each prompt one of its own length, each token at the next place."""
    recorded: dict[tuple[int, ...], int] = {}

    def impl(model: Any, inputs: list[Any], static: Sequence[int], **options: Any) -> Any:
        assert set(options["mutated_input_idxs"]) <= set(static), "else PyTorch does not record"
        sizes = [i for i, value in enumerate(inputs) if isinstance(value, int)]

        def run(arguments: list[Any]) -> Any:
            form = tuple(arguments[i] for i in sizes)
            recorded[form] = recorded.get(form, 0) + 1
            return model(arguments)

        return run

    def put(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(0, at, torch.tanh(new))
        return cache.sum(0)

    monkeypatch.setattr(cudagraph_trees, "cudagraphify_impl", impl)
    monkeypatch.setattr(cuda_graphs, "refusal", lambda *_: None)
    monkeypatch.setattr(cuda_graphs, "_device_index", lambda gm: 0)
    use(FakeGpu(), monkeypatch)
    fast = fc.compile(put, cudagraphs=True, tune=False, strict=True)
    caches = [torch.randn(length, 64) for length in (16, 24, 16, 40)]
    with torch.no_grad():
        for cache in caches:
            twin = cache.clone()
            for position in range(4):
                new, at = torch.randn(1, 64), torch.tensor([position])
                torch.testing.assert_close(fast(cache, new, at), put(twin, new, at))
                torch.testing.assert_close(cache, twin)
    assert [plan.decision("CUDA graph").reason for plan in fast.plan] == [f"{RECORDED}; {FORMS}"] * 2
    assert list(recorded.values()) == [3] * 4, "all tokens but each cache's first"


def test_on_a_cpu_it_says_why_not() -> None:
    fast = fc.compile(lambda x: F.gelu(x), cudagraphs=True, backend="interpret")
    x = torch.randn(5)
    with pytest.warns(FusionWarning, match="graph0.inference is not recorded as a CUDA graph"):
        torch.testing.assert_close(fast(x), F.gelu(x))
    assert "interpret" in fast.plan[0].decision("CUDA graph").reason


def test_no_memory_is_kept_from_a_recording() -> None:
    scratch = ZeroedScratch(FakeGpu(), (contiguous("t", (1,), torch.int32, zeroed=True),))
    with unkept_scratch():
        first = scratch(1, (4,))[0]
        assert scratch(1, (4,))[0] is not first and first.tolist() == [0] * 4
    kept = scratch(1, (4,))[0]
    assert kept is not first and scratch(1, (4,))[0] is kept


def test_a_recording_clears_its_scratch_once() -> None:
    gpu = FakeGpu()
    dtypes = {"t": torch.int32, "m": torch.int64}
    counters = [contiguous(name, (1,), dtype, zeroed=True) for name, dtype in dtypes.items()]
    first, second = ZeroedScratch(gpu, counters), ZeroedScratch(gpu, counters[:1])
    with unkept_scratch():
        small, wide = first(1, (3, 5))
        assert (small.dtype, small.shape, wide.dtype, wide.shape) == (torch.int32, (3,), torch.int64, (5,))
        assert wide.data_ptr() - small.data_ptr() == 16 and not wide.any()
        assert second(1, (9,))[0].data_ptr() == small.data_ptr() != second(2, (9,))[0].data_ptr()
        (large,) = second(1, (SHARED_BYTES,))
        assert large.numel() == SHARED_BYTES and large.data_ptr() != small.data_ptr()
    with unkept_scratch():
        assert first(1, (3, 5))[0] is not small


@pytest.mark.parametrize("drawn", [False, True])
def test_inference_is_tuned_once_before_it_is_recorded(monkeypatch: pytest.MonkeyPatch, drawn: bool) -> None:
    """But where it draws random numbers: trials would draw them as well."""
    ran: list[Any] = []
    monkeypatch.setattr(Pool, "free_bytes", lambda self: 1 << 30)
    for name in ("recorded", "Recorder"):
        monkeypatch.setattr(cuda_graphs, name, lambda *_: lambda arguments: ran.append("replayed") or [])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def plain(arguments: list[Any]) -> list[Any]:
        ran.append("plain")
        return []

    def tuning(run: Any, arguments: Sequence[Any], written: Sequence[int], index: int) -> None:
        run(["tuned"])
        assert ran.pop() == "plain"
        ran.append(("tuned", arguments, written, index))

    def f(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(y)
        return torch.rand_like(y) if drawn else y + 1

    graph = traced(f, "cuda", "cuda")
    info = replace(info_of(Phase.INFERENCE), static_inputs=(0,))
    for terms in (None, lambda at: PAYS):
        call, _ = Recordings().wrap(plain, graph, [], info, terms, tuning)
        for number in range(3):
            call([number])
        first = [] if drawn else [("tuned", [1], (0,), 0)]
        assert ran == ["plain", *first, "replayed", "replayed"]
        ran.clear()


def test_chunks_of_a_loss_count_with_all_that_they_launch() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(512, 32000, bias=False, dtype=torch.bfloat16)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x).float(), labels)

    rows = 16384
    x = torch.empty(rows, 512, dtype=torch.bfloat16)
    report = fc.explain(Loss(), x, torch.empty(rows, dtype=torch.int64), device="h200")
    plans = {plan.name: plan for plan in report.plans}
    loops = [
        op.target
        for p in plans.values()
        for op in map(p.dag.op, p.dag.order)
        if isinstance(op.target, Chunked)
    ]
    device = device_spec("h200")
    assert loops
    for plan in plans.values():
        chunked = [op.target for op in map(plan.dag.op, plan.dag.order) if isinstance(op.target, Chunked)]
        took = step_time(plan, device)
        assert took.host_us >= sum(loop.host_us for loop in chunked)
        assert took.gpu_us >= sum(loop.gpu_us for loop in chunked)
    (loop,) = loops[:1]
    bodies = [plan for name, plan in plans.items() if loop.name in name]
    one = step_time(bodies[0], device)
    assert loop.sizes == (loop.chunk,) * loop.count and len(bodies) == 1
    assert loop.host_us == loop.count * one.host_us and loop.gpu_us == pytest.approx(loop.count * one.gpu_us)


def test_a_graph_with_a_collective_is_not_recorded_unasked() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0")),))
    reason = cuda_graphs._collective(fx.GraphModule({}, graph))
    assert reason == "other processes take part in _c10d_functional.all_reduce.default"
    assert cuda_graphs._collective(fx.symbolic_trace(lambda x: x + 1)) is None
