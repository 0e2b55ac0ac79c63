"""The package against the paper's formulas written out sample by sample (`oracle.py`).

Algebra is compared at 1e-8, relative to the largest entry. Monte Carlo results are compared within the
standard error that the oracle's own samples imply, times the normal quantile at which a correct package would
fail one comparison in a million.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

import errbar
import oracle
from comparison import assert_close

PRIOR_PRECISION = 1.7
N_TRAIN, N_TEST = 23, 4
SUBSETS = [
    *[(name, subset) for name in ("mlp", "cnn", "residual") for subset in (1, 2, "all")],
    *[(name, subset) for name in ("logistic", "elm", "one_logit") for subset in (1, "all")],
]
properties = settings(deadline=None, derandomize=True, max_examples=40)


# --------------------------------------------------------------------------------------------- helpers


def numpy(value: torch.Tensor | np.ndarray | float) -> np.ndarray:
    """Any number or tensor as a float64 array."""
    return value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value, dtype=np.float64)


def assert_within(actual: torch.Tensor, expected: np.ndarray, standard_error: np.ndarray) -> None:
    """Every entry within z standard errors, z such that all of them hold but once in a million runs.

    The union bound over the entries needs no independence. The 1e-12 is for entries without any error.
    """
    actual = numpy(actual)
    assert actual.shape == expected.shape
    z = stats.norm.isf(0.5e-6 / expected.size)
    excess = np.abs(actual - expected) - z * standard_error
    assert np.max(excess) <= 1e-12, f"{np.max(excess):.3g} beyond {z:.2f} standard errors"


def mean_error(variance: np.ndarray, *counts: int) -> np.ndarray:
    """Standard error of a mean of K draws, or of the difference of two means of K and K' draws."""
    return np.sqrt(variance * sum(1.0 / count for count in counts))


def covariance_error(f: np.ndarray, *counts: int) -> np.ndarray:
    """Standard error of the entries of a sample covariance, from the fourth moments of samples (K, M)."""
    deviations = f - f.mean(axis=0)
    products = deviations[:, :, None] * deviations[:, None, :]
    return mean_error(products.var(axis=0), *counts)


def in_batches(x: torch.Tensor, y: torch.Tensor, size: int = 9) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of uneven size: the last one is short."""
    return list(zip(x.split(size), y.split(size), strict=True))


def selection(subset: int | str) -> dict:
    """The keyword that selects the parameters."""
    return {"parameters": "all"} if subset == "all" else {"last_layers": subset}


@dataclass(frozen=True)
class Problem:
    """A network, its data, and what the oracle says about them."""

    network: oracle.Network
    model: nn.Module
    names: list[str]
    x: torch.Tensor
    y: torch.Tensor
    x_test: torch.Tensor
    g: np.ndarray
    g_test: np.ndarray
    J: list[np.ndarray]
    J_test: list[np.ndarray]

    @property
    def prior(self) -> np.ndarray:
        return np.full(self.J[0].shape[1], PRIOR_PRECISION)

    def information(self, fisher: str) -> np.ndarray:
        return oracle.information(self.J, self.g, fisher)

    def covariance(self, fisher: str) -> np.ndarray:
        return oracle.covariance(self.information(fisher), self.prior)

    def logit_covariances(self, fisher: str) -> np.ndarray:
        P = self.covariance(fisher)
        return np.array([oracle.logit_covariance(J_n, P) for J_n in self.J_test])


@functools.cache
def problem(name: str, subset: int | str, seed: int = 0) -> Problem:
    """The oracle's view of one network; cached because central differences and double loops are slow."""
    network = oracle.NETWORKS[name]
    model = network.model(seed)
    names = network.names(model, subset)
    x, x_test = network.inputs(N_TRAIN, 1), network.inputs(N_TEST, 2)
    return Problem(
        network,
        model,
        names,
        x,
        network.labels(N_TRAIN, 3),
        x_test,
        oracle.logits(model, x),
        oracle.logits(model, x_test),
        oracle.jacobians(model, x, names),
        oracle.jacobians(model, x_test, names),
    )


def fitted(case: Problem, subset: int | str, fisher: str, **changes: object) -> errbar.Posterior:
    """errbar's posterior for a problem."""
    options = {"prior": errbar.Prior(PRIOR_PRECISION), "fisher": fisher, **selection(subset), **changes}
    return errbar.fit(case.model, in_batches(case.x, case.y), **options)


def random_gaussians(seed: int, count: int, B: int, M: int) -> tuple[np.ndarray, np.ndarray]:
    """Means (count, B, M) and well-conditioned covariances (count, B, M, M)."""
    rng = np.random.default_rng(seed)
    roots = rng.standard_normal((count, B, M, M))
    return rng.standard_normal((count, B, M)), roots @ np.swapaxes(roots, -1, -2) + 0.2 * np.eye(M)


def gaussian(mean: np.ndarray, covariance: np.ndarray) -> errbar.LogitGaussian:
    """A LogitGaussian from arrays."""
    return errbar.LogitGaussian(torch.from_numpy(mean), torch.from_numpy(covariance))


def joint(z: np.ndarray, R: np.ndarray) -> errbar.JointLogits:
    """JointLogits from arrays."""
    return errbar.JointLogits(torch.from_numpy(z), torch.from_numpy(R))


every_subset = pytest.mark.parametrize(("name", "subset"), SUBSETS)
every_fisher = pytest.mark.parametrize("fisher", ["ggn", "eta"])


# --------------------------------------------------------------------------- the oracle against itself


@pytest.mark.parametrize("name", list(oracle.NETWORKS))
def test_backward_passes_equal_central_differences(name: str) -> None:
    """The oracle's own Jacobians are checked by a method that knows nothing of autograd."""
    case = problem(name, "all")
    differences = oracle.jacobians_by_differences(case.model, case.x_test, case.names)
    assert_close(np.array(case.J_test), np.array(differences), tolerance=1e-7)


