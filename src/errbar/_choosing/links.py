"""Links from logit Gaussians to PMFs, and their cross-validated scores.

A link is the set of values that are fitted: T alone (temperature scaling), T and T_c, or T, T_c and the softening c.
Out of fold, all that is fitted is fitted on the other folds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar import metrics
from errbar._calibration.held_out import HeldOut
from errbar._calibration.question import LITTLE, NAMES, OBJECTIVES, TWO
from errbar._calibration.search import (
    TEMPERATURE_BOUNDS,
    best_calibration,
    calibration_near,
    temperature_scaling,
)
from errbar._distributions.calibration import Calibration

LINKS = (TWO, NAMES)
# Draws while searching, fewer where there are many numbers; four times as many for the scores out of fold. Few draws
# only cost: they lower E ln f by about Var f/(2 K f²).
_MOST_DRAWS, _LEAST_DRAWS, _NUMBERS, _TIMES = 100, 16, 2e7, 4


def search_draws(held_out: HeldOut) -> int:
    """Draws of a search through these inputs."""
    return int(min(_MOST_DRAWS, max(_LEAST_DRAWS, _NUMBERS // held_out.mean.numel())))


@dataclass(frozen=True, eq=False)
class Scores:
    """Out of fold: −ln f_y of each held-out input, and the PMF."""

    losses: Float[Tensor, "N"]
    pmf: Float[Tensor, "N M"]
    labels: Int[Tensor, "N"]

    @property
    def nll(self) -> float:
        return float(self.losses.mean())

    @property
    def ece(self) -> float:
        return metrics.ece(self.pmf, self.labels)

    @property
    def brier(self) -> float:
        return metrics.brier(self.pmf, self.labels)


@dataclass(frozen=True)
class Judged:
    """A link with its scores out of fold, the values fitted on all held-out inputs, and the prior that these want."""

    names: tuple[str, ...]
    calibration: Calibration
    scores: Scores
    variant: int


def plain_softmax(held_out: HeldOut) -> Scores:
    return _scored(held_out, [(torch.arange(len(held_out)), held_out, Calibration(1.0, 0.0))])


def scaled_softmax(held_out: HeldOut, folds: Sequence[Int[Tensor, "n"]]) -> tuple[Calibration, Scores]:
    """Temperature scaling."""

    def fitted(part: HeldOut) -> Calibration:
        low, high = map(math.log, TEMPERATURE_BOUNDS)
        return Calibration(temperature_scaling(part, low, high, 0.0).temperature, 0.0)

    parts = [(rows, held_out, fitted(held_out.chosen(_others(folds, index)))) for index, rows in enumerate(folds)]
    return fitted(held_out), _scored(held_out, parts)


def judged(variants: Sequence[HeldOut], folds: Sequence[Int[Tensor, "n"]], seed: int) -> list[Judged]:
    """Each link, for one posterior or for several that differ in their prior (`variants`).

    Of several, the one with the least NLL is taken, by T and T_c on all held-out inputs for the values that are
    returned, and on the other folds for the scores out of fold.
    """
    starts: list[Calibration] = []
    for held_out in variants:
        starts.append(_near(held_out, starts[-1], TWO, seed) if starts else _whole(held_out, TWO, seed))
    best, chosen = _best_variants(variants, starts, folds, seed)
    results = []
    for names in LINKS:
        is_known = names == TWO and best == 0
        overall = {best: starts[0] if is_known else _whole(variants[best], names, seed, starts[best])}
        for index in dict.fromkeys(chosen):
            if index != best:
                overall[index] = _near(variants[index], overall[best], names, seed)
        parts = []
        for index, rows in enumerate(folds):
            variant = chosen[index]
            others = variants[variant].chosen(_others(folds, index))
            parts.append((rows, variants[variant], _near(others, overall[variant], names, seed)))
        results.append(Judged(names, overall[best], _scored(variants[0], parts), best))
    return results


def _whole(held_out: HeldOut, names: tuple[str, ...], seed: int, near: Calibration | None = None) -> Calibration:
    """The values for all held-out inputs, with T_c as near to 1 as that costs little; T and T_c near known ones."""
    draws = search_draws(held_out)
    if near is not None and names == TWO:
        return calibration_near(held_out, names, near, draws, seed)
    return best_calibration(held_out, OBJECTIVES["nll"], names, Calibration(), draws, seed, LITTLE)[0]


def _near(held_out: HeldOut, near: Calibration, names: tuple[str, ...], seed: int) -> Calibration:
    """The best values for some inputs; what is given away for T_c near 1, 1e-4 nats at most, is left out of account."""
    return calibration_near(held_out, names, near, search_draws(held_out), seed, slides=False)


def _best_variants(
    variants: Sequence[HeldOut], starts: Sequence[Calibration], folds: Sequence[Int[Tensor, "n"]], seed: int
) -> tuple[int, list[int]]:
    """The variant with the least NLL of all inputs, and for each fold that with the least NLL of the other folds.

    T and T_c of a fold are fitted to the others, to second order: with g the mean slope of the others' losses at the
    values for all inputs and H = E s sᵀ, the fitted NLL is less than that at these values by ½ gᵀH⁻¹g. So one
    evaluation of a variant serves all folds.
    """
    if len(variants) == 1:
        return 0, [0] * len(folds)
    whole: list[float] = []
    by_fold: list[list[float]] = [[] for _ in folds]
    for held_out, start in zip(variants, starts, strict=True):
        draws = held_out.draws(search_draws(held_out), seed)
        value, slopes = held_out.log_likelihood(start, draws, TWO)
        losses, each = -value.cpu(), torch.stack([slopes[name] for name in TWO]).cpu()
        whole.append(float(losses.mean()))
        inverse_curvature = (each @ each.T / each.shape[1] + 1e-8 * torch.eye(len(TWO), dtype=torch.float64)).inverse()
        for index, values in enumerate(by_fold):
            rows = _others(folds, index)
            slope = each[:, rows].mean(1)
            gain = float(slope @ inverse_curvature @ slope) / 2
            values.append(float(losses[rows].mean()) - gain)
    return _least(whole), [_least(values) for values in by_fold]


def _least(values: Sequence[float]) -> int:
    return min(range(len(values)), key=values.__getitem__)


def _others(folds: Sequence[Int[Tensor, "n"]], index: int) -> Int[Tensor, "m"]:
    return torch.cat([rows for other, rows in enumerate(folds) if other != index]).sort().values


def _scored(like: HeldOut, parts: Sequence[tuple[Int[Tensor, "n"], HeldOut, Calibration]]) -> Scores:
    """The losses and PMFs of rows, by the calibration of each part."""
    losses = torch.empty(len(like), dtype=torch.float64)
    pmf = torch.empty(like.mean.shape, dtype=like.mean.dtype)
    for rows, held_out, at in parts:
        part = held_out.chosen(rows)
        # Other draws than those of the search, to which its result is adapted.
        normal = part.draws(_TIMES * search_draws(like), 1)
        losses[rows] = -part.log_likelihood(at, normal)[0].cpu()
        pmf[rows] = part.pmf(at, normal)[0].cpu()
    return Scores(losses, pmf, like.labels.cpu())
