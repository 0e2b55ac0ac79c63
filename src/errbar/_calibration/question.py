"""`Question`: an objective of `calibrate` as a function of the logarithms of what is fitted, for given draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from errbar import metrics
from errbar._base.optimise import Slopes
from errbar._calibration.held_out import HeldOut
from errbar._distributions.calibration import Calibration

NAMES = ("temperature", "covariance_scale", "softening")
TWO = NAMES[:2]
# N (NLL − its minimum) is a log-likelihood ratio: up to 2, ln T_c is within two standard deviations of its optimum
# (Wilks). With few samples that permits much worse PMFs, so it is also limited, in nats per sample, to 0.08 % of a
# probability. With other draws than those of the search the loss differs: up to 1e-3 averaged over seeds. With a
# softening the gains are smaller than that, so less of them is given away.
LOG_LIKELIHOOD_RATIO = 2.0
NEGLIGIBLE_NATS = 8e-4
LITTLE = 1e-4
# Between the bins of the ECE.
_EDGES = torch.arange(1, 10, dtype=torch.float64) / 10

# Draws for the many points at which the search begins: a part of all, because these choose between the best few.
_COARSE_SAMPLES, _COARSE_SHARE, _LEAST_COARSE = 100, 5, 20

Minimum = tuple[float, Tensor]


@dataclass(frozen=True)
class Objective:
    """A score to minimise, of (ĝ and P^g, calibration, draws), with its gradient and a curvature if it is smooth."""

    value: Callable[[HeldOut, Calibration, Tensor], float]
    slopes: Callable[[HeldOut, Calibration, Tensor, Sequence[str]], Slopes] | None
    is_likelihood: bool = False


def _nll_slopes(held_out: HeldOut, at: Calibration, normal: Tensor, names: Sequence[str]) -> Slopes:
    """With s the derivatives of ln f_y of an input: −E s and, as an estimate of the Hessian, E s sᵀ."""
    value, slopes = held_out.log_likelihood(at, normal, names)
    each = torch.stack([slopes[name] for name in names]).cpu()
    return -float(value.mean()), -each.mean(1), each @ each.T / each.shape[1]


def _brier(held_out: HeldOut, at: Calibration, normal: Tensor) -> float:
    return metrics.brier(held_out.pmf(at, normal)[0], held_out.labels)


def _brier_slopes(held_out: HeldOut, at: Calibration, normal: Tensor, names: Sequence[str]) -> Slopes:
    """2 E (f − e_y)ᵀ ∂f, and the curvature of Gauss and Newton, 2 E (∂f)ᵀ ∂f."""
    pmf, slopes = held_out.pmf(at, normal, names)
    error = pmf - torch.nn.functional.one_hot(held_out.labels, pmf.shape[1]).to(pmf)
    each = torch.stack([slopes[name].flatten() for name in names]).double()
    gradient, curvature = each @ error.flatten().double(), each @ each.T
    return (
        metrics.brier(pmf, held_out.labels),
        2 * gradient.cpu() / len(pmf),
        2 * curvature.cpu() / len(pmf),
    )


def _ece(held_out: HeldOut, at: Calibration, normal: Tensor) -> float:
    """Σ_j |Σ_{n in bin j} (right_n − confidence_n)|/N: that of `metrics.ece` in fewer steps, for hundreds of trials."""
    confidence, label = held_out.pmf(at, normal)[0].double().max(1)
    index = torch.bucketize(confidence, _EDGES.to(confidence.device), right=True)
    gaps = torch.bincount(index, (label == held_out.labels).double() - confidence)
    return float(gaps.abs().sum()) / len(held_out)


OBJECTIVES = {
    "nll": Objective(HeldOut.nll, _nll_slopes, is_likelihood=True),
    "brier": Objective(_brier, _brier_slopes),
    "ece": Objective(_ece, None),
}


@dataclass(frozen=True, eq=False)
class Question:
    """An objective as a function of the logarithms of the fitted values, for these draws.

    What is not among `names` is that of `start`; `most` is what may be given away for the sake of T_c. With T and c
    among them, the first coordinate is that of T(x) at the median of v̄.
    """

    held_out: HeldOut
    objective: Objective
    names: tuple[str, ...]
    start: Calibration
    normal: Float[Tensor, "d K"]
    most: float = NEGLIGIBLE_NATS

    @cached_property
    def _typical(self) -> float:
        """The v̄ at which the first coordinate is the temperature; 0 unless both T and c are fitted."""
        return self.held_out.typical_variance() if {"temperature", "softening"} <= set(self.names) else 0.0

    def at(self, point: Tensor) -> Calibration:
        values = {name: math.exp(float(x)) for name, x in zip(self.names, point, strict=True)}
        if self._typical:
            values["temperature"] /= math.sqrt(1 + values["softening"] * self._typical)
        return replace(self.start, **values)

    def point(self, at: Calibration) -> Float[Tensor, "d"]:
        """The coordinates of a calibration; zero, which has no logarithm, counts as one."""
        values = {name: math.log(getattr(at, name) or 1.0) for name in self.names}
        if self._typical:
            values["temperature"] += 0.5 * math.log1p(at.softening * self._typical)
        return torch.tensor([values[name] for name in self.names], dtype=torch.float64)

    def value(self, point: Tensor) -> float:
        return self.objective.value(self.held_out, self.at(point), self.normal)

    def slopes(self, point: Tensor) -> Slopes:
        assert self.objective.slopes is not None
        at = self.at(point)
        value, gradient, curvature = self.objective.slopes(self.held_out, at, self.normal, self.names)
        if self._typical:
            # With the first coordinate held, c lowers ln T by ½ c v/(1 + c v).
            excess = at.softening * self._typical
            turn = torch.eye(len(self.names), dtype=torch.float64)
            turn[self.names.index("temperature"), self.names.index("softening")] = -excess / (2 * (1 + excess))
            gradient, curvature = turn.T @ gradient, turn.T @ curvature @ turn
        return value, gradient, curvature

    def nll(self, point: Tensor) -> float:
        return self.held_out.nll(self.at(point), self.normal)

    def with_draws(self, count: int) -> Question:
        """The same with the first draws alone."""
        return replace(self, normal=self.normal[:, :count])

    def coarse(self) -> Question:
        """The same with so few draws that many points cost little."""
        return self.with_draws(min(_COARSE_SAMPLES, max(_LEAST_COARSE, self.normal.shape[1] // _COARSE_SHARE)))

    @property
    def allowance(self) -> float:
        """A difference that the data hardly determine, in nats per sample; for other objectives in their units."""
        return min(LOG_LIKELIHOOD_RATIO / len(self.held_out), self.most)

    def ranked(self, points: Sequence[Tensor]) -> list[Minimum]:
        return sorted(((self.value(point), point) for point in points), key=lambda pair: pair[0])
