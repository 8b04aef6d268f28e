"""Graph breaks in a plan, with place and reason, and what strict=True makes of all that would run eager."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion_compiler as fc
from fusion_compiler.errors import (
    EagerDeviceError,
    EagerOperatorError,
    FusionError,
    FusionWarning,
    GraphBreakError,
    UnsupportedDtypeError,
)
from fusion_compiler.ir.plan_text import breaks_text

HERE = Path(__file__).name


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch.compiler.disable
def disabled(x: Tensor) -> Tensor:
    return x + 1


def masked(x: Tensor) -> Tensor:
    y = x * 2
    return y[y > 0] + 1


def nothing_before(x: Tensor) -> Tensor:
    return x.nonzero() + 1


def nested(x: Tensor) -> Tensor:
    return masked(x + 1).sum() * 3


def branching(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x * 3


def calls_disabled(x: Tensor) -> Tensor:
    return disabled(x * 2) * 3


def looping(x: Tensor) -> Tensor:
    for _ in range(2):
        x = x * 2
        torch._dynamo.graph_break()
    return x


def line_of(function: Callable[..., Any], code: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if code in line)


BREAKS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str, str, int]] = {
    # name: (model, function and piece of the line, what the reason says, graphs)
    "mask": (masked, masked, "y > 0]", "aten.nonzero.default", 2),
    "nothing before": (nothing_before, nothing_before, "nonzero", "aten.nonzero.default", 1),
    "nested": (nested, masked, "y > 0]", "aten.nonzero.default", 4),
    "branch": (branching, branching, "else", "a branch depends on the values of a tensor", 2),
    "disabled": (calls_disabled, calls_disabled, "return", "wrapped with `torch.compiler.disable`", 2),
    "given up": (looping, looping, "graph_break()", "all of looping() runs eager", 0),
}


@pytest.mark.parametrize("case", BREAKS)
def test_a_plan_names_the_place_and_the_reason_of_a_break(case: str) -> None:
    model, function, code, reason, graphs = BREAKS[case]
    fast = fc.compile(model, backend="interpret")
    assert str(fast.plan) == "no graph has been captured yet: call it once"
    x = torch.randn(4, 6)
    with pytest.warns(FusionWarning, match=r"breaks the graph: (.|\n)*this part runs eager"):
        torch.testing.assert_close(fast(x), model(x))
    assert len(fast.plan) == graphs
    (one,) = fast.plan.breaks
    assert (Path(one.source.file).name, one.source.line) == (HERE, line_of(function, code))
    text = str(fast.plan)
    assert f"  {HERE}:{one.source.line}: {one.source.code}" in text
    assert reason in text.replace("\n          ", " ")
    assert text.startswith("no graph was captured when it was called" if not graphs else "plan graph0")
    fast(torch.randn(4, 6))
    fast(torch.randn(5, 7))  # compiled again: the same place
    assert fast.plan.breaks == (one,)


def test_a_plan_without_a_graph_says_why() -> None:
    fast = fc.compile(lambda x: [x], backend="interpret")
    fast(torch.ones(2))
    assert "found nothing that computes on tensors" in str(fast.plan) and not fast.plan.breaks
    off = fc.compile(torch.sin, backend="interpret")
    with torch.compiler.set_stance("force_eager"):
        off(torch.ones(2))
    assert str(off.plan).startswith("no graph was captured when it was called: TorchDynamo is off")


@pytest.mark.filterwarnings("ignore:Error detected in IndexPutBackward0")  # AOTAutograd looks for anomalies
def test_a_gradient_whose_size_depends_on_data_is_no_fault_of_the_compilers() -> None:
    """AOTAutograd cannot trace it: Dynamo leaves the function alone, as it does for every backend."""

    def assigned(x: Tensor, value: Tensor) -> Tensor:
        x = x * 2
        x[x > 0] = value
        return x.sin()

    fast = fc.compile(assigned, backend="interpret")
    x, ours, eager = torch.randn(4, 6), *(torch.tensor(0.3, requires_grad=True) for _ in range(2))
    with pytest.warns(FusionWarning, match=r"all of assigned\(\) runs eager: Backend .*aten\.nonzero"):
        fast(x, ours).sum().backward()
    assigned(x, eager).sum().backward()
    assert ours.grad == eager.grad
    assert any(one.function == "assigned" for one in fast.plan.breaks) and len(fast.plan) == 0


def test_breaks_belong_to_the_model_that_they_are_in() -> None:
    first, second = (fc.compile(f, backend="interpret") for f in (masked, calls_disabled))
    with pytest.warns(FusionWarning):
        first(torch.randn(4, 6))
        second(torch.randn(4, 6))
        first(torch.randn(4, 6))
    assert [len(f.plan.breaks) for f in (first, second)] == [1, 1]
    assert "nonzero" in first.plan.breaks[0].reason and "disable" in second.plan.breaks[0].reason
    unbroken = fc.compile(lambda x: x.sin() + 1, backend="interpret")
    unbroken(torch.randn(4))
    assert unbroken.plan.breaks == () and "graph breaks" not in str(unbroken.plan)


class Module(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return masked(x)


def test_code_that_torch_fx_printed_is_no_place_in_a_file() -> None:
    graph = torch.fx.symbolic_trace(lambda x: torch.unique(x + 1) * 2)
    with pytest.warns(FusionWarning, match=r"(?s)breaks the graph.*at torch.fx graph:\d+") as caught:
        fast = fc.compile(graph, backend="eager")
        fast(torch.randn(8))
    assert all(w.filename == __file__ for w in caught)
    assert "\n  torch.fx graph:" in str(fast.plan) and "eval_with_key" not in str(fast.plan)

    class Around(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return graph(x)

    with pytest.warns(FusionWarning, match=r"at .*test_breaks\.py:\d+: return graph\(x\)") as caught:
        fc.compile(Around(), backend="eager")(torch.randn(8))
    assert all(w.filename == __file__ and "eval_with_key" not in str(w.message) for w in caught)


def test_a_break_without_a_line_names_the_function_that_was_called() -> None:
    def grown(x: Tensor, by: int) -> Tensor:
        return x + by

    fast = fc.compile(grown, backend="eager", dynamic=False)
    with pytest.warns(FusionWarning, match=r"grown: Dynamo recompile limit exceeded"):
        for size in range(1, torch._dynamo.config.recompile_limit + 3):
            fast(torch.randn(size), size)
    text = " ".join(str(fast.plan).split())
    assert "grown: Dynamo recompile limit exceeded" in text and "somewhere" not in text


def test_a_report_lists_them() -> None:
    report = fc.explain(Module(), torch.randn(4, 6))
    (one,) = report.breaks
    assert breaks_text(report.breaks) in str(report)
    (row,) = json.loads(json.dumps(report.json()))["breaks"]
    assert row["source"]["line"] == line_of(masked, "y > 0]") == one.source.line
    assert "aten.nonzero.default" in row["reason"] and row["function"] == "" and row["todo"]
    empty = fc.explain(nothing_before, torch.randn(4, 6))
    assert not empty.plans and str(empty).splitlines()[1].startswith("  nothing captured: 0 calls")
    assert "aten.nonzero.default" in str(empty)


# -- strict ----------------------------------------------------------------------------------------------


def ordered(x: Tensor) -> Tensor:
    return (x * x).sort(0).values + 1


def largest(x: Tensor) -> Tensor:
    return (x * x).topk(2).values.sort(0).values + 1


def spectrum(x: Tensor) -> Tensor:
    return torch.fft.rfft(x).abs()


STRICT: dict[str, tuple[Callable[..., Any], type[FusionError], str]] = {
    "no row": (ordered, EagerOperatorError, r"aten.sort.default would run eager: no row"),
    "two of them": (largest, EagerOperatorError, r"aten.topk.default .*; as would aten.sort.default"),
    "dtype": (spectrum, UnsupportedDtypeError, r"torch.complex64"),
    "a size that data decides": (masked, EagerOperatorError, r"index selects by a mask"),
    "graph break": (branching, GraphBreakError, r"a branch depends on the values of a tensor"),
    "given up": (looping, GraphBreakError, r"graph_break"),
}


@pytest.mark.parametrize("case", STRICT)
def test_strict_raises_with_place_reason_and_what_to_do(case: str) -> None:
    model, error, text = STRICT[case]
    with pytest.raises(error, match=rf"{text}(.|\n)*at .*{HERE}:\d+: .*\n +what to do: ."):
        fc.compile(model, backend="interpret", strict=True)(torch.randn(4, 8))


def test_strict_raises_where_no_kernel_runs_on_the_device() -> None:
    with pytest.raises(EagerDeviceError, match=r"the graph is on cpu(.|\n)*backend='interpret'"):
        fc.compile(torch.sin, strict=True)(torch.ones(3))
    fc.compile(torch.sin, strict=True, backend="eager")(torch.ones(3))  # as asked


def test_a_number_that_the_host_reads_stays_in_the_graph_where_none_may_break() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * (x * 2).sum().item() + 1

    fast, x = fc.compile(scaled, backend="interpret", strict=True), torch.randn(4, 8)
    torch.testing.assert_close(fast(x), scaled(x))
    assert len(fast.plan) == 1 and not fast.plan.breaks


class Trained(nn.Module):
    """Every library call that is one on purpose: products, a convolution, attention, an embedding's gradient,
    a seed, a kernel of the user's, an operator of another library."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(9, 8), nn.BatchNorm1d(4)
        self.conv, self.linear = nn.Conv1d(4, 4, 3, padding=1), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.linear(self.conv(self.norm(self.embedding(tokens))))
        x = nn.functional.scaled_dot_product_attention(x, x, x)
        x = nn.functional.dropout(torch.tanh(x) * 2, 0.5)
        return torch.ops.tests_of_breaks.double(x).index_add(0, tokens[:, 0], x).sum()


def test_strict_lets_library_calls_be() -> None:
    torch.library.define("tests_of_breaks::double", "(Tensor x) -> Tensor")
    torch.library.impl("tests_of_breaks::double", "CompositeExplicitAutograd", lambda x: x * 2)
    torch.library.register_fake("tests_of_breaks::double", torch.empty_like)
    torch.library.register_autograd("tests_of_breaks::double", lambda ctx, g: g * 2)
    example = torch.ones(2, 4, 8)
    tanh = fc.user_kernel(lambda x: torch.tanh(x) * 2, lambda x: x.tanh() * 2, example, name="own")
    fast = fc.compile(Trained(), backend="interpret", strict=True, patterns=(tanh, *fc.DEFAULT_PATTERNS))
    fast(torch.randint(0, 2, (2, 4))).backward()
    left = {x.target: x.reason for plan in fast.plan for x in plan.leftovers}
    assert "aten.embedding_dense_backward.default" in left and "aten.copy_.default" not in left
    assert "no row in the operator table" not in left.values(), left
