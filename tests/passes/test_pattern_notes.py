"""The notes of a plan about the user's patterns, the arguments of `where=`, and the text of a pattern."""

from __future__ import annotations

import functools
import itertools
import linecache
import math
import re
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_compiler as fc
from fusion_compiler.errors import FusionError, InvalidPatternError, PredicateError
from fusion_compiler.ir import pattern_text
from fusion_compiler.ir.dag import OpDag
from fusion_compiler.passes.patterns import notes
from fusion_compiler.passes.patterns.indexed import looked_through
from fusion_compiler.passes.patterns.trace import traced_above_autograd, traced_hint
from fusion_compiler.patterns import DEFAULT_PATTERNS, ClusterHint, MatchedTensor, Pattern, Rewrite
from tests import ROOT

rows, row = torch.ones(6, 10), torch.ones(10)
SORTS: dict[str, Callable[..., Pattern]] = {
    "hint": fc.cluster_hint,
    "rewrite": lambda code, *example, **more: fc.rewrite(code, lambda *a: code(*a), *example, **more),
    "kernel": lambda code, *example, **more: fc.user_kernel(code, lambda *a: code(*a), *example, **more),
}


def line_of(code: str) -> str:
    """The place in this file that has a piece of code, as a note names it."""
    numbers = [i for i, text in enumerate(linecache.getlines(__file__), 1) if code in text]
    return f"test_pattern_notes.py:{numbers[0]}"


def compiled(fn: Callable[..., Any], *patterns: Pattern, **options: Any) -> Any:
    return fc.compile(fn, patterns=patterns, backend="eager", **options)


def note(fn: Callable[..., Any], name: str, *patterns: Pattern, inputs: tuple[Tensor, ...] = ()) -> str:
    fast = compiled(fn, *patterns)
    fast(*(inputs or (torch.randn(4, 8),)))
    return fast.plan[0].notes[name]


# -- what came closest ------------------------------------------------------------------------------------


def norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def model(x: Tensor, w: Tensor) -> Tensor:
    a = torch.tanh(x) * 0.5
    b = a * torch.rsqrt(a.pow(2).sum(-1, keepdim=True) + 1e-6) * w  # no mean
    return torch.exp(torch.sin(b) * 2 - 1)


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize(
    ("code", "example", "expected"),
    [
        (
            lambda x: torch.tanh(x) * 0.25,
            (rows,),
            f"closest at {line_of('torch.tanh(x) * 0.5')}: 1 of 2 ops, "
            "then mul(…, 0.5) where the pattern has mul(…, 0.25)",
        ),
        (
            lambda x: torch.exp(torch.sin(x) * 2 + 1),
            (rows,),
            f"closest at {line_of('torch.sin(b) * 2 - 1')}: 3 of 4 ops, "
            "then sub(…, 1) where the pattern has add(…, 1)",
        ),
        (lambda x: torch.tanh(torch.erf(x)), (rows,), "no op aten.erf in the graph"),
        (
            lambda x: torch.tan(torch.sin(x) * 2),
            (rows,),
            f"no op aten.tan in the graph; closest at {line_of('torch.sin(b) * 2 - 1')}: 2 of 3 ops, "
            "then sub(…, 1) where the pattern has tan(…)",
        ),
        (
            lambda x, y: torch.sin(x) * y,
            (rows, rows),
            "then mul(…, 2) where the pattern has mul(…, …)",
        ),
    ],
    ids=["a constant", "an operator", "absent", "absent, nearly", "an operand"],
)  # fmt: skip
def test_a_pattern_without_a_match_says_what_came_closest(
    sort: str, code: Callable[..., Any], example: tuple[Tensor, ...], expected: str
) -> None:
    pattern = SORTS[sort](code, *example, name="mine")
    text = note(model, "mine", pattern, inputs=(torch.randn(4, 8), torch.randn(8)))
    assert text.startswith("never matched: ") and expected in text


def test_the_count_of_equal_ops_looks_past_the_first_difference() -> None:
    pattern = fc.user_kernel(norm, norm, rows, row, 1e-6)
    text = note(model, "norm", pattern, inputs=(torch.randn(4, 8), torch.randn(8)))
    place = line_of("no mean")
    # The mean is one operator above autograd: pow, add, rsqrt and both products are as in the model.
    assert text == (
        "never matched: no op aten.mean in the graph; "
        f"closest at {place}: 5 of 6 ops, then sum(…, [-1], True) where the pattern has mean(…, [-1], True)"
    )