@every_fisher
def test_the_root_of_the_logit_fisher_squares_to_it(fisher: str) -> None:
    """R R^T = diag f - f f^T, and diag sqrt(eta) squared is diag eta."""
    f = oracle.softmax(np.array([0.3, -1.2, 2.0, 0.1]))
    root = oracle.logit_fisher_root(f, fisher)
    assert_close(root @ root.T, oracle.logit_fisher(f, fisher), tolerance=1e-14)


def test_the_contrast_basis_is_orthonormal_and_sums_to_zero() -> None:
    """Helmert's contrasts span the complement of the common shift."""
    B = oracle.contrast_basis(5)
    assert_close(B.T @ B, np.eye(4), tolerance=1e-14)
    assert np.max(np.abs(B.sum(axis=0))) < 1e-14


# -------------------------------------------------------------------------------- parameter covariance


@every_subset
@every_fisher
def test_information_is_the_sum_over_samples_and_classes(name: str, subset: int | str, fisher: str) -> None:
    """eq:information_with_M and eq:parmaCovariance; the parameters and their order are the contract's."""
    case = problem(name, subset)
    information = fitted(case, subset, fisher).information
    assert list(information.parameter_names) == case.names
    assert information.n_parameters == case.J[0].shape[1]
    assert information.n_samples == N_TRAIN
    assert information.dense().dtype == torch.float64
    assert_close(information.dense(), case.information(fisher))


@every_subset
def test_results_are_numbers_and_not_graphs(name: str, subset: int | str) -> None:
    """A result that requires a gradient keeps the graphs of all batches alive, and the memory they hold."""
    case = problem(name, subset)
    posterior = fitted(case, subset, "ggn")
    logits, joint_logits = posterior.logits(case.x_test), posterior.joint_logits(case.x_test)
    prediction = posterior.predict(case.x_test, samples=20)
    by_parameters = posterior.predict_by_parameters(case.x_test, samples=20, seed=0)
    results = {
        "information": posterior.information.dense(),
        "covariance": posterior.covariance(),
        "logits": logits.mean,
        "logit covariance": logits.covariance,
        "joint logits": joint_logits.mean,
        "joint covariance": joint_logits.covariance,
        "pmf": prediction.pmf,
        "pmf covariance": prediction.covariance,
        "pmf by parameters": by_parameters.pmf,
        **posterior.sample_parameters(samples=2, seed=0),
    }
    assert [what for what, value in results.items() if value.requires_grad] == []


@every_subset
@every_fisher
def test_covariance_is_the_inverse_of_information_plus_prior(name: str, subset: int | str, fisher: str) -> None:
    """eq:PN approx."""
    case = problem(name, subset)
    covariance = fitted(case, subset, fisher).covariance()
    assert covariance.dtype == torch.float64
    assert_close(covariance, case.covariance(fisher))


@every_subset
@every_fisher
def test_covariance_equals_the_recursion_of_the_paper(name: str, subset: int | str, fisher: str) -> None:
    """eq:recUpdate_all, started at P_0 and run sample by sample, ends at the same covariance."""
    case = problem(name, subset)
    expected = oracle.recursive_covariance(case.J, case.g, case.prior, fisher)
    assert_close(fitted(case, subset, fisher).covariance(), expected)


@every_subset
def test_information_does_not_depend_on_the_labels(name: str, subset: int | str) -> None:
    """The Fisher information is an expectation over the labels: without them it is the same."""
    case = problem(name, subset)
    bare = errbar.collect(case.model, [(case.x,)], fisher="ggn", **selection(subset))
    assert_close(bare.dense(), case.information("ggn"))


@every_fisher
@pytest.mark.parametrize("prefixes", [["mix"], ["embed", "head"], ["final_norm", "norm.weight"], ["head.bias"]])
def test_named_parameters_keep_the_order_of_the_model(prefixes: list[str], fisher: str) -> None:
    """The flat order is that of `named_parameters`, neither the order of running nor that of the request."""
    network = oracle.NETWORKS["residual"]
    case = problem("residual", "all")
    names = [name for name, _ in case.model.named_parameters() if any(f"{name}.".startswith(f"{p}.") for p in prefixes)]
    J = oracle.jacobians(case.model, case.x, names)
    x, y = network.inputs(N_TRAIN, 1), network.labels(N_TRAIN, 3)
    information = errbar.collect(case.model, in_batches(x, y), parameters=prefixes, fisher=fisher)
    assert list(information.parameter_names) == names
    assert_close(information.dense(), oracle.information(J, case.g, fisher))


def test_one_logit_has_the_same_information_with_both_fishers() -> None:
    """For the logits (0, g) only one gradient is not zero, and both formulas weigh it by f (1 - f)."""
    case = problem("one_logit", "all")
    assert_close(case.information("eta"), case.information("ggn"))
    assert_close(fitted(case, "all", "eta").covariance(), numpy(fitted(case, "all", "ggn").covariance()))


# ----------------------------------------------------------------------------------------------- prior


def test_a_prior_may_be_given_per_module() -> None:
    """A mapping from module name to precision; every parameter of the module gets its module's."""
    case = problem("residual", "all")
    precisions = {"head": 0.5, "mix": 2.0, "norm": 3.0, "embed": 0.7, "final_norm": 5.0}
    sizes = dict(case.model.named_parameters())
    flat = np.concatenate([np.full(sizes[n].numel(), precisions[n.rpartition(".")[0]]) for n in case.names])
    posterior = fitted(case, "all", "ggn", prior=errbar.Prior(precisions))
    assert_close(posterior.covariance(), oracle.covariance(case.information("ggn"), flat))


@every_fisher
def test_a_prior_may_be_given_per_parameter(fisher: str) -> None:
    """A tensor of n precisions, in the flat order."""
    case = problem("residual", 2)
    flat = np.random.default_rng(4).uniform(0.5, 4.0, size=case.J[0].shape[1])
    posterior = fitted(case, 2, fisher, prior=errbar.Prior(torch.from_numpy(flat)))
    assert_close(posterior.covariance(), oracle.covariance(case.information(fisher), flat))


