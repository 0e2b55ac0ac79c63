"""Evidence that accumulates over a stream, one number at a time: bets against "nothing has changed".

A *bet* multiplies its stake by a factor ≥ 0 whose expectation is at most 1 as long as nothing has changed. A gambler
who starts with 1 ever reaches 1/α with a probability of at most α, whatever the strategy (Ville's inequality): capital
is evidence, and an alarm at 1/α has a false-alarm rate of α over a stream of any length.

- `Evidence` is the capital: several bets at a time, started anew at every step.
- `RankTest` bets that a score is no longer exchangeable with those of a reference (a conformal test martingale).
- `gap_factors` and `innovation_factors` bet on labels against the PMF.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray

from errbar._base.checks import stored_numbers, stored_whole

# Cells of scores: sixteen per octave (4.4 % wide) from 2⁻²⁰ to 2²⁰. The grid is fixed in advance, because one made from
# the reference would treat the reference unlike the stream. An input's score differs between batches by a relative
# 10⁻⁵ or so (rounding of a float32 network; that of the sums is smaller), far less than a cell: hardly one score in a
# thousand changes its cell, in either direction. Below 10⁻⁶ an input is certain, and all such inputs share one cell.
_CELLS_PER_OCTAVE = 16
_OCTAVES = 20
SCORE_CELLS = 2 * _OCTAVES * _CELLS_PER_OCTAVE + 1

# The learned densities of p-values: the number of equal cells, and the number of recent p-values that count.
_DENSITY_CELLS = 10
_MEMORIES = (30, 300)
RANK_SIDES = ("higher",) * 3 + ("lower",) * 3 + ("different",) * len(_MEMORIES)

_GAP_STAKES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
_INNOVATION_STAKES = (0.003, 0.01, 0.03, 0.1, 0.3)
GAP_BETS, INNOVATION_BETS = len(_GAP_STAKES), len(_INNOVATION_STAKES)


@dataclass
class Evidence:
    """What K bets make of a capital of 1, when the change may begin at any step.

    At step s, 1/(s(s+1)) of the initial capital is taken from the reserve and staked on the K bets in equal parts:
        W_k ← (W_k + 1/(K s(s+1))) · factor_k,     capital = 1/(s+1) + Σ_k W_k,
    which is a martingale if the factors have expectation 1: Ville's inequality holds. A bet that began with the
    stream and lost for a million steps would have to win all of that back before it noticed a change; this capital is
    never below 1/(s+1), and a change at step s costs no more than about 2 ln s + ln K nats. (A weighted
    Shiryaev–Roberts sum.)

    `best[k]` is the most that bet k made of 1 from any single step on, and `start[k]` that step (Page's CUSUM): the
    most likely beginning of the change, as one of the caller's `mark`s.
    """

    wealth: list[float]
    best: list[float]
    start: list[int]
    steps: int = 0

    @staticmethod
    def of(bets: int) -> Evidence:
        return Evidence([0.0] * bets, [0.0] * bets, [0] * bets)

    def bet(self, factors: Sequence[float], mark: int) -> None:
        self.steps += 1
        stake = 1.0 / (self.steps * (self.steps + 1) * len(self.wealth))
        for k, factor in enumerate(factors):
            self.wealth[k] = (self.wealth[k] + stake) * factor
            if self.best[k] <= 1:
                self.best[k], self.start[k] = 1.0, mark
            self.best[k] *= factor

    @property
    def capital(self) -> float:
        return 1.0 / (self.steps + 1) + sum(self.wealth)

    @property
    def winner(self) -> int:
        """The bet with the most capital."""
        return max(range(len(self.wealth)), key=self.wealth.__getitem__)

    def state(self) -> dict[str, Any]:
        return {"wealth": [*self.wealth], "best": [*self.best], "start": [*self.start], "steps": self.steps}

    @staticmethod
    def from_state(state: dict[str, Any], bets: int) -> Evidence:
        wealth, best, start = (stored_numbers(state[name], bets) for name in ("wealth", "best", "start"))
        return Evidence(wealth, best, [stored_whole(mark) for mark in start], stored_whole(state["steps"]))


@dataclass(frozen=True)
class Alarm:
    """An alarm of one test: if nothing has changed, a run has one with a probability of at most `rate`.

    `at` and `since` count the inputs of the run from 1: the one whose score or label raised the alarm, and the one at
    which the change probably began. `observations` is the number of scores or labels the test had used, and `capital`
    what its bets had made of 1; the alarm is raised at 1/rate.
    """

    test: str
    side: str
    at: int
    since: int
    observations: int
    capital: float
    rate: float

    def __str__(self) -> str:
        return (
            f"{self.test}: {self.side}, since about input {self.since} (noticed at {self.at}, after "
            f"{self.observations} observations; false-alarm rate {self.rate:.2g})"
        )


@dataclass
class RankTest:
    """Bets on the ranks of scores among the reference and all earlier scores (a conformal test martingale).

    `counts` are the numbers of scores in each cell, including the reference's. The p-value of a score s_t is
        p_t = (#{i ≤ t : s_i > s_t} + U_t #{i ≤ t : s_i = s_t}) / (n + t),     U_t uniform in [0, 1].
    If reference and stream are exchangeable, p_1, p_2, … are independent and uniform (Vovk, Gammerman and Shafer,
    *Algorithmic Learning in a Random World*, section 8.2), whatever the scores, their ties and the size n of the
    reference. Ranks within the reference alone would not suffice: it differs from the truth by 1/√n, which a long
    stream would detect.

    The bets are densities on [0, 1]. Three say that scores are higher than the reference's (½ p^−½, ¼ p^−¾, 3/2 − p),
    three mirror images say that they are lower, and two histograms are learned from earlier p-values.
    """

    reference: NDArray[np.int64]
    counts: NDArray[np.int64]
    total: int
    evidence: Evidence
    histories: list[list[float]]

    @staticmethod
    def against(cells: Int[np.ndarray, "n"], size: int) -> RankTest:
        """A test against a reference whose scores lie in these cells, out of `size` cells."""
        reference = np.bincount(cells, minlength=size).astype(np.int64)
        return RankTest.begin(reference)

    @staticmethod
    def begin(reference: NDArray[np.int64]) -> RankTest:
        histories = [[0.0] * _DENSITY_CELLS for _ in _MEMORIES]
        return RankTest(reference, reference.copy(), int(reference.sum()), Evidence.of(len(RANK_SIDES)), histories)

    def observe(self, cell: int, uniform: float, mark: int) -> None:
        self.evidence.bet(self._factors(self.place(cell, uniform)), mark)

    def place(self, cell: int, uniform: float) -> float:
        """Count a score and return its p-value."""
        self.counts[cell] += 1
        self.total += 1
        return (int(self.counts[cell + 1 :].sum()) + uniform * int(self.counts[cell])) / self.total

    def _factors(self, p: float) -> list[float]:
        low = max(p, 1e-15)  # zero has probability zero, and no finite density
        high = max(1 - p, 1e-15)
        root_low, root_high = math.sqrt(low), math.sqrt(high)
        factors = [0.5 / root_low, 0.25 / (root_low * math.sqrt(root_low)), 1.5 - p]
        factors += [0.5 / root_high, 0.25 / (root_high * math.sqrt(root_high)), 0.5 + p]
        at = min(int(p * _DENSITY_CELLS), _DENSITY_CELLS - 1)
        for memory, history in zip(_MEMORIES, self.histories, strict=True):
            factors.append(_DENSITY_CELLS * (history[at] + 1) / (sum(history) + _DENSITY_CELLS))
            for j in range(_DENSITY_CELLS):
                history[j] *= 1 - 1 / memory
            history[at] += 1
        return factors

    def state(self) -> dict[str, Any]:
        return {
            "reference": _sparse(self.reference),
            "counts": _sparse(self.counts),
            "evidence": self.evidence.state(),
            "seen": [[*history] for history in self.histories],
        }

    @staticmethod
    def from_state(state: dict[str, Any], size: int) -> RankTest:
        reference, counts = _dense(state["reference"], size), _dense(state["counts"], size)
        if not reference.any() or (counts < reference).any():
            raise ValueError("fewer scores than in the reference")
        evidence = Evidence.from_state(state["evidence"], len(RANK_SIDES))
        histories = [stored_numbers(own, _DENSITY_CELLS) for own in state["seen"]]
        if len(histories) != len(_MEMORIES):
            raise ValueError(f"{len(histories)} densities instead of {len(_MEMORIES)}")
        return RankTest(reference, counts, int(counts.sum()), evidence, histories)


def score_cells(scores: Float[np.ndarray, "B"]) -> Int[np.ndarray, "B"]:
    """The cell of each score ≥ 0 on the logarithmic grid."""
    octaves = np.log2(np.clip(scores, 2.0**-_OCTAVES, 2.0**_OCTAVES)) + _OCTAVES
    cells: NDArray[np.int64] = np.floor(octaves * _CELLS_PER_OCTAVE).astype(np.int64)
    return cells


def gap_factors(gap: float, tolerance: float) -> list[float]:
    """1 + λ (d − δ)/(1 + δ) for d in [−1, 1] and several λ < 1: expectation at most 1 if that of d is at most δ."""
    excess = (gap - tolerance) / (1 + tolerance)
    return [1 + stake * excess for stake in _GAP_STAKES]


def innovation_factors(innovation: float, classes: int) -> list[float]:
    """1 + λ (ν/(M−1) − 1) for ν ≥ 0 and several λ < 1: expectation at most 1 if that of ν is at most M − 1."""
    excess = innovation / (classes - 1) - 1
    return [1 + stake * excess for stake in _INNOVATION_STAKES]


def innovation_squared(pmf: Float[np.ndarray, "M"], label: int, noise: float) -> float:
    """The normalised innovation squared ν = (y − f)ᵀ S⁺ (y − f), S = diag f − f fᵀ, y the label's unit vector.

    diag(1/f) is a generalised inverse of S and y − f is in its range (the vectors that sum to zero), so
        ν = Σ_m (y_m − f_m)²/f_m = 1/f_y − 1,     with expectation Σ_m f_m (1/f_m − 1) = M − 1 if y is drawn from f.
    f is (1 − ε) f̂ + ε/M: the PMF, if a share ε of the labels is drawn at random. Then ν has expectation at most M − 1
    for every share of such labels from 0 to ε: it is linear in the share, M − 1 at ε, and at 0 one less than
    Σ_m f̂_m/((1 − ε) f̂_m + ε/M), which is convex in ε and at most M at both ends, ε = 0 and 1. Without ε, one
    wrong label that the network considers impossible (f̂_y = 10⁻⁹) would outweigh a million right ones.
    """
    probability = (1 - noise) * float(pmf[label]) + noise / len(pmf)
    return 1 / probability - 1


def _sparse(counts: NDArray[np.int64]) -> list[list[int]]:
    return [[int(cell), int(counts[cell])] for cell in np.flatnonzero(counts)]


def _dense(pairs: Sequence[Sequence[int]], size: int) -> NDArray[np.int64]:
    counts = np.zeros(size, np.int64)
    for cell, count in pairs:
        counts[stored_whole(cell)] = stored_whole(count)
    return counts
