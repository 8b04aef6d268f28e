"""A headless Chromium of the machine's own, and what tests ask of a page that is open in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def _missing(what: str) -> None:
    """A machine of one's own may lack a browser; continuous integration may not."""
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)


@contextmanager
def chromium() -> Iterator[Any]:
    """A playwright.sync_api.Browser. Skips the test where there is none; fails it where CI is set."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("needs Playwright: pip install -e '.[dev]'")
        raise
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        _missing(f"needs one of {', '.join(NAMES)} on the PATH: apt-get install chromium")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        yield launched
        launched.close()


# The tooltips of lines that run through a box.
THROUGH_BOXES = """() => {
    const boxes = [...document.querySelectorAll(".unit .back, .module .back")]
        .map(box => box.getBoundingClientRect());
    const inside = ({ x, y }) => boxes.some(
        box => x > box.left + 1 && x < box.right - 1 && y > box.top + 1 && y < box.bottom - 1);
    return [...document.querySelectorAll(".line .ink")].filter(ink => {
        const length = ink.getTotalLength();
        for (let at = 8; at < length - 8; at += 4)
            if (inside(ink.getPointAtLength(at).matrixTransform(ink.getScreenCTM()))) return true;
        return false;
    }).map(ink => ink.parentElement.querySelector("title").textContent);
}"""

# [contrast, text, class] of every text, by WCAG 2; the colours behind are made opaque over the page's.
CONTRAST = """() => {
    const pencil = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const luminance = (colour, below) => {
        for (pencil.fillStyle of [below, colour]) pencil.fillRect(0, 0, 1, 1);
        const linear = value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
        const [r, g, b] = [...pencil.getImageData(0, 0, 1, 1).data].map(value => linear(value / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const body = getComputedStyle(document.body).backgroundColor;
    const behind = element => {
        for (let at = element; at; at = at.parentElement) {
            const back = at.querySelector(":scope > rect");
            const colour = back ? getComputedStyle(back).fill : getComputedStyle(at).backgroundColor;
            if (colour !== "rgba(0, 0, 0, 0)") return colour;
        }
        return body;
    };
    const own = element => [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    const texts = [...document.querySelectorAll(".box text, #panel *, header *, #legend *")].filter(own);
    return texts.map(element => {
        const style = getComputedStyle(element);
        const ink = element.tagName === "text" ? style.fill : style.color;
        const [a, b] = [luminance(ink, body), luminance(behind(element), body)].sort((x, y) => y - x);
        return [(a + 0.05) / (b + 0.05), element.textContent.slice(0, 30), element.getAttribute("class")];
    });
}"""

# The tooltips, up to the rule, of lines that end higher than they begin.
UPWARDS = """all => all.filter(ink => {
    const [first, last] = [0, ink.getTotalLength()].map(at => ink.getPointAtLength(at));
    return last.y < first.y;
}).map(ink => ink.parentElement.querySelector("title").textContent.split(":")[0])"""
