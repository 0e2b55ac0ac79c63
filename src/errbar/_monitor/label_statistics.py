"""How well labels agree with predictions, as running sums, with an interval that is valid at all times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from errbar._base.checks import stored_numbers, stored_whole

_BINS = 10

# The stitched boundary of Howard et al.: epochs grow by η = 2, epoch k gets a share (k + 1)^−s/ζ(s) of the error.
_ETA, _S, _ZETA_S = 2.0, 1.4, 3.105547277977581


@dataclass(frozen=True)
class Agreement:
    """How N labels agree with their predictions; of several labels at a time, how those of N inputs do.

    - `gap`: mean confidence minus accuracy, positive where the classifier is over-confident;
    - `interval`: contains the expected gap at all times at once with probability `level`, however often you look;
    - `ece`: Σ_j (n_j/N) |accuracy − confidence| of ten bins of confidence;
    - `innovation`: the mean of ν/(M−1), one or less for a calibrated PMF (`martingales.innovation_squared`).

    Of several labels `confidence`, `accuracy` and `ece` are over all that were given, and `gap` and `innovation` are
    means over inputs of the mean over the labels of each: labels of one input may depend on each other.
    """

    labels: int
    confidence: float
    accuracy: float
    gap: float
    interval: tuple[float, float]
    level: float
    ece: float
    innovation: float


@dataclass
class Tally:
    """Sums over labels. All but `squares` and `means` are independent of the order of the labels.

    Bins count what was decided: of several labels each that was given. Then `means` has the sums over inputs of their
    mean confidence and their mean accuracy; otherwise it is None.
    """

    labels: int = 0
    innovation: float = 0.0
    squares: float = 0.0
    count: list[int] = field(default_factory=lambda: [0] * _BINS)
    confidence: list[float] = field(default_factory=lambda: [0.0] * _BINS)
    correct: list[int] = field(default_factory=lambda: [0] * _BINS)
    means: list[float] | None = None

    def add(self, confidences: Sequence[float], correct: Sequence[bool], innovation: float) -> None:
        """What was decided about one input: its class, or each of its labels that is given."""
        # Relative to the mean so far: the boundary needs a guess made before the number is seen.
        guess = self._gap / self.labels if self.labels else 0.0
        size = len(confidences)
        self.squares += ((sum(confidences) - sum(correct)) / size - guess) ** 2
        self.labels += 1
        self.innovation += innovation
        if self.means is not None:
            self.means = [self.means[0] + sum(confidences) / size, self.means[1] + sum(correct) / size]
        for confidence, right in zip(confidences, correct, strict=True):
            at = min(int(confidence * _BINS), _BINS - 1)
            self.count[at] += 1
            self.confidence[at] += confidence
            self.correct[at] += int(right)

    @property
    def _gap(self) -> float:
        claimed, right = (sum(self.confidence), sum(self.correct)) if self.means is None else self.means
        return claimed - right

    def agreement(self, level: float) -> Agreement:
        n = self.labels
        if n == 0:
            return Agreement(0, math.nan, math.nan, math.nan, (-1.0, 1.0), level, math.nan, math.nan)
        gap = self._gap / n
        # The gap of one label is in [−1, 1], which is 2 wide; half of the error on each side.
        margin = stitched_boundary(self.squares, (1 - level) / 2, scale=2.0) / n
        decisions = sum(self.count)
        ece = sum(abs(a - b) for a, b in zip(self.confidence, self.correct, strict=True)) / decisions
        return Agreement(
            labels=n,
            confidence=sum(self.confidence) / decisions,
            accuracy=sum(self.correct) / decisions,
            gap=gap,
            interval=(max(gap - margin, -1.0), min(gap + margin, 1.0)),
            level=level,
            ece=ece,
            innovation=self.innovation / n,
        )

    def state(self) -> dict[str, Any]:
        return {
            "labels": self.labels,
            "innovation": self.innovation,
            "squares": self.squares,
            "count": [*self.count],
            "confidence": [*self.confidence],
            "correct": [*self.correct],
            **({} if self.means is None else {"means": [*self.means]}),
        }

    @staticmethod
    def from_state(state: dict[str, Any]) -> Tally:
        innovation, squares = stored_numbers([state["innovation"], state["squares"]], 2)
        count, correct = (
            [stored_whole(n) for n in stored_numbers(state[name], _BINS)] for name in ("count", "correct")
        )
        confidence = stored_numbers(state["confidence"], _BINS)
        labels = stored_whole(state["labels"])
        means = stored_numbers(state["means"], 2) if "means" in state else None
        fits = labels == sum(count) if means is None else labels <= sum(count)
        if not fits or any(right > all_ for right, all_ in zip(correct, count, strict=True)):
            raise ValueError(f"{labels} labels, which do not match its bins")
        return Tally(labels, innovation, squares, count, confidence, correct, means)


def stitched_boundary(variance: float, alpha: float, scale: float) -> float:
    """u(V_t): Σ_i (X_i − E[X_i | before]) exceeds it at some t with a probability of at most α.

    X_i lie in an interval `scale` wide, V_t = Σ_i (X_i − X̂_i)² with any guesses X̂_i made before X_i is seen
    (Howard, Ramdas, McAuliffe and Sekhon, *Time-uniform, nonparametric, nonasymptotic confidence sequences*, 2021,
    theorem 4 with the boundary of eq. 10):
        u(v) = √(k₁² v ℓ + k₂² c² ℓ²) + k₂ c ℓ,     ℓ = s ln ln(η v) + ln(ζ(s)/(α lnˢ η)),     v at least 1,
        k₁ = (η^¼ + η^−¼)/√2,     k₂ = (√η + 1)/2.
    It grows as √(v ln ln v): an interval valid at all times is hardly wider than one for a single look.
    """
    v = max(variance, 1.0)
    ell = _S * math.log(math.log(_ETA * v)) + math.log(_ZETA_S / (alpha * math.log(_ETA) ** _S))
    k1 = (_ETA**0.25 + _ETA**-0.25) / math.sqrt(2)
    linear = (math.sqrt(_ETA) + 1) / 2 * scale * ell
    return math.sqrt(k1**2 * v * ell + linear**2) + linear
