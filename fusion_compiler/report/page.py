"""The report as one HTML page that needs nothing else: no network, no other file. See assets/README.md."""

from __future__ import annotations

import hashlib
import html
import json
import re
from base64 import b64encode
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from fusion_compiler.errors import ReportSchemaError

SCHEMA = 2  # the version of docs/report-schema.md
SCRIPTS = (
    "libraries/libraries.min.js",
    "dom.js",
    "model.js",
    "layout.js",
    "graph.js",
    "moving.js",
    "panel.js",
    "tables.js",
    "search.js",
    "page.js",
)


def page(report: Mapping[str, Any]) -> str:
    """Return the page of a report, as text to be written in UTF-8.

    report: the result of `fc.explain(...).json()`, by docs/report-schema.md. Its texts stay text: data is
        escaped, and the page's Content-Security-Policy runs no script but the page's own.

    Raises ReportSchemaError if the report has another schema, and ValueError if a number in it is not finite
    (JSON has no such numbers).
    """
    if report.get("schema") != SCHEMA:
        raise ReportSchemaError(got=report.get("schema"), known=SCHEMA)
    style = _asset("page.css")
    script = '"use strict";\n' + "\n".join(_asset(name) for name in SCRIPTS)
    parts = {
        "title": html.escape(f"{report['model']}: fusion report"),
        "style": style,
        "style hash": _hash(style),
        "script": script,
        "script hash": _hash(script),
        "licences": _asset("libraries/LICENSES.txt"),
        "report": _data(report),
    }
    # One pass replaces the fields of the template alone: "{{script}}" within a report stays as it is.
    return re.sub(r"\{\{([a-z ]+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def framed(report: Mapping[str, Any]) -> str:
    """Return an HTML element that shows `page(report)` apart from the document around it."""
    text = html.escape(page(report))
    style = "width: 100%; border: 1px solid #8888"
    return f'<iframe sandbox="allow-scripts" height="640" style="{style}" srcdoc="{text}"></iframe>'


def _asset(name: str) -> str:
    return (files("fusion_compiler") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data(report: Mapping[str, Any]) -> str:
    """Return JSON for a script element: nothing in it ends the element or opens a comment."""
    return json.dumps(report, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
