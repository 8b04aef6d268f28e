"""Texts of functions: equal where the functions do the same in another process, and different otherwise."""

from __future__ import annotations

import functools
import math
import operator
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fusion_compiler.ir.record import NotWritable
from fusion_compiler.ir.stable_text import stable_text
from fusion_compiler.patterns import DEFAULT_PATTERNS, cluster_hint, rewrite, text_of_patterns
from tests import ROOT

SCALE = 2.0


def scaled(x: Any) -> Any:
    return x * SCALE


def calls_scaled(x: Any) -> Any:
    return [scaled(y) for y in (x, x)]


def even(n: int) -> bool:
    return n == 0 or odd(n - 1)


def odd(n: int) -> bool:
    return n != 0 and even(n - 1)


def adding(value: Any, by: Any = 1, *, also: Any = 2) -> Callable[[Any], Any]:
    return lambda x, by=by, *, also=also: x + value + by + also


def text(value: Any) -> str:
    return str(stable_text(value))


def test_values_of_closures_and_defaults_and_globals_count(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text(adding(value)) for value in (1, 1.0, True, (1, 2), [1, 2], "1", 0.0, -0.0)]
    texts += [text(adding(1, 2)), text(adding(1, also=3)), text(adding(scaled))]
    assert text(adding(1)) == texts[0] and len(set(texts)) == len(texts)
    before = text(calls_scaled)
    assert text(calls_scaled) == before
    monkeypatch.setitem(globals(), "SCALE", 3.0)  # two calls away
    assert text(calls_scaled) != before


def test_code_counts_and_names_and_lines_do_not() -> None:
    def one(x: Any) -> Any:
        return x.sin()

    def two(x: Any) -> Any:
        # Another line.
        return x.sin()

    texts = [text(f) for f in (one, lambda x: x.cos(), lambda x: x.sin() + 1, lambda x: x.sin() + 1.0)]
    assert text(two) == texts[0] and len(set(texts)) == len(texts)
    before = text(one)
    for _ in range(100):  # the interpreter specializes the code
        one(torch.ones(1))
    assert text(one) == before


def test_functions_that_call_each_other_end() -> None:
    assert text(even) == text(even) != text(odd)


def test_functions_of_pytorch_and_python_are_their_names() -> None:
    pools = [F.max_pool2d, F.max_pool3d]  # two functions with one name
    values = [torch.relu, F.gelu, F.softmax, math.sin, operator.add, len, torch.Tensor, torch.float32, *pools]
    texts = [text(value) for value in values]
    assert len(set(texts)) == len(texts)
    assert text(functools.partial(F.gelu, approximate="tanh")) != text(functools.partial(F.gelu))
    assert text(lambda x: torch.ops.aten.sin(x)) != text(lambda x: torch.ops.aten.cos(x))


def changes(x: Any) -> Any:
    global SCALE
    SCALE = 2.0
    return x


def unbound() -> Callable[[Any], Any]:
    def inner(x: Any) -> Any:
        return later(x)

    if False:
        later = scaled
    return inner


endless: list[Any] = []
endless.append(endless)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: np.sin(x), "the module numpy"),
        (lambda x: os.environ["A"], "the module os"),
        (lambda x: __import__("os").environ, "reads __import__"),
        (lambda x: eval(x), "reads eval"),
        (lambda x, f=eval: f(x), "builtin_function"),
        (lambda x: torch.ops.mine.double(x), "reads torch.ops.mine"),
        (lambda x: undefined(x), "reads undefined"),  # type: ignore[name-defined]  # noqa: F821
        (lambda x, t=torch.ones(1): x + t, "a Tensor"),  # noqa: B008
        (adding(object()), "a object"),
        (adding([].append), "builtin_function"),
        (changes, "changes the global SCALE"),
        (unbound(), "no value yet"),
        (adding(endless), "holds itself"),
    ],
)
def test_what_another_process_may_have_otherwise_has_no_text(function: Any, reason: str) -> None:
    with pytest.raises(NotWritable, match=reason):
        stable_text(function)


def test_patterns_have_a_text_of_all_that_they_are() -> None:
    def after(x: Any) -> Any:
        return x * 2

    x, hints = torch.randn(3), [cluster_hint(scaled, torch.ones(3), name=name) for name in ("a", "b")]
    hints.append(cluster_hint(scaled, torch.ones(3), name="a", fuse=False))
    hints.append(cluster_hint(scaled, torch.ones(3, dtype=torch.float64), name="a"))
    hints.append(cluster_hint(scaled, torch.ones(3, 1), name="a"))
    hints.append(cluster_hint(scaled, torch.ones(3), name="a", where=lambda x: True))
    rules = [rewrite(scaled, after, x, name="a", domain=domain) for domain in (None, "finite", (0.0, 1.0))]
    rules.append(rewrite(after, scaled, x, name="a"))
    texts = [str(pattern.stable_text()) for pattern in (*hints, *rules)]
    assert len(set(texts)) == len(texts)
    assert str(cluster_hint(scaled, torch.randn(3), name="a").stable_text()) == texts[0]
    assert text_of_patterns(DEFAULT_PATTERNS) == list(range(len(DEFAULT_PATTERNS)))
    with pytest.raises(NotWritable, match="pattern mine has no stable hash: it reads a Tensor"):
        cluster_hint(scaled, x, name="mine", where=adding(x)).stable_text()


def test_texts_are_the_same_in_another_process() -> None:
    """Hashes of strings, and with them the order of sets, differ there."""
    code = "from tests.ir import test_stable_text as t; print(t.text((t.calls_scaled, t.chosen, t.even)))"
    for seed in ("1", "2"):
        environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
        assert done.stdout.strip() == text((calls_scaled, chosen, even)), done.stderr


def chosen(x: Any, among: Any = frozenset({"a", "b", "c"})) -> bool:
    return x.dtype in {torch.float16, torch.bfloat16} or x in {"d", "e", "f"} or x in among
