"""Progress with the time left, for anything that takes longer than a second.

The only part of the package that writes to a terminal while it computes: one line on standard error, rewritten in
terminals and notebooks; in a file, which would fill, a new line follows now and then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class _Manner:
    """How to show a line: what comes before it, whether it is rewritten, when first, and how often, in seconds."""

    before: str
    rewritten: bool
    first: float
    again: float


_TERMINAL = _Manner("\r\x1b[2K", True, 1.0, 0.1)
# Front ends of Jupyter know the carriage return, and write over what is there; each line is a message to them.
_NOTEBOOK = _Manner("\r", True, 1.0, 0.5)
_FILE = _Manner("", False, 10.0, 10.0)


def track(items: Iterable[Item], description: str, *, total: int | None = None, enabled: bool = True) -> Iterator[Item]:
    """Yield `items` unchanged; show `description`, the progress and the time left if it takes over a second.

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
        for count, item in enumerate(items):
            line.show(count)
            yield item
        line.finish()
    finally:
        line.clear()


def note(text: str, *, enabled: bool = True) -> None:
    """A line that stays, between those that show progress."""
    if enabled and sys.stderr is not None:
        sys.stderr.write(f"{_manner().before}{text}\n")
        sys.stderr.flush()


class _Line:
    """One status line on standard error, at most as often as its manner says."""

    def __init__(self, description: str, total: int | None) -> None:
        self.description = description
        self.total = total
        self.manner = _manner()
        self.start = time.monotonic()
        self.next = self.start + self.manner.first
        self.width = 0
        self.done = 0

    def show(self, done: int) -> None:
        self.done = done
        now = time.monotonic()
        if now < self.next:
            return
        self.next = now + self.manner.again
        self._write(self._text(now - self.start), end="" if self.manner.rewritten else "\n")

    def finish(self) -> None:
        if self.width:
            self._write(f"{self.description}: done in {_clock(time.monotonic() - self.start)}", end="\n")
            self.width = 0

    def clear(self) -> None:
        if self.width and self.manner.rewritten:
            self._write("", end="\r" if self.manner is _NOTEBOOK else "")
        self.width = 0

    def _text(self, elapsed: float) -> str:
        if not self.total:
            return f"{self.description}: {self.done} done, {_clock(elapsed)} so far"
        share = min(self.done / self.total, 1.0)
        full_cells = round(24 * share)
        bar = "━" * full_cells + "─" * (24 - full_cells)
        time_left = _clock(elapsed * (1 - share) / share) if share > 0 else "?"
        return f"{self.description} {bar} {share:4.0%}  {time_left} left"

    def _write(self, text: str, *, end: str) -> None:
        if sys.stderr is None:
            return
        # Spaces cover what is left of a longer line where it cannot be erased.
        line = text.ljust(self.width) if self.manner is _NOTEBOOK else text
        self.width = max(len(text), 1)
        sys.stderr.write(f"{self.manner.before}{line}{end}")
        sys.stderr.flush()


def _manner() -> _Manner:
    if sys.stderr is not None and sys.stderr.isatty():
        return _TERMINAL
    return _NOTEBOOK if _in_notebook() else _FILE


def _in_notebook() -> bool:
    """Whether this is the kernel of a notebook: a shell of IPython that has one. IPython is not imported for that."""
    module = sys.modules.get("IPython")
    return module is not None and getattr(module.get_ipython(), "kernel", None) is not None


def _clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
