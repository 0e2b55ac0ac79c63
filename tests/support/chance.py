"""How many events chance allows: bounds that are exceeded once in a thousand times."""

from __future__ import annotations

from scipy import stats


def fewest(runs: int, rate: float) -> float:
    """Fewer than this come with a probability of 0.1 % if their rate is what it should be at least."""
    return float(stats.binom.ppf(0.001, runs, rate))


def most(runs: int, rate: float) -> float:
    """More than this come with a probability of 0.1 % if their rate is what it should be at most."""
    return float(stats.binom.ppf(0.999, runs, rate))
