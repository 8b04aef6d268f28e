"""Garbage collection while a graph is compiled, and after it."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import fx

import fusion_compiler as fc
from fusion_compiler.compiler import compiler
from fusion_compiler.errors import FusionWarning
from fusion_compiler.runtime.collection import WHILE_COMPILING, rare_collections


def test_the_settings_come_back_when_the_last_one_leaves() -> None:
    before, inside, seen = gc.get_threshold(), threading.Event(), list[tuple[int, int, int]]()
    leave = threading.Event()

    def other() -> None:
        with rare_collections():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with rare_collections(), pytest.raises(ZeroDivisionError), rare_collections():
        thread.start()
        assert inside.wait(10)
        _ = 1 / 0
    seen.append(gc.get_threshold())
    leave.set()
    thread.join()
    assert seen == [WHILE_COMPILING] and gc.get_threshold() == before


def test_what_the_user_has_set_stays() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(0)
        with rare_collections():
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold()[0] == 0
        gc.set_threshold(*before)
        with rare_collections():
            gc.set_threshold(123, 4, 5)
        assert gc.get_threshold() == (123, 4, 5)
    finally:
        gc.set_threshold(*before)


def test_young_garbage_is_collected() -> None:
    class Node:
        def __init__(self) -> None:
            self.me = self

    gc.collect()
    with rare_collections():
        gone = weakref.ref(Node())
        kept = [Node() for _ in range(WHILE_COMPILING[0] + 1000)]
        assert gone() is None
    del kept


def test_a_compilation_forward_and_backward_runs_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int]] = []
    before, build = gc.get_threshold(), compiler.build

    @torch.compiler.assume_constant_result
    def by_dynamo() -> float:
        seen.append(gc.get_threshold())
        return 2.0

    def built(*args: Any) -> Any:
        seen.append(gc.get_threshold())
        return build(*args)

    def model(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * by_dynamo()

    monkeypatch.setattr(compiler, "build", built)

    fast = fc.compile(model, backend="eager")
    x = torch.randn(4, requires_grad=True)
    result = fast(x)
    assert set(seen) == {WHILE_COMPILING} and gc.get_threshold() == before
    result.sum().backward()
    assert set(seen) == {WHILE_COMPILING} and len(seen) >= 3 and gc.get_threshold() == before


def test_a_compilation_that_fails_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_threshold()

    def fails(graph: fx.Graph) -> object:
        raise RuntimeError("broken")

    monkeypatch.setattr(compiler, "build", fails)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusionWarning)
        fc.compile(lambda x: x.sin() + 1, backend="eager")(torch.randn(3))
    assert gc.get_threshold() == before
