"""`Calibration`: the numbers that make a Gaussian over logits as wide and as sharp as held-out data say.

    N(ĝ, P^g) ↦ N(ĝ/T(x), T_c P^g/T(x)²),   T(x) = T √(1 + c v̄(x)),

with v̄(x) the mean variance of the M−1 contrasts of P^g, before T and T_c. With the softening c = 0, which is usual,
T(x) is T for every input.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from errbar._model.outputs import OutputKind
from errbar.errors import ArgumentError

# What T and T_c of each of several labels are times those of all.
LabelFactors = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Calibration:
    """Temperature T, covariance scale T_c and softening c: logits N(ĝ/T(x), T_c P^g/T(x)²), T(x) = T √(1 + c v̄(x)).

    v̄(x) is `contrast_variance` of the logits without calibration. So c > 0 makes the network less confident where the
    training data say little about the input.
    """

    temperature: float = 1.0
    covariance_scale: float = 1.0
    softening: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", require_temperature(self.temperature))
        object.__setattr__(self, "covariance_scale", require_covariance_scale(self.covariance_scale))
        object.__setattr__(self, "softening", require_softening(self.softening))

    def temperatures(self, contrast_variance: Float[Tensor, "B *L"]) -> Float[Tensor, "B *L"]:
        """T(x) = T √(1 + c v̄(x)) of each input, or of each of its labels, from its v̄(x); in float64."""
        return self.temperature * (1 + self.softening * contrast_variance.double()).sqrt()

    def described(self) -> dict[str, float]:
        """The values by their names."""
        return dataclasses.asdict(self)


def checked_label_factors(factors: LabelFactors | None, kind: OutputKind, count: int) -> LabelFactors | None:
    """A pair for each of `count` labels, or none."""
    if factors is None:
        return None
    if kind.has_gauge or len(factors) != count:
        raise ArgumentError(
            f"label_factors are {len(factors)} pairs, for a posterior of {count} {kind.noun}; expected a pair of "
            "factors of T and T_c for each label of one that was fitted with outputs='labels'."
        )
    return tuple((require_temperature(T), require_covariance_scale(scale)) for T, scale in factors)


def require_temperature(temperature: float) -> float:
    T = _require_number("The temperature", temperature, zero_allowed=False)
    if not 1e-100 <= T <= 1e100:
        raise ArgumentError(
            f"The temperature is {T!r}; expected one from 1e-100 to 1e100, so that T² is finite and positive."
        )
    return T


def require_covariance_scale(scale: float) -> float:
    return _require_number("The covariance scale", scale, zero_allowed=True)


def require_softening(softening: float) -> float:
    return _require_number("The softening", softening, zero_allowed=True)


def _require_number(name: str, value: float, *, zero_allowed: bool) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero_allowed):
        expectation = "zero or a positive" if zero_allowed else "a positive"
        raise ArgumentError(f"{name} is {value!r}; expected {expectation} finite number.")
    return number
