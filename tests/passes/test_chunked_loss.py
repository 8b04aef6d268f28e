"""Losses whose logits are made one chunk of rows after the other: results, gradients, what is stored,
refusals."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fusion_compiler as fc
from benchmarks.harness.accuracy import InFloat64
from fusion_compiler.ir.chunks import Chunked
from fusion_compiler.ops.decompositions.table import decomposition_table
from fusion_compiler.passes.chunks import chunk
from fusion_compiler.passes.chunks import gradients as gradients_in_chunks
from fusion_compiler.passes.chunks.chunk import Limits
from fusion_compiler.passes.chunks.one_hot import sum_one_hot
from fusion_compiler.stitch.order import ordered
from tests import models
from tests.exactness import not_as_close, wide

VOCABULARY, HIDDEN = 72, 12
IN_FORWARD, AGAIN = "gradients made in the forward pass", "computed again in backward"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "LIMITS", Limits(bytes=0, width=6, rows=4, columns=30, alignment=8))


def logits_of(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).flatten(0, -2).float()


def mean(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(x, w), t.flatten())


def smoothed(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    t = t.flatten().clamp(3)
    return F.cross_entropy(logits_of(x, w), t, label_smoothing=0.1, ignore_index=3, reduction="sum")


def weighted(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    logits = logits_of(x, w)
    weight = torch.arange(VOCABULARY) / VOCABULARY
    return F.cross_entropy(logits, t.flatten(), weight=weight.to(logits.dtype))


def each(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(x, w), t.flatten(), reduction="none")


def shifted(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    logits = F.linear(x, w).float()
    cut = logits[..., :-1, :].contiguous().view(-1, VOCABULARY)
    return F.cross_entropy(cut, t[..., 1:].contiguous().view(-1))


def padded_labels(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    t = F.pad(t, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits_of(x, w), t.view(-1), reduction="sum") / 7


def capped(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    logits = (2 * torch.tanh(F.linear(x, w) / 2)).float()
    return (
        F.cross_entropy(logits.view(-1, VOCABULARY), t.flatten()) + 1e-2 * logits.logsumexp(-1).pow(2).mean()
    )


def transposed(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy((x.flatten(0, 1) @ w.t().contiguous()).float(), t.flatten())


def biased(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w, w.sum(1)).flatten(0, 1).float(), t.flatten())


def distilled(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        teacher = F.log_softmax(logits_of(x.roll(1, -1), w.flip(0)) / 2, -1)
    student = logits_of(x, w)
    soft = F.kl_div(F.log_softmax(student / 2, -1), teacher, reduction="batchmean", log_target=True)
    return 4 * soft + F.cross_entropy(student, t.flatten())


def log_probabilities(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """Return the log-probability of each sequence."""
    log_p = F.linear(x, w).float().log_softmax(-1)
    each = log_p.gather(-1, t.clamp(0).unsqueeze(-1)).squeeze(-1)
    return (each * (t >= 0)).sum(-1)


def preferred(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        reference = log_probabilities(x, w.flip(0), t)
    ratio = log_probabilities(x, w, t) - reference
    return -F.logsigmoid(0.1 * (ratio[0] - ratio[1]))


def focal(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    log_p = logits_of(x, w).log_softmax(-1).gather(1, t.clamp(0).flatten()[:, None])[:, 0]
    return -((1 - log_p.exp()).square() * log_p).mean()


def entropy(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    p = logits_of(x, w).softmax(-1)
    return -(p * (p + 1e-6).log()).sum(-1).mean()


def cumulative(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """The ranked probability score."""
    below = torch.arange(VOCABULARY) >= t.flatten()[:, None]
    return (logits_of(x, w).softmax(-1).cumsum(-1) - below.float()).square().mean()


def squared(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """Gradients depend on what all rows give."""
    return F.cross_entropy(logits_of(x, w), t.flatten()).square()


LOSSES: dict[Callable[..., Tensor], str] = {
    mean: IN_FORWARD,
    smoothed: IN_FORWARD,
    weighted: IN_FORWARD,
    each: AGAIN,
    shifted: IN_FORWARD,
    padded_labels: IN_FORWARD,
    capped: IN_FORWARD,
    transposed: IN_FORWARD,
    biased: IN_FORWARD,
    distilled: IN_FORWARD,
    log_probabilities: AGAIN,
    preferred: AGAIN,
    focal: IN_FORWARD,
    entropy: IN_FORWARD,
    cumulative: IN_FORWARD,
    squared: AGAIN,
}


# Sums over the words cancel in the gradients of these losses. Over 1000 inputs of the cumulative one, eager's
# error is up to 34 units in the last place of the largest gradient, and ours up to 11.
CANCELLING = (cumulative, entropy, preferred)


def inputs(dtype: torch.dtype, length: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    labels = torch.randint(0, VOCABULARY, (2, length))
    labels[0, 2] = labels[1, 1] = -100
    return torch.randn(2, length, HIDDEN).to(dtype), torch.randn(VOCABULARY, HIDDEN).to(dtype), labels


def results(fn: Callable[..., Any], x: Tensor, w: Tensor, t: Tensor) -> list[Tensor]:
    """The loss, and the gradients of the hidden states and the weight for a gradient that is not one."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    loss = fn(x, w, t)
    (loss * torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape)).sum().backward()
    assert x.grad is not None and w.grad is not None
    return [loss.detach(), x.grad, w.grad]