def test_a_rank_is_named_where_it_counts() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.sin(torch.tanh(x))

    for sort, matches in (("hint", True), ("kernel", False)):  # hints take leading dimensions
        text = note(fn, "mine", SORTS[sort](fn, rows, name="mine"), inputs=(torch.randn(2, 3, 8),))
        assert (
            text.startswith("matched once") if matches else "of 3 dimensions where the pattern has 2" in text
        )
        torch._dynamo.reset()


def test_an_argument_that_has_to_be_the_same_twice() -> None:
    text = note(
        lambda x: torch.sin(x) * torch.cos(x + 1),
        "mine",
        fc.cluster_hint(lambda x: torch.sin(x) * torch.cos(x), rows, name="mine"),
    )
    assert "then add(…, 1) where the pattern reads its argument x again" in text


def test_a_second_result_that_is_not_there() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(torch.tanh(x)), torch.cos(torch.tanh(x)) * 3

    def user(x: Tensor) -> Tensor:
        return torch.sin(torch.tanh(x)) + torch.cos(x) * 2

    text = note(user, "both", fc.cluster_hint(both, rows))
    assert "of 5 ops, then mul(…, 2) where the pattern has mul(…, 3)" in text


def test_a_gradient_is_looked_for_in_the_backward_graph() -> None:
    pattern = fc.cluster_hint(lambda x: torch.exp(torch.tanh(x) * 0.25), rows, name="mine", backward=True)
    fast = compiled(model, pattern)
    fast(torch.randn(4, 8, requires_grad=True), torch.randn(8)).sum().backward()
    forward, backward = fast.plan
    assert "mine" in forward.notes and "mine" not in backward.notes
    assert "mul(…, 0.5) where the pattern has mul(…, 0.25)" in backward.notes["mine_backward"]


def test_a_match_is_counted_with_its_places() -> None:
    def user(x: Tensor) -> Tensor:
        first = torch.sin(torch.tanh(x))  # one
        return first + torch.sin(torch.tanh(x + 1))  # two

    pattern = fc.cluster_hint(lambda x: torch.sin(torch.tanh(x)), rows, name="mine")
    places = f"{line_of('# one')}, {line_of('# two')}"
    assert note(user, "mine", pattern) == f"matched 2 times, at {places}"
    rule = SORTS["rewrite"](lambda x: torch.sin(torch.tanh(x)), rows, name="rule")
    text = note(user, "rule", rule)
    assert text == "; ".join(f"done: 2 ops replaced, at {line_of(c)}" for c in ("# one", "# two"))


def test_only_the_users_patterns_without_a_match_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    original = notes.closest

    def counted(traced: Any, dag: OpDag, **more: Any) -> str:
        asked.append(traced.name)
        return original(traced, dag, **more)

    monkeypatch.setattr(notes, "closest", counted)
    mine = fc.cluster_hint(lambda x: torch.tanh(x) * 0.25, rows, name="mine")
    matching = fc.cluster_hint(lambda x: torch.tanh(x) * 0.5, rows, name="found")
    fast = compiled(model, mine, matching, *DEFAULT_PATTERNS)
    fast(torch.randn(4, 8), torch.randn(8))
    assert asked == ["mine"]
    torch._dynamo.reset()
    asked.clear()
    fast = compiled(model, *DEFAULT_PATTERNS)
    fast(torch.randn(4, 8), torch.randn(8))
    assert not asked and set(fast.plan[0].notes) == {"memory", "seconds"}


def test_a_graph_without_a_form_above_autograd_says_so() -> None:
    def user(x: Tensor) -> Tensor:
        return torch.vmap(torch.sin)(x) * 2

    text = note(user, "mine", SORTS["kernel"](lambda x: torch.sin(x) * 2, rows, name="mine"))
    assert text == "not looked for: see pre-autograd"


# -- overlaps ---------------------------------------------------------------------------------------------


def long(x: Tensor) -> Tensor:
    return torch.cos(torch.sin(torch.tanh(x)))


def short(x: Tensor) -> Tensor:
    return torch.sin(torch.tanh(x))


@pytest.mark.parametrize("sort", SORTS)
def test_of_two_patterns_that_overlap_the_first_wins_and_the_other_says_so(sort: str) -> None:
    def user(x: Tensor) -> Tensor:
        return torch.cos(torch.sin(torch.tanh(x))) + 1  # both

    first, second = SORTS[sort](short, rows, name="first"), SORTS[sort](long, rows, name="second")
    fast = compiled(user, first, second)
    fast(torch.randn(4, 8))
    notes = fast.plan[0].notes
    assert notes["second"] == f"lost op tanh to first, at {line_of('# both')}: first comes first in patterns"
    assert "lost" not in notes["first"]