def test_weight_decay_on_a_mean_loss_is_a_prior_of_n_times_its_size() -> None:
    """wd/2 |theta|^2 added to a mean over N samples is N wd/2 |theta|^2 added to the sum."""
    case = problem("mlp", 2)
    posterior = fitted(case, 2, "ggn", prior=errbar.Prior.from_weight_decay(0.03, N_TRAIN))
    flat = np.full(len(case.prior), 0.03 * N_TRAIN)
    assert_close(posterior.covariance(), oracle.covariance(case.information("ggn"), flat))


def test_another_prior_needs_no_second_look_at_the_data() -> None:
    """`with_prior` replaces the prior and keeps the information."""
    case = problem("mlp", "all")
    posterior = fitted(case, "all", "ggn").with_prior(errbar.Prior(0.4))
    expected = oracle.covariance(case.information("ggn"), np.full(len(case.prior), 0.4))
    assert_close(posterior.covariance(), expected)


# -------------------------------------------------------------------------------- more data, less data


@every_subset
@every_fisher
def test_update_equals_a_fit_on_the_union(name: str, subset: int | str, fisher: str) -> None:
    """Information adds up; prior, temperature and covariance scale stay."""
    case = problem(name, subset)
    first = errbar.fit(
        case.model,
        [(case.x[:10], case.y[:10])],
        prior=errbar.Prior(PRIOR_PRECISION),
        fisher=fisher,
        **selection(subset),
    ).with_calibration(temperature=1.3, covariance_scale=0.8)
    updated = first.update([(case.x[10:], case.y[10:])])
    assert updated.information.n_samples == N_TRAIN
    assert (updated.temperature, updated.covariance_scale) == (1.3, 0.8)
    assert_close(updated.information.dense(), case.information(fisher))
    assert_close(updated.covariance(), case.covariance(fisher))
    assert_close(first.information.dense(), oracle.information(case.J[:10], case.g[:10], fisher))


@every_subset
@every_fisher
def test_forget_equals_a_fit_on_the_difference(name: str, subset: int | str, fisher: str) -> None:
    """Subtracting what some samples said leaves what the others said."""
    case = problem(name, subset)
    kept = fitted(case, subset, fisher).forget([(case.x[15:], case.y[15:])])
    expected = oracle.information(case.J[:15], case.g[:15], fisher)
    assert kept.information.n_samples == 15
    assert_close(kept.information.dense(), expected)
    assert_close(kept.covariance(), oracle.covariance(expected, case.prior))


@every_fisher
def test_discounted_information_is_the_multiple(fisher: str) -> None:
    """I1 + I2 * 0.5: a forgetting factor, with the count of samples discounted too."""
    case = problem("mlp", 2)
    first = errbar.collect(case.model, [(case.x[:10], case.y[:10])], last_layers=2, fisher=fisher)
    second = errbar.collect(case.model, [(case.x[10:], case.y[10:])], last_layers=2, fisher=fisher)
    total = first * 0.5 + second
    expected = 0.5 * oracle.information(case.J[:10], case.g[:10], fisher)
    expected = expected + oracle.information(case.J[10:], case.g[10:], fisher)
    assert total.n_samples == pytest.approx(0.5 * 10 + N_TRAIN - 10)
    assert_close(total.dense(), expected)


# -------------------------------------------------------------------------------------------- evidence


@every_subset
@every_fisher
def test_log_evidence_is_that_of_the_laplace_approximation(name: str, subset: int | str, fisher: str) -> None:
    """eq:laplace approx, integrated over the selected parameters; the temperatures do not enter."""
    case = problem(name, subset)
    expected = oracle.log_evidence(
        oracle.log_likelihood(oracle.softmax(case.g), case.y.numpy()),
        oracle.parameter_vector(case.model, case.names),
        case.prior,
        case.covariance(fisher),
    )
    posterior = fitted(case, subset, fisher)
    assert_close(float(posterior.log_evidence()), expected)
    calibrated = posterior.with_calibration(temperature=2.0, covariance_scale=0.5)
    assert_close(float(calibrated.log_evidence()), expected)


def test_log_evidence_follows_updates() -> None:
    """The likelihood of the new samples joins that of the old ones."""
    case = problem("mlp", "all")
    first = errbar.fit(case.model, [(case.x[:10], case.y[:10])], prior=errbar.Prior(PRIOR_PRECISION), parameters="all")
    updated = first.update([(case.x[10:], case.y[10:])])
    assert_close(float(updated.log_evidence()), float(fitted(case, "all", "ggn").log_evidence()))


def test_log_evidence_needs_labels() -> None:
    """There is no likelihood without labels; the error says so."""
    case = problem("mlp", 1)
    posterior = errbar.fit(case.model, [case.x], last_layers=1)
    with pytest.raises(errbar.ErrbarError, match=r"(?i)label"):
        posterior.log_evidence()


# ------------------------------------------------------------------------------------- logit Gaussians


@every_subset
@every_fisher
def test_logit_gaussian_is_the_delta_method(name: str, subset: int | str, fisher: str) -> None:
    """eq:linearize: mean g(x), covariance J P J^T."""
    case = problem(name, subset)
    result = fitted(case, subset, fisher).logits(case.x_test)
    expected = case.logit_covariances(fisher)
    assert len(result) == N_TEST
    assert result.mean.dtype == result.covariance.dtype == torch.float64
    assert_close(result.mean, case.g_test)
    assert_close(result.covariance, expected)
    assert_close(result.variance, np.array([np.diag(P) for P in expected]))


@every_subset
@every_fisher
def test_joint_logits_have_the_blocks_of_the_paper(name: str, subset: int | str, fisher: str) -> None:
    """R_ij = J_i P J_j^T for every pair of frames."""
    case = problem(name, subset)
    result = fitted(case, subset, fisher).joint_logits(case.x_test)
    assert_close(result.mean, case.g_test)
    assert_close(result.covariance, oracle.joint_logit_covariance(case.J_test, case.covariance(fisher)))


