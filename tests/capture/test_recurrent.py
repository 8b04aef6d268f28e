"""nn.LSTM, nn.GRU and nn.RNN are one library call each of a graph that is compiled around them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import fusion_compiler as fc
from fusion_compiler.errors import LostRecordError
from fusion_compiler.ops.own.recurrent import recurrent

pytestmark = pytest.mark.filterwarnings("ignore:.*oneDNN.*", "ignore:.*is on cpu.*")


class Tagger(nn.Module):
    """A recurrent layer between a GELU and a norm. A kernel could write the sum over the layer's input."""

    def __init__(self, kind: str = "LSTM", **options: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.layer = getattr(nn, kind)(8, 8, **options)
        self.norm = nn.LayerNorm(options.get("proj_size", 8))

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, ...]:
        x = nn.functional.gelu(self.embed(x))
        y, state = self.layer(x, state)
        y = self.norm(y.unflatten(-1, (-1, self.norm.normalized_shape[0])).sum(-2))
        state = state if isinstance(state, tuple) else (state,)
        return (x + y if x.shape == y.shape else y, *state)


def loss_of(results: tuple[Tensor, ...]) -> Any:
    """A sum with fixed weights, so that gradients are not all ones."""
    weights = [torch.arange(1, r.numel() + 1, device=r.device).view(r.shape) / r.numel() for r in results]
    return sum((r * w).sum() for r, w in zip(results, weights, strict=True))


def step(model: Any, *inputs: Any) -> list[Tensor]:
    """The results of a call and the gradients of the inputs and parameters."""
    wanted = [t for t in (*inputs, *model.parameters()) if isinstance(t, Tensor) and t.requires_grad]
    results = model(*inputs)
    return [*results, *torch.autograd.grad(loss_of(results), wanted)]


def check(model: nn.Module, compiled: Any, *inputs: Any) -> None:
    """The same numbers as in float64, as close as float32 allows, and eager's strides."""
    torch.manual_seed(1)
    got = step(compiled, *inputs)
    torch.manual_seed(1)
    eager = step(model, *inputs)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    torch.manual_seed(1)
    truth = step(copy.deepcopy(model).double(), *wide)
    assert [t.stride() for t in got[:1]] == [t.stride() for t in eager[:1]]
    for ours, theirs in zip(got, truth, strict=True):
        torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-4, atol=1e-5)


def layers(compiled: Any) -> list[list[str]]:
    """The recurrent calls of each plan."""
    calls = [
        [left for left in plan.leftovers if left.reason.startswith("a recurrent")] for plan in compiled.plan
    ]
    return [[left.target.split(".")[1] for left in graph] for graph in calls]


CASES = [
    ("LSTM", {"num_layers": 2, "bidirectional": True, "batch_first": True}, (3, 7, 5)),
    ("LSTM", {"proj_size": 4, "bias": False}, (7, 5)),
    ("GRU", {"batch_first": True}, (3, 7, 5)),
    ("RNN", {"nonlinearity": "relu", "num_layers": 2}, (7, 3, 5)),
]