def test_a_default_pattern_that_loses_is_named_by_the_winner() -> None:
    mine = fc.cluster_hint(lambda x: torch.softmax(x, -1), rows, name="mine")
    text = note(lambda x: torch.softmax(x * 2, -1), "mine", mine, *DEFAULT_PATTERNS)
    assert "took op amax from softmax" in text and "mine comes first in patterns" in text
    last = note(lambda x: torch.softmax(x * 2, -1), "mine", *DEFAULT_PATTERNS, mine)
    assert "lost op amax to softmax" in last and "softmax comes first in patterns" in last


def test_hints_are_told_that_a_kernel_was_there_before() -> None:
    hint, kernel = fc.cluster_hint(long, rows), SORTS["kernel"](short, rows, name="quick")
    assert "kernels go first: quick took ops above autograd" in note(long, "long", hint, kernel)


# -- where= -----------------------------------------------------------------------------------------------


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.randn(8))
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("kept", torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x) * self.trained + torch.tanh(x + 1) * self.frozen
        return h + torch.tanh(h) * self.kept + torch.tanh(x.detach() - 1) * x[0]


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("how", ["compile", "explain"])
def test_a_predicate_is_told_where_tensors_come_from(sort: str, how: str) -> None:
    seen: set[tuple[Any, ...]] = set()

    def where(x: MatchedTensor, w: MatchedTensor) -> bool:
        if len(w.shape) == 1:  # other products are in the backward graph, which explain() plans too
            seen.add((w.origin, w.requires_grad, x.origin, x.requires_grad))
        return False

    pattern = SORTS[sort](lambda x, w: torch.tanh(x) * w, rows, row, name="mine", where=where)
    x = torch.randn(4, 8, requires_grad=True)
    if how == "explain":
        (plan, *_) = fc.explain(Scales(), x, patterns=(pattern,)).plans
    else:
        fast = compiled(Scales(), pattern)
        fast(x)
        plan = fast.plan[0]
    detached = sort == "hint"  # below autograd nothing is left of a detach
    assert seen - {("computed", True, "input", True), ("computed", True, "computed", True)} == {
        ("parameter", True, "input", True),
        ("parameter", False, "computed", True),
        ("buffer", False, "computed", True),
        *([] if detached else [("computed", True, "computed", False)]),
    }
    assert "where= said no to" in plan.notes["mine"]


@pytest.mark.parametrize("sort", SORTS)
def test_a_predicate_may_say_why(sort: str) -> None:
    def twice(x: Tensor) -> Tensor:
        return torch.tanh(x) * 2.0

    pattern = SORTS[sort](twice, torch.ones(6, 10), name="mine", where=lambda x: f"{x.shape[-1]} columns")
    fast = compiled(twice, pattern)
    fast(torch.randn(4, 8))
    assert fast.plan[0].notes["mine"].endswith(": 8 columns")


@pytest.mark.parametrize("sort", SORTS)
def test_a_predicate_sees_shapes_dtypes_devices_and_constants(sort: str) -> None:
    seen: list[tuple[Any, ...]] = []

    def where(x: MatchedTensor, scale: float, dim: int) -> bool:
        seen.append((x.shape, x.stride, x.dtype, x.device, scale, dim))
        return scale == 3.0

    pattern = SORTS[sort](
        lambda x, scale, dim: torch.tanh(x * scale).sum(dim), rows, 2.0, -1, name="mine", where=where
    )

    def user(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x * 0.5).sum(-1), torch.tanh(x.t() * 3.0).sum(-1)

    fast = compiled(user, pattern)
    x = torch.randn(4, 8, dtype=torch.float64)
    torch.testing.assert_close(fast(x), user(x))
    assert seen == [
        ((4, 8), (8, 1), torch.float64, "cpu", 0.5, -1),
        ((8, 4), (1, 8), torch.float64, "cpu", 3.0, -1),
    ]
    assert re.match(r"matched once|done: 3 ops", fast.plan[0].notes["mine"])


