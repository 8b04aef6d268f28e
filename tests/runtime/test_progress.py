"""The progress line in a terminal: its states in order, and nothing in the end; other outputs see nothing."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusion_compiler as fc
from fusion_compiler.compiler import compiler
from fusion_compiler.errors import InvalidOptionError
from fusion_compiler.runtime import builds, progress
from fusion_compiler.runtime.builds import compile_builds
from fusion_compiler.runtime.progress import ERASE, Line, Logged, Plain, Progress, Spinner
from tests.runtime.test_target import fresh_build


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """Return the lines that can be read on the screen, after escapes and carriage returns."""
        lines: list[str] = [""]
        row = column = 0
        for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|.|\n", self.getvalue()):
            if part == "\n":
                row, column = row + 1, 0
                lines += [""] * (row == len(lines))
            elif part == "\r":
                column = 0
            elif part == "\x1b[2K":
                lines[row] = ""
            elif part == "\x1b[1A":
                row -= 1
            elif not part.startswith("\x1b"):
                lines[row] = f"{lines[row][:column]:<{column}}{part}{lines[row][column + 1 :]}"
                column += 1
        return [line.rstrip() for line in lines if line.strip()]


class Recorded:
    """A line that keeps what it shows."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.erased = 0

    def show(self, text: str) -> None:
        self.shown.append(text)

    def erase(self) -> None:
        self.erased += 1


def begun(display: Progress) -> None:
    """Waits until the line is there: with no patience that is at once, but in a thread."""
    deadline = time.monotonic() + 10
    while display._line is None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert display._line is not None


def at_once(line: Callable[[Any], Line]) -> Progress:
    return Progress(stream=Terminal(), patience=0, line=line)


def test_states_in_order_and_erased_once() -> None:
    line = Recorded()
    display = at_once(lambda _: line)
    with display:
        begun(display)
        with display:
            display.say("captured graph0.forward (512 ops)")
            display.kernels(12, 31)
        assert line.erased == 0, "the outermost context erases"
    assert line.shown == ["compiling", "captured graph0.forward (512 ops)", "kernels 12/31"]
    assert line.erased == 1
    display.say("later")
    assert line.shown[-1] == "kernels 12/31"


def test_it_is_erased_where_the_compilation_fails() -> None:
    line = Recorded()
    display = at_once(lambda _: line)
    with pytest.raises(RuntimeError, match="no"), display:
        begun(display)
        raise RuntimeError("no")
    assert line.erased == 1


@pytest.mark.parametrize(
    "display",
    [
        Progress(False, Terminal(), 0, lambda _: Recorded()),
        Progress(True, io.StringIO(), 0, lambda _: Recorded()),
        Progress(True, Terminal(), 60, lambda _: Recorded()),
    ],
    ids=["off", "a pipe", "quick"],
)
def test_nothing_is_shown(display: Progress) -> None:
    with display:
        display.say("planned 3 kernels")
        time.sleep(0.02)
        assert display._line is None


def test_a_closed_or_missing_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = Terminal()
    closed.close()
    monkeypatch.setattr(closed, "isatty", io.StringIO.isatty.__get__(closed))
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress(patience=0, line=lambda _: Recorded()) as display:
            time.sleep(0.01)
            assert display._line is None


def test_a_quick_compilation_leaves_no_thread() -> None:
    before = threading.active_count()
    with Progress(True, Terminal()):
        pass
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threading.active_count() == before


def a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Makes sys.stderr a terminal of 40 columns; in a test's body, since pytest sets it for that anew."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    return stream


EACH_LINE = pytest.mark.parametrize("line", [Plain, Spinner])


