"""Progress on standard error: one line on terminals and in notebooks, several now and then in log files."""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from errbar._base import progress
from errbar._base.progress import track


class Stream(io.StringIO):
    """Standard error with or without a terminal behind it."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def in_notebook(monkeypatch: pytest.MonkeyPatch, shell: Any) -> None:
    """As if IPython ran, with this shell; None for a script that has imported it."""
    module = ModuleType("IPython")
    module.get_ipython = lambda: shell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", module)


def tracked(clock: Clock, *, items: int, seconds: float) -> None:
    for _ in track(range(items), "Counting"):
        clock.now += seconds


def test_a_terminal_shows_one_line_that_is_rewritten(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    tracked(clock, items=10, seconds=1.0)
    shown = stream.getvalue()
    assert shown.count("\n") == 1
    assert "50%  0:05 left" in shown
    assert shown.endswith("Counting: done in 0:10\n")
    assert shown.startswith("\r\x1b[2K")


def test_a_notebook_shows_one_line_that_is_rewritten(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its standard error is no terminal, and takes carriage returns but no other commands of terminals."""
    stream = Stream(terminal=False)
    monkeypatch.setattr(sys, "stderr", stream)
    in_notebook(monkeypatch, SimpleNamespace(kernel=object()))
    tracked(clock, items=10, seconds=1.0)
    shown = stream.getvalue()
    assert "\x1b" not in shown
    assert shown.count("\n") == 1
    assert "50%  0:05 left" in shown
    # What is shorter than the line before covers all of it.
    lines = shown.rstrip("\n").split("\r")[1:]
    assert lines[-1].rstrip() == "Counting: done in 0:10"
    assert len(lines[-1]) == len(lines[-2])


def test_a_log_file_gets_a_line_now_and_then(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=False)
    monkeypatch.setattr(sys, "stderr", stream)
    in_notebook(monkeypatch, None)
    tracked(clock, items=300, seconds=0.5)
    lines = stream.getvalue().splitlines()
    assert not any(character in stream.getvalue() for character in "\r\x1b")
    assert 4 <= len(lines) <= 16
    assert lines[0].startswith("Counting")
    assert "left" in lines[0]
    assert lines[-1] == "Counting: done in 2:30"


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_soon_over_shows_nothing(clock: Clock, monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> None:
    stream = Stream(terminal=terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    tracked(clock, items=8, seconds=0.1)
    assert stream.getvalue() == ""


def test_without_standard_error_there_is_nothing_to_show(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    tracked(clock, items=5, seconds=20.0)


@pytest.mark.parametrize("notebook", [True, False])
def test_a_loop_that_is_left_ends_its_line(clock: Clock, monkeypatch: pytest.MonkeyPatch, *, notebook: bool) -> None:
    stream = Stream(terminal=False)
    monkeypatch.setattr(sys, "stderr", stream)
    in_notebook(monkeypatch, SimpleNamespace(kernel=object()) if notebook else None)
    for done in track(range(10), "Counting"):
        clock.now += 20.0
        if done == 4:
            break
    shown = stream.getvalue()
    assert "done in" not in shown
    assert shown.split("\r")[-1].strip() == "" if notebook else shown.endswith("\n")