@pytest.mark.parametrize("sort", SORTS)
def test_what_a_predicate_asks_of_a_symbolic_size_is_a_guard(sort: str) -> None:
    pattern = SORTS[sort](
        lambda x: torch.sin(torch.tanh(x)), rows, name="mine", where=lambda x: x.shape[0] % 4 == 0
    )
    fast = compiled(lambda x: torch.sin(torch.tanh(x)) + 1, pattern, dynamic=True)
    for size in (8, 12, 7, 9, 16):
        x = torch.randn(size, 5)
        torch.testing.assert_close(fast(x), torch.sin(torch.tanh(x)) + 1)
    multiples, others = (plan.notes["mine"] for plan in fast.plan)  # and no third graph
    assert re.match("matched once|done", multiples) and "where= said no to 1 match" in others


@pytest.mark.parametrize("sort", SORTS)
def test_a_predicate_that_raises_is_an_error_at_its_line(sort: str) -> None:
    def where(x: MatchedTensor) -> bool:
        return x.nothing > 3  # type: ignore[attr-defined]  # raises

    pattern = SORTS[sort](lambda x: torch.sin(torch.tanh(x)), rows, name="mine", where=where)
    fast = compiled(lambda x: torch.sin(torch.tanh(x)) + 1, pattern)
    with pytest.raises(PredicateError) as caught:
        fast(torch.randn(4, 8))
    text = str(caught.value)
    assert (
        isinstance(caught.value, InvalidPatternError)
        and "the where= of pattern mine raises AttributeError" in text
    )
    assert f"{line_of('# raises')}: return x.nothing > 3" in text and "what to do: " in text


def test_a_gradient_without_the_argument_that_a_predicate_asks_for_is_left_alone() -> None:
    """The gradient of a softmax needs its result alone, which is there as it is returned."""
    pattern = fc.cluster_hint(
        lambda x: torch.softmax(x, -1), rows, name="mine", backward=True, where=lambda x: x.shape[-1] == 8
    )
    fast = compiled(lambda x: torch.softmax(x, -1), pattern)
    fast(torch.randn(8, 8, requires_grad=True)).sum().backward()
    assert "matched once" in fast.plan[0].notes["mine"]
    text = fast.plan[1].notes["mine_backward"]
    assert text.startswith("never matched: where= asks about an argument that the gradient does not need")


# -- printing ---------------------------------------------------------------------------------------------

numbers = itertools.count()


def executed(text: str) -> Pattern:
    """The pattern that printed text makes, from a file of its own, so that it has a source too."""
    file = f"<printed pattern {next(numbers)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"torch": torch, "F": F, "Tensor": Tensor, "math": math, "fc": fc}
    scope |= {"__name__": __name__, "row_sum": row_sum, "keep": keep}
    exec(compile(text, file, "exec"), scope)
    return scope["pattern"]


def program(pattern: Pattern, code: Callable[..., Any]) -> list[Any]:
    """The pattern's code as the operators that it is, without names."""
    hint = fc.cluster_hint(code, *pattern.example, name="same")
    dag = traced_hint(hint).dag if isinstance(pattern, ClusterHint) else traced_above_autograd(hint).dag
    ops = [op for op in map(dag.op, dag.order) if not looked_through(op, dag)]
    place = {op.name: i for i, op in enumerate(ops)}
    return [(str(op.target), [place.get(i) for i in op.inputs], op.outputs, op.flops) for op in ops]


def row_sum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def keep(x: MatchedTensor) -> bool:
    return x.shape[-1] > 3


def closure(scale: float, layer: Any = None) -> Pattern:
    if layer is not None:
        return fc.cluster_hint(lambda x: layer(x) * 2, rows, name="around")
    return fc.rewrite(lambda x: torch.tanh(x) * scale, lambda x: scale * torch.tanh(x), rows, name="scaled")


def unsourced() -> Callable[..., Any]:
    scope: dict[str, Any] = {"torch": torch}
    exec("def made(x, s, y): return torch.softmax(x * s, -1) + y * (s * 2), torch.sqrt(y)", scope)
    return scope["made"]


PRINTED: tuple[Pattern, ...] = (
    *DEFAULT_PATTERNS,
    *(fc.rewrite(lambda x: torch.exp(x) * torch.exp(x), lambda x: torch.exp(2 * x), rows, name="square"),),
    closure(0.5),
    fc.cluster_hint(
        lambda x, y: torch.tanh(x) * (lambda z: z + y)(x), rows, row, name="inner", where=lambda x, y: True
    ),
    fc.user_kernel(row_sum, row_sum, rows, name="sums", where=keep, backward=lambda x, y, g: g.expand_as(x)),
    fc.user_kernel(
        lambda x: (
            torch.relu(x)
            + 1
        ),
        torch.sin, rows.to(torch.bfloat16), name="lines",
    ),
    fc.cluster_hint(unsourced(), rows, 0.5, rows),
    fc.rewrite(
        functools.partial(torch.softmax, dim=-1), functools.partial(torch.softmax, dim=1), rows, name="part"
    ),
    fc.cluster_hint(torch.gather, rows, 1, torch.zeros(6, 10, dtype=torch.int64), fuse=False),
    closure(0, nn.ReLU()),
)  # fmt: skip


