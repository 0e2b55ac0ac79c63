"""Models that are linear in their parameters, where the method makes fewer approximations.

For multinomial logistic regression and extreme learning machines g(x; theta) is linear in theta. The delta
method (eq:linearize) is then exact, so that sampling logits and sampling parameters are two ways to the same
numbers; and the only approximation left is that of Laplace, so that the intervals can be held against the
probabilities that generated the data.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import errbar
import oracle

LEVELS = (0.5, 0.8, 0.95)
LAPLACE_ALLOWANCE = 0.02  # the posterior of a logistic regression is not Gaussian: skewness costs O(1/N) coverage
N_TRAIN, N_REDRAWS, PRIOR_PRECISION = 120, 300, 1e-2
linear_models = pytest.mark.parametrize("name", ["logistic", "elm"])
every_fisher = pytest.mark.parametrize("fisher", ["ggn", "eta"])


def quantile_for(count: int) -> float:
    """The z that `count` standard normal numbers, dependent or not, all stay below but once in a million."""
    return float(stats.norm.isf(0.5e-6 / count))


def fitted(name: str, fisher: str) -> tuple[errbar.Posterior, torch.Tensor]:
    """A posterior of a linear model, and inputs it has not seen."""
    network = oracle.NETWORKS[name]
    data = [(network.inputs(30, 1), network.labels(30, 2))]
    posterior = errbar.fit(network.model(3), data, prior=errbar.Prior(1.5), last_layers=1, fisher=fisher)
    return posterior, network.inputs(5, 4)


# ---------------------------------------------------------------------------------- the delta method is exact


@linear_models
@every_fisher
@pytest.mark.parametrize(("temperature", "covariance_scale"), [(1.0, 1.0), (0.7, 2.0)])
def test_sampling_logits_and_sampling_parameters_agree(
    name: str, fisher: str, temperature: float, covariance_scale: float
) -> None:
    """eq:gmarg and eq:genMC estimate the same PMF and P^f; the difference of two means of K draws has error
    sqrt(2 v / K), v the variance of one draw."""
    posterior, x = fitted(name, fisher)
    posterior = posterior.with_calibration(temperature=temperature, covariance_scale=covariance_scale)
    K = 8000
    by_logits = posterior.predict(x, samples=K, seed=1)
    by_parameters = posterior.predict_by_parameters(x, samples=K, seed=2)
    z = quantile_for(by_logits.pmf.numel())
    assert torch.all((by_logits.pmf - by_parameters.pmf).abs() <= z * by_logits.std * (2.0 / K) ** 0.5)

    deviations = by_logits.samples() - by_logits.pmf[:, None]
    products = torch.einsum("bkm,bkl->bkml", deviations, deviations)
    error = (products.var(dim=1) * 2.0 / K).sqrt()
    z = quantile_for(error.numel())
    assert torch.all((by_logits.covariance - by_parameters.covariance).abs() <= z * error)


@linear_models
@every_fisher
def test_logits_of_sampled_parameters_have_the_logit_covariance(name: str, fisher: str) -> None:
    """Mean g(x) within sqrt(P_mm / K), covariance P^g within sqrt((P_mm P_ll + P_ml^2) / K)."""
    posterior, x = fitted(name, fisher)
    K = 20_000
    draws = posterior.sample_parameters(samples=K, seed=3)
    with torch.no_grad():
        g = torch.func.vmap(lambda values: torch.func.functional_call(posterior.model, values, (x,)))(draws)
    expected = posterior.logits(x)
    variance = expected.variance
    deviations = g - expected.mean
    mean_error = (variance / K).sqrt()
    assert torch.all(deviations.mean(dim=0).abs() <= quantile_for(mean_error.numel()) * mean_error)
    covariance = torch.einsum("kbm,kbl->bml", deviations, deviations) / K
    error = ((variance[:, :, None] * variance[:, None, :] + expected.covariance**2) / K).sqrt()
    assert torch.all((covariance - expected.covariance).abs() <= quantile_for(error.numel()) * error)


@linear_models
@every_fisher
def test_the_logit_covariance_does_not_know_the_point_of_linearisation(name: str, fisher: str) -> None:
    """P^g = Phi P Phi^T with features Phi that do not depend on theta: differences with steps of one do."""
    posterior, x = fitted(name, fisher)
    model = oracle.NETWORKS[name].model(3)
    names = [n for n, _ in model.named_parameters()]
    features = oracle.jacobians_by_differences(model, x, names, step=1.0)
    P = posterior.covariance().numpy()
    expected = np.array([oracle.logit_covariance(phi, P) for phi in features])
    assert np.max(np.abs(posterior.logits(x).covariance.numpy() - expected)) <= 1e-8 * np.max(expected)


# ------------------------------------------------------------------------------------------------- coverage


@functools.cache
def coverage(n_classes: int, fisher: str) -> dict[float, tuple[float, float]]:
    """Level -> how often the interval of f_m(x) holds the true probability, and the standard error of that.

    Every re-draw makes new inputs and labels from known parameters, finds the MAP estimate by Newton's method
    and asks for intervals at eight fixed points. Points and classes of one re-draw are dependent, re-draws
    are not: the error is the standard deviation over re-draws of their average, over sqrt(R).
    """
    rng = np.random.default_rng(17 + n_classes)
    truth = np.random.default_rng(41 + n_classes).standard_normal((n_classes, 3))
    points = np.random.default_rng(7).standard_normal((8, 2))
    true_pmf = torch.from_numpy(oracle.softmax(points @ truth[:, :2].T + truth[:, 2]))
    hits = {level: [] for level in LEVELS}
    for redraw in range(N_REDRAWS):
        x = rng.standard_normal((N_TRAIN, 2))
        pmf = oracle.softmax(x @ truth[:, :2].T + truth[:, 2])
        labels = np.sum(np.cumsum(pmf, axis=1)[:, :-1] < rng.random((N_TRAIN, 1)), axis=1)
        W = torch.from_numpy(oracle.newton_logistic_regression(x, labels, n_classes, PRIOR_PRECISION))
        model = nn.Linear(2, n_classes, dtype=torch.float64)
        with torch.no_grad():
            model.weight.copy_(W[:, :2])
            model.bias.copy_(W[:, 2])
        data = [(torch.from_numpy(x), torch.from_numpy(labels))]
        prior = errbar.Prior(PRIOR_PRECISION)
        posterior = errbar.fit(model, data, prior=prior, last_layers=1, fisher=fisher)
        prediction = posterior.predict(torch.from_numpy(points), samples=1000, seed=redraw)
        for level in LEVELS:
            lower, upper = prediction.interval(level)
            inside = (lower <= true_pmf) & (true_pmf <= upper)
            hits[level].append(float(inside.double().mean()))
    return {
        level: (float(np.mean(values)), float(np.std(values) / np.sqrt(N_REDRAWS))) for level, values in hits.items()
    }


@pytest.mark.parametrize("n_classes", [2, 3])
def test_intervals_of_the_full_fisher_cover_what_they_promise(n_classes: int) -> None:
    """Four standard errors of the experiment (4 to 6 % at level 0.8) and the allowance for Laplace."""
    for level, (covered, error) in coverage(n_classes, "ggn").items():
        assert error < 0.02, level
        assert abs(covered - level) <= 4.0 * error + LAPLACE_ALLOWANCE, level


def test_two_class_intervals_of_the_written_out_fisher_are_wider_by_the_root_of_two() -> None:
    """eta keeps half of the information about the one contrast: z becomes sqrt(2) z, 80 % becomes 93 %."""
    for level, (covered, error) in coverage(2, "eta").items():
        wide = stats.norm.cdf(np.sqrt(2.0) * stats.norm.isf((1.0 - level) / 2.0))
        assert abs(covered - (2.0 * wide - 1.0)) <= 4.0 * error + LAPLACE_ALLOWANCE, level
        assert covered - level > 4.0 * error, level


def test_three_class_intervals_of_the_written_out_fisher_cover_too_much() -> None:
    """Dropping the off-diagonal of diag f - f f^T loses information with any number of classes."""
    for level, (covered, error) in coverage(3, "eta").items():
        assert covered - level > 3.0 * error, level
        assert covered > coverage(3, "ggn")[level][0], level
