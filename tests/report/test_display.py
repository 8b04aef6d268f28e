"""Plans, reports and profiles in a notebook and in an interactive session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fusion_compiler as fc
from tests.browser import chromium
from tests.reports import report_of


@pytest.fixture(scope="module")
def net() -> Any:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))


def test_reprs_are_short_and_say_what_it_is(net: Any) -> None:
    report = fc.explain(net, torch.ones(2, 8))
    assert repr(report).startswith("<Report of Sequential on h200: <FusionPlan graph0.forward: ")
    assert len(repr(report)) < 200
    fast = fc.compile(net, backend="eager")
    assert repr(fast.plan) == "<Plans: none yet>" and fast.plan._repr_html_() is None
    fast(torch.ones(2, 8))
    assert repr(fast.plan) == f"<Plans: {fast.plan[0]!r}>" and len(repr(fast.plan)) < 100
    assert "2 kernels" in repr(fast.plan[0]) or "1 kernel" in repr(fast.plan[0])
    profiled = fc.profile(fast, torch.ones(2, 8), repetitions=1)
    assert repr(profiled).startswith("<Profile of Sequential on the host: ") and len(repr(profiled)) < 100
    assert repr(fc.compile(torch.sin, backend="eager")).startswith("<compiled <built-in method sin")


def test_a_notebook_shows_the_page(net: Any) -> None:
    fast = fc.compile(net, backend="eager")
    fast(torch.ones(2, 8))
    for shown in (fast.plan, fast.report(), fc.profile(fast, torch.ones(2, 8), repetitions=1)):
        text = shown._repr_html_()
        assert text.startswith("<iframe sandbox=") and text.count("<") == 2
    assert fast.plan[0]._repr_html_().startswith("<pre>plan graph0.forward for ")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


def test_the_page_works_within_a_notebook(browser: Any) -> None:
    from fusion_compiler.report.page import framed

    problems: list[str] = []
    tab = browser.new_page(viewport={"width": 1000, "height": 800})
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.set_content(f"<!doctype html><body>{framed(report_of(60, hostile=True))}</body>")
    tab.wait_for_selector("iframe")
    frame = tab.frames[1]
    frame.wait_for_selector("html[data-ready]", timeout=10_000)
    assert frame.locator(".unit").count() > 5
    frame.locator(".unit.cluster").first.dispatch_event("click")  # it may lie outside of what is shown
    assert "kernel" in frame.locator("#panel").inner_text()
    assert tab.evaluate("window.broken") is None and problems == []
    tab.close()
