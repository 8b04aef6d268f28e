"""The arithmetic of nests: fewer operators, the same values, and values of rows computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import fusion_compiler as fc
from benchmarks.chains.variants import VARIANTS, Shape, added
from fusion_compiler.passes.nests.arithmetic import hoist, rows_of, simplify
from tests.exactness import not_as_close
from tests.passes.test_general_attention import bodies_of, general_of, run, run_all

LOWEST = torch.finfo(torch.float32).min
BY_NAME = {variant.name: variant for variant in VARIANTS}
POWERS = {"exp": torch.ops.aten.exp.default, "exp2": torch.ops.aten.exp2.default}
Code = Callable[..., tuple[Tensor, ...]]


def softmax(scores: Tensor, largest: Tensor, total: Tensor) -> Tensor:
    return (scores - largest).exp() / total


def scaled(q: Tensor, k: Tensor, m: Tensor, n: Tensor, shown: Tensor) -> tuple[Tensor, ...]:
    scores = (torch.bmm(q, k.mT) * 0.25).masked_fill(~shown, -torch.inf)
    weights = softmax(scores, m.clamp_min(LOWEST), n.clamp_min(1e-30))
    return (torch.bmm((weights * 4.0 * (torch.bmm(k, q.mT) * 1.5).masked_fill(~shown, 0.0) / 8).mT, q),)


def masked(q: Tensor, k: Tensor, m: Tensor, n: Tensor, shown: Tensor) -> tuple[Tensor, ...]:
    """Add a mask with the lowest number, which no number may multiply."""
    scores = torch.bmm(q, k.mT) * 0.25 + torch.zeros_like(shown, dtype=q.dtype).masked_fill(~shown, LOWEST)
    return (torch.bmm(softmax(scores, m, n).mT, q),)


def squared(q: Tensor, k: Tensor, m: Tensor, n: Tensor, shown: Tensor) -> tuple[Tensor, ...]:
    scores = torch.bmm(q, k.mT) * 2.0
    doubled = softmax(scores, m, n) * 2.0
    return (torch.bmm((doubled * doubled * 0.5).mT, q), doubled.sum(-1))


def capped(q: Tensor, k: Tensor, m: Tensor, n: Tensor, shown: Tensor) -> tuple[Tensor, ...]:
    return (torch.bmm(softmax(torch.tanh(torch.bmm(q, k.mT) * 0.25 / 20.0) * 20.0, m, n).mT, q),)


def inputs() -> list[Tensor]:
    q, k = torch.randn(2, 2, 20, 4).double()
    m, n = torch.randn(2, 2, 20, 1).double()
    return [q, k, m, n.abs() + 1, torch.rand(2, 20, 20) < 0.7]


def targets(graph: fx.Graph) -> list[str]:
    return [str(n.target).split(".")[1] for n in graph.nodes if n.op == "call_function"]


def simplified(code: Code, values: list[Tensor]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the graph of the rows' values, and what is left of a function's."""
    gm = make_fx(code, tracing_mode="fake")(*values)
    statistics = gm.graph.find_nodes(op="placeholder")[2:4]
    simplify(gm.graph, statistics, statistics[1:])
    before = hoist(gm.graph, rows_of(gm.graph, statistics))
    gm.graph.lint()
    gm.recompile()
    return fx.GraphModule({}, before), gm


def together(rows: fx.GraphModule, left: fx.GraphModule, values: list[Tensor], count: int = 1) -> Any:
    """Return the results of a nest whose values of rows, `count` of them, another graph computes."""
    every = dict(zip((n.name for n in rows.graph.find_nodes(op="placeholder")), values, strict=True))
    names = [n.name for n in left.graph.find_nodes(op="placeholder")]
    assert [n for n in names if n.startswith("row_")] == names[-count:]
    return left(*(every[n] for n in names[:-count]), *rows(*values))


@pytest.mark.parametrize("code", [scaled, masked, squared, capped])
def test_results_are_the_same(code: Code) -> None:
    values = inputs()
    rows, left = simplified(code, values)
    torch.testing.assert_close(together(rows, left, values), code(*values), rtol=1e-13, atol=1e-13)


def test_a_number_in_the_scores_takes_the_base_and_sums_give_theirs_away() -> None:
    rows, left = simplified(scaled, inputs())
    assert targets(rows.graph)[-1] == "add" and targets(rows.graph).count("log2") == 1
    assert "exp" not in targets(left.graph) and "div" not in targets(left.graph)
    assert targets(left.graph).count("exp2") == 1
    products = [n for n in left.graph.nodes if "mul" in str(n.target)]
    by_number = [n.args[1] for n in products if isinstance(n.args[1], float)]
    assert sorted(by_number) == pytest.approx([0.25 * 1.4426950408889634, 4.0 * 1.5 / 8])


def negative(q: Tensor, k: Tensor, m: Tensor, n: Tensor, shown: Tensor) -> tuple[Tensor, ...]:
    """Divide by what may be negative, and multiply scores by more than one."""
    return (torch.bmm(((torch.bmm(q, k.mT) - m).exp() / (n - 10.0) * 3.0).mT, q),)


def test_a_divisor_that_may_be_negative_has_no_logarithm_and_a_large_number_stays() -> None:
    values = inputs()
    rows, left = simplified(negative, values)
    torch.testing.assert_close(together(rows, left, values, 2), negative(*values), rtol=1e-13, atol=1e-13)
    assert "log2" not in targets(rows.graph) and "div" in targets(left.graph)
    assert targets(left.graph)[-1] == "bmm"


def test_rows_that_see_nothing_but_the_lowest_number_are_eagers() -> None:
    values = inputs()
    values[4][1, 3] = False
    values[2][1, 3], values[3][1, 3] = LOWEST, 20.0
    values = [x.float() if x.is_floating_point() else x for x in values]
    rows, left = simplified(masked, values)
    (result,) = together(rows, left, values)
    torch.testing.assert_close(result, *masked(*values))
    assert result.isfinite().all()


@pytest.mark.parametrize("name", ["soft cap, causal", "ALiBi, causal (Bloom)", "sinks, causal (gpt-oss)"])
def test_nests_of_16_bits_have_powers_of_two_and_those_of_32_bits_have_not(name: str) -> None:
    for dtype, power in ((torch.bfloat16, "exp2"), (torch.float32, "exp")):
        torch._dynamo.reset()
        compiled, shape = general_of(BY_NAME[name].code), Shape(1, 2, 70, 8, 8, dtype=dtype)
        run(compiled, [*shape.inputs(), *BY_NAME[name].more(shape)])
        bodies = [dag for n, dag in bodies_of(compiled).items() if ".backward." in n]
        used = [{dag.op(n).target for n in dag.order} & set(POWERS.values()) for dag in bodies]
        assert used == [{POWERS[power]}] * len(bodies) and bodies


def bottomless(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
    """Add the dtype's lowest number where nothing is shown, as models of Hugging Face do."""
    return (5 * torch.tanh(q @ k.mT / 5) + added(shown[:, None], q.dtype)).softmax(-1) @ v


def test_gradients_of_rows_that_see_only_the_lowest_number_are_as_close_as_eagers() -> None:
    values: list[Any] = [*Shape(2, 3, 37, 8, 8, dtype=torch.bfloat16).inputs(), torch.rand(2, 37, 37) < 0.5]
    values[3][1, 5] = False
    compiled = fc.compile(bottomless, backend="eager", disable=("fused attention",))
    for one, theirs, exact in zip(*run_all(compiled, bottomless, values), strict=True):
        assert not (wrong := not_as_close(one, theirs, exact)), wrong