def notes(compiled: Any) -> str:
    return " ".join(plan.notes.get("chunked loss", "") for plan in compiled.plan)


def gradient_notes(compiled: Any) -> str:
    return " ".join(plan.notes.get("chunked gradient", "") for plan in compiled.plan)


def check(fn: Callable[..., Any], x: Tensor, w: Tensor, t: Tensor, backend: str = "eager") -> str:
    """Compares with float64 and with eager; the notes.

    Where eager was lucky, 8 units in the last place of the largest gradient are allowed, and 16 for the
    losses of CANCELLING.
    """
    compiled = fc.compile(fn, backend=backend)
    ours, eager = results(compiled, x, w, t), results(fn, x, w, t)
    with InFloat64():
        truth = results(fn, wide(x), wide(w), t)
    units = 16 if fn in CANCELLING else 8
    for name, our, their, true in zip(("loss", "x", "w"), ours, eager, truth, strict=True):
        largest = 10.0 if name == "loss" else true.abs().max().item()  # log-probabilities, which may cancel
        wrong = not_as_close(our, their, true.double(), units * torch.finfo(torch.float32).eps * largest)
        assert wrong is None, f"{name}: {wrong}"
    return notes(compiled)


@pytest.mark.sample(10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_results_and_gradients(loss: Callable[..., Tensor], dtype: torch.dtype) -> None:
    said = check(loss, *inputs(dtype))
    assert LOSSES[loss] in said and "refused" not in said


@pytest.mark.parametrize("loss", [smoothed, each], ids=lambda f: f.__name__)
def test_the_kernels_give_the_same(loss: Callable[..., Tensor]) -> None:
    assert LOSSES[loss] in check(loss, *inputs(torch.float32), "interpret")


def test_small_gradients_survive_in_float16() -> None:
    """Gradients are scaled before they are rounded to float16, as in autograd: those for a gradient of one
    vanish."""

    def scaled(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(x, w), t.flatten()) / 4096 * 4096

    x, w, t = inputs(torch.float16)
    assert AGAIN in check(scaled, x, w, t)
    compiled = fc.compile(lambda x, w, t: mean(x, w, t) / 1e7, backend="eager")
    x.requires_grad_()
    (compiled(x, w, t) * 1e7).backward()
    assert x.grad is not None and (x.grad.abs() > 1e-5).any()


def test_rows_that_no_equal_chunks_hold() -> None:
    assert Limits().chunk(8192) == 2048 and Limits().chunk(4 * 2047) == 2047
    x, w, t = inputs(torch.float32, 11)
    x, t = x.flatten(0, 1)[:17], t.flatten()[:17]
    said = check(lambda x, w, t: F.cross_entropy(F.linear(x, w), t), x, w, t)
    assert "5 chunks of 4 rows" in said


def test_only_what_is_asked_for() -> None:
    """A frozen weight, frozen hidden states, and no gradient at all."""
    x, w, t = inputs(torch.float32)
    with InFloat64():
        truth = results(mean, x.double(), w.double(), t)
    for position, (a, b) in enumerate(((x.clone().requires_grad_(), w), (x, w.clone().requires_grad_()))):
        compiled = fc.compile(mean, backend="eager")
        (0.5 * compiled(a, b, t)).backward()
        torch.testing.assert_close((a, b)[position].grad, truth[1 + position].float())
        assert IN_FORWARD in notes(compiled)
    compiled = fc.compile(mean, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, w, t), truth[0].float())
    assert "6 chunks of 3 rows" in notes(compiled) and len(compiled.plan) == 2


