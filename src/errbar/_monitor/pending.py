"""Predictions that wait for their labels, which come late or never."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from errbar._base.checks import stored_numbers, stored_whole, whole_number
from errbar.errors import ArgumentError, DataError

Identifier = int | str


class LabelledPrediction(NamedTuple):
    """A prediction whose label has come: the number of its input, its PMF and the label, or all of its labels."""

    number: int
    pmf: NDArray[np.float64]
    label: int | list[int]


@dataclass
class PendingLabels:
    """The PMFs of inputs by name, the oldest first, at most `limit` of them.

    `dropped` counts inputs whose labels did not come in time, `unmatched` labels without a pending input.
    """

    limit: int
    dropped: int = 0
    unmatched: int = 0
    entries: dict[Identifier, tuple[int, NDArray[np.float64]]] = field(default_factory=dict)

    def require_new(self, names: Sequence[Identifier]) -> None:
        for name in names:
            if name in self.entries:
                raise DataError(
                    f"The input {name!r} is still waiting for its label; expected an id that is not in use."
                )

    def add(self, name: Identifier, number: int, pmf: NDArray[np.float64]) -> None:
        self.entries[name] = (number, pmf.copy())
        if len(self.entries) > self.limit:
            del self.entries[next(iter(self.entries))]
            self.dropped += 1

    def take(self, names: Sequence[Identifier], labels: Sequence[int | list[int]]) -> list[LabelledPrediction]:
        """Remove and return those of `names` that are pending, in the order in which they were observed."""
        pairs = zip(names, labels, strict=True)
        matches = [LabelledPrediction(*self.entries.pop(name), label) for name, label in pairs if name in self.entries]
        self.unmatched += len(names) - len(matches)
        return sorted(matches, key=lambda entry: entry.number)

    def drop_all(self) -> None:
        self.dropped += len(self.entries)
        self.entries.clear()

    def state(self) -> dict[str, Any]:
        entries = [[name, number, pmf.tolist()] for name, (number, pmf) in self.entries.items()]
        return {"limit": self.limit, "dropped": self.dropped, "unmatched": self.unmatched, "entries": entries}

    @staticmethod
    def from_state(state: dict[str, Any], classes: int) -> PendingLabels:
        entries: dict[Identifier, tuple[int, NDArray[np.float64]]] = {}
        for name, number, pmf in state["entries"]:
            if len(pmf) != classes:
                raise ValueError(f"a PMF of {len(pmf)} numbers for {classes} classes")
            key = name if isinstance(name, str) else whole_number(name)
            if key is None:
                raise ValueError(f"the name {str(name)[:60]!r}")
            entries[key] = (stored_whole(number), np.array(stored_numbers(pmf, classes), np.float64))
        limit, dropped, unmatched = (stored_whole(state[name]) for name in ("limit", "dropped", "unmatched"))
        return PendingLabels(limit, dropped, unmatched, entries)


def identifiers(ids: Sequence[Identifier] | Tensor, size: int | None = None) -> list[Identifier]:
    """Names as integers and strings, all different; `size` of them, if given."""
    values: Any = ids.tolist() if isinstance(ids, (Tensor, np.ndarray)) and ids.ndim == 1 else ids
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise ArgumentError(f"ids is {ids!r}; expected a sequence of integers or strings, one per input.")
    names: list[Identifier] = []
    for value in values:
        name = value if isinstance(value, str) else whole_number(value)
        if name is None:
            raise ArgumentError(f"ids hold {value!r}; expected integers or strings.")
        names.append(name)
    if size is not None and len(names) != size:
        raise ArgumentError(f"There are {len(names)} ids for {size} inputs; expected one per input.")
    if len(set(names)) < len(names):
        raise DataError("ids hold the same name twice; expected a different name for each input.")
    return names