@pytest.mark.parametrize(("name", "subset"), [("mlp", 2), ("elm", 1), ("cnn", "all"), ("one_logit", "all")])
@every_fisher
def test_calibration_divides_the_logits_and_scales_the_covariance(name: str, subset: int | str, fisher: str) -> None:
    """A calibrated posterior is N(g / T, T_c P^g / T^2), for one input and for joint frames; P stays."""
    case = problem(name, subset)
    T, T_c = 1.6, 0.35
    posterior = fitted(case, subset, fisher).with_calibration(temperature=T, covariance_scale=T_c)
    assert (posterior.temperature, posterior.covariance_scale) == (T, T_c)
    assert_close(posterior.covariance(), case.covariance(fisher))
    assert_close(posterior.logits(case.x_test).mean, case.g_test / T)
    assert_close(posterior.logits(case.x_test).covariance, T_c * case.logit_covariances(fisher) / T**2)
    R = oracle.joint_logit_covariance(case.J_test, case.covariance(fisher))
    assert_close(posterior.joint_logits(case.x_test).mean, case.g_test / T)
    assert_close(posterior.joint_logits(case.x_test).covariance, T_c * R / T**2)


@every_fisher
@pytest.mark.parametrize(("name", "subset"), [("mlp", 2), ("logistic", 1)])
def test_without_covariance_only_temperature_scaling_is_left(name: str, subset: int | str, fisher: str) -> None:
    """T_c = 0 is eq:temp scaling: no sampling error, no spread."""
    case = problem(name, subset)
    posterior = fitted(case, subset, fisher).with_calibration(temperature=2.5, covariance_scale=0.0)
    prediction = posterior.predict(case.x_test, samples=50)
    assert_close(prediction.pmf, oracle.tempered_softmax(case.g_test, 2.5))
    assert np.max(np.abs(numpy(prediction.covariance))) < 1e-15


def test_tempered_scaled_and_centered_are_linear_maps() -> None:
    """tempered(T) divides the logits, scaled(T_c) scales the covariance, centered() keeps the contrasts."""
    means, covariances = random_gaussians(seed=8, count=1, B=3, M=4)
    value = gaussian(means[0], covariances[0])
    projection = np.eye(4) - np.full((4, 4), 0.25)
    assert_close(value.tempered(1.7).mean, means[0] / 1.7)
    assert_close(value.tempered(1.7).covariance, covariances[0] / 1.7**2)
    assert_close(value.scaled(0.3).mean, means[0])
    assert_close(value.scaled(0.3).covariance, 0.3 * covariances[0])
    assert_close(value.centered().mean, oracle.center(means[0]))
    assert_close(value.centered().covariance, projection @ covariances[0] @ projection)
    assert_close(value[1:].mean, means[0, 1:])
    assert_close(value[1:].covariance, covariances[0, 1:])


# ------------------------------------------------------------------------------------------ prediction


@every_subset
@every_fisher
def test_samples_have_the_contrasts_of_the_logit_gaussian(name: str, subset: int | str, fisher: str) -> None:
    """eq:gmarg: ln f^(k), centered, is a draw of the contrasts of N(g, P^g).

    The mean of K Gaussian draws has variance v/K, a sample covariance (v_i v_j + c_ij^2)/K.
    """
    case = problem(name, subset)
    K = 4000
    f = numpy(fitted(case, subset, fisher).predict(case.x_test, samples=K, seed=3).samples())
    M = case.g_test.shape[1]
    assert f.shape == (N_TEST, K, M)
    projection = np.eye(M) - np.full((M, M), 1.0 / M)
    for f_n, g_n, P_n in zip(f, case.g_test, case.logit_covariances(fisher), strict=True):
        contrasts = oracle.center(np.log(f_n)) - oracle.center(g_n)
        P = projection @ P_n @ projection
        variance = np.diag(P)
        assert_within(contrasts.mean(axis=0), np.zeros(M), mean_error(variance, K))
        assert_within(contrasts.T @ contrasts / K, P, mean_error(np.outer(variance, variance) + P**2, K))


@every_subset
@every_fisher
def test_pmf_and_its_covariance_are_the_moments_of_the_marginal(name: str, subset: int | str, fisher: str) -> None:
    """eq:gmarg against the oracle's own draws: the errors of both sample sizes add up."""
    case = problem(name, subset)
    K, K_oracle = 4000, 40_000
    prediction = fitted(case, subset, fisher).predict(case.x_test, samples=K, seed=1)
    for n, (g_n, P_n) in enumerate(zip(case.g_test, case.logit_covariances(fisher), strict=True)):
        f = oracle.marginal_samples(g_n, P_n, K_oracle, seed=100 + n)
        P_f = oracle.pmf_covariance(f)
        assert_within(prediction.pmf[n], oracle.pmf(f), mean_error(np.diag(P_f), K, K_oracle))
        assert_within(prediction.covariance[n], P_f, covariance_error(f, K, K_oracle))


@every_subset
@every_fisher
def test_risk_is_the_probability_of_exceeding_the_threshold(name: str, subset: int | str, fisher: str) -> None:
    """Section Risk, for one threshold and for one per class, against the oracle's own draws.

    Indicators have variance r (1 - r); half a count keeps the error of a share near 0 or 1 from vanishing.
    """
    case = problem(name, subset)
    K, K_oracle = 4000, 40_000
    M = case.g_test.shape[1]
    thresholds = np.linspace(0.2, 0.5, M)
    prediction = fitted(case, subset, fisher).predict(case.x_test, samples=K, seed=2)
    for n, (g_n, P_n) in enumerate(zip(case.g_test, case.logit_covariances(fisher), strict=True)):
        f = oracle.marginal_samples(g_n, P_n, K_oracle, seed=200 + n)
        for argument, gamma in ((0.3, np.full(M, 0.3)), (torch.from_numpy(thresholds), thresholds)):
            expected = oracle.risk(f, gamma)
            spread = np.maximum(expected * (1.0 - expected), 0.5 / K)
            assert_within(prediction.risk(argument)[n], expected, mean_error(spread, K, K_oracle))


