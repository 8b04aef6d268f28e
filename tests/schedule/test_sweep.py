"""The sweep over widths, its figure, and the page that shows the results."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.__main__ import parse
from benchmarks.harness.record import ROOT
from benchmarks.kernels import sweep
from benchmarks.kernels.case import PHASES
from benchmarks.kernels.sizes import SWEEP_WIDTHS
from benchmarks.kernels.sizes import sweep as sweep_cases
from benchmarks.pages.plot import Line, svg
from benchmarks.pages.readme import FIGURES, RESULTS, page_of, write_figures
from benchmarks.pages.reports import rewritten

ORIGIN = {
    "command": "python -m benchmarks",
    "commit": "0123abc",
    "device": "GPU",
    "versions": {"torch": "2.11"},
}


def row(width: int, fraction: float | None, kind: str = "softmax") -> dict[str, object]:
    cell = {"failed": "no"} if fraction is None else {"us": 1.0, "fraction": fraction, "kernels": 1}
    case = f"{kind}, {width} wide"
    return {"case": case, "phase": PHASES[0], "family": kind, "cells": {"ours": cell}}


def test_the_sweep_goes_by_factors_of_the_square_root_of_two() -> None:
    assert (SWEEP_WIDTHS[0], SWEEP_WIDTHS[1], SWEEP_WIDTHS[2], SWEEP_WIDTHS[-1]) == (256, 362, 512, 262144)
    cases = sweep_cases()
    assert len(cases) == len({c.name for c in cases}) == 4 * len(SWEEP_WIDTHS)
    assert all(c.sizes["rows"] * c.sizes["columns"] <= 1 << 26 for c in cases)


def test_cliffs_lie_between_neighbours_in_either_direction() -> None:
    rows = [row(1024, 0.5), row(256, 0.9), row(512, 0.8), row(2048, 0.9), row(4096, None)]
    assert list(sweep.cliffs(rows)) == [
        "softmax, forward: 0.80 at 512, 0.50 at 1024, 0.90 at 2048",
    ]
    apart = [row(256, 0.9), row(512, 0.5), row(1024, 0.5), row(2048, 0.9)]
    assert list(sweep.cliffs(apart)) == [
        "softmax, forward: 0.90 at 256, 0.50 at 512",
        "softmax, forward: 0.50 at 1024, 0.90 at 2048",
    ]


def test_a_figure_has_a_panel_for_each_kind_and_breaks_where_nothing_was_measured() -> None:
    rows = [
        row(w, f, kind) for kind in ("softmax", "RMSNorm") for w, f in ((256, 0.9), (362, None), (512, 0.8))
    ]
    drawn = ElementTree.fromstring(sweep.figure_of(rows))
    name = "{http://www.w3.org/2000/svg}"
    assert [t.text for t in drawn.iter(f"{name}text") if t.get("class") == "title"] == ["softmax", "RMSNorm"]
    lines = [p.get("d") for p in drawn.iter(f"{name}path") if p.get("stroke")]
    assert [(d or "").count("M") for d in lines] == [2, 2]
    ElementTree.fromstring(svg({}))
    inside = svg({"a": [Line("ours", "#000", [(256, 5.0)])]})
    assert 'd="M' in inside and "-" not in inside.split('stroke="#000" d="')[1].split('"')[0]


def test_a_quick_sweep_fills_its_json(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    arguments = ["sweep", "--quick", "--device", "cpu", "--repetitions", "1", "--backend", "eager"]
    record = sweep.main(
        parse([*arguments, "--filter", "softmax, (362|512) wide, forward$", "--json", str(path)])
    )
    assert [r["case"] for r in record.rows] == ["softmax, 362 wide", "softmax, 512 wide"]
    assert list(record.rows[0]["cells"]) == ["ours"]
    assert json.loads(path.read_text())["summary"]["cliffs"] == list(sweep.cliffs(record.rows))


def results(folder: Path) -> Path:
    held = {**row(4096, 0.97), "bar": 0.95}
    odd = {**row(3072, 0.7), "neighbour": "softmax, 4096 wide", "bar": None}
    (folder / "kernels.json").write_text(json.dumps(ORIGIN | {"rows": [held, odd]}))
    (folder / "sweep.json").write_text(json.dumps(ORIGIN | {"rows": [row(256, 0.9), row(362, 0.6)]}))
    timed = {n: {"schedule": f"{n} one", "us": us} for n, us in (("first", 12), ("tuned", 11), ("best", 10))}
    cluster = {"cluster": "softmax", "predicted_us": 9.0, "fraction": 0.9, **timed}
    searched = {"case": "softmax", "commit": "4567def", "clusters": [cluster]}
    schedules = {"rows": [searched], "summary": {"clusters": 1}}
    (folder / "schedules.json").write_text(json.dumps(ORIGIN | schedules))
    return folder


def test_the_page_holds_results_to_their_bars_and_keeps_what_a_person_wrote(tmp_path: Path) -> None:
    page = tmp_path / "figures.md"
    page.write_text(f"mine\n<!-- {FIGURES} -->\nold\n<!-- end of figures -->\nmine too\n")
    write_figures(results(tmp_path), tmp_path)
    text = page.read_text()
    assert text.startswith("mine\n") and text.endswith("mine too\n") and "old" not in text
    assert "| softmax, 4096 wide, fwd | 1 | 0.95 | 0.97 | met |" in text
    assert "| softmax, 3072 wide, fwd | 1 | 0.80 | 0.70 | MISSED |" in text
    assert "- softmax, forward: 0.90 at 256, 0.60 at 362" in text
    assert "| softmax: softmax | 9.0 | first one | 12.0 | best one | 10.0 | 1.20 | 4567def |" in text
    assert "at 0123abc on GPU: torch 2.11" in text
    assert (tmp_path / "sweep.svg").exists()
    with pytest.raises(ValueError, match="needs the lines"):
        rewritten("no marks", FIGURES, "")


def test_the_page_is_what_the_results_say() -> None:
    page = (ROOT / "docs" / "figures.md").read_text()
    assert rewritten(page, FIGURES, page_of(RESULTS)) == page
