"""Writes into existing memory happen in place: no cache is copied, and values are eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import fusion_compiler as fc
from fusion_compiler.errors import IndexRangeError
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.writes import base_of
from tests import fake_gpu
from tests.exactness import not_as_close
from tests.random_writes import drawn, program


def held(function: Callable[..., Any], make: Callable[[], list[Tensor]], **options: Any) -> Any:
    """The compiled function, after three calls that gave and wrote what eager does."""
    fast = fc.compile(function, **{"backend": "interpret", "device": "h200", **options})
    for _ in range(3):
        ours = make()
        theirs = [t.clone() for t in ours]
        want = function(*theirs)
        torch.testing.assert_close(fast(*ours), want)
        torch.testing.assert_close(ours, theirs)
    return fast


def stored(plan: FusionPlan) -> int:
    """Bytes of the largest result that has memory of its own."""
    dag = plan.dag
    stored = {n for c in plan.clusters for n in c.outputs} | {left.subject for left in plan.leftovers}
    stored -= {
        n for n in stored if base_of(dag, n) is not None or dag.op(n).target is torch.ops.aten.copy_.default
    }
    return max(
        (m.dtype.itemsize * torch.Size(m.shape).numel() for n in stored for m in dag.op(n).outputs), default=0
    )


def copies(plan: FusionPlan) -> list[str]:
    return [left.subject for left in plan.leftovers if left.target == "aten.copy_.default"]


def cache() -> Tensor:
    return torch.randn(2, 3, 8, 16)


def new() -> Tensor:
    return torch.randn(2, 3, 2, 16)


def places() -> Tensor:
    return torch.randperm(8)[:2]


def a_slice(c: Tensor, n: Tensor) -> Tensor:
    c[:, :, 3:5] = n * 2
    return c.sum(-1)


def every_fourth(c: Tensor, n: Tensor) -> Tensor:
    c[:, :, ::4] = n
    return c.sum(-1)


def converted(c: Tensor, n: Tensor) -> Tensor:
    c[:, :, 1:3] = n.double().sin()
    return c.sum(-1)


def transposed(c: Tensor, n: Tensor) -> Tensor:
    view = c.transpose(1, 2)
    view[:, 2:4] = n.transpose(1, 2)
    return view.sum(-1)


def reshaped(c: Tensor, n: Tensor) -> Tensor:
    c.view(6, 8, 16)[:, 2:4] = n.reshape(6, 2, 16).sin()
    return c.sum(-1)


def through_two_views(c: Tensor, n: Tensor) -> Tensor:
    part = c[0]
    part[1, 2:4] = n[0, 1]
    c[1, 0, 0] = n[1, 0, 0]
    return c.sum(-1)


def twice(c: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    c[:, :, 1:3] = n
    between = c.sum(-1)
    c[:, :, 2:4] = n * 2
    return between, c.mean(-1)


def before_and_after(c: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    old = c.sum(-1)
    c[:, :, 1:3] = n
    return old, c.sum(-1)


def returned(c: Tensor, n: Tensor) -> Tensor:
    c[:, :, 1:3] = n
    return c


def from_itself(c: Tensor) -> Tensor:
    c[:, :, 1:3] = c[:, :, 2:4] * 2
    c[:, :, 4:6] = c[:, :, 4:6].flip(2)
    return c.sum(-1)


def a_part_of_itself(c: Tensor) -> Tensor:
    c[:, :, 1:3] *= 2
    c[:, 1].add_(1)
    return c.sum(-1)


def filled(c: Tensor) -> Tensor:
    c[:, 1].fill_(2)
    c[:, :, 1].zero_()
    return c.sum(-1)


def masked(c: Tensor) -> Tensor:
    c[:, 1] *= 2
    c.masked_fill_(c > 1, 0.5)
    return c[0, 0, 0] * 2


def at_places(c: Tensor, n: Tensor, p: Tensor) -> Tensor:
    c[:, :, p] = torch.sin(n)
    return c.sum(-1)


def index_copied(c: Tensor, n: Tensor, p: Tensor) -> Tensor:
    c.index_copy_(2, p, torch.sin(n))
    return c.sum(-1)


def index_added(c: Tensor, n: Tensor, p: Tensor) -> Tensor:
    c.index_add_(2, p, n)
    return c.sum(-1)


def accumulated(c: Tensor, n: Tensor, p: Tensor) -> Tensor:
    c.index_put_((torch.arange(2)[:, None], torch.zeros(2, 1).long(), p[None]), n[:, 0], accumulate=True)
    return c.sum(-1)


def scattered(c: Tensor, n: Tensor, p: Tensor) -> Tensor:
    c.scatter_(2, p[None, None, :, None].expand(2, 3, 2, 16), n)
    return c.sum(-1)


def all_places(c: Tensor, n: Tensor) -> Tensor:
    c.copy_(c * 0.9 + n.mean())
    return c.sum(-1)


WRITES: Sequence[tuple[Callable[..., Any], Callable[[], list[Tensor]]]] = [
    *((f, lambda: [cache(), new()]) for f in (a_slice, every_fourth, converted, transposed, reshaped)),
    *((f, lambda: [cache(), new()]) for f in (through_two_views, twice, before_and_after, returned)),
    *((f, lambda: [cache()]) for f in (from_itself, a_part_of_itself, filled)),
    *((f, lambda: [cache(), new(), places()]) for f in (at_places, index_copied, scattered)),
    (at_places, lambda: [cache(), new(), places() - 8]),
    *((f, lambda: [cache(), new(), torch.tensor([3, 3])]) for f in (index_added, accumulated)),
]


@pytest.mark.parametrize(("function", "make"), WRITES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_cache_is_written_in_place(function: Callable[..., Any], make: Callable[[], list[Tensor]]) -> None:
    (plan,) = held(function, make).plan
    assert not copies(plan)
    assert stored(plan) < cache().nbytes
    assert "refused" not in plan.notes["in place"]


def test_a_whole_result_is_stored_in_its_argument() -> None:
    """A result that is also read elsewhere has memory of its own as well."""
    (plan,) = held(counted, lambda: [cache(), cache()]).plan
    assert not plan.leftovers and stored(plan) == cache().nbytes, "of x.sin()"
    assert len(plan.clusters) == 1
    for function, make in ((all_places, lambda: [cache(), new()]), (masked, lambda: [cache()])):
        (plan,) = held(function, make).plan
        assert not plan.leftovers


def test_a_masked_write_is_a_call_in_place() -> None:
    def function(c: Tensor, rows: Tensor) -> Tensor:
        c[rows] = 3.0
        c[c > 0.5] = 0.25
        return c.sum(-1)

    (plan,) = held(function, lambda: [cache(), torch.tensor([True, False])]).plan
    assert not copies(plan)


def test_what_is_not_the_programs_is_copied() -> None:
    def function(c: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        mine = c.clone()
        mine[:, :, 1:3] = n
        return mine, c.index_put((torch.arange(2),), n[0, 0, 0])

    (plan,) = held(function, lambda: [cache(), new()]).plan
    assert "in place" not in plan.notes


@pytest.mark.parametrize("index", [8, -9])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_place_outside_is_an_error(index: int, dynamic: bool) -> None:
    fast = held(at_places, lambda: [cache(), new(), places()], dynamic=dynamic or None)
    before = cache()
    argument = before.clone()
    with pytest.raises(IndexRangeError, match=f"index {index} is not in"):
        fast(argument, new(), torch.tensor([0, index]))
    torch.testing.assert_close(argument[:, :, 1:], before[:, :, 1:])


def test_lengths_that_differ_from_call_to_call() -> None:
    lengths = iter((8, 11, 64))

    def make() -> list[Tensor]:
        length = next(lengths)
        return [torch.randn(2, 3, length, 16), new(), torch.tensor([-length, length - 1])]

    (plan,) = held(at_places, make, dynamic=True).plan
    assert not plan.leftovers


def doubled_front(c: Tensor, at: Tensor) -> Tensor:
    front = c[:, : (c.shape[1] + 1) // 2]
    front.index_fill_(0, at, 2.0)
    return front


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_of_what_is_written_is_one_of_the_argument(dynamic: bool, gradient: bool) -> None:
    """Wherever the argument lies in its memory, and with nothing copied for it."""
    fast = fc.compile(doubled_front, backend="interpret", device="h200", dynamic=dynamic)
    for offset, length in ((1, 5), (4, 6), (0, 9)):
        memory = torch.randn(100).requires_grad_(gradient)
        ours, theirs = ((memory * 1)[offset:][: 7 * length].view(7, length) for _ in range(2))
        for at in (2, 0):
            shown, want = (f(x, torch.tensor([at])) for f, x in ((fast, ours), (doubled_front, theirs)))
            torch.testing.assert_close((ours, shown), (theirs, want))
            assert shown.data_ptr() == ours.data_ptr() and shown.requires_grad == gradient
    assert gradient or not any("in place: refused" in str(p) for p in fast.plan)


def test_a_result_is_not_the_argument_that_has_its_numbers() -> None:
    fast = fc.compile(lambda c: torch.slice_scatter(c, c[1:], 0, 1), backend="interpret", device="h200")
    argument = torch.randn(4, 8)
    torch.testing.assert_close(result := fast(argument), argument)
    assert result.data_ptr() != argument.data_ptr()


def rotated(c: Tensor, n: Tensor, angle: Tensor, at: Tensor, q: Tensor) -> Tensor:
    """RoPE, the write, and attention that reads it."""
    a, b = n.chunk(2, -1)
    turned = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
    c.index_copy_(2, at, turned)
    return torch.softmax(q @ c.transpose(-1, -2), -1) @ c


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears")
def test_one_kernel_rotates_keys_and_stores_them_in_the_cache() -> None:
    def make() -> list[Tensor]:
        key, query = torch.randn(2, 1, 2, 1, 64)
        return [torch.randn(1, 2, 512, 64), key, torch.randn(1, 32), torch.randint(512, (1,)), query]

    fast = held(rotated, make, backend="interpret")
    (plan,) = fast.plan
    (put,) = (n for n in plan.dag.order if base_of(plan.dag, n) is not None)
    (cluster,) = (c for c in plan.clusters if put in c.outputs)
    assert cluster.outputs == (put,) and "cos" in str(cluster.ops)
    assert cluster.cost.bytes_read + cluster.cost.bytes_written < 3000
    arguments = make()
    assert stored(plan) <= arguments[0].nbytes / 16, "what chunks of keys give"
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        fast(*arguments)
    taken = [e.self_cpu_memory_usage for e in watched.events() or ()]
    assert max(taken) < arguments[0].nbytes / 8, "nothing of the cache's size is allocated"


def test_statistics_of_batch_norms_are_stored_where_they_belong() -> None:
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())]
    model = nn.Sequential(*layers).double()
    eager = copy.deepcopy(model)
    fast = fc.compile(model, backend="interpret", device="h200")
    for _ in range(3):
        x = torch.randn(5, 4, 6, 6, dtype=torch.float64)
        got, want = fast(x), eager(x)
        torch.testing.assert_close(got, want)
        got.square().sum().backward()
        want.square().sum().backward()
    torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])
    forward = fast.plan[0]
    assert not copies(forward)
    norms = [c for c in forward.clusters if any("sum" in op for op in c.ops)]
    assert len(norms) == 3 and all(sum(op.startswith("put") for op in c.ops) == 2 for c in norms)


def test_a_statistic_that_many_rows_share_is_updated_once() -> None:
    """Each of a thousand rows could: those of another program would find it updated (a random program)."""

    def f(x: Tensor, y: Tensor, mean: Tensor, w: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        distance = (y - x).abs()
        loss = torch.where(distance < 1, 0.5 * distance * distance, distance - 0.5).sum()
        normal = F.batch_norm(x, mean, variance, w, None, True, 0.25, 0.1)
        spread = normal.var(2, correction=0, keepdim=True)
        return loss, (normal - normal.mean(2, True)) / (spread + 0.1).sqrt()

    tensors = [torch.randn(500, 2, 2, 1), torch.randn(500, 1, 2, 1), *(torch.rand(2) for _ in range(3))]
    ours, theirs, exact = ([t.clone() for t in tensors] for _ in range(3))
    exact = [t.double() for t in exact]
    fast = fc.compile(f, backend="interpret", strict=True)
    results = zip(fast(*ours), f(*theirs), f(*exact), strict=True)
    for mine, eager, truth in (*results, *zip(ours, theirs, exact, strict=True)):
        assert not_as_close(mine, eager, truth) is None
    (plan,) = fast.plan
    assert "into an argument" in plan.notes["in place"]


def test_a_training_step_that_saves_what_it_overwrites() -> None:
    def step(c: Tensor, x: Tensor) -> Tensor:
        loss = (c.clone() * x).sin().sum()
        c[1:] = x.detach()[1:]
        return loss + (c * x).sum()

    fast = fc.compile(step, backend="interpret", device="h200")
    for _ in range(2):
        c, x = torch.randn(4, 8), torch.randn(4, 8, requires_grad=True)
        d, y = c.clone(), x.detach().clone().requires_grad_()
        fast(c, x).backward()
        step(d, y).backward()
        torch.testing.assert_close((c, x.grad), (d, y.grad))


def test_a_cache_that_records_gradients() -> None:
    def step(c: Tensor, x: Tensor) -> Tensor:
        c = c * 1
        c[1:3] = x.sin()
        return (c * c).sum()

    fast = fc.compile(step, backend="interpret", device="h200")
    c, x = torch.randn(4, 8, requires_grad=True), torch.randn(2, 8, requires_grad=True)
    want = torch.autograd.grad(step(c, x), (c, x))
    torch.testing.assert_close(torch.autograd.grad(fast(c, x), (c, x)), want)


def counted(c: Tensor, x: Tensor) -> Tensor:
    c.mul_(0.5).add_(x)
    return x.sin()


def test_candidates_are_timed_on_copies_of_what_they_update(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_gpu.FakeGpu(us=(3.0, 2.0, 1.0, 4.0, 5.0, 6.0))
    fake_gpu.use(gpu, monkeypatch)
    held(counted, lambda: [torch.randn(64, 512), torch.randn(64, 512)], backend="auto")
    assert gpu.timed == 1


def test_verify_writes_once() -> None:
    fast = held(counted, lambda: [torch.randn(4, 8), torch.randn(4, 8)], verify=True)
    assert fast.verification.rows


def test_what_nobody_needs_orders_nothing() -> None:
    """A write into a value that is dropped, and into an argument that the value was made of."""

    def function(x: Tensor, at: Tensor, new: Tensor) -> Tensor:
        dropped = nn.functional.one_hot(x.argmax(0), 4)
        dropped.index_copy_(0, at, new)
        x[at] = 0
        return x * 2

    held(function, lambda: [torch.randn(4, 3), torch.tensor([1]), torch.randint(4, (1, 4))], strict=True)


def test_arguments_that_are_one_memory() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        a[1:3] = b[2:4] * 2
        return a + b

    fast = fc.compile(function, backend="interpret", device="h200")
    for _ in range(2):
        ours = torch.randn(4, 8)
        theirs = ours.clone()
        torch.testing.assert_close(fast(ours, ours), function(theirs, theirs))
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(fast(ours, ours.flip(0)), function(theirs, theirs.flip(0)))


@pytest.mark.parametrize(("seeds", "backend"), [(range(40), "eager"), (range(100, 120), "interpret")])
def test_random_programs_of_writes(seeds: range, backend: str) -> None:
    """Reads, writes through views, whole copies and swaps in any order; what is written in place is read
    before and after."""
    done = 0
    for seed in seeds:
        torch._dynamo.reset()
        function, text = program(seed)
        ours, theirs = drawn(seed), drawn(seed)
        try:
            want = function(*theirs)
        except RuntimeError:  # eager refuses to copy what overlaps
            continue
        fast = fc.compile(function, backend=backend, device="h200")
        torch.testing.assert_close(fast(*ours), want, msg=lambda m, t=text: f"{t}\n{m}")
        torch.testing.assert_close(ours, theirs, msg=lambda m, t=text: f"{t}\n{m}")
        done += sum("done" in plan.notes.get("in place", "") for plan in fast.plan)
    assert done >= len(seeds) / 2


def test_a_tensor_that_is_written_into_is_held_while_the_result_is_read() -> None:
    def function(x: Tensor, at: Tensor, n: Tensor) -> Tensor:
        product = x @ x
        product = product.index_put((at,), n, accumulate=True)
        return product @ x

    def make() -> list[Tensor]:
        return [torch.randn(512, 512), torch.tensor([3, 3]), torch.randn(512)]

    (plan,) = held(function, make).plan
    assert plan.notes["in place"] == "done: written into a result that dies"
    assert f"{2 * 512 * 512 * 4 / 1e6:.1f} MB in mm_1" in plan.notes["memory"]