@EACH_LINE
def test_one_line_is_rewritten_and_nothing_is_left(
    line: Callable[[Any], Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = a_terminal(monkeypatch)
    shown = line(terminal)
    shown.show("planned 31 kernels")
    assert [row[-18:] for row in terminal.screen()] == ["planned 31 kernels"]
    shown.show("kernels 12/31")
    assert [row[-13:] for row in terminal.screen()] == ["kernels 12/31"]
    shown.erase()
    assert terminal.screen() == []
    assert sys.stderr is terminal


@EACH_LINE
def test_warnings_and_prints_meanwhile_are_whole(
    line: Callable[[Any], Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = a_terminal(monkeypatch)
    shown = line(terminal)
    shown.show("kernels 1/2")
    sys.stderr.write(warnings.formatwarning("runs eager", UserWarning, "m.py", 3))
    print("half a line, ", end="", file=sys.stderr)
    print("and its end", file=sys.stderr)
    shown.show("kernels 2/2")
    rows = terminal.screen()
    assert rows[:2] == ["m.py:3: UserWarning: runs eager", "half a line, and its end"]
    assert len(rows) == 3 and rows[2].endswith("kernels 2/2")
    shown.erase()
    assert terminal.screen() == rows[:2]
    assert sys.stderr is terminal


def test_a_narrow_terminal_gets_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    line = Plain(terminal)
    line.show("captured graph0.forward (" + "9" * 60 + " ops)")
    assert len(terminal.screen()[0]) == 39 and "\n" not in terminal.getvalue()
    line.erase()
    assert terminal.getvalue().endswith(ERASE)


def test_a_stderr_that_was_replaced_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    line = Plain(terminal)
    line.show("kernels 1/2")
    other = io.StringIO()
    sys.stderr = other
    line.erase()
    assert sys.stderr is other


def test_without_rich_it_is_a_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    first = progress.line_on(terminal)
    assert isinstance(first.line, Spinner)
    first.erase()
    monkeypatch.setitem(sys.modules, "rich.console", None)
    line = progress.line_on(terminal)
    assert isinstance(line.line, Plain)
    line.erase()


@EACH_LINE
def test_loggers_write_above_the_line(line: Callable[[Any], Line], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    logger = logging.getLogger("tests.progress")
    handler = logging.StreamHandler(terminal)
    logger.addHandler(handler)
    try:
        shown = Logged(terminal, line(terminal))
        shown.show("kernels 1/2")
        logger.warning("a tokenizer is slow")
        shown.show("kernels 2/2")
        rows = terminal.screen()
        assert rows[0] == "a tokenizer is slow" and rows[1].endswith("kernels 2/2") and len(rows) == 2
        shown.erase()
        assert terminal.screen() == ["a tokenizer is slow"] and handler.stream is terminal
    finally:
        logger.removeHandler(handler)


# -- a compilation -------------------------------------------------------------------------------------


class Patient(Progress):
    """Shows from the first moment, on a terminal of its own, and waits until the line is there."""

    line: Recorded

    def __init__(self, enabled: bool) -> None:
        self.line = Recorded()
        super().__init__(enabled, Terminal(), 0, lambda _: self.line)

    def __enter__(self) -> Patient:
        super().__enter__()
        if self._enabled:
            begun(self)
        return self


@pytest.fixture
def patient_lines(monkeypatch: pytest.MonkeyPatch) -> list[Patient]:
    lines: list[Patient] = []

    def make(enabled: bool) -> Patient:
        lines.append(Patient(enabled))
        return lines[-1]

    monkeypatch.setattr(compiler, "Progress", make)
    return lines


def test_a_compilation_says_what_it_captured_and_planned(patient_lines: list[Patient]) -> None:
    fast = fc.compile(lambda x: torch.softmax(x * 2, -1), backend="interpret")
    x = torch.randn(4, 4, requires_grad=True)
    fast(x).sum().backward()
    (shown,) = patient_lines
    states = [re.sub(r"\(\d+ ops\)", "(n ops)", text) for text in shown.line.shown]
    assert states == [
        "compiling",
        "captured graph0.forward (n ops)",
        "planned 1 kernel",
        "compiling",
        "captured graph0.backward (n ops)",
        "planned 1 kernel",
    ]
    assert shown.line.erased == 2, "a backward is compiled when it is first needed"
    fast(x)
    assert len(shown.line.shown) == 6, "a call that compiles nothing says nothing"


def test_off_by_option(patient_lines: list[Patient]) -> None:
    fc.compile(torch.sin, backend="eager", progress=False)(torch.randn(3))
    (shown,) = patient_lines
    assert shown.line.shown == [] and shown.line.erased == 0
    with pytest.raises(InvalidOptionError, match="progress"):
        fc.compile(torch.sin, progress="loud")


def test_kernels_are_counted_as_they_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [fresh_build(n) for n in range(3)]
    done: set[str] = set()
    monkeypatch.setattr(builds, "is_cached", lambda build: build.name in done)  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(builds, "_attempt", lambda build: None)  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(builds.sys, "executable", "")  # no server
    seen: list[tuple[int, int]] = []
    assert compile_builds([*many, many[0]], report=lambda *n: seen.append(n)) == {}
    assert seen == [(1, 3), (2, 3), (3, 3)]
