"""How often the interval of `metrics.ece_interval` contains the population's ECE, and how wide it is, by simulation.

`python bench/ece_interval.py [--simulations 500] [--processes 2]` prints the table of `docs/results/coverage.md`.

Confidences are drawn, and labels are right with the confidence plus the gap of the bin, so the population's ECE
Σ_j w_j |gap_j| is known. The width is relative to the central 95 % of the plug-in ECE of such data.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import cache
from multiprocessing import get_context

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from numpy.typing import NDArray

from errbar._base.ece_limits import ece_limits

Array = NDArray[np.float64]
BINS = 10
# Draws of each interval; fewer than the default, so that the table takes minutes.
RESAMPLES = 300
SIZES = (300, 1000, 10_000)

CONFIDENCE: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "0.1 to 1, even": lambda rng, count: rng.uniform(0.1, 1, count),
    "0.5 to 1, even": lambda rng, count: rng.uniform(0.5, 1, count),
    "most above 0.9": lambda rng, count: 1 - 0.5 * rng.beta(0.3, 3, count),
    "nearly all at 1": lambda rng, count: 1 - 0.3 * rng.beta(0.15, 6, count),
}
# The gaps of the bins relative to each other, with their signs, from the weights of the bins.
GAPS: dict[str, Callable[[Array], Array]] = {
    "too sure": lambda weight: -np.ones(BINS),
    "in turn": lambda weight: np.where(np.arange(BINS) % 2, -1.0, 1.0),
    "every other bin": lambda weight: -1.0 * (np.arange(BINS) % 2),
    "one bin": lambda weight: -1.0 * (np.arange(BINS) == weight.argmax()),
    "two bins": lambda weight: -1.0 * np.isin(np.arange(BINS), (4, 7)),
}
CASES = [
    *[("0.1 to 1, even", gaps, ece) for gaps in ("too sure", "in turn") for ece in (0.01, 0.03, 0.1, 0.2)],
    *[("0.1 to 1, even", "every other bin", ece) for ece in (0.03, 0.1)],
    *[("0.1 to 1, even", "one bin", ece) for ece in (0.02, 0.03)],
    ("0.1 to 1, even", "two bins", 0.06),
    # At N = 1000 all gaps are about 1.25 standard errors: neither noise nor clear.
    *[("0.1 to 1, even", gaps, 0.05) for gaps in ("too sure", "in turn")],
    *[("0.5 to 1, even", gaps, 0.04) for gaps in ("too sure", "in turn")],
    *[("0.5 to 1, even", gaps, ece) for gaps in ("too sure", "in turn") for ece in (0.03, 0.2)],
    *[("most above 0.9", "too sure", ece) for ece in (0.01, 0.03, 0.2)],
    ("most above 0.9", "in turn", 0.01),
    *[("nearly all at 1", "too sure", ece) for ece in (0.01, 0.03, 0.2)],
]


@cache
def population(shape: str, gaps: str, ece: float) -> Array:
    """The signed gaps of all bins with this ECE, as equal as accuracies between 0 and 1 allow."""
    confidence = CONFIDENCE[shape](np.random.default_rng(123), 400_000)
    index = _bin(confidence)
    weight = np.bincount(index, minlength=BINS) / len(confidence)
    relative = GAPS[gaps](weight)
    lowest, highest = np.full(BINS, 1.0), np.full(BINS, 0.0)
    np.minimum.at(lowest, index, confidence)
    np.maximum.at(highest, index, confidence)
    room = np.where(relative > 0, 1 - highest, lowest)
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        reached = weight @ np.minimum(middle * np.abs(relative), room)
        low, high = (middle, high) if reached < ece else (low, middle)
    made: Array = np.sign(relative) * np.minimum(high * np.abs(relative), room)
    if abs(weight @ np.abs(made) - ece) > 1e-6:
        raise ValueError(f"{shape}, {gaps}: there is no room for an ECE of {ece}")
    return made


def _bin(confidence: Array) -> NDArray[np.int64]:
    return np.minimum((confidence * BINS).astype(np.int64), BINS - 1)


def draw(shape: str, gap: Array, count: int, rng: np.random.Generator) -> tuple[Array, NDArray[np.bool_]]:
    """Confidences, and which of them are right."""
    confidence = CONFIDENCE[shape](rng, count)
    return confidence, rng.uniform(size=count) < confidence + gap[_bin(confidence)]


def binned(confidence: Array, right: NDArray[np.bool_]) -> tuple[Array, Array, Array]:
    """For each bin, the number of inputs, the number of right ones, and the sum of the confidences."""
    index = _bin(confidence)
    inputs = np.bincount(index, minlength=BINS).astype(np.float64)
    return inputs, np.bincount(index, right, BINS), np.bincount(index, confidence, BINS)


def simulate(case: tuple[str, str, float, int, int]) -> tuple[float, float]:
    """The share of intervals that contain the ECE, and their mean width relative to the spread of the plug-in."""
    shape, gaps, ece, count, simulations = case
    gap = population(shape, gaps, ece)
    # A seed of its own for each cell, so that the noise of one says nothing about the noise of another.
    rng = np.random.default_rng(list(f"{shape}, {gaps}, {ece:g}, {count}".encode()))
    counts = [binned(*draw(shape, gap, count, rng)) for _ in range(4000)]
    plug_in = [np.abs(right - total).sum() / count for _, right, total in counts]
    held, width = 0, 0.0
    for seed, (inputs, right, total) in enumerate(counts[:simulations]):
        # What `metrics.ece_interval` does, without the PMFs of all classes.
        values = [torch.from_numpy(each) for each in (inputs, right, total / np.maximum(1, inputs))]
        low, high = ece_limits(*values, level=0.95, resamples=RESAMPLES, seed=seed)
        held += low <= ece + 1e-12 and ece - 1e-12 <= high
        width += (high - low) / simulations
    spread = np.subtract(*np.quantile(plug_in, [0.975, 0.025]))
    return held / simulations, float(width / spread)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--simulations", type=int, default=500)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    cases = [*[(shape, "none", 0.0) for shape in CONFIDENCE], *CASES]
    cells = [
        (shape, "too sure" if gaps == "none" else gaps, ece, count, given.simulations)
        for shape, gaps, ece in cases
        for count in SIZES
    ]
    with get_context("spawn").Pool(given.processes) as pool:
        made = iter(pool.imap(simulate, cells))
        sizes = [f"N = {count:,}".replace(",", " ") for count in SIZES]
        print(f"| confidence | gaps | ECE | {' | '.join(sizes)} |\n|---|---|---:|{'---:|' * len(SIZES)}")
        for shape, gaps, ece in cases:
            row = [next(made) for _ in SIZES]
            written = " | ".join(f"{100 * held:.1f} % · {width:.2f}" for held, width in row)
            print(f"| {shape} | {gaps} | {ece:g} | {written} |", flush=True)


if __name__ == "__main__":
    main()
