"""Show what a compilation is doing, on a terminal: one line that is rewritten, and erased in the end."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TextIO

PATIENCE = 1.0  # seconds until anything is shown
ERASE = "\r\x1b[2K"


class Line(Protocol):
    """A line can be shown on a terminal, and erased."""

    def show(self, text: str) -> None: ...
    def erase(self) -> None: ...


class Plain:
    """Show a line by carriage return. What others print meanwhile goes above it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.RLock()
        self._text = ""
        self._drawn = False
        self._replaced = [name for name in ("stdout", "stderr") if _is_terminal(getattr(sys, name))]
        for name in self._replaced:
            setattr(sys, name, Above(getattr(sys, name), self))

    def show(self, text: str) -> None:
        with self._lock:
            self._text = text
            self.draw()

    def draw(self) -> None:
        with self._lock:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"{ERASE}{self._text[:width]}")
            self._stream.flush()
            self._drawn = True

    def write_above(self, stream: TextIO, text: str) -> int:
        """Take the line away, write, and draw it again under a line that is finished."""
        with self._lock:
            if self._drawn:
                self._stream.write(ERASE)
                self._stream.flush()
                self._drawn = False
            written = stream.write(text)
            if self._text and text.endswith("\n"):
                stream.flush()
                self.draw()
            return written

    def erase(self) -> None:
        with self._lock:
            self._text = ""
            if self._drawn:
                self._stream.write(ERASE)
                self._stream.flush()
                self._drawn = False
        for name in self._replaced:
            now = getattr(sys, name)
            if isinstance(now, Above) and now.line is self:  # somebody else's is left as it is
                setattr(sys, name, now.stream)


class Above:
    """The stream writes above a line, and like the original stream once that line is erased."""

    def __init__(self, stream: TextIO, line: Plain) -> None:
        self.stream, self.line = stream, line

    def write(self, text: str) -> int:
        return self.line.write_above(self.stream, text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Spinner:
    """Show rich's status line, which keeps what others print above itself."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner as Dots

        self._dots = Dots("dots")
        self._live = Live(
            self._dots,
            console=Console(file=stream),
            transient=True,
            redirect_stdout=_is_terminal(sys.stdout),  # what goes to a file must not end here
        )
        self._live.start()

    def show(self, text: str) -> None:
        from rich.text import Text

        self._dots.update(text=Text(text, overflow="ellipsis", no_wrap=True))
        self._live.refresh()

    def erase(self) -> None:
        self._live.stop()


class Logged:
    """Loggers write above this line as well: their handlers hold the stream that sys.stderr was."""

    def __init__(self, stream: TextIO, line: Line) -> None:
        self.line, self._stream, self._stand_in = line, stream, sys.stderr
        self._handlers = _handlers_on(stream)
        for handler in self._handlers:
            handler.setStream(self._stand_in)

    def show(self, text: str) -> None:
        self.line.show(text)

    def erase(self) -> None:
        for handler in self._handlers:
            if handler.stream is self._stand_in:
                handler.setStream(self._stream)
        self.line.erase()


def _handlers_on(stream: TextIO) -> list[logging.StreamHandler[Any]]:
    loggers = [logging.root, *logging.Logger.manager.loggerDict.values()]
    handlers = [h for logger in loggers if isinstance(logger, logging.Logger) for h in logger.handlers]
    return [h for h in handlers if isinstance(h, logging.StreamHandler) and h.stream is stream]


def line_on(stream: TextIO) -> Logged:
    """Return rich's line if rich is installed, or else a plain one."""
    with contextlib.suppress(ImportError):
        return Logged(stream, Spinner(stream))
    return Logged(stream, Plain(stream))


class Progress(contextlib.ContextDecorator):
    """Show the state of one compile() call: `with progress: progress.say("planned 31 kernels")`.
    As a decorator, the object shows the state of each call of a function.

    enabled: False shows nothing. stream: None is the present sys.stderr; if it is no terminal, nothing is
    shown. patience: seconds of silence. line: makes the line. Contexts may be nested; the outermost erases.
    """

    def __init__(
        self,
        enabled: bool = True,
        stream: TextIO | None = None,
        patience: float = PATIENCE,
        line: Callable[[TextIO], Line] = line_on,
    ) -> None:
        self._enabled, self._stream, self._patience, self._make = enabled, stream, patience, line
        self._lock = threading.RLock()
        self._depth = 0
        self._text = ""
        self._line: Line | None = None
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Progress:
        with self._lock:
            self._depth += 1
            stream = self._stream if self._stream is not None else sys.stderr
            if self._depth == 1 and self._enabled and _is_terminal(stream):
                self._text = "compiling"
                self._timer = threading.Timer(self._patience, self._begin, (stream,))
                self._timer.daemon = True
                self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth:
                return
            if self._timer is not None:
                self._timer.cancel()
            line, self._line, self._timer = self._line, None, None
        if line is not None:
            line.erase()

    def say(self, text: str) -> None:
        """Show this state from now on."""
        with self._lock:
            self._text = text
            if self._line is not None:
                self._line.show(text)

    def kernels(self, done: int, of: int) -> None:
        """Say how many kernels are compiled."""
        self.say(f"kernels {done}/{of}")

    def _begin(self, stream: TextIO) -> None:
        line = self._make(stream)  # rich is imported in it, for which `say` should not wait
        with self._lock:
            if self._timer is threading.current_thread():
                self._line = line
                line.show(self._text)
                return
        line.erase()  # the compilation is over


def _is_terminal(stream: TextIO | None) -> bool:
    """True if lines can be rewritten on a stream; sys.stderr may be None, or closed."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:
        return False