@pytest.mark.parametrize(("kind", "options", "shape"), CASES)
def test_a_layer_is_one_call_forward_and_backward(
    kind: str, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    model = Tagger(kind, **options)
    compiled = fc.compile(model, backend="interpret")
    check(model, compiled, torch.randn(shape, requires_grad=True))
    name = "rnn_relu" if kind == "RNN" else kind.lower()
    assert layers(compiled) == [[name], [f"{name}_backward"]]
    assert not compiled.plan.breaks and all(plan.clusters for plan in compiled.plan)
    assert "each step needs the one before" in str(compiled.plan)


def test_a_call_without_gradients_keeps_no_record() -> None:
    model = Tagger("LSTM", num_layers=2, dropout=0.5, batch_first=True).eval()
    compiled = fc.compile(model)
    x, state = torch.randn(3, 7, 5), (torch.randn(2, 3, 8), torch.randn(2, 3, 8))
    with torch.no_grad():
        for ours, theirs in zip(compiled(x, state), model(x, state), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert layers(compiled) == [["lstm"]]
    (call,) = (plan.dag.op("lstm") for plan in compiled.plan)
    assert len(call.outputs) == 3


def test_dropout_between_layers_draws_what_eager_draws() -> None:
    model = Tagger("GRU", num_layers=3, dropout=0.5)
    check(model, fc.compile(model, strict=False), torch.randn(7, 3, 5))


def test_frozen_weights_and_a_graph_that_is_used_twice() -> None:
    model = Tagger("LSTM")
    model.layer.weight_hh_l0.requires_grad_(False)
    compiled = fc.compile(model)
    x = torch.randn(4, 2, 5, requires_grad=True)
    check(model, compiled, x)
    loss = loss_of(compiled(x))
    first, second = (torch.autograd.grad(loss, [x], retain_graph=True) for _ in range(2))
    assert torch.equal(first[0], second[0])


def test_sequences_of_any_length_share_a_graph() -> None:
    model = Tagger("GRU", batch_first=True)
    compiled = fc.compile(model)
    for length in (3, 5, 9, 30):
        check(model, compiled, torch.randn(2, length, 5))
    assert len(compiled.plan) == 4  # forward and backward, of the first length and of any


def test_replaced_saved_tensors_run_the_layer_again() -> None:
    """`save_on_cpu` and the like give back tensors that have no record."""
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t)
    for options in ({}, {"num_layers": 2, "dropout": 0.5}):
        model = Tagger("LSTM", **options)
        compiled, x = fc.compile(model), torch.randn(4, 2, 5, requires_grad=True)
        with hooks:
            loss = loss_of(compiled(x))
        if options:
            with pytest.raises(LostRecordError, match="dropout"):
                loss.backward()
        else:
            (got,) = torch.autograd.grad(loss, [x])
            (eager,) = torch.autograd.grad(loss_of(model(x)), [x])
            torch.testing.assert_close(got, eager)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_autocast_gives_the_dtypes_of_eager(kind: str) -> None:
    model = Tagger(kind)
    compiled, x = fc.compile(model), torch.randn(4, 2, 5)
    with torch.autocast("cpu", torch.bfloat16):
        got, eager = step(compiled, x), step(model, x)
    for ours, theirs in zip(got, eager, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


def test_autocast_on_cuda_gives_sixteen_bits() -> None:
    with FakeTensorMode():
        x, h = torch.empty(2, 3, 8, device="cuda"), torch.empty(1, 2, 8, device="cuda")
        weights = [torch.empty(24, 8, device="cuda"), torch.empty(24, 8, device="cuda")]
        torch.set_autocast_enabled("cuda", True)
        try:
            results = recurrent("gru", False, x, h, weights, False, 1, 0.0, True, False, True)
        finally:
            torch.set_autocast_enabled("cuda", False)
    assert [r.dtype for r in results] == [torch.get_autocast_dtype("cuda")] * 2
    assert results[0].stride() == (8, 16, 1) and results[0].device.type == "cuda"


def test_packed_sequences_with_an_initial_state() -> None:
    """Without a state, and in a GRU, PyTorch reads the batch size from data, which ends the graph."""
    layer = nn.LSTM(5, 8, bidirectional=True)
    compiled = fc.compile(lambda packed, state: torch.tanh(layer(packed, state)[0].data) * 2)
    x, lengths = torch.randn(6, 3, 5, requires_grad=True), torch.tensor([6, 4, 1])
    state = (torch.randn(2, 3, 8), torch.randn(2, 3, 8))
    packed: PackedSequence = pack_padded_sequence(x, lengths)
    got, eager = compiled(packed, state), torch.tanh(layer(packed, state)[0].data) * 2
    torch.testing.assert_close(got, eager)
    ours, theirs = (torch.autograd.grad(y.square().sum(), [x], retain_graph=True)[0] for y in (got, eager))
    torch.testing.assert_close(ours, theirs)
    assert layers(compiled) == [["lstm"], ["lstm_backward"]]


def test_function_transforms_see_the_layer_written_out() -> None:
    layer, x = nn.RNN(4, 4), torch.randn(2, 1, 4)
    slope = torch.func.grad(lambda x: layer(x)[0].square().sum())
    compiled = fc.compile(slope)
    torch.testing.assert_close(compiled(x), slope(x), rtol=1e-4, atol=1e-5)
    assert layers(compiled) == [[]]


def test_other_compilations_keep_pytorchs_setting() -> None:
    model, graphs = Tagger("LSTM"), []
    fc.compile(model)(torch.randn(4, 2, 5))
    assert not torch._dynamo.config.allow_rnn
    torch.compile(Tagger("LSTM"), backend=lambda gm, _: graphs.append(gm) or gm.forward)(torch.randn(4, 2, 5))
    assert not any("lstm" in str(node.target) for gm in graphs for node in gm.graph.nodes)


def test_the_plan_for_a_gpu_has_the_layer_there_and_needs_no_dynamo() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The .grad attribute")  # PyTorch 2.15 reads it itself
        explained = fc.explain(Tagger("LSTM", batch_first=True), torch.randn(2, 50, 5))
    assert "captured by torch.fx" in str(explained)
    forward, backward = (plan.dag for plan in explained.plans)
    assert forward.op("lstm").outputs[0].device.startswith("cuda")
    assert backward.op("lstm_backward").flops == 2 * forward.op("lstm").flops == 4 * 2 * 50 * 8 * 64
