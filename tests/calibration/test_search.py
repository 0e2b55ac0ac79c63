"""The search for T, T_c and the softening, against a fine grid and a generic optimiser."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from errbar import metrics
from errbar._calibration.held_out import HeldOut
from errbar._calibration.question import LITTLE, NAMES, OBJECTIVES, TWO
from errbar._calibration.search import (
    ABOVE_TEMPERATURE_SCALING,
    best_calibration,
    calibration_near,
    largest_covariance,
    temperature_scaling,
)
from errbar._distributions.calibration import Calibration
from errbar._distributions.sampling import SamplingRoot


def problem(count: int = 1500, *, softening: float = 0.0, temperature: float = 1.5, seed: int = 0) -> HeldOut:
    """Inputs of varied variance, whose labels follow from T(x) alone: the truth has T_c = 0 and this softening."""
    generator = torch.Generator().manual_seed(seed)
    mean = 4 * torch.randn(count, 4, generator=generator, dtype=torch.float64)
    mean -= mean.mean(1, keepdim=True)
    size = torch.exp(torch.randn(count, 1, 1, generator=generator, dtype=torch.float64))
    root = size * torch.randn(count, 4, 3, generator=generator, dtype=torch.float64) / 2
    root -= root.mean(1, keepdim=True)
    variance = root.square().sum((1, 2)) / 3
    true = mean / (temperature * (1 + softening * variance).sqrt())[:, None]
    labels = torch.multinomial(torch.softmax(true, 1), 1, generator=generator)[:, 0]
    return HeldOut(mean, SamplingRoot(root), labels, variance)


def nll(held_out: HeldOut, at: Calibration, samples: int = 200) -> float:
    return held_out.nll(at, held_out.draws(samples, 0))


@pytest.mark.parametrize("softening", [0.0, 0.5, 20.0])
def test_three_values_are_as_good_as_a_fine_grid(softening: float) -> None:
    held_out = problem(600, softening=softening)
    found, _ = best_calibration(held_out, OBJECTIVES["nll"], NAMES, Calibration(), 200, 0)
    grid = (
        nll(held_out, Calibration(t, s, c))
        for t in (0.3, 0.6, 1.0, 1.5, 2.0, 3.0)
        for s in (1e-3, 1e-2, 0.1, 0.5, 2.0)
        for c in (0.0, 0.1, 0.5, 2.0, 10.0, 50.0)
    )
    assert nll(held_out, found) <= min(grid) + 1e-4 + 1e-9


def test_a_softening_that_made_the_labels_is_found() -> None:
    held_out = problem(20_000, softening=2.0)
    found, messages = best_calibration(
        held_out, OBJECTIVES["nll"], ("temperature", "softening"), Calibration(1.0, 0.0), 1, 0
    )
    assert not messages
    assert found.softening == pytest.approx(2.0, rel=0.25)
    assert found.temperature == pytest.approx(1.5, rel=0.15)
    assert found.covariance_scale == 0


def test_a_softening_is_never_worse_than_none() -> None:
    for seed in range(4):
        held_out = problem(300, seed=seed)
        two, _ = best_calibration(held_out, OBJECTIVES["nll"], TWO, Calibration(), 200, 0)
        three, _ = best_calibration(held_out, OBJECTIVES["nll"], NAMES, Calibration(), 200, 0)
        assert nll(held_out, three) <= nll(held_out, two) + 1e-4


@pytest.mark.parametrize("objective", ["nll", "brier", "ece"])
def test_every_objective_takes_three_values_and_is_not_worse_than_before(objective: str) -> None:
    held_out = problem(400, softening=1.0)
    start = Calibration(1.4, 0.1, 0.2)
    found, _ = best_calibration(held_out, OBJECTIVES[objective], NAMES, start, 200, 0)
    normal = held_out.draws(200, 0)
    before, after = (OBJECTIVES[objective].value(held_out, at, normal) for at in (start, found))
    assert after <= before + 1e-4


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_the_ece_of_the_search_is_that_of_the_metrics(scale: float) -> None:
    """Confidences at the edges of bins too: one input is certain, one has two classes alike."""
    held_out = problem(300)
    held_out.mean[0] = torch.tensor([1e3, 0.0, 0.0, 0.0])
    held_out.mean[1] = torch.tensor([0.0, 0.0, -1e3, -1e3])
    held_out.root.values[:2] = 0
    at, normal = Calibration(0.8, scale), held_out.draws(50, 0)
    pmf = held_out.pmf(at, normal)[0]
    assert float(pmf[0].max()) == 1
    assert float(pmf[1].max()) == 0.5
    assert OBJECTIVES["ece"].value(held_out, at, normal) == pytest.approx(metrics.ece(pmf, held_out.labels), abs=1e-12)


@pytest.mark.parametrize("objective", ["nll", "brier"])
def test_slopes_are_those_of_central_differences(objective: str) -> None:
    held_out, at, step = problem(50, softening=1.0), (1.3, 0.4, 0.7), 1e-5
    normal = held_out.draws(40, 0)
    slopes = OBJECTIVES[objective].slopes
    assert slopes is not None
    _, gradient, _ = slopes(held_out, Calibration(*at), normal, NAMES)
    for index in range(3):
        up, down = (
            OBJECTIVES[objective].value(
                held_out, Calibration(*[v * math.exp(s * (i == index)) for i, v in enumerate(at)]), normal
            )
            for s in (step, -step)
        )
        assert float(gradient[index]) == pytest.approx((up - down) / (2 * step), rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("names", [TWO, NAMES])
def test_near_the_whole_a_part_is_fitted_as_by_itself(names: tuple[str, ...]) -> None:
    held_out = problem(1000, softening=2.0)
    part = held_out.chosen(torch.arange(0, 1000, 2))
    whole, _ = best_calibration(held_out, OBJECTIVES["nll"], names, Calibration(), 100, 0, LITTLE)
    alone, _ = best_calibration(part, OBJECTIVES["nll"], names, Calibration(), 100, 0, LITTLE)
    near = calibration_near(part, names, whole, 100, 0)
    assert nll(part, near, 100) == pytest.approx(nll(part, alone, 100), abs=1e-3)


def test_what_is_given_away_for_the_covariance_is_as_good_as_temperature_scaling_by_the_rule() -> None:
    held_out = problem(600)
    draws = held_out.draws(200, 0)
    begin = Calibration(1.5, 0.003)
    scaled = temperature_scaling(held_out, math.log(1e-2), math.log(1e2), 0.0)
    alone = held_out.log_likelihood(Calibration(scaled.temperature, 0.0), draws)[0]

    def excess(at: Calibration) -> Tensor:
        return alone - held_out.log_likelihood(at, draws)[0]

    def found(rule: Callable[[Tensor], bool] | None = None, *, slides: bool = True) -> Calibration:
        return calibration_near(held_out, TWO, begin, 200, 0, slides=slides, is_as_good=rule)

    least, most = found(slides=False), found()
    assert least.covariance_scale < 0.8 * most.covariance_scale
    assert found(lambda _: False) == begin
    assert found(lambda _: True) == most
    # A rule about the spread, of which the mean, by which the ridge is followed, says nothing.
    limit = float((excess(least).std() + excess(most).std()) / 2)
    between = found(lambda difference: float(difference.std()) <= limit)
    assert float(excess(between).std()) <= limit + 1e-9
    assert least.covariance_scale < between.covariance_scale < most.covariance_scale
    further = Calibration(between.temperature, 1.1 * between.covariance_scale)
    assert float(excess(further).std()) > limit - 2e-3


def test_the_largest_covariance_costs_no_more_than_it_may() -> None:
    held_out = problem(1000)
    scaling = temperature_scaling(held_out, math.log(1e-2), math.log(1e2), 0.0)
    limit = ABOVE_TEMPERATURE_SCALING
    found = largest_covariance(held_out, 200, 0, lambda difference: float(difference.mean()) <= limit)
    assert 0 < found.covariance_scale <= 1
    assert nll(held_out, found) <= scaling.nll + limit + 1e-9
    wider = Calibration(found.temperature, found.covariance_scale * 1.1)
    assert nll(held_out, wider) > nll(held_out, found)
    # The rule is about the difference of each input to temperature scaling, and may ask for more.
    seen = []

    def rule(difference: Tensor) -> bool:
        seen.append(difference)
        return float(difference.mean() + 1.96 * difference.std() / len(difference) ** 0.5) <= 1e-3

    narrower = largest_covariance(held_out, 200, 0, rule)
    assert narrower.covariance_scale < found.covariance_scale
    losses = [
        -held_out.log_likelihood(at, held_out.draws(200, 0))[0]
        for at in (narrower, Calibration(scaling.temperature, 0.0))
    ]
    assert rule(losses[0] - losses[1])
    assert all(difference.shape == (1000,) for difference in seen)
    assert largest_covariance(held_out, 200, 0, lambda _: False).covariance_scale == 0


def test_inputs_without_variance_leave_the_softening_zero() -> None:
    held_out = problem(200)
    flat = HeldOut(held_out.mean, SamplingRoot(0 * held_out.root.values), held_out.labels, 0 * held_out.variance)
    found, messages = best_calibration(flat, OBJECTIVES["nll"], NAMES, Calibration(), 50, 0)
    assert found.softening == 0
    assert any("The softening stays 0" in message for message in messages)
