"""Sums over draws: against float64 oracles of the same draws, whatever K and the batch; and the Monte Carlo error."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import errbar
import oracle
from errbar._distributions.covariance import DiagonalCovariance, FactoredCovariance, FullCovariance
from errbar._distributions.logits import LogitGaussian
from errbar._distributions.sampling import GaussianSampler, GivenSampler

FORMS = ["full", "diagonal", "factored"]


def gaussian(
    form: str, *, rows: int = 2, classes: int = 4, shift: float = 0.0, spread: float = 1.0, dtype: torch.dtype
) -> LogitGaussian:
    """Logits of some rows, the first class above the others by `shift`, in each of the forms that a P^g can have."""
    generator = torch.Generator().manual_seed(3)
    mean = torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    mean[:, 0] += shift
    half = spread * torch.randn(rows, classes, classes, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(half[0])[0]
    weights = spread**2 * torch.rand(rows, classes, generator=generator, dtype=torch.float64)
    if form == "full":
        return LogitGaussian(mean.to(dtype), FullCovariance((half @ half.mT).to(dtype)))
    if form == "diagonal":
        return LogitGaussian(mean.to(dtype), DiagonalCovariance(weights.to(dtype)))
    form = FactoredCovariance(basis.to(dtype), weights.to(dtype), basis.T.to(dtype))
    return LogitGaussian(mean.to(dtype), form)


def float64_samples(prediction: errbar.Prediction, row: int) -> np.ndarray:
    """f⁽ᵏ⁾ (K, M) of the same draws, all in float64."""
    sampler = prediction.sampler
    assert isinstance(sampler, GaussianSampler)
    root, normal = sampler.root.values[row].double(), sampler.normal.double()
    spread = root[:, None] * normal if root.ndim == 1 else root @ normal
    logits = spread + sampler.mean[row].double()[:, None]
    return np.asarray(torch.softmax(logits, 0).T.numpy())


@pytest.mark.parametrize("shift", [0.0, 9.0], ids=["unsure", "confident"])
@pytest.mark.parametrize(
    ("form", "samples"), [("full", 20), ("full", 1000), ("diagonal", 1000), ("full", 30_000), ("diagonal", 1_000_000)]
)
def test_sums_over_draws_are_those_of_float64(samples: int, form: str, shift: float) -> None:
    rows = 1 if samples > 10_000 else 5
    prediction = gaussian(form, rows=rows, shift=shift, dtype=torch.float32).predict(samples, seed=1)
    risk = prediction.risk(0.3)
    for row in range(rows):
        f = float64_samples(prediction, row)
        pmf, covariance = oracle.pmf(f), oracle.pmf_covariance(f)
        expected = {
            "pmf": pmf,
            "covariance": covariance,
            "std": np.sqrt(np.diag(covariance)),
            "entropy": oracle.entropy(pmf),
            "mutual_information": oracle.mutual_information(f),
        }
        for name, value in expected.items():
            error = np.abs(getattr(prediction, name)[row].double().numpy() - value).max()
            assert error <= 1e-6, (name, error)
        assert abs(float(prediction.pmf[row].double().sum()) - 1) <= 3e-7
        # One draw next to the threshold may be on either side; the rest is the rounding of the share to float32.
        assert np.abs(risk[row].double().numpy() - oracle.risk(f, np.full(4, 0.3))).max() <= 1 / samples + 6e-8


@pytest.mark.parametrize("shift", [6.0, 12.0, 18.0])
def test_entropies_of_confident_inputs_have_all_their_digits(shift: float) -> None:
    """1 − f is 1e-3 to 1e-8, of which float32 has few digits or none; logits have five, so the entropies do."""
    prediction = gaussian("full", shift=shift, spread=0.3, dtype=torch.float32).predict(1000)
    for row in range(2):
        f = float64_samples(prediction, row)
        others, top = oracle.pmf(f)[1:], -math.fsum(oracle.pmf(f)[1:])
        entropy = -math.fsum(others * np.log(others)) - (1 + top) * math.log1p(top)
        ratio = f / oracle.pmf(f)
        information = math.fsum((f * np.log(ratio) - f + oracle.pmf(f)).ravel()) / len(f)
        assert float(prediction.entropy[row]) == pytest.approx(entropy, rel=1e-5)
        assert float(prediction.mutual_information[row]) == pytest.approx(information, rel=1e-4)


@pytest.mark.parametrize("spread", [1e-1, 1e-2, 1e-3])
def test_small_mutual_information_has_its_digits(spread: float) -> None:
    """Entropies of order 1 whose difference is 1e-3 to 1e-7."""
    prediction = gaussian("full", spread=spread, dtype=torch.float32).predict(1000)
    truth = gaussian("full", spread=spread, dtype=torch.float64).predict(1000)
    torch.testing.assert_close(
        prediction.mutual_information.double(), truth.mutual_information, rtol=1e-4 + 1e-7 / spread, atol=0
    )


@pytest.mark.parametrize("samples", [20, 1000, 10_000])
@pytest.mark.parametrize("form", FORMS)
def test_without_covariance_float32_is_softmax(form: str, samples: int) -> None:
    logits = gaussian(form, rows=40, classes=10, dtype=torch.float32)
    prediction = logits.scaled(0.0).predict(samples)
    expected = torch.softmax(logits.mean, 1)
    torch.testing.assert_close(prediction.pmf, expected, rtol=0, atol=1.2e-7)
    assert float((prediction.pmf.double().sum(1) - 1).abs().max()) <= 3e-7
    assert float(prediction.mutual_information.max()) <= 1e-12
    for draws in ("antithetic", "sobol"):
        assert float(logits.scaled(0.0).predict(20, draws=draws).standard_error.max()) <= 1e-7


@pytest.mark.parametrize("samples", [3, 1000])
def test_equal_draws_have_no_standard_deviation(samples: int) -> None:
    draws = torch.rand(5, 1, 7, generator=torch.Generator().manual_seed(0)).expand(5, samples, 7)
    prediction = errbar.Prediction(draws.mean(1), GivenSampler(draws.mT.contiguous()))
    assert torch.equal(prediction.std, torch.zeros(5, 7))
    assert torch.equal(prediction.standard_error, torch.zeros(5, 7))


def test_logits_far_from_zero_are_as_good() -> None:
    """Softmax takes the largest away, and that is exact where it counts; a mean over the classes is not."""
    mean = torch.tensor([[300.0, 299.0, -900.0, -100.0]])
    logits = LogitGaussian(mean, torch.zeros(1, 4, 4))
    torch.testing.assert_close(logits.predict(50).pmf, torch.softmax(mean, 1), rtol=0, atol=1e-7)


def test_small_probabilities_keep_their_digits() -> None:
    """A class that is likely at ĝ and hardly ever among the draws: f̂ is far below softmax(ĝ)."""
    variance = torch.full((1, 300), 900.0)
    variance[:, 0] = 0
    prediction = LogitGaussian(torch.zeros(1, 300), DiagonalCovariance(variance)).predict(1000)
    expected = oracle.pmf(float64_samples(prediction, 0))
    assert expected[0] < 1e-12
    np.testing.assert_allclose(prediction.pmf[0].double().numpy(), expected, rtol=1e-4)


def network(scale: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 5))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("samples", [1000, 10_000])
def test_inputs_in_a_batch_are_predicted_as_alone(samples: int) -> None:
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    posterior = errbar.fit(network(1.0), [x], last_layers=1, prior=errbar.Prior(20.0))
    together = posterior.predict(x, samples)
    alone = [posterior.predict(row, samples) for row in x.split(1)]
    for name in ("pmf", "std", "covariance"):
        apart = torch.cat([getattr(one, name) for one in alone])
        torch.testing.assert_close(apart, getattr(together, name), rtol=0, atol=1e-6)
    for name in ("entropy", "mutual_information"):
        apart = torch.cat([getattr(one, name) for one in alone])
        torch.testing.assert_close(apart, getattr(together, name), rtol=3e-5, atol=0)
    steps = (torch.cat([one.risk(0.2) for one in alone]) - together.risk(0.2)).abs() * samples
    assert float(steps.max()) <= 1.001


def test_sampled_parameters_are_summed_as_well() -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    model = network(1.0)
    posterior = errbar.fit(model, [x], last_layers=1).with_calibration(covariance_scale=0.0)
    with torch.no_grad():
        expected = torch.softmax(model(x), 1)
    torch.testing.assert_close(posterior.predict_by_parameters(x, 500).pmf, expected, rtol=0, atol=1.2e-7)
    values = torch.full((1, 2, 100_003), 0.3)
    assert float((errbar.Prediction.from_sampler(GivenSampler(values)).pmf - 0.3).abs().max()) <= 3e-8


def test_nan_in_one_class_is_in_every_summary() -> None:
    values = torch.full((1, 3, 4), 1 / 3)
    values[0, 1, 2] = math.nan
    prediction = errbar.Prediction.from_sampler(GivenSampler(values))
    for summary in (prediction.entropy, prediction.mutual_information, prediction.standard_error[:, 1]):
        assert bool(summary.isnan().all())


# ----------------------------------------------------------------------------------------------- Monte Carlo error


def even() -> LogitGaussian:
    """g = (0, z, −z) and a little more: f of the first class is an even function of z, and antithetic pairs agree."""
    direction = torch.tensor([0.0, 2.0, -2.0], dtype=torch.float64)
    covariance = torch.outer(direction, direction) + 1e-4 * torch.eye(3, dtype=torch.float64)
    return LogitGaussian(torch.zeros(1, 3, dtype=torch.float64), covariance[None])


CASES = {
    "even": even,
    "full": lambda: gaussian("full", rows=1, dtype=torch.float64),
    "diagonal": lambda: gaussian("diagonal", rows=1, spread=2.0, dtype=torch.float64),
    "factored": lambda: gaussian("factored", rows=1, spread=2.0, dtype=torch.float64),
}


@pytest.mark.parametrize("samples", [32, 33])
@pytest.mark.parametrize("draws", ["random", "antithetic", "sobol"])
@pytest.mark.parametrize("case", list(CASES))
def test_the_standard_error_is_the_spread_over_seeds(case: str, draws: str, samples: int) -> None:
    """E[standard_error²] = Var f̂; both are means over seeds, whose relative errors are those of χ² variables.

    The variance of S means has a relative error of √(2/(S − 1)), and 16 replicates one of √(2/15/S) at most; PMFs of
    32 draws have tails, hence five of these errors and not four.
    """
    logits, seeds = CASES[case](), 100 if draws == "sobol" else 300
    predictions = [logits.predict(samples, seed, draws=draws) for seed in range(seeds)]
    spread: Tensor = torch.cat([one.pmf for one in predictions]).var(0)
    estimate = torch.cat([one.standard_error for one in predictions]).square().mean(0)
    tolerance = 5 * math.sqrt(2 / (seeds - 1) + 2 / (15 * seeds))
    assert float((estimate / spread - 1).abs().max()) <= tolerance


def test_antithetic_draws_of_even_functions_have_larger_errors_than_random_ones() -> None:
    random, antithetic = (even().predict(4000, draws=draws).standard_error[0, 0] for draws in ("random", "antithetic"))
    assert float(antithetic / random) == pytest.approx(math.sqrt(2), rel=0.05)


@pytest.mark.parametrize(("draws", "samples"), [("random", 1), ("antithetic", 1), ("antithetic", 2), ("antithetic", 3)])
def test_draws_that_cannot_tell_their_error_have_none(draws: str, samples: int) -> None:
    """One independent draw has no spread; that is no certainty."""
    assert bool(CASES["full"]().predict(samples, draws=draws).standard_error.isnan().all())


def test_the_standard_error_of_sobol_points_follows_from_the_seed() -> None:
    first, again, other = (CASES["factored"]().predict(50, seed, draws="sobol").standard_error for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert bool(CASES["full"]().predict(1, draws="sobol").standard_error.isfinite().all())