def test_rows_without_a_label_and_infinite_logits() -> None:
    x, w, t = inputs(torch.float32)
    check(mean, x, w, torch.full_like(t, -100).index_fill_(1, torch.tensor(3), 5))
    x[0, 4] = math.inf
    ours, eager = (results(fn, x, w, t) for fn in (fc.compile(mean, backend="eager"), mean))
    assert all(torch.equal(a.isfinite(), b.isfinite()) for a, b in zip(ours, eager, strict=True))


def test_backward_may_run_twice() -> None:
    x, w, t = inputs(torch.float32)
    x.requires_grad_()
    loss = fc.compile(mean, backend="eager")(x, w, t)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(2 * loss, x)
    torch.testing.assert_close(second, 2 * first)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_models_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are tied (gpt2) or have a bias (bert). Models that return logits beside the loss are
    refused."""
    for config in (models._DECODER, models._ENCODER):
        monkeypatch.setitem(config, "vocab_size", 448)
    monkeypatch.setattr(models, "VOCABULARY", 448)
    model, batch = models.small(name, batch=2, length=8)
    model.eval()
    compiled = fc.compile(lambda: model(**batch).loss, backend="eager")
    truth = copy.deepcopy(model).double()
    with InFloat64():
        truth(**batch).loss.backward()
    gradients: list[dict[str, Tensor]] = []
    for call in (lambda: model(**batch).loss, compiled):
        model.zero_grad()
        call().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for key, parameter in truth.named_parameters():
        if parameter.grad is not None:
            noise = 1e-6 * parameter.grad.abs().max().item()
            assert not_as_close(gradients[1][key], gradients[0][key], parameter.grad, noise) is None
    assert IN_FORWARD in notes(compiled)
    with_logits = fc.compile(model, backend="eager")
    model.zero_grad()
    with_logits(**batch).loss.backward()
    assert "refused" in notes(with_logits) and "the model returns it" in notes(with_logits)
    assert "done: the gradient of" in gradient_notes(with_logits)
    for key, parameter in truth.named_parameters():
        if parameter.grad is not None:
            ours = model.get_parameter(key).grad
            assert ours is not None
            noise = 1e-6 * parameter.grad.abs().max().item()
            assert not_as_close(ours, gradients[0][key], parameter.grad, noise) is None


def refused(fn: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    compiled = fc.compile(fn, backend="eager", **options)
    torch.testing.assert_close(compiled(*arguments), fn(*arguments))
    return notes(compiled)


def with_logits(x: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits_of(x, w)
    return F.cross_entropy(logits, t.flatten()), logits


def with_loss(x: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers returns both, in the logits' own shape."""
    logits = F.linear(x, w)
    return F.cross_entropy(logits.flatten(0, -2).float(), t.flatten()), logits


