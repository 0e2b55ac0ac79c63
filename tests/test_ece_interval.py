"""The interval of the expected calibration error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import errbar
from errbar import metrics


def test_the_interval_of_the_ece_covers_the_error_of_a_known_classifier() -> None:
    # Confidence 0.9 or 0.6 and right with probability 0.8 or 0.5: the expected calibration error is 0.1.
    covered = 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        sure = torch.rand(400, generator=generator, dtype=torch.float64) < 0.5
        confidence = torch.where(sure, 0.9, 0.6).double()
        right = torch.rand(400, generator=generator, dtype=torch.float64) < confidence - 0.1
        low, high = metrics.ece_interval(torch.stack([confidence, 1 - confidence], 1), (~right).long(), seed=seed)
        covered += low <= 0.1 <= high
    # Nominal 95 %; 60 trials of it have a standard deviation of 1.7.
    assert covered >= 60 * 0.95 - 4 * 1.7


def test_the_interval_of_the_ece_is_the_basic_bootstrap_at_any_level() -> None:
    generator = torch.Generator().manual_seed(0)
    pmf = torch.rand(2000, 3, generator=generator).softmax(1)
    labels = torch.multinomial(pmf, 1, generator=generator)[:, 0]
    labels[:400] = 0
    resampler = torch.Generator().manual_seed(7)
    drawn = []
    for _ in range(200):
        chosen = torch.randint(2000, (2000,), generator=resampler)
        drawn.append(metrics.ece(pmf[chosen], labels[chosen], 5))
    ece, quantiles = metrics.ece(pmf, labels, 5), torch.tensor(drawn, dtype=torch.float64)
    for level in (0.5, 0.9):
        low, high = metrics.ece_interval(pmf, labels, 5, level=level, resamples=200, seed=7)
        assert low == pytest.approx(2 * ece - float(quantiles.quantile((1 + level) / 2)), abs=1e-12)
        assert high == pytest.approx(2 * ece - float(quantiles.quantile((1 - level) / 2)), abs=1e-12)
        assert 0 < low < ece < high


@pytest.mark.parametrize("mistake", [{"level": 1.0}, {"level": 95}, {"level": True}, {"resamples": 0}, {"bins": 0}])
def test_the_interval_of_the_ece_refuses_what_is_none(mistake: dict[str, Any]) -> None:
    with pytest.raises(errbar.ArgumentError, match=f"{next(iter(mistake))} is"):
        metrics.ece_interval([[0.5, 0.5]], [0], **mistake)
