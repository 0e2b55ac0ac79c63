"""The settings of a `Monitor`, from a user or from a saved state."""

from __future__ import annotations

import math
from dataclasses import dataclass

from errbar._distributions.sampling import require_seed
from errbar._model.outputs import CLASSES, OutputKind, require_outputs
from errbar.errors import ArgumentError

INPUT_TESTS = ("mutual_information", "entropy", "classes")
LABEL_TESTS = ("overconfidence", "underconfidence", "innovation")
# More than any classifier has; a state with more would only take memory.
_MOST_CLASSES = 2**24


@dataclass(frozen=True)
class MonitorSettings:
    """See `Monitor`; invalid settings are refused."""

    classes: int
    rate: float
    tests: tuple[str, ...]
    tolerance: float
    label_noise: float
    seed: int
    outputs: str = CLASSES.name

    @property
    def kind(self) -> OutputKind:
        return require_outputs(self.outputs)

    def __post_init__(self) -> None:
        require_between("rate", self.rate, 0, 1)
        require_between("label_noise", self.label_noise, 0, 1)
        names = INPUT_TESTS + LABEL_TESTS
        if not self.tests or len(set(self.tests)) < len(self.tests) or any(name not in names for name in self.tests):
            raise ArgumentError(
                f"tests is {[*self.tests]!r}; expected one or more of {', '.join(map(repr, names))}, each once."
            )
        is_number = isinstance(self.tolerance, (int, float)) and not isinstance(self.tolerance, bool)
        if not is_number or not 0 <= self.tolerance < 1:
            raise ArgumentError(f"tolerance is {self.tolerance!r}; expected a number from 0 to less than 1.")
        if not 1 + self.kind.has_gauge <= self.classes <= _MOST_CLASSES:
            least = "two" if self.kind.has_gauge else "one"
            raise ArgumentError(
                f"There are {self.classes} {self.kind.noun}; expected {least} or more, at most {_MOST_CLASSES}."
            )
        require_seed(self.seed)
        for name in ("rate", "tolerance", "label_noise"):
            object.__setattr__(self, name, float(getattr(self, name)))


def require_between(name: str, value: float, low: float, high: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low < value < high:
        raise ArgumentError(f"{name} is {value!r}; expected a number between {low} and {high}.")