def biased_logits(x: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, w, w.sum(1))
    return F.cross_entropy(logits.flatten(0, -2).float(), t.flatten(), label_smoothing=0.1), logits


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fn", [with_loss, with_logits, biased_logits], ids=lambda f: f.__name__)
@pytest.mark.parametrize("read", [False, True], ids=["loss", "loss and logits"])
@pytest.mark.parametrize("unit", ["columns", "rows"])
def test_the_gradient_of_stored_logits(
    fn: Callable[..., tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    read: bool,
    unit: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether or not the logits have a gradient of their own."""
    if unit == "rows":
        monkeypatch.setattr(gradients_in_chunks, "ALIGNED", 5)

    def gradients(fn: Callable[..., Any], x: Tensor, w: Tensor, t: Tensor) -> list[Tensor]:
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        loss, logits = fn(x, w, t)
        total = 0.75 * loss + (0.01 * logits.square().sum() if read else 0)
        return [loss.detach(), logits.detach(), *torch.autograd.grad(total, (x, w))]

    x, w, t = inputs(dtype, 80)
    compiled = fc.compile(fn, backend="interpret" if fn is with_loss else "eager")
    ours, eager = gradients(compiled, x, w, t), gradients(fn, x, w, t)
    with InFloat64():
        truth = gradients(fn, wide(x), wide(w), t)
    for name, our, their, true in zip(("loss", "logits", "x", "w"), ours, eager, truth, strict=True):
        noise = 8 * torch.finfo(torch.float32).eps * max(10.0, true.abs().max().item())
        wrong = not_as_close(our, their, true.double(), noise)
        assert wrong is None, f"{name}: {wrong}"
    wanted = {"columns": "3 chunks of 24 columns", "rows": "40 chunks of 4 rows"}[unit]
    assert wanted in gradient_notes(compiled)


def test_sums_as_large_as_what_they_save_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients_in_chunks, "ALIGNED", 5)
    x, w, t = inputs(torch.bfloat16)
    compiled = fc.compile(with_loss, backend="eager")
    compiled(x, w.requires_grad_(), t)[0].backward()
    assert "sums over its chunks would take" in gradient_notes(compiled)


def one_hot_sums(x: Tensor, labels: Tensor, classes: int) -> list[Tensor]:
    hot = torch.arange(classes) == labels[:, None]
    turned = torch.arange(classes)[:, None] == labels
    return [
        torch.where(hot, x[:, None], 0.0).sum(1, keepdim=True),
        torch.where(turned, x, torch.zeros(())).sum(0),
        torch.where(hot, x[:, None], 0.0).sum(0),  # over others
        torch.where(hot, x[:, None], 1.0).sum(1),
        torch.where(hot, torch.arange(classes) / 7, torch.zeros(())).sum(1),
    ]


def test_sums_of_one_element_are_the_element() -> None:
    x, labels = torch.randn(6), torch.tensor([0, 4, -1, 5, 100, -100])
    gm = make_fx(lambda x, t: one_hot_sums(x, t, 5), decomposition_table(), tracing_mode="fake")(x, labels)
    truth = gm(x, labels)
    sum_one_hot(gm.graph)
    gm.recompile()
    left = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
    assert len(left) == 3
    for mine, theirs in zip(gm(x, labels), truth, strict=True):
        assert torch.equal(mine, theirs)


def test_gradients_that_nothing_is_made_for_are_left_alone() -> None:
    """The gradient of the logits is the caller's own."""
    x, w, _ = inputs(torch.float32)
    compiled = fc.compile(F.linear, backend="eager")
    compiled(x, w.requires_grad_()).sum().backward()
    assert gradient_notes(compiled).strip() == ""


@pytest.mark.parametrize(
    ("dims", "note"), [((0,), "in 3 chunks of 24 columns"), ((0, 1), "(18, 72) is stored whole")]
)
def test_a_gradient_that_is_read_whole_is_refused(dims: tuple[int, ...], note: str) -> None:
    """The rows of a cumulative sum's gradient depend on each other, and its columns if these are added up."""

    def summed(x: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        logits = sums = F.linear(x, w).flatten(0, -2)
        for dim in dims:
            sums = sums.cumsum(dim)
        return sums.sin().mean() + logits.square().mean(), logits

    x, w, t = inputs(torch.float32)
    operands = x.requires_grad_(), w.requires_grad_()
    compiled = fc.compile(summed, backend="eager")
    ours, eager = (torch.autograd.grad(fn(x, w, t)[0], operands) for fn in (compiled, summed))
    for our, their in zip(ours, eager, strict=True):
        torch.testing.assert_close(our, their)
    assert "the gradient of view_2" in gradient_notes(compiled) and note in gradient_notes(compiled)


def test_refusals_have_their_reasons() -> None:
    x, w, t = inputs(torch.float32)
    w.requires_grad_()
    assert "cumsum" in refused(lambda x, w, t: logits_of(x, w).cumsum(0).logsumexp(-1).mean(), x, w, t)
    assert "no sum over all rows" in refused(lambda x, w, t: logits_of(x, w).amax(0).mean(), x, w, t)
    assert "the model returns it" in refused(with_logits, x, w, t)
    assert refused(lambda x, w, t: logits_of(x, w), x, w, t) == ""  # there is no loss
    assert "sizes vary" in refused(mean, x, w, t, dynamic=True)
    across = refused(lambda x, w, t: (logits_of(x, w).view(2, 9, -1) + w.sum(1)).sum(1).exp().mean(), x, w, t)
    assert "no sum over all rows" in across


def test_hidden_layers_are_left_alone() -> None:
    """Whose rows another product reads: no loss, and no note."""

    def feed_forward(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w)), w.t())

    x, w, t = inputs(torch.float32)
    assert refused(feed_forward, x, w.requires_grad_(), t) == ""


def test_rows_are_dropped_where_nobody_reads_them() -> None:
    def cut(x: Tensor, w: Tensor, *, written: bool = False, read: bool = False) -> Tensor:
        logits = F.linear(x, w).tanh()
        if written:
            logits[:, 0] = 7.0
        return logits[:, :-1].sum(-1) + (logits.amax() if read else 0)

    x, w, _ = inputs(torch.float32)
    for options, done in (({}, True), ({"written": True}, False), ({"read": True}, False)):
        compiled = fc.compile(lambda x, w, options=options: cut(x, w, **options), backend="eager")
        torch.testing.assert_close(compiled(x, w), cut(x, w, **options))
        assert ("dropped rows" in compiled.plan[-1].notes) == done


class Head(nn.Module):
    """A norm and a vocabulary, with the loss as transformers writes it; on a device that is not there."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.empty(hidden, dtype=torch.bfloat16, device="cuda"))
        self.weight = nn.Parameter(torch.empty(vocabulary, hidden, dtype=torch.bfloat16, device="cuda"))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(F.rms_norm(x, self.norm.shape, self.norm), self.weight).float()
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels)


def test_no_tensor_is_as_large_as_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3's logits for 4 x 2048 tokens have 2.1 GB in bfloat16, and their gradient as much again."""
    monkeypatch.setattr(chunk, "LIMITS", Limits())
    vocabulary, hidden, rows = 128256, 2048, 4 * 2048
    with FakeTensorMode():
        x = torch.empty(4, 2048, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        labels = torch.empty(4, 2048, dtype=torch.int64, device="cuda")
        plans = {p.name: p for p in fc.explain(Head(vocabulary, hidden), x, labels, device="h200").plans}
    body, forward = plans["graph0.forward.mm.2048_rows"], plans["graph0.forward"]
    sizes = [math.prod(m.shape) for p in plans.values() for n in p.dag.order for m in p.dag.op(n).outputs]
    assert max(sizes) == vocabulary * hidden  # the weight; logits would be four times as large
    assert ordered(body).peak < 2.1 * 2048 * vocabulary * 2
    chunks = 2.1 * 2048 * vocabulary * 2
    assert ordered(forward).peak < vocabulary * hidden * 4 + 3 * rows * hidden * 2 + chunks
    (cluster,) = body.clusters  # loss and gradient from one reading of the logits
    assert cluster.cost.bytes_read + cluster.cost.bytes_written < 2.1 * 2048 * vocabulary * 2
    assert sum(isinstance(node.target, Chunked) for node in forward.dag.module.graph.nodes) == 1
    assert "chunks_of_mm (4 x 2048 rows)" in str(forward) and "4 chunks of 2048 rows" in str(forward)