@pytest.mark.parametrize("pattern", PRINTED, ids=lambda p: p.name)
def test_what_is_printed_makes_an_equal_pattern(pattern: Pattern) -> None:
    again = executed(str(pattern))
    assert type(again) is type(pattern) and again.name == pattern.name
    assert again.options() == pattern.options() and again.functions().keys() == pattern.functions().keys()
    assert program(again, again.code) == program(pattern, pattern.code)
    if isinstance(pattern, Rewrite) and isinstance(again, Rewrite):
        assert program(again, again.after) == program(pattern, pattern.after)
    for ours, theirs in zip(pattern.example, again.example, strict=True):
        same = isinstance(ours, Tensor) and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert same or ours == theirs
    # What a function read of the one around it stands before it.
    assert str(pattern).endswith(str(again)) and (pattern.name == "scaled" or str(again) == str(pattern))


def test_a_pattern_prints_as_it_was_written() -> None:
    square = next(p for p in PRINTED if p.name == "square")
    assert str(square) == (
        "pattern = fc.rewrite(\n"
        "    lambda x: torch.exp(x) * torch.exp(x),\n"
        "    lambda x: torch.exp(2 * x),\n"
        "    torch.ones(6, 10),\n"
        '    name="square",\n'
        ")"
    )
    sums = next(p for p in PRINTED if p.name == "sums")
    assert "def row_sum(x: Tensor) -> Tensor:\n    return x.sum(-1, keepdim=True)\n" in str(sums)
    assert "fc.user_kernel(" in str(sums) and "where=keep" in str(sums)
    assert "backward=lambda x, y, g: g.expand_as(x)" in str(sums)


def test_lambdas_of_one_line_are_told_apart() -> None:
    texts = ["lambda: None", "lambda: 3", "lambda x: True", "lambda x: False", "lambda x: 1", "lambda x: x",
             "lambda x: (lambda z: z + x)(x)", "lambda y: y", "lambda x: x if x else 2"]  # fmt: skip
    line = f"made = [{', '.join(texts)}]\n"
    linecache.cache["<one line>"] = (len(line), None, [line], "<one line>")
    scope: dict[str, Any] = {}
    exec(compile(line, "<one line>", "exec"), scope)
    assert [pattern_text._source(f) for f in scope["made"]] == texts


def test_a_function_without_source_prints_as_the_program_that_it_is() -> None:
    text = str(next(p for p in PRINTED if p.name == "made"))
    assert text.startswith("def made(x, s, y):\n    mul = torch.ops.aten.mul.Tensor(x, s)\n")
    assert "MARK" not in text and "torch.ops.aten.mul.Tensor(y, 1.0)" in text  # 2 s, for the example's s


def test_the_page_on_patterns_does_what_it_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "patterns.md").read_text()
    code = code_by_line(page)
    linecache.cache["patterns.md"] = (len(code), None, code.splitlines(keepends=True), "patterns.md")
    module = types.ModuleType("page_of_patterns")  # TorchDynamo imports what it finds globals of
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, "patterns.md", "exec"), vars(module))
    out = capsys.readouterr().out
    promised = re.findall(r"^print\(.*\)  # (matched .*|done.*)$", code, re.MULTILINE)
    assert len(promised) == 3 and all(f"{text}\n" in out for text in promised)
    shown = re.search(r"(?:^    .*\n)*^    the replacement of pattern.*\n(?:^    .*\n)*", page, re.MULTILINE)
    assert shown is not None and textwrap.dedent(shown[0]) in out
    assert "squared_relu_backward  gradient of argument 0" in out


def code_by_line(page: str) -> str:
    """The Python of a page on the lines that it has there."""
    inside, lines = False, list[str]()
    for line in page.splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = line == "```python" or (inside and not fence)
    return "\n".join(lines) + "\n"


def test_every_error_of_a_pattern_can_be_raised_from_a_compiled_call() -> None:
    """An error inside TorchDynamo reaches the user as itself."""
    kernel = fc.user_kernel(short, lambda x: x.sum(), rows)
    with pytest.raises(FusionError, match="the user's kernel short does not compute what its pattern does"):
        compiled(short, kernel)(torch.randn(4, 8))
