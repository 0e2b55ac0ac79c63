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
from data import shuffled_digits
from errbar._calibration.held_out import HeldOut
from errbar._distributions.calibration import Calibration
from errbar._distributions.sampling import SamplingRoot
from errbar.experiments import coverage as study
from networks import trained

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


def linear(weights: Tensor, dtype: torch.dtype = torch.float64) -> torch.nn.Linear:
    """The classifier with these weights, M × D, and no shift."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Linear(weights.shape[1], weights.shape[0], dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(weights)
        model.bias.zero_()
    return model


def unscaled_nll(posterior: errbar.Posterior, x: Tensor, y: Tensor, temperature: float) -> float:
    return float(torch.nn.functional.cross_entropy(posterior.model(x).detach().double() / temperature, y))


def test_a_hard_decision_is_not_taken_for_a_probability() -> None:
    """Both fitted to few labels that are all right: T goes no further towards zero, where PMFs have entries of zero,
    than it takes to be as good as temperature scaling to 3e-4."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 6, generator=generator, dtype=torch.float64)
    weights = 4 * torch.randn(6, 3, generator=generator, dtype=torch.float64)
    y = (x @ weights).argmax(1)
    posterior = errbar.fit(linear(weights.T / 3), [x[:100]], last_layers=1, prior=errbar.Prior(0.5))
    found = calibrated(posterior, x[100:200], y[100:200])
    for seed in range(5):
        assert math.isfinite(errbar.metrics.nll(found.predict(x[200:], 300, seed).pmf, y[200:]))
    alone = calibrated(posterior.with_calibration(covariance_scale=0.0), x[100:200], y[100:200], ("temperature",))
    assert found.temperature > alone.temperature
    assert unscaled_nll(posterior, x[100:200], y[100:200], 1.3 * found.temperature) > 1.4e-4
    scaled = unscaled_nll(posterior, x[100:200], y[100:200], alone.temperature)
    assert nll(found.logits(x[100:200]), y[100:200]) <= scaled + 3e-4


@cache
def digits(scale: float = 1.0, prior: float = 1.0, steps: int = 100) -> tuple[errbar.Posterior, Tensor, Tensor]:
    """A network for digits that was trained with its logits multiplied by `scale`, and 300 held-out digits."""
    x, y = shuffled_digits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).double()
    trained(model, x[:700], y[:700], steps=steps, lr=1e-2, scale=scale)
    posterior = errbar.fit(model.eval(), [x[:700]], last_layers=1, prior=errbar.Prior(prior))
    return posterior, x[700:1000], y[700:1000]