@pytest.mark.parametrize(("name", "subset"), [("mlp", 2), ("elm", 1), ("one_logit", "all")])
@every_fisher
def test_summaries_are_those_of_the_samples(name: str, subset: int | str, fisher: str) -> None:
    """PMF, P^f with 1/K, risk, interval, entropies: all are functions of one set of samples."""
    case = problem(name, subset)
    K = 777
    prediction = fitted(case, subset, fisher).predict(case.x_test, samples=K, seed=5)
    M = case.g_test.shape[1]
    gamma = np.linspace(0.1, 0.4, M)
    for n, f in enumerate(numpy(prediction.samples())):
        assert_close(f.sum(axis=1), np.ones(K), tolerance=1e-12)
        assert_close(prediction.pmf[n], oracle.pmf(f))
        assert_close(prediction.covariance[n], oracle.pmf_covariance(f))
        assert_close(prediction.std[n], np.sqrt(np.diag(oracle.pmf_covariance(f))))
        # 1/K or 1/(K - 1) inside the standard error: half a part in K.
        standard_error = np.sqrt(np.diag(oracle.pmf_covariance(f)) / K)
        assert_close(prediction.standard_error[n], standard_error, tolerance=1.0 / K)
        assert_close(prediction.risk(0.25)[n], oracle.risk(f, np.full(M, 0.25)), tolerance=1e-12)
        assert_close(prediction.risk(torch.from_numpy(gamma))[n], oracle.risk(f, gamma), tolerance=1e-12)
        assert int(prediction.label[n]) == int(np.argmax(oracle.pmf(f)))
        assert_close(prediction.confidence[n], np.max(oracle.pmf(f)))
        assert_close(prediction.entropy[n], oracle.entropy(oracle.pmf(f)))
        assert_close(prediction.mutual_information[n], oracle.mutual_information(f), tolerance=1e-7)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
@every_fisher
def test_interval_is_equal_tailed(level: float, fisher: str) -> None:
    """Its ends are sample quantiles at (1 - level)/2 and (1 + level)/2, whatever their definition."""
    case = problem("mlp", 2)
    prediction = fitted(case, 2, fisher).predict(case.x_test, samples=1000, seed=6)
    ends = prediction.interval(level)
    for n, f in enumerate(numpy(prediction.samples())):
        for end, (below, above) in zip(ends, oracle.interval_brackets(f, level), strict=True):
            assert end.shape == (N_TEST, 3)
            assert np.all(numpy(end[n]) >= below - 1e-12)
            assert np.all(numpy(end[n]) <= above + 1e-12)


def test_risk_is_strict() -> None:
    """A probability that equals the threshold does not exceed it."""
    certain = gaussian(np.zeros((1, 2)), np.zeros((1, 2, 2))).predict(samples=10)
    assert_close(certain.pmf, np.array([[0.5, 0.5]]), tolerance=1e-15)
    assert numpy(certain.risk(0.5)).tolist() == [[0.0, 0.0]]
    assert numpy(certain.risk(0.4999)).tolist() == [[1.0, 1.0]]


def test_all_inputs_share_the_draws() -> None:
    """The Mahalanobis length of draw k depends on no basis, only on the draw: all inputs have the same."""
    case = problem("mlp", 2)
    f = numpy(fitted(case, 2, "ggn").predict(case.x_test, samples=200, seed=7).samples())
    B = oracle.contrast_basis(3)
    lengths = []
    for f_n, g_n, P_n in zip(f, case.g_test, case.logit_covariances("ggn"), strict=True):
        contrasts = (np.log(f_n) - g_n) @ B
        lengths.append(np.sum(contrasts @ np.linalg.inv(B.T @ P_n @ B) * contrasts, axis=1))
    for other in lengths[1:]:
        assert_close(other, lengths[0], tolerance=1e-7)


@every_fisher
def test_a_prediction_does_not_depend_on_its_batch(fisher: str) -> None:
    """The same input alone, in another place, and with other companions."""
    case = problem("cnn", 2)
    posterior = fitted(case, 2, fisher)
    together = posterior.predict(case.x_test, samples=300, seed=4)
    for n in range(N_TEST):
        alone = posterior.predict(case.x_test[n : n + 1], samples=300, seed=4)
        assert_close(alone.pmf[0], numpy(together.pmf[n]))
        assert_close(alone.covariance[0], numpy(together.covariance[n]))


