"""The HTML report as text: what stands in it, and what cannot. tests/report/test_page.py opens it."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import pytest

from fusion_compiler.errors import ReportSchemaError
from fusion_compiler.report.page import page
from tests import ROOT
from tests.reports import OPS_OF_A_LAYER, report_of

ASSETS = ROOT / "fusion_compiler" / "assets"


class Scripts(HTMLParser):
    """The text of every script and style element, in order, and all attributes that name a place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.places: list[str] = []
        self.policy = ""
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.places += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]
        if dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attrs)["content"] or ""
        self.inside = tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts.append(data)
            self.inside = False


def test_data_survives_the_way_into_the_page() -> None:
    report = report_of(60, hostile=True)
    read = Scripts(page(report))
    assert read.tags.count("script") == 2, "no text of the model ends the data or opens a script"
    assert json.loads(read.texts[1]) == report
    assert "img" not in read.tags


def test_only_the_pages_own_script_and_style_may_run() -> None:
    read = Scripts(page(report_of(60)))
    style, _, script = read.texts
    for text, kind in ((style, "style"), (script, "script")):
        assert f"{kind}-src 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" in read.policy
    assert "default-src 'none'" in read.policy
    assert read.places == ["data:,"], "an empty icon, so that none is asked for"


def test_the_page_is_small_and_carries_its_licences() -> None:
    text = page(report_of(1))
    assert len(text.encode()) < 1_000_000
    licences = (ASSETS / "libraries" / "LICENSES.txt").read_text(encoding="utf-8")
    pinned = re.findall(r"(@?[\w./-]+)@(\d[\d.]+)", (ASSETS / "README.md").read_text(encoding="utf-8"))
    tools = {"esbuild", "prettier"}
    named = re.findall(r"^== (\S+) (\S+)$", licences, re.MULTILINE)
    assert named and sorted(named) == sorted(pair for pair in pinned if pair[0] not in tools)
    assert licences in text


def test_what_is_no_report_of_this_schema_is_refused() -> None:
    with pytest.raises(ReportSchemaError, match="schema 1, but this page shows schema 2"):
        page({**report_of(1), "schema": 1})
    report = report_of(1)
    report["totals"]["us_after"] = float("nan")
    with pytest.raises(ValueError, match="not JSON compliant"):
        page(report)


def test_the_made_up_report_is_what_it_says() -> None:
    report = report_of(2 * OPS_OF_A_LAYER + 1)
    assert len(report["graphs"][0]["ops"]) == 3 * OPS_OF_A_LAYER + 1
    names = {op["name"] for op in report["graphs"][0]["ops"]}
    assert {i for u in report["graphs"][0]["units"] for i in u["inputs"]} <= names | {"x"}
