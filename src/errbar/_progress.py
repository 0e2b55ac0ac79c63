"""Progress with time left, for whatever takes longer than a second.

The only place of the package that writes to a terminal while it computes: one line on standard error, rewritten.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

Item = TypeVar("Item")

_SILENT_SECONDS = 1.0
_REDRAW_SECONDS = 0.1


def track(items: Iterable[Item], description: str, *, total: int | None = None, enabled: bool = True) -> Iterator[Item]:
    """Yield `items` unchanged; show `description`, how far, and how long still, when it takes over a second.

    >>> list(track([1, 2, 3], "Counting", enabled=False))
    [1, 2, 3]
    """
    if not enabled:
        yield from items
        return
    if total is None and isinstance(items, Sized):
        total = len(items)
    line = _Line(description, total)
    try:
        for done, item in enumerate(items):
            line.show(done)
            yield item
        line.finish()
    finally:
        line.clear()


class _Line:
    """One status line on standard error, redrawn at most ten times a second."""

    def __init__(self, description: str, total: int | None) -> None:
        self.description = description
        self.total = total
        self.start = time.monotonic()
        self.drawn = self.start + _SILENT_SECONDS - _REDRAW_SECONDS
        self.visible = False
        self.done = 0

    def show(self, done: int) -> None:
        self.done = done
        now = time.monotonic()
        if now - self.drawn < _REDRAW_SECONDS:
            return
        self.drawn = now
        self.visible = True
        self._write(self._text(now - self.start))

    def finish(self) -> None:
        if self.visible:
            self._write(f"{self.description}: done in {_clock(time.monotonic() - self.start)}\n")
            self.visible = False

    def clear(self) -> None:
        if self.visible:
            self._write("")
            self.visible = False

    def _text(self, elapsed: float) -> str:
        if not self.total:
            return f"{self.description}: {self.done} done, {_clock(elapsed)} so far"
        share = min(self.done / self.total, 1.0)
        filled = round(24 * share)
        bar = "━" * filled + "─" * (24 - filled)
        left = _clock(elapsed * (1 - share) / share) if share > 0 else "?"
        return f"{self.description} {bar} {share:4.0%}  {left} left"

    @staticmethod
    def _write(text: str) -> None:
        # Where standard error is a file, rewriting a line only fills the file.
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[2K{text}")
            sys.stderr.flush()


def _clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