def test_seeds_change_the_draws_and_nothing_else_does() -> None:
    """Equal seeds give equal samples; different seeds do not."""
    case = problem("mlp", 2)
    posterior = fitted(case, 2, "ggn")
    first, again, other = (posterior.predict(case.x_test, samples=100, seed=s).samples() for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert float((first - other).abs().max()) > 1e-3


# ------------------------------------------------------------------------------- parameters as samples


@pytest.mark.parametrize(("name", "subset"), [("mlp", "all"), ("residual", 2), ("elm", 1), ("cnn", 2)])
@every_fisher
def test_sampled_parameters_have_the_moments_of_the_posterior(name: str, subset: int | str, fisher: str) -> None:
    """theta^(k) ~ N(theta, P), without T and T_c, shaped like the parameters."""
    case = problem(name, subset)
    K = 5000
    posterior = fitted(case, subset, fisher).with_calibration(temperature=3.0, covariance_scale=7.0)
    draws = posterior.sample_parameters(samples=K, seed=11)
    assert list(draws) == case.names
    shapes = {n: tuple(p.shape) for n, p in case.model.named_parameters()}
    assert {n: tuple(value.shape) for n, value in draws.items()} == {n: (K, *shapes[n]) for n in case.names}
    flat = np.hstack([numpy(draws[n]).reshape(K, -1) for n in case.names])
    deviations = flat - oracle.parameter_vector(case.model, case.names)
    P = case.covariance(fisher)
    variance = np.diag(P)
    assert_within(deviations.mean(axis=0), np.zeros(len(P)), mean_error(variance, K))
    assert_within(deviations.T @ deviations / K, P, mean_error(np.outer(variance, variance) + P**2, K))


@pytest.mark.parametrize(("name", "subset"), [("mlp", "all"), ("residual", 2), ("one_logit", "all")])
@every_fisher
def test_prediction_by_parameters_runs_the_whole_network(name: str, subset: int | str, fisher: str) -> None:
    """eq:genMC with theta^(k) ~ N(theta, T_c P) and softmax(g / T): no linearisation anywhere."""
    case = problem(name, subset)
    K, K_oracle, T, T_c = 4000, 1500, 1.4, 0.6
    posterior = fitted(case, subset, fisher).with_calibration(temperature=T, covariance_scale=T_c)
    prediction = posterior.predict_by_parameters(case.x_test, samples=K, seed=12)
    P = T_c * case.covariance(fisher)
    samples = oracle.parameter_marginal_samples(case.model, case.x_test, case.names, P, T, K_oracle, seed=13)
    assert numpy(prediction.samples()).shape == (N_TEST, K, case.g_test.shape[1])
    for n, f in enumerate(samples):
        P_f = oracle.pmf_covariance(f)
        assert_within(prediction.pmf[n], oracle.pmf(f), mean_error(np.diag(P_f), K, K_oracle))
        assert_within(prediction.covariance[n], P_f, covariance_error(f, K, K_oracle))


# ---------------------------------------------------------------------------------------------- fusion


@properties
@given(seed=st.integers(0, 10**6), count=st.integers(1, 4), M=st.integers(2, 5))
def test_fusion_of_classifiers_in_contrasts(seed: int, count: int, M: int) -> None:
    """Precisions of the contrasts add up, row by row; the covariance has no component along the shift."""
    means, covariances = random_gaussians(seed, count, B=3, M=M)
    fused = errbar.fuse([gaussian(m, P) for m, P in zip(means, covariances, strict=True)])
    expected = [oracle.fuse_contrasts(list(means[:, b]), list(covariances[:, b])) for b in range(3)]
    assert_close(oracle.center(numpy(fused.mean)), np.array([mean for mean, _ in expected]))
    assert_close(fused.covariance, np.array([P for _, P in expected]))


@properties
@given(seed=st.integers(0, 10**6), count=st.integers(1, 4), M=st.integers(2, 5))
def test_raw_fusion_of_classifiers_is_the_formula_of_the_paper(seed: int, count: int, M: int) -> None:
    """P = (sum P_c^{-1})^{-1}, g = P sum P_c^{-1} g_c, to the letter."""
    means, covariances = random_gaussians(seed, count, B=3, M=M)
    fused = errbar.fuse([gaussian(m, P) for m, P in zip(means, covariances, strict=True)], raw=True)
    expected = [oracle.fuse(list(means[:, b]), list(covariances[:, b])) for b in range(3)]
    assert_close(fused.mean, np.array([mean for mean, _ in expected]))
    assert_close(fused.covariance, np.array([P for _, P in expected]))


@pytest.mark.parametrize("raw", [False, True])
@every_fisher
def test_fusion_of_two_fitted_classifiers(raw: bool, fisher: str) -> None:
    """Two networks with different weights, the same inputs, and a PMF sampled from the fused Gaussian."""
    first, second = problem("mlp", 2, seed=0), problem("mlp", "all", seed=1)
    a, b = fitted(first, 2, fisher), fitted(second, "all", fisher)
    fused = errbar.fuse([a.logits(first.x_test), b.logits(first.x_test)], raw=raw)
    K, K_oracle = 4000, 40_000
    prediction = fused.predict(samples=K, seed=1)
    P_a, P_b = first.logit_covariances(fisher), second.logit_covariances(fisher)
    rule = oracle.fuse if raw else oracle.fuse_contrasts
    for n in range(N_TEST):
        mean, P = rule([first.g_test[n], second.g_test[n]], [P_a[n], P_b[n]])
        assert_close(oracle.center(numpy(fused.mean[n])), oracle.center(mean))
        assert_close(fused.covariance[n], P)
        f = oracle.marginal_samples(mean, P, K_oracle, seed=300 + n)
        assert_within(prediction.pmf[n], oracle.pmf(f), mean_error(f.var(axis=0), K, K_oracle))


def test_fusion_of_one_logit_classifiers_adds_the_precisions_of_the_logit() -> None:
    """The logits (0, g) have a singular covariance; its one contrast fuses like a scalar."""
    case = problem("one_logit", "all")
    logits = fitted(case, "all", "ggn").logits(case.x_test)
    fused = errbar.fuse([logits, logits.scaled(3.0)])
    variance = case.logit_covariances("ggn")[:, 1, 1]
    contrast = numpy(fused.covariance) @ np.array([-1.0, 1.0]) @ np.array([-1.0, 1.0])
    assert_close(contrast, 1.0 / (1.0 / variance + 1.0 / (3.0 * variance)))
    assert_close(numpy(fused.mean) @ np.array([-1.0, 1.0]), case.g_test[:, 1])


def test_raw_fusion_refuses_a_singular_covariance() -> None:
    """The paper's formula inverts every covariance; where there is no inverse, the error says so."""
    means, covariances = random_gaussians(seed=1, count=1, B=2, M=3)
    centered = gaussian(means[0], covariances[0]).centered()
    with pytest.raises(errbar.ErrbarError, match=r"(?i)singular"):
        errbar.fuse([centered, centered], raw=True)


@properties
@given(seed=st.integers(0, 10**6), C=st.integers(1, 4), M=st.integers(2, 4))
def test_fusion_of_frames_in_contrasts(seed: int, C: int, M: int) -> None:
    """P = (H^T R^{-1} H)^{-1} for the contrasts of every frame, with the correlations between frames."""
    z, R = random_gaussians(seed, count=1, B=1, M=C * M)
    z, R = z.reshape(C, M), R.reshape(C, M, C, M)
    fused = errbar.fuse_frames(joint(z, R))
    mean, P = oracle.fuse_frames_contrasts(z, R)
    assert_close(oracle.center(numpy(fused.mean)), mean[None])
    assert_close(fused.covariance, P[None])


@properties
@given(seed=st.integers(0, 10**6), C=st.integers(1, 4), M=st.integers(2, 4))
def test_raw_fusion_of_frames_is_the_formula_of_the_paper(seed: int, C: int, M: int) -> None:
    """P = (H^T R^{-1} H)^{-1}, g = P H^T R^{-1} z, to the letter."""
    z, R = random_gaussians(seed, count=1, B=1, M=C * M)
    z, R = z.reshape(C, M), R.reshape(C, M, C, M)
    fused = errbar.fuse_frames(joint(z, R), raw=True)
    mean, P = oracle.fuse_frames(z, R)
    assert_close(fused.mean, mean[None])
    assert_close(fused.covariance, P[None])


@pytest.mark.parametrize("raw", [False, True])
@every_fisher
def test_fusion_of_frames_of_a_fitted_classifier(raw: bool, fisher: str) -> None:
    """Three inputs known to belong to one class; 59 parameters, so R has full rank."""
    case = problem("mlp", "all")
    fused = errbar.fuse_frames(fitted(case, "all", fisher).joint_logits(case.x_test[:3]), raw=raw)
    R = oracle.joint_logit_covariance(case.J_test[:3], case.covariance(fisher))
    rule = oracle.fuse_frames if raw else oracle.fuse_frames_contrasts
    mean, P = rule(case.g_test[:3], R)
    assert_close(oracle.center(numpy(fused.mean)), oracle.center(mean)[None], tolerance=1e-7)
    assert_close(fused.covariance, P[None], tolerance=1e-7)


@every_fisher
def test_repeating_a_frame_changes_nothing(fisher: str) -> None:
    """The same image twice is no new evidence: R is singular and inverted on its range."""
    case = problem("mlp", "all")
    posterior = fitted(case, "all", fisher)
    once = errbar.fuse_frames(posterior.joint_logits(case.x_test[[0, 1]]))
    repeated = errbar.fuse_frames(posterior.joint_logits(case.x_test[[0, 1, 1, 0, 1]]))
    R = oracle.joint_logit_covariance([case.J_test[i] for i in (0, 1, 1, 0, 1)], case.covariance(fisher))
    mean, P = oracle.fuse_frames_contrasts(case.g_test[[0, 1, 1, 0, 1]], R)
    assert_close(oracle.center(numpy(repeated.mean)), mean[None], tolerance=1e-7)
    assert_close(repeated.covariance, P[None], tolerance=1e-7)
    assert_close(oracle.center(numpy(repeated.mean)), oracle.center(numpy(once.mean)), tolerance=1e-7)
    assert_close(repeated.covariance, numpy(once.covariance), tolerance=1e-7)


@every_fisher
def test_more_contrasts_than_parameters_are_fused_on_the_range(fisher: str) -> None:
    """20 frames of 2 contrasts each, 5 features: the 40 x 40 matrix R has rank 10."""
    case = problem("mlp", 1)
    frames = case.network.inputs(20, 9)
    J, g = oracle.jacobians(case.model, frames, case.names), oracle.logits(case.model, frames)
    R = oracle.joint_logit_covariance(J, case.covariance(fisher))
    mean, P = oracle.fuse_frames_contrasts(g, R)
    fused = errbar.fuse_frames(fitted(case, 1, fisher).joint_logits(frames))
    assert_close(oracle.center(numpy(fused.mean)), mean[None], tolerance=1e-6)
    assert_close(fused.covariance, P[None], tolerance=1e-6)


@pytest.mark.parametrize("variance", [1e-2, 1e-6, 1e-9])
def test_a_frame_that_is_nearly_certain_counts_by_the_formula(variance: float) -> None:
    """One frame far nearer to the origin than the others: correlated with them, and much surer."""
    generator = np.random.default_rng(3)
    h = generator.standard_normal((3, 4))
    h[1] *= np.sqrt(variance)
    M, x = 3, np.stack([np.kron(np.eye(3), row) for row in h])
    root = generator.standard_normal((12, 12))
    P = root @ root.T + np.eye(12)
    R = np.einsum("imk,kl,jnl->imjn", x, P, x)
    z = generator.standard_normal((3, M))
    fused = errbar.fuse_frames(joint(z, (R + R.transpose(2, 3, 0, 1)) / 2))
    mean, covariance = exact_fusion_of_frames(z, R)
    # R is rounded to eps of its largest entry, and the surest frame is `variance` of that.
    tolerance = 1e-13 / variance
    assert_close(oracle.center(numpy(fused.mean)), mean[None], tolerance=tolerance)
    assert_close(fused.covariance, covariance[None], tolerance=tolerance)
    assert fused.rank == 6


def exact_fusion_of_frames(z: np.ndarray, R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The formula of frames for contrasts by Gaussian elimination in fractions of integers: nothing is rounded."""
    C, M = z.shape
    B = oracle.contrast_basis(M)
    contrasts = np.einsum("imjn,ma,nb->iajb", R, B, B).reshape(C * (M - 1), -1)
    H = [[Fraction(int(i % (M - 1) == a)) for a in range(M - 1)] for i in range(C * (M - 1))]
    exact = [[Fraction(float(value)) for value in row] for row in contrasts]
    right = [[*H[i], Fraction(float(value))] for i, value in enumerate((z @ B).reshape(-1))]
    solved = _solved(exact, right)
    information = [[sum(H[k][a] * solved[k][b] for k in range(len(H))) for b in range(M)] for a in range(M - 1)]
    P = _solved(
        [row[:-1] for row in information], [[Fraction(int(a == b)) for b in range(M - 1)] for a in range(M - 1)]
    )
    mean = [sum(P[a][b] * information[b][-1] for b in range(M - 1)) for a in range(M - 1)]
    covariance = np.array([[float(value) for value in row] for row in P])
    return B @ np.array([float(value) for value in mean]), B @ covariance @ B.T


def _solved(matrix: list[list[Fraction]], right: list[list[Fraction]]) -> list[list[Fraction]]:
    rows = [[*a, *b] for a, b in zip(matrix, right, strict=True)]
    for i, pivot in enumerate(rows):
        rows[i] = pivot = [value / pivot[i] for value in pivot]
        for j, row in enumerate(rows):
            if j != i:
                rows[j] = [value - row[i] * own for value, own in zip(row, pivot, strict=True)]
    return [row[len(matrix) :] for row in rows]


def test_raw_fusion_of_repeated_frames_is_refused() -> None:
    """The paper's formula needs R^{-1}."""
    case = problem("mlp", "all")
    frames = fitted(case, "all", "eta").joint_logits(case.x_test[[0, 0]])
    with pytest.raises(errbar.ErrbarError, match=r"(?i)singular"):
        errbar.fuse_frames(frames, raw=True)


# --------------------------------------------------------------------------------------------- metrics


def random_predictions(seed: int, count: int, M: int) -> tuple[np.ndarray, np.ndarray]:
    """PMFs without ties, and labels that follow them."""
    rng = np.random.default_rng(seed)
    p = oracle.softmax(2.0 * rng.standard_normal((count, M)))
    return p, np.array([rng.choice(M, p=p_n) for p_n in p])


@pytest.mark.parametrize("metric", ["accuracy", "log_likelihood", "nll", "brier", "aurc"])
@properties
@given(seed=st.integers(0, 10**6), count=st.integers(1, 40), M=st.integers(2, 6))
def test_scores_are_those_of_the_paper(metric: str, seed: int, count: int, M: int) -> None:
    """Accuracy, sum and mean of ln f, the Brier score, and the area under the risk-coverage curve."""
    p, labels = random_predictions(seed, count, M)
    expected = getattr(oracle, metric)(p, labels)
    actual = getattr(errbar.metrics, metric)(torch.from_numpy(p), torch.from_numpy(labels))
    assert float(actual) == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("metric", ["ece", "ece_literal"])
@properties
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 60),
    M=st.integers(2, 6),
    bins=st.sampled_from([1, 5, 10, 15]),
)
def test_calibration_errors_are_sums_over_bins(metric: str, seed: int, count: int, M: int, bins: int) -> None:
    """The usual ECE weighs bins by |B_j| / N, the printed formula by 1 / |B_j|; empty bins are skipped."""
    p, labels = random_predictions(seed, count, M)
    expected = getattr(oracle, metric)(p, labels, bins)
    actual = getattr(errbar.metrics, metric)(torch.from_numpy(p), torch.from_numpy(labels), bins=bins)
    assert float(actual) == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("bins", [4, 8, 10])