NETWORKS = {
    "usual": {},
    "wide covariance": {"prior": 0.01},
    "logits times ten": {"scale": 10.0},
    "logits times a tenth": {"scale": 0.1},
    "briefly trained": {"steps": 8},
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", NETWORKS)
def test_both_are_never_worse_than_temperature_scaling_and_there_is_nothing_to_warn_of(name: str) -> None:
    """Small logits want a small T, a wide covariance wants a small T_c: nothing is wrong with that."""
    posterior, x, y = digits(**NETWORKS[name])
    found = errbar.calibrate(posterior, [(x, y)], samples=SAMPLES)
    scaled = min(unscaled_nll(posterior, x, y, math.exp(t / 100)) for t in range(-460, 461))
    assert nll(found.logits(x), y) <= scaled + 3e-4
    assert found.covariance_scale > 0


@pytest.mark.parametrize("start", [(1000.0, 1.0), (1.0, 0.0), (1e-3, 1e6)])
@pytest.mark.parametrize(
    ("objective", "fit"), [("nll", BOTH), ("nll", BOTH[:1]), ("nll", BOTH[1:]), ("brier", BOTH), ("ece", BOTH)]
)
def test_the_result_is_no_worse_than_the_start_wherever_that_is(
    start: tuple[float, float], objective: str, fit: tuple[str, ...]
) -> None:
    posterior, x, y = drawn(0)
    x, y = x[:60], y[torch.randperm(500, generator=torch.Generator().manual_seed(1))][:60]
    before = posterior.with_calibration(temperature=start[0], covariance_scale=start[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.CalibrationWarning)
        after = errbar.calibrate(before, [(x, y)], fit=fit, samples=20, objective=objective)
    scores = [getattr(errbar.metrics, objective)(p.logits(x).predict(20).pmf, y) for p in (before, after)]
    assert scores[1] <= scores[0] + (8e-4 if start[1] == 0 else 1e-12)


def on_a_grid(objective: str, posterior: errbar.Posterior, x: Tensor, y: Tensor, fit: tuple[str, ...]) -> float:
    """The least that a grid finds between the bounds: 30 values each of two, 120 of one."""
    gaussian, score = posterior.logits(x), getattr(errbar.metrics, objective)
    count = 30 if len(fit) == 2 else 120
    even = torch.linspace(-1, 1, count, dtype=torch.float64) * math.log(100)
    temperatures = even.exp().tolist() if "temperature" in fit else [1.0]
    scales = (2 * even).exp().tolist() if "covariance_scale" in fit else [1.0]
    return min(score(gaussian.scaled(c).tempered(t).predict(SAMPLES).pmf, y) for t in temperatures for c in scales)


@pytest.mark.parametrize(
    ("objective", "fit", "random"),
    [
        ("nll", BOTH[:1], False),
        ("nll", BOTH[:1], True),
        ("nll", BOTH[1:], True),
        ("nll", BOTH, True),
        ("brier", BOTH, False),
        ("brier", BOTH[1:], False),
        ("ece", BOTH, False),
        ("ece", BOTH[:1], False),
        ("ece", BOTH[1:], True),
    ],
)
def test_a_grid_finds_nothing_that_is_better(objective: str, fit: tuple[str, ...], random: bool) -> None:
    posterior, x, y = digits(prior=0.1)
    x, y = x[:100], y[:100]
    if random:
        y = y[torch.randperm(100, generator=torch.Generator().manual_seed(0))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.CalibrationWarning)
        found = errbar.calibrate(posterior, [(x, y)], fit=fit, objective=objective, samples=SAMPLES)
    reached = getattr(errbar.metrics, objective)(found.logits(x).predict(SAMPLES).pmf, y)
    assert reached <= on_a_grid(objective, posterior, x, y, fit) + 8e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fit", [BOTH, BOTH[:1]])
def test_a_warning_names_the_value_that_is_returned(dtype: torch.dtype, fit: tuple[str, ...]) -> None:
    """Logits of ±3000 and one wrong label: its probability underflows wherever T is small, and the best T is at 100."""
    x = torch.eye(2, dtype=dtype).repeat(20, 1)
    y = torch.tensor([0, 1] * 20)
    y[0] = 1
    model = linear(6000 * torch.eye(2, dtype=dtype) - 3000, dtype)
    with pytest.warns(UserWarning, match="no information at all"):
        posterior = errbar.fit(model, [x], last_layers=1, prior=errbar.Prior(1e6))
    with pytest.warns(errbar.CalibrationWarning, match=r"temperature lies at the edge of the search, 100 ") as caught:
        found = errbar.calibrate(posterior, [(x, y)], fit=fit, samples=SAMPLES)
    assert found.temperature == pytest.approx(100)
    assert len(caught) == 1


def test_an_improbable_label_is_a_finite_loss_with_exact_slopes() -> None:
    """By log-probabilities and central differences, where a probability would be zero in either dtype."""
    mean = torch.tensor([[3000.0, -3000.0, 0.0], [1.0, 2.0, 3.0]], dtype=torch.float64)
    root = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    held_out = HeldOut(mean, SamplingRoot(root), torch.tensor([1, 0]), torch.ones(2, dtype=torch.float64))
    normal = held_out.draws(50, 0)
    values, names = (0.7, 2.0, 0.4), (*BOTH, "softening")
    value, slopes = held_out.log_likelihood(Calibration(*values), normal, names)
    assert float(value[0]) == pytest.approx(-6000 / (0.7 * math.sqrt(1.4)), rel=1e-2)
    pmf, _ = held_out.pmf(Calibration(*values), normal)
    assert float(value[1]) == pytest.approx(float(pmf[1, 0].log()), rel=1e-12)
    step = 1e-5
    for index, name in enumerate(names):
        up, down = (
            held_out.log_likelihood(
                Calibration(*[v * math.exp(s * (i == index)) for i, v in enumerate(values)]), normal
            )[0]
            for s in (step, -step)
        )
        torch.testing.assert_close(slopes[name], (up - down) / (2 * step), rtol=1e-5, atol=1e-7)
