"""Random numbers: the same bits in eager and in a kernel, the same mask in forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_compiler.capture.partition import partition
from fusion_compiler.codegen.strength_reduction import thresholds
from fusion_compiler.ir.kernel import Argument, Kernel, Role
from fusion_compiler.ir.loops import COLS, Axis, Compute, Index, Load, LoopNest, Random, Store, Value
from fusion_compiler.ops.decompositions.table import decomposition_table
from fusion_compiler.ops.own.random import merge_seeds, philox, seed, uniform
from fusion_compiler.runtime.interpreter import run_kernel
from tests.exactness import Compiled

HEADER = """
import triton
import triton.language as tl
from fusion_compiler.codegen import math as fm

@triton.jit
"""
ONE_BY_ONE = """def kernel(seed_ptr, out_ptr):
    i = (tl.arange(0, 256) + {first}).to(tl.{index})
    tl.store(out_ptr + tl.arange(0, 256), fm.uniform(tl.load(seed_ptr), i, {salt}))
"""
BY_FOURS = """def kernel(seed_ptr, out_ptr):
    numbers = fm.uniform_block(tl.load(seed_ptr), tl.arange(0, 64), {salt})
    tl.store(out_ptr + tl.arange(0, 256), numbers)
"""
IN_ROWS = """def kernel(seed_ptr, out_ptr):
    row, quarter = tl.arange(0, 4)[:, None], tl.arange(0, 16)[None, :]
    numbers = fm.uniform_block(tl.load(seed_ptr), row * 16 + quarter, {salt})
    tl.store(out_ptr + row * 64 + tl.arange(0, 64)[None, :], numbers)
"""
TRITONS_WORDS = """def kernel(seed_ptr, out_ptr):
    zero = tl.zeros([64], tl.uint32)
    c = tl.arange(0, 64)
    words = tl.philox(tl.load(seed_ptr), c.to(tl.uint32), zero, zero + {salt}, zero, 7)
    for k in tl.static_range(4):
        tl.store(out_ptr + c * 4 + k, fm.fraction(words[k]))
"""


def interpret(body: str, key: torch.Tensor) -> torch.Tensor:
    out = torch.empty(256)
    arguments = (
        Argument("seed_ptr", Role.INPUT, 0, torch.int64),
        Argument("out_ptr", Role.OUTPUT, 0, torch.float32),
    )
    run_kernel(Kernel("kernel", HEADER + body, arguments, (1,)), [key, out], (1,))
    return out


@pytest.mark.parametrize("salt", [0, 1, 12345])
@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
def test_kernel_and_eager_have_the_same_bits(key: int, salt: int) -> None:
    words = torch.tensor([key])
    expected = uniform(words, [16, 16], salt).flatten()
    for index in ("int32", "int64"):
        assert torch.equal(interpret(ONE_BY_ONE.format(first=0, salt=salt, index=index), words), expected)
    for body in (BY_FOURS, IN_ROWS, TRITONS_WORDS):
        assert torch.equal(interpret(body.format(salt=salt), words), expected)


def test_elements_past_two_to_the_34() -> None:
    key, first = torch.tensor([77]), 2**34 + 8  # the counter's upper word is 1
    body = ONE_BY_ONE.replace(
        "(tl.arange(0, 256) + {first}).to(tl.{index})", "tl.arange(0, 256).to(tl.int64) + {first}"
    )
    words = torch.stack(philox(key, torch.arange(64) + first // 4, 3), -1).flatten()
    got = interpret(body.format(first=first, salt=3), key)
    assert torch.equal(got.double(), (words >> 8).double() / 2**24)
    assert not torch.equal(got, uniform(key, [256], 3))


def test_known_answer() -> None:
    """The first of Random123's own test vectors for Philox4x32-7: counter and key are zero."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = [int(word) for word in philox(zero, zero, 0)]
    assert words == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


def test_uniform_and_independent() -> None:
    key = seed(torch.device("cpu"))
    x = uniform(key, [8, 1 << 16], 0).double()
    assert x.min() >= 0 and x.max() < 1
    n = x.numel()
    assert abs(x.mean() - 0.5) < 5 / (12 * n) ** 0.5
    assert abs(x.var() - 1 / 12) < 5 * (1 / 180 / n) ** 0.5
    counts = torch.histc(x, 64, 0, 1)
    assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 63 + 5 * (2 * 63) ** 0.5
    others = [uniform(key, [8, 1 << 16], salt).double() for salt in (1, 2)] + [
        uniform(key + 1, [8, 1 << 16], 0)
    ]
    for other in [*others, x.roll(1, 1), x.roll(1, 0)]:
        correlation = ((x - 0.5) * (other - 0.5)).mean() * 12
        assert abs(correlation) < 5 / n**0.5


