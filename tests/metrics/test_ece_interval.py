"""The interval of the expected calibration error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import errbar
from errbar import metrics


def two_classes(confidence: Tensor) -> Tensor:
    return torch.stack([confidence, 1 - confidence], 1)


def test_the_interval_of_the_ece_covers_the_error_of_a_known_classifier() -> None:
    # Confidence 0.9 or 0.6 and right with probability 0.8 or 0.5: the expected calibration error is 0.1.
    covered = 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        sure = torch.rand(400, generator=generator, dtype=torch.float64) < 0.5
        confidence = torch.where(sure, 0.9, 0.6).double()
        right = torch.rand(400, generator=generator, dtype=torch.float64) < confidence - 0.1
        low, high = metrics.ece_interval(two_classes(confidence), (~right).long(), seed=seed)
        covered += low <= 0.1 <= high
    # Nominal 95 %; 60 trials of it have a standard deviation of 1.7.
    assert covered >= 60 * 0.95 - 4 * 1.7


@pytest.mark.parametrize("count", [300, 3000])
def test_labels_drawn_from_the_pmf_have_zero_in_the_interval(count: int) -> None:
    held = 0
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        pmf = torch.softmax(2 * torch.randn(count, 4, generator=generator, dtype=torch.float64), 1)
        labels = torch.multinomial(pmf, 1, generator=generator)[:, 0]
        held += metrics.ece_interval(pmf, labels, resamples=200, seed=seed)[0] == 0
    assert held >= 0.93 * 100


# Confidence between the two, and right with it plus the gap of its bin: a gap in all, of turning
# sign, and one so small that noise hides it.
@pytest.mark.parametrize(
    ("least", "count", "gaps"),
    [
        (0.5, 300, [-0.05]),
        (0.5, 1000, [0.1, -0.1]),
        (0.1, 1000, [0.03, -0.03]),
        (0.9, 300, [-0.02]),
    ],
)
def test_the_interval_of_the_ece_holds_and_is_not_wide(least: float, count: int, gaps: list[float]) -> None:
    """`bench/ece_interval.py` in small: 93 % at least, and 1.5 times the central 95 % of the plug-in ECE at most."""
    rng = np.random.default_rng(1)
    gap = np.resize(gaps, 10)
    gap[9] = -abs(gap[9])
    weight = np.clip(np.arange(1, 11) / 10 - least, 0, 0.1)
    truth = float(weight @ np.abs(gap) / weight.sum())
    held, widths, estimates = 0, [], []
    for seed in range(60):
        confidence = rng.uniform(least, 1, count)
        right = rng.uniform(size=count) < confidence + gap[np.minimum((10 * confidence).astype(int), 9)]
        others = np.repeat((1 - confidence)[:, None] / 20, 20, 1)
        pmf = np.concatenate([confidence[:, None], others], 1)
        labels = np.where(right, 0, 1)
        low, high = metrics.ece_interval(pmf, labels, resamples=200, seed=seed)
        held += low <= truth <= high
        widths.append(high - low)
        estimates.append(metrics.ece(pmf, labels))
    assert held >= 0.93 * 60
    assert np.mean(widths) <= 1.5 * np.subtract(*np.quantile(estimates, [0.975, 0.025]))


def test_one_clear_bin_among_exact_ones_is_known_by_itself() -> None:
    """Nine bins of 400, one 8 standard errors too sure: a limit of the sum alone is lost in the noise of the others."""
    size, accuracy = 400, torch.linspace(0.15, 0.95, 9, dtype=torch.float64)
    right = (accuracy * size).round()
    right[6] -= 80
    confidence = accuracy.repeat_interleave(size)
    is_right = torch.cat([torch.arange(size) < count for count in right.tolist()])
    others = ((1 - confidence) / 20)[:, None].expand(-1, 20)
    low, _ = metrics.ece_interval(torch.cat([confidence[:, None], others], 1), (~is_right).long())
    gap, error = 0.2, (0.65 * 0.35 / size) ** 0.5
    assert (gap - 3 * error) / 9 < low < (gap - 1.5 * error) / 9


def test_the_limits_of_one_bin_are_those_of_a_binomial_share() -> None:
    """All of 100 right: the accuracy is above p with ½ p¹⁰⁰ = 0.4 · 0.05, half of the draws being equal to the data."""
    least = 0.04**0.01
    labels = torch.zeros(100, dtype=torch.long)
    low, high = metrics.ece_interval(two_classes(torch.full((100,), 0.9, dtype=torch.float64)), labels)
    assert low == pytest.approx(least - 0.9, rel=0.01)
    assert high == pytest.approx(0.1, rel=1e-3)
    # Sure of all and right in all: that says little about one in a hundred, and zero is inside.
    low, high = metrics.ece_interval(two_classes(torch.ones(100, dtype=torch.float64)), labels)
    assert low == 0
    assert high == pytest.approx(1 - least, rel=0.01)


def test_the_interval_of_the_ece_grows_with_its_level_and_shrinks_with_data() -> None:
    generator = torch.Generator().manual_seed(0)
    pmf = torch.softmax(2 * torch.randn(500, 3, generator=generator, dtype=torch.float64), 1)
    labels = torch.multinomial(pmf, 1, generator=generator)[:, 0]
    labels[:100] = 0
    before = None
    for level in (0.99, 0.95, 0.8, 0.5):
        low, high = metrics.ece_interval(pmf, labels, level=level)
        assert 0 <= low <= high <= 1
        assert before is None or before[0] <= low <= high <= before[1]
        before = (low, high)
    wide, narrow = (metrics.ece_interval(pmf.repeat(n, 1), labels.repeat(n)) for n in (1, 16))
    assert narrow[1] - narrow[0] < (wide[1] - wide[0]) / 2
    assert narrow[0] <= metrics.ece(pmf, labels) <= narrow[1]


def test_the_interval_of_the_ece_depends_on_the_counts_of_the_bins_and_the_seed() -> None:
    generator = torch.Generator().manual_seed(0)
    pmf = torch.softmax(2 * torch.randn(300, 3, generator=generator, dtype=torch.float64), 1)
    labels = torch.randint(3, (300,), generator=generator)
    order = torch.randperm(300, generator=generator)
    one = metrics.ece_interval(pmf, labels, seed=3)
    assert metrics.ece_interval(pmf, labels, seed=3) == one
    assert metrics.ece_interval(pmf[order], labels[order], seed=3) == pytest.approx(one, rel=1e-9)
    assert metrics.ece_interval(pmf, labels, seed=4) == pytest.approx(one, rel=0.1)


def test_few_inputs_leave_a_wide_interval() -> None:
    low, high = metrics.ece_interval([[0.75, 0.25]], [0])
    assert low == 0
    assert high > 0.5


@pytest.mark.parametrize(
    "mistake", [{"level": 1.0}, {"level": 95}, {"level": True}, {"resamples": 0}, {"bins": 0}, {"seed": -1}]
)
def test_the_interval_of_the_ece_refuses_what_is_none(mistake: dict[str, Any]) -> None:
    with pytest.raises(errbar.ArgumentError, match=f"{next(iter(mistake))} is"):
        metrics.ece_interval([[0.5, 0.5]], [0], **mistake)