@pytest.mark.parametrize("metric", ["ece", "ece_literal"])
def test_bins_are_closed_below_and_the_last_one_at_one(metric: str, bins: int) -> None:
    """Confidences that sit on the edges j/J, and 1 itself."""
    confidences = [j / bins for j in range(bins // 2 + 1, bins + 1)]
    confidences += [c - 0.3 / bins for c in confidences]
    p = np.array([[c, 1.0 - c] for c in confidences])
    labels = np.arange(len(p)) % 2
    expected = getattr(oracle, metric)(p, labels, bins)
    actual = getattr(errbar.metrics, metric)(torch.from_numpy(p), torch.from_numpy(labels), bins=bins)
    assert float(actual) == pytest.approx(expected, rel=1e-10)


def test_calibration_errors_by_hand() -> None:
    """Four bins: {0.5, 0.6} with one hit, {0.75, 1.0} with one hit. Ten bins: one sample each."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.2, 0.2], [0.0, 1.0, 0.0], [0.1, 0.15, 0.75]], dtype=torch.float64)
    labels = torch.tensor([0, 1, 1, 0])
    lower, upper = abs(0.5 - 0.55), abs(0.5 - 0.875)
    assert float(errbar.metrics.ece(p, labels, bins=4)) == pytest.approx(0.5 * lower + 0.5 * upper)
    assert float(errbar.metrics.ece_literal(p, labels, bins=4)) == pytest.approx(lower / 2 + upper / 2)
    gaps = 0.5 + 0.6 + 0.0 + 0.75
    assert float(errbar.metrics.ece(p, labels)) == pytest.approx(gaps / 4)
    assert float(errbar.metrics.ece_literal(p, labels)) == pytest.approx(gaps)


@properties
@given(seed=st.integers(0, 10**6), count=st.integers(2, 40), levels=st.sampled_from([2, 5, 1000]))
def test_auroc_is_the_share_of_ordered_pairs(seed: int, count: int, levels: int) -> None:
    """Ties count one half; few levels make many of them."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, levels, count) / 7.0
    positive = np.arange(count) % 2 == 0
    rng.shuffle(positive)
    actual = errbar.metrics.auroc(torch.from_numpy(scores), torch.from_numpy(positive))
    assert float(actual) == pytest.approx(oracle.auroc(scores, positive), rel=1e-12)


def test_brier_of_two_certain_predictions_by_hand() -> None:
    """A certain hit scores 0 and a certain miss 2: the sum is over classes, as in the paper."""
    p = torch.eye(2, dtype=torch.float64)
    assert float(errbar.metrics.brier(p, torch.tensor([0, 0]))) == pytest.approx(1.0)
    assert math.isclose(float(errbar.metrics.accuracy(p, torch.tensor([0, 0]))), 0.5)