@pytest.mark.parametrize(
    "p", [2**-24, 0.1, 1 / 3, 0.5, 0.9, 1 - 2**-24, 5 * 2**-24, 1e-9, 0.0, 1.0, 2.0, -0.1]
)
@pytest.mark.parametrize("name", ["ge", "gt", "lt", "le"])
def test_comparisons_of_words_decide_as_those_of_numbers_do(name: str, p: float) -> None:
    """Also for the words on both sides of the threshold, which no sample would meet."""
    aten = torch.ops.aten
    index, compare = Index(0, ((0, 1),)), getattr(aten, name).Scalar
    nodes = (
        Load("seed", Index(0, ()), None, torch.int64),
        Random(0, index, 0),
        Compute(compare, (("self", Value(1)), ("other", p)), torch.bool),
    )
    loops = LoopNest((Axis("col", 64, COLS),), nodes, (Store("out", index, 2),), ("seed", "uniform", "keep"))
    short = thresholds(loops)
    number, decision = short.nodes[1], short.nodes[2]
    assert isinstance(number, Random) and isinstance(decision, Compute)
    edge = int(p * 2**32)
    words = torch.cat(
        [torch.arange(edge - 600, edge + 600), torch.arange(300), 2**32 - 1 - torch.arange(300)]
    )
    words = words[(words >= 0) & (words < 2**32)]
    exact = compare((words >> 8).float() * 2**-24, p)
    if number.dtype is torch.uint32:
        decide = decision.target.overloadpacket
        assert torch.equal(decide(words, dict(decision.operands)["other"]), exact)
    else:
        assert short == loops and not 2**-24 <= p < 1 - 2**-24
    stored = replace(loops, stores=(*loops.stores, Store("numbers", index, 1)))
    assert thresholds(stored) == stored, "the number itself is wanted"


def test_seed_follows_manual_seed() -> None:
    device = torch.device("cpu")
    torch.manual_seed(3)
    first, second = seed(device), seed(device)
    torch.manual_seed(3)
    assert torch.equal(seed(device), first) and not torch.equal(first, second)
    assert first.dtype is torch.int64 and first.shape == (1,)


def test_fake() -> None:
    with FakeTensorMode():
        x = uniform(seed(torch.device("cuda")), [3, 5], 1)
    assert x.shape == (3, 5) and x.dtype is torch.float32 and x.device.type == "cuda" and x.is_contiguous()


def capture(function: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, dict[str, fx.GraphModule]]:
    graphs: dict[str, fx.GraphModule] = {}

    def keep(name: str) -> Any:
        return lambda gm, _: graphs.setdefault(name, gm) and make_boxed_func(gm)

    backend = aot_autograd(
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        decompositions=decomposition_table(),
        partition_fn=partition,
    )
    out = torch.compile(function, backend=backend)(*inputs)
    out.sum().backward()
    return out, graphs


def targets(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def test_backward_makes_the_mask_again() -> None:
    x = torch.randn(64, 128, requires_grad=True)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(torch.dropout(x, 0.5, True) * 3, 0.25, True)

    out, graphs = capture(twice, x)
    kept = out != 0
    assert x.grad is not None
    assert torch.equal(x.grad != 0, kept)
    torch.testing.assert_close(x.grad, torch.where(kept, 3 / (0.5 * 0.75), 0.0))
    assert abs(kept.double().mean() - 0.375) < 0.02
    assert targets(graphs["forward"]).count(seed) == 1
    assert seed not in targets(graphs["backward"])
    assert targets(graphs["backward"]).count(uniform) == 2
    saved = [node.meta["val"] for node in graphs["backward"].graph.nodes if node.op == "placeholder"]
    assert sorted((tuple(v.shape), v.dtype) for v in saved if v.dtype is not torch.float32) == [
        ((1,), torch.int64)
    ]
    salts = [n.args[2] for n in graphs["forward"].graph.nodes if n.target is uniform]
    assert salts == [0, 1]


def test_two_dropouts_differ_and_repeat_under_manual_seed() -> None:
    x = torch.ones(4096, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.dropout(x, 0.5, True), torch.dropout(x, 0.5, True)])

    torch.manual_seed(5)
    first, _ = capture(function, x)
    torch._dynamo.reset()
    torch.manual_seed(5)
    again, _ = capture(function, x)
    assert torch.equal(first, again)
    assert 0.4 < (first[0] == first[1]).double().mean() < 0.6


def test_merge_keeps_what_shared_a_stream() -> None:
    graph = fx.Graph()
    first, second = (graph.call_function(seed, (torch.device("cpu"),)) for _ in range(2))
    streams = ((first, 0), (second, 0), (first, 0), (second, 4))
    graph.output([graph.call_function(uniform, (key, [8], salt)) for key, salt in streams])
    merged = merge_seeds(fx.GraphModule({}, graph))
    a, b, c, d = merged()
    assert torch.equal(a, c) and not torch.equal(a, b) and not torch.equal(b, d)
    assert targets(merged).count(seed) == 1


def test_checkpointed_dropout_keeps_its_mask() -> None:
    x = torch.randn(64, 128, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(torch.sin(x), 0.5, True)

    out, graphs = capture(lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False), x)
    assert x.grad is not None and seed not in targets(graphs["backward"])
    torch.testing.assert_close(x.grad, torch.where(out != 0, 2 * torch.cos(x), 0.0).detach())


def test_dropout_of_a_number() -> None:
    """An index that is known when the kernel is made has no type of its own."""
    compiled = Compiled(lambda x: torch.nn.functional.dropout(x, 0.5))
    drawn = {float(compiled(torch.tensor(2.0))) for _ in range(20)}
    assert drawn == {0.0, 4.0}
