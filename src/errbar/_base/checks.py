"""Conditions on tensors that do not make the device wait.

Reading a number from a GPU stops the program until everything before it is computed. So there the conditions of a
whole pass are collected and checked at its end; on a CPU they are checked at once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch
from jaxtyping import Bool
from torch import Tensor

from errbar.errors import ArgumentError


def whole_number(value: object) -> int | None:
    """An int from any whole number (also NumPy's); None for anything else, including a bool."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def stored_whole(value: object) -> int:
    """A whole number of zero or more from a stored state; otherwise raises a ValueError."""
    number = whole_number(value)
    if number is None or number < 0:
        raise ValueError(f"{str(value)[:60]!r} instead of a whole number of zero or more")
    return number


def stored_numbers(values: object, length: int) -> list[float]:
    """`length` finite numbers of zero or more from a stored state; otherwise raises a ValueError."""
    is_list = isinstance(values, (list, tuple)) and len(values) == length
    if not is_list or not all(type(value) in (int, float) and 0 <= value < math.inf for value in values):  # type: ignore[attr-defined]
        raise ValueError(f"{str(values)[:60]!r} instead of {length} finite numbers of zero or more")
    return [*values]  # type: ignore[misc]


class Checks:
    """Raises the error of the first condition that does not hold: at once on a CPU, in `finish` elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._at_once = device.type == "cpu"
        self._pending: list[tuple[Tensor, Callable[[], Exception]]] = []

    def require(self, holds: Bool[Tensor, ""], error: Callable[[], Exception]) -> None:
        if not self._at_once:
            self._pending.append((holds, error))
        elif not bool(holds):
            raise error()

    def finish(self) -> None:
        if self._pending:
            failures = (~torch.stack([holds for holds, _ in self._pending])).nonzero()
            if len(failures):
                raise self._pending[int(failures[0])][1]()
            self._pending.clear()


def require_option(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        choices = " or ".join(repr(option) for option in allowed)
        raise ArgumentError(f"{name} is {value!r}; expected {choices}.")
