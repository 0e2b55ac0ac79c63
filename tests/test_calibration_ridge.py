"""T and T_c can stand in for each other; `calibrate` keeps the covariance of theory as far as the data allow."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

import errbar
from errbar.experiments import coverage as study

BOTH = ("temperature", "covariance_scale")
SAMPLES = 100


@cache
def redraws() -> study.Redraws:
    """Logistic regressions, whose covariance is right: T = T_c = 1 is the truth."""
    return study.redraw_and_fit(replace(study.LOGISTIC, classes=3, held_out_size=500, redraws=12))


def drawn(redraw: int, inflated: float = 1.0) -> tuple[errbar.Posterior, Tensor, Tensor]:
    """A posterior, its covariance `inflated` by that factor, and held-out samples."""
    found = redraws()
    posterior = found.posterior(redraw, "all", "ggn")
    if inflated != 1:
        prior = errbar.Prior(float(posterior.prior.precision) / inflated)  # type: ignore[arg-type]
        posterior = errbar.condition(posterior.information * (1 / inflated), prior)
    return posterior, found.held_out_x[redraw], found.held_out_y[redraw]


def calibrated(posterior: errbar.Posterior, x: Tensor, y: Tensor, fit: tuple[str, ...] = BOTH) -> errbar.Posterior:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.CalibrationWarning)
        return errbar.calibrate(posterior, [(x, y)], fit=fit, samples=SAMPLES)


def nll(gaussian: errbar.LogitGaussian, y: Tensor) -> float:
    return errbar.metrics.nll(gaussian.predict(SAMPLES).pmf, y)


@pytest.mark.parametrize(("redraw", "inflated"), [(0, 1.0), (1, 30.0), (2, 0.03)])
def test_the_scale_nearest_to_one_is_taken_that_a_grid_cannot_tell_from_the_best(redraw: int, inflated: float) -> None:
    posterior, x, y = drawn(redraw, inflated)
    found = calibrated(posterior, x, y)
    gaussian = posterior.logits(x)
    # The best T for each T_c; a grid of T in steps of 10 % may miss the NLL by some 1e-4.
    profile = {}
    for log_scale in torch.arange(-60, 61, 3).double() / 10:
        scaled = gaussian.scaled(math.exp(log_scale))
        profile[float(log_scale)] = min(nll(scaled.tempered(math.exp(t / 10)), y) for t in range(-6, 7))
    reached, best = nll(found.logits(x), y), min(profile.values())
    assert reached <= best + 8e-4
    distance = abs(math.log(found.covariance_scale))
    nearer = [value for log_scale, value in profile.items() if abs(log_scale) < distance - 0.1]
    assert all(value > best + 6e-4 for value in nearer)
    if inflated == 30:
        assert found.covariance_scale < 0.5


@pytest.mark.filterwarnings("error")
def test_data_that_say_nothing_about_the_covariance_leave_it_as_it_is() -> None:
    """Almost no covariance: T_c changes nothing, T alone is fitted, and there is nothing to warn of."""
    posterior, x, y = drawn(0)
    certain = posterior.with_prior(errbar.Prior(1e12))
    both = errbar.calibrate(certain, [(x, y)], samples=SAMPLES)
    alone = errbar.calibrate(certain, [(x, y)], samples=SAMPLES, fit="temperature")
    assert both.covariance_scale == 1
    assert both.temperature == pytest.approx(alone.temperature, rel=1e-3)


@pytest.mark.parametrize("start", [(1.0, 1.0), (0.5, 20.0), (1.0, 0.0)])
def test_calibrating_again_changes_nothing(start: tuple[float, float]) -> None:
    posterior, x, y = drawn(4, 10.0)
    once = calibrated(posterior.with_calibration(temperature=start[0], covariance_scale=start[1]), x, y)
    twice = calibrated(once, x, y)
    assert twice.covariance_scale == pytest.approx(once.covariance_scale, rel=1e-9)
    assert twice.temperature == pytest.approx(once.temperature, rel=1e-3)


def test_the_result_is_never_worse_than_what_was_there() -> None:
    """Not even within what else counts as equally good."""
    for redraw in range(4):
        posterior, x, y = drawn(redraw)
        before = calibrated(posterior, x, y, ("covariance_scale",))
        assert nll(calibrated(before, x, y).logits(x), y) <= nll(before.logits(x), y) + 1e-12


def test_the_order_of_what_is_fitted_does_not_matter() -> None:
    posterior, x, y = drawn(6)
    first, second = (calibrated(posterior, x, y, names) for names in (BOTH, BOTH[::-1]))
    assert (first.temperature, first.covariance_scale) == (second.temperature, second.covariance_scale)


def test_intervals_still_cover_after_both_are_fitted() -> None:
    """Where the covariance is right, calibration on 500 samples must not take it away.

    At the minimum of the NLL itself, these intervals cover 50 %. One re-draw's share has a standard deviation of about
    0.2, so four standard errors of twelve are 0.23.
    """
    found = redraws()
    shares = []
    for redraw in range(12):
        low, high = calibrated(*drawn(redraw)).predict(found.points, seed=redraw).interval(0.8)
        shares.append(float(((low <= found.truth) & (found.truth <= high)).double().mean()))
    assert sum(shares) / len(shares) == pytest.approx(0.8, abs=0.23)


def test_a_hard_decision_is_not_taken_for_a_probability() -> None:
    """Both fitted to few labels that are nearly all right: T must not run to zero, where PMFs have entries of zero."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 6, generator=generator)
    weights = 4 * torch.randn(6, 3, generator=generator)
    y = (x @ weights).argmax(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 3)
    with torch.no_grad():
        model.weight.copy_(weights.T / 3)
    posterior = errbar.fit(model, [x[:100]], last_layers=1, prior=errbar.Prior(0.5))
    found = calibrated(posterior, x[100:200], y[100:200])
    assert found.temperature >= 0.3
    for seed in range(5):
        assert math.isfinite(errbar.metrics.nll(found.predict(x[200:], 300, seed).pmf, y[200:]))
    alone = calibrated(posterior.with_calibration(covariance_scale=0.0), x[100:200], y[100:200], ("temperature",))
    assert alone.temperature < 0.3
